"""Replaces a family's weights while it drafts.

New weights are loaded beside the earlier weights, and then each connection is replaced by a new
one. So a verifier opens its sequences anew, no guess of one version meets a state of the other, and
the verifier counts each version's acceptance.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

from drafter_svc.families.base import Family, Loaded
from outrider.errors import OutriderError, invalid
from outrider.protocol.draft_messages import FeatureRequest
from outrider.protocol.model_info import ModelInfo, Stage

log = logging.getLogger(__name__)

_NO_VERIFIER = ModelInfo("", Stage.LOADING, "")


class ServedWeights:
    """The loaded family of a process. After each `ask`, `follow` loads the family again."""

    loaded: Loaded
    """What new connections use. `load` sets it."""

    def __init__(self, load: Callable[[int | None], Awaitable[Loaded]]) -> None:
        """`load` gets the number of pages of the present KV cache, or None."""
        self._load = load
        self._asked = asyncio.Event()

    async def load(self) -> None:
        """Load for the first time. Raises what the family's `load` raises."""
        self.loaded = await self._load(None)

    def make(self, info: ModelInfo) -> Family:
        """Make a connection's strategy, with the newest weights."""
        return self.loaded.make(info)

    def ask(self) -> None:
        """Ask for new weights. Requests that come while weights are loaded count as one."""
        self._asked.set()

    async def follow(self, rejoin: Callable[[], Awaitable[None]]) -> None:
        """Replace the weights each time that `ask` is called; never return.

        `rejoin` replaces the connections, and returns when the former connections are closed.
        """
        while True:
            await self._asked.wait()
            self._asked.clear()
            await self._replace(rejoin)

    async def _replace(self, rejoin: Callable[[], Awaitable[None]]) -> None:
        """Load and use new weights; if the files cannot be used, log why and change nothing."""
        present = "the earlier weights"
        try:
            family = self.make(_NO_VERIFIER)
            present = family.weights_version
            if family.device != "cpu":
                raise invalid("device", f"is {family.device}; on a GPU start a new process")
            new = await self._load(self.loaded.page_count)
            _check_same_kind(self.loaded, new)
        except (asyncio.CancelledError, KeyboardInterrupt, SystemExit):
            raise
        # The files may hold anything, so loading may fail in any way. A panic in a tokenizer's
        # Rust code is no Exception.
        except BaseException as error:  # noqa: BLE001
            kind = "" if isinstance(error, OutriderError) else f"{type(error).__name__}: "
            why = kind + " ".join(str(error).split())
            log.error("the new weights were not loaded, and %s draft on: %s", present, why)
            return
        self.loaded = new
        await rejoin()
        newest = self.make(_NO_VERIFIER).weights_version
        log.info("the weights %s draft in place of %s", newest, present)


def _check_same_kind(old: Loaded, new: Loaded) -> None:
    """Raise OutriderError(INVALID_VALUE) for weights that a verifier might refuse."""
    if new.tokenizer_fingerprint != old.tokenizer_fingerprint:
        raise invalid("tokenizer", "is not the tokenizer of the earlier weights")
    if _states(new) != _states(old):
        raise invalid("head", "reads other hidden states of the target than the earlier head")


def _states(loaded: Loaded) -> FeatureRequest | None:
    """Return the family's request for states, without the projection, which is optional."""
    request = loaded.make(_NO_VERIFIER).feature_request
    return request and replace(request, projection="")
