"""Shared by every process of Outrider; imports no service."""

__version__ = "0.1.0"
