"""The connection to Redis."""
