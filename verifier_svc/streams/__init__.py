"""The verifier's ends of its streams: drafters' and gateways'."""
