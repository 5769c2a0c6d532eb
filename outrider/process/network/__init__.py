"""gRPC channels, servers and their errors, and network addresses."""
