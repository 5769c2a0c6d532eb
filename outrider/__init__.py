"""The code that all processes of Outrider share. Imports no service."""

# This import comes first: it sets variables that torch, gRPC and other libraries read.
from outrider.process import runtime as _runtime  # noqa: F401

__version__ = "0.1.0"
