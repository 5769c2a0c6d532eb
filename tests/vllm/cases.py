"""Requests whose texts two engines write, as plain data to send between processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.lm.pages import KVSequence
from outrider.protocol.messages import SamplingParams, SpeculationStats, TokenRequest
from verifier_svc.state.sequence import Sequence

MODEL = str(Path(__file__).parents[2] / "models/target")
EOS = frozenset({0, 3})
DRAFT_TOKENS = 4


@dataclass
class Case:
    """One request."""

    prompt: list[int]
    sampling: dict[str, Any]
    stop_token_ids: list[int] = field(default_factory=list)
    committed: list[int] = field(default_factory=list)
    max_tokens: int = 24
    ignore_eos: bool = True

    def request(self, seed: int) -> TokenRequest:
        """Return the request, with this seed for its sampling."""
        settings = dict(self.sampling)
        for name in ("logit_bias", "banned_token_ids"):
            if name in settings:
                entries = settings[name]
                settings[name] = tuple(tuple(e) if isinstance(e, list) else e for e in entries)
        return TokenRequest(
            self.prompt,
            self.max_tokens,
            SamplingParams(**settings, seed=seed),
            frozenset(self.stop_token_ids),
            self.ignore_eos,
            committed=self.committed,
        )

    def sequence(self, number: int, seed: int) -> Sequence:
        """Return the request as the sequence of an engine."""
        request = self.request(seed)
        return Sequence(
            id=number,
            arrival=number,
            request=request,
            seed=seed,
            max_draft_tokens=DRAFT_TOKENS,
            end_ids=request.stop_token_ids | (frozenset() if self.ignore_eos else EOS),
            kv=KVSequence(),
            sink=_drop,
            tokens=[*request.prompt, *request.committed],
            stats=SpeculationStats(),
        )


def _drop(_: object) -> None:
    pass


def seed_of(number: int) -> int:
    """Return the seed of the case of this number. Seeds have 64 bits."""
    return 2**63 + 1000 + number
