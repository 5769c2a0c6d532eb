"""Converts between protos and domain objects, and checks every message that comes in."""
