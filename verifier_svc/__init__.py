"""The verifier: owns the target model and decides, losslessly, which draft tokens to accept."""
