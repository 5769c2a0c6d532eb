"""The drafter service. It dials verifiers and streams guesses of their sequences' next tokens."""
