"""Checks that the libraries of an optional extra are installed."""

from __future__ import annotations

from importlib.util import find_spec

from outrider.protocol.errors import OutriderError, Reason

# What pyproject.toml's extra "models" installs.
MODEL_LIBRARIES = ("torch", "transformers", "safetensors", "xgrammar", "llguidance", "jsonschema")


def need_models() -> None:
    """Raises OutriderError(INTERNAL) that names the missing libraries and the extra with them."""
    missing = [name for name in MODEL_LIBRARIES if find_spec(name) is None]
    if missing:
        need = f"running a model needs {', '.join(missing)}"
        hint = "in Outrider's sources, pip install '.[models]'"
        raise OutriderError(Reason.INTERNAL, f"{need}; {hint}")
