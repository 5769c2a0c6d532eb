"""What only some processes need is installed as an extra; says so where it is missing."""

from __future__ import annotations

from importlib.util import find_spec

from outrider.errors import OutriderError, Reason


def need_models() -> None:
    """Raises OutriderError(INTERNAL) that names the extra when the libraries that run models are not installed."""
    missing = [
        name
        for name in ("torch", "transformers", "safetensors", "xgrammar", "llguidance")
        if find_spec(name) is None
    ]
    if missing:
        message = f"running a model needs {', '.join(missing)}; in Outrider's sources, pip install '.[models]'"
        raise OutriderError(Reason.INTERNAL, message)
