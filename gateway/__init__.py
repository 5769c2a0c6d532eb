"""The gateway: turns text into tokens and back, and serves HTTP APIs and gRPC.

It touches no model.
"""
