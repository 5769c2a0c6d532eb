"""The verifier's ends of its streams: of drafters and of gateways."""
