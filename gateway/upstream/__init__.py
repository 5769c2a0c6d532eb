"""Verifiers: chooses one for each request, and streams tokens from it."""
