"""A verifier's description of its model and drafters: GetModel's answer as plain data."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from enum import Enum


class Stage(Enum):
    """The stage of a verifier's start or end. Outrider's own verifier never sends FAILED."""

    LOADING = 1
    WARMING_UP = 2
    READY = 3
    DRAINING = 4
    FAILED = 5


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a drafter. Empty `cores` mean not pinned; `numa_node` None means not bound."""

    kind: str = "local"
    host: str = ""
    device: str = "cpu"
    cores: tuple[int, ...] = ()
    numa_node: int | None = None
    architecture: str = ""
    gpu_uuid: str = ""
    """The GPU's UUID by NVIDIA's driver, equal in all processes and containers; empty on a CPU."""


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """A verifier's information about a drafter."""

    drafter_id: str
    family: str
    placement: Placement
    connected: bool
    sequence_count: int
    acceptance_rate: float | None = None
    round_trip_s: float | None = None
    """Seconds from a verdict to its answer, without drafting time; None before the first answer."""
    token_s: float | None = None
    """Seconds to draft one token; None before the first draft."""


@dataclass(frozen=True, slots=True)
class Load:
    """A verifier's load. All counts are numbers of sequences."""

    running: int
    waiting: int
    max_running: int
    max_waiting: int
    sequence_s: float | None = None
    """Seconds that a sequence is expected to be in the batch; None before anything was timed."""
    kv_cache_usage: float = 0.0
    """Share of the KV cache's pages that sequences hold, 0 to 1."""

    @property
    def fitting(self) -> float:
        """The number of sequences of the present lengths that can run at once.

        The KV cache may have room for fewer sequences than the batch has places.
        """
        if self.waiting and self.running:
            return self.running
        if self.running and self.kv_cache_usage:
            return min(self.max_running, self.running / self.kv_cache_usage)
        return self.max_running

    @property
    def places(self) -> int:
        """The number of sequences that can run at once.

        If long sequences fill the cache before the batch is full, further sequences wait, and no
        more can run.
        """
        return self.running if self.waiting and self.running else self.max_running

    def beside(self, own: int) -> int:
        """Return how many sequences other callers have if `own` sequences are the caller's."""
        return max(0, self.running + self.waiting - own)

    def wait_s(self) -> float:
        """Return how many seconds a further sequence waits for a place; 0 if that is not known."""
        return wait_s(self.running + self.waiting + 1, self.places, self.sequence_s)


def wait_s(count: int, places: float, sequence_s: float | None) -> float:
    """Return how many seconds the last of `count` sequences waits for one of `places` places.

    `sequence_s` is how long each sequence keeps its place. The result is 0 if that is not known.
    """
    return max(0.0, count - places) * (sequence_s or 0.0) / places


def retry_after_s(wait_s: float) -> float:
    """Return how many seconds a refused caller should wait before it tries again.

    `wait_s` is the wait in the present queue: after this time, all sequences that wait now will
    have started. OpenAI's clients ignore times of more than a minute.
    """
    return min(max(1.0, wait_s), 60.0)


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that a verifier serves, and its drafters."""

    model_id: str
    stage: Stage
    stage_detail: str = ""
    tokenizer_fingerprint: str = ""
    vocab_size: int = 0
    context_length: int = 0
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = ""
    device: str = ""
    drafters: tuple[DrafterInfo, ...] = ()
    max_draft_tokens: int = 0
    load: Load | None = None
    weights_fingerprint: str = ""
    acceptance_settings: tuple[tuple[str, str], ...] = ()
    """Settings that decide how drafts are drawn and tokens chosen, keyed by flag and sorted."""
    server_version: str = ""
    model_fingerprint: str = ""
    """A hash of weights, dtype, settings and version. Verifiers with equal hashes continue each
    other's answers."""
    graph_count: int = 0
    """The number of CUDA graphs of the target's forward; 0 on a CPU."""
    graph_memory_bytes: int = 0
    """Device memory that the graphs took."""
    engine: str = "native"
    """What computes the target, with a version unless it is the native engine."""
    unsupported: tuple[str, ...] = ()
    """What the engine cannot do, see `outrider.protocol.unsupported`."""
    aliases: tuple[str, ...] = ()
    """Further names of the model in requests."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names by which requests may call the model. Answers contain the first name."""
        return self.model_id, *self.aliases


def with_fingerprint(info: ModelInfo) -> ModelInfo:
    """Return the model with the fingerprint of its weights, dtype, settings and version."""
    parts = (info.weights_fingerprint, info.dtype, info.acceptance_settings, info.server_version)
    found = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    return replace(info, model_fingerprint=found)
