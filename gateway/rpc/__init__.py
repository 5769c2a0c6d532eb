"""gRPC and Connect."""
