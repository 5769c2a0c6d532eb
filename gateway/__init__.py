"""The gateway: text to tokens and back, OpenAI's HTTP API and gRPC. Touches no model."""
