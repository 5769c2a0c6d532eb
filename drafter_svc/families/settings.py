"""The base of a family's settings. Apart from the families, which need more to load."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class FamilySettings(BaseModel):
    """Base of a family's own settings.

    They become flags, environment variables and YAML keys of a drafter that runs this family. The
    docstring below each setting is its help text.
    """

    model_config = ConfigDict(use_attribute_docstrings=True)
