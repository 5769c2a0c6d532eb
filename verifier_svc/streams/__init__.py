"""The verifier's ends of the streams of drafters and of gateways."""
