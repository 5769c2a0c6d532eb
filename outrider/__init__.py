"""The code that all processes of Outrider share. Imports no service."""

# First of all: torch, gRPC and other libraries read the variables that this sets when they load.
from outrider.process import runtime as _runtime  # noqa: F401

__version__ = "0.1.0"
