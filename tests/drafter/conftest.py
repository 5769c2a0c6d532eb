"""Makes the fakes beside the tests importable, and the scripted verifier a fixture."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from scripted_drafts import ScriptedVerifier

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
async def verifier() -> AsyncIterator[ScriptedVerifier]:
    from scripted_drafts import ScriptedVerifier

    verifier = ScriptedVerifier()
    await verifier.start()
    yield verifier
    await verifier.stop()
