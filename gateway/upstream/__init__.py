"""Verifiers: which one serves a request, and the streams of tokens from it."""
