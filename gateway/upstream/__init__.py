"""Verifiers: the choice of a verifier for a request, and the streams of tokens from it."""
