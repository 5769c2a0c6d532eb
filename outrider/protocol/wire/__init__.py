"""Converts between protos and plain data, and checks the messages that come in, except chunks."""
