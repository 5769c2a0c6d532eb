"""Polls the verifier's replicas, and picks a ready replica for each request.

The router picks the replica that earlier got the longest beginning of the prompt. It leaves out
replicas that have clearly more to do than the others. If no such replica is left, it picks the
least busy replica.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from gateway.upstream.prefixes import PrefixRecord
from gateway.upstream.replica import Replica, explain_differing, for_callers
from outrider.errors import OutriderError, Reason
from outrider.process.network.addresses import Addresses
from outrider.process.security.tls import Tls
from outrider.process.tasks import keep_running
from outrider.protocol.model_info import ModelInfo

log = logging.getLogger(__name__)

_POLL_READY_S = 1.0
_POLL_LOADING_S = 0.2
_DRAIN_POLL_S = 0.05
# A verifier whose engine hangs says so after this time. A verifier that says nothing for this time
# hangs too, though its connection is open: gRPC answers pings without the process's event loop.
_SILENT_S = 60.0
# A verifier that starts together with the gateway may take this long to answer. Until then its
# problems are not logged.
_STARTUP_S = 30.0
# A replica that was sent a prompt's prefix gets the request while its load is at most this multiple
# of the mean load, plus `_SPARE_LOAD`.
_MOST_LOAD = 1.25
_SPARE_LOAD = 1 / 16
# A replica whose address has vanished from its DNS name takes requests for at most this time.
_HANDOVER_S = 30.0
_LEFT = OutriderError(Reason.VERIFIER_UNAVAILABLE, "its name no longer has its address")
# Errors of one replica after which a sequence moves to another replica.
RETRYABLE = (
    Reason.VERIFIER_UNAVAILABLE,
    Reason.NOT_READY,
    Reason.DRAINING,
    Reason.MODEL_CHANGED,
)


class Pick(NamedTuple):
    """The replica picked for a request, with its model's name and info at that time."""

    model: str
    info: ModelInfo
    replica: Replica

    def busyness(self) -> tuple[bool, float]:
        """Return whether the replica's queue is full, and its load.

        The load is the number of the replica's sequences, divided by the number that fits at once.
        If the verifier does not report its load, the number of this gateway's sequences there takes
        its place.
        """
        own = self.replica.own_count
        load = self.info.load
        if load is None:
            return self.replica.full, own
        count = own + self.replica.foreign_count
        is_full = count >= load.max_running + load.max_waiting
        return self.replica.full or is_full, count / load.fitting

    def continues(self, begun: ModelInfo, length: int) -> bool:
        """Return whether the replica can continue a sequence of a verifier with the info `begun`.

        `length` is the sequence's prompt and `max_tokens` together, in tokens.
        """
        return self.is_same(begun) and length <= self.info.context_length

    def is_same(self, begun: ModelInfo) -> bool:
        """True if the replica writes the same texts as a verifier with the info `begun`."""
        return _identity(self.info) == _identity(begun)


def _identity(info: ModelInfo) -> tuple[object, ...]:
    return info.model_id, info.vocab_size, info.eos_token_ids, info.model_fingerprint


class Router:
    """Polls the replicas and picks one for each request."""

    def __init__(
        self,
        addresses: Sequence[str],
        fingerprint: str,
        tls: Tls | None = None,
        on_unresolved: Callable[[str], object] | None = None,
    ) -> None:
        """`on_unresolved` is called with a name each time that it cannot be resolved."""
        self.addresses = Addresses(addresses, on_unresolved)
        self.replicas = [Replica(address, tls) for address in self.addresses.now]
        self.draining = False
        self._fingerprint = fingerprint
        self._tls = tls
        self.sent = PrefixRecord()
        """Records to which replica each prefix was last sent."""
        self._on_ready: Callable[[bool], Awaitable[None]]
        self._polls: dict[Replica, asyncio.Task[None]] = {}
        self._following: asyncio.Task[None] | None = None
        self._reported_ready: bool | None = None
        # This event is set, and replaced by a new event, after each poll of a ready replica, and
        # when the gateway begins to drain. A task that takes the event before it reads the replicas
        # cannot miss a change.
        self._changed = asyncio.Event()
        self._cut_off = False
        self._logged_differing: list[str] = []

    def start(self, on_ready: Callable[[bool], Awaitable[None]]) -> None:
        """Start polling. `on_ready` is called with each change of `ready`."""
        self._on_ready = on_ready
        for replica in self.replicas:
            self._start_polling(replica)
        if self.addresses.has_names:
            follow = partial(self.addresses.follow, self._take)
            self._following = keep_running(follow, "following the names of verifiers")

    def _start_polling(self, replica: Replica) -> None:
        poll = partial(self._poll, replica)
        self._polls[replica] = keep_running(poll, f"polling verifier {replica.address}")

    async def _take(self, addresses: Sequence[str]) -> None:
        """Add the replicas of new addresses, and retire replicas whose addresses are missing.

        A retired replica that `ready_picks` leaves out is forgotten after its sequences have ended.
        The sequences may stay: a verifier that is about to stop says so, and then they move.
        """
        known = {replica.address: replica for replica in self.replicas}
        for address in addresses:
            if address not in known:
                log.info("verifier %s has joined", address)
                self.replicas.append(Replica(address, self._tls))
                self._start_polling(self.replicas[-1])
        for address, replica in known.items():
            if address in addresses:
                replica.retired_at = None
            elif replica.retired_at is None:
                replica.retired_at = time.monotonic()
        for address, replica in known.items():
            picked = {pick.replica for pick in self.ready_picks()}
            if replica.leaving and not replica.sequences and replica not in picked:
                log.info("verifier %s has left", address)
                replica.mark_lost(_LEFT)
                polling = self._polls[replica]
                polling.cancel()
                await asyncio.gather(polling, return_exceptions=True)
                await replica.close()
                self.replicas.remove(replica)
                del self._polls[replica]

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, let sequences run for `seconds`, and fail those that still run."""
        self.draining = True
        self._wake()
        deadline = time.monotonic() + seconds
        # Sequences end in many places, so there is no single event to wait for.
        while any(r.sequences for r in self.replicas) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_POLL_S)
        self._cut_off = True
        for replica in self.replicas:
            replica.fail_sequences(_shutting_down())

    async def close(self) -> None:
        """Stop polling, and close all connections."""
        tasks = [*self._polls.values(), *filter(None, [self._following])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in self.replicas:
            await replica.close()

    async def _poll(self, replica: Replica) -> None:
        logged = str(replica.problem)
        log_after = time.monotonic() + _STARTUP_S
        while True:
            replica.poll_now.clear()
            await replica.refresh(self._fingerprint)
            if replica.problem is None:
                log_after = 0.0
                self._wake()
            # While the gateway drains, it need not report verifiers that stop with it.
            silent = self.draining or time.monotonic() <= log_after
            if str(replica.problem) != logged and not silent:
                level, message = logging.INFO, f"verifier {replica.address} is ready"
                if replica.problem is not None:
                    message = str(replica.problem)
                    if replica.problem.reason is Reason.VERIFIER_UNAVAILABLE:
                        level = logging.WARNING
                log.log(level, "%s", message)
                logged = str(replica.problem)
            if replica.problem is not None:
                self._move(replica, replica.problem)
            self._report_differing()
            if self.ready is not self._reported_ready:
                self._reported_ready = self.ready
                await self._on_ready(self.ready)
            pause_s = _POLL_READY_S if replica.problem is None else _POLL_LOADING_S
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await replica.poll_now.wait()

    def _move(self, replica: Replica, problem: OutriderError) -> None:
        """Move sequences from a replica to another ready replica that can continue all of them.

        All sequences leave a replica that says it drains or hangs. Only sequences without a chunk
        leave a replica that does not answer polls, since it may just be slow; after `_SILENT_S` all
        sequences leave it. Without another replica that has room, sequences stay.
        """
        is_silent = problem.reason is Reason.VERIFIER_UNAVAILABLE
        may_be_slow = is_silent and time.monotonic() - replica.answered_at < _SILENT_S
        info = replica.info
        if info is None:
            return
        picks = [pick for pick in self.ready_picks(info.model_id) if not pick.busyness()[0]]
        if any(pick.continues(info, info.context_length) for pick in picks):
            replica.fail_sequences(for_callers(problem), waiting_only=may_be_slow)

    def _report_differing(self) -> None:
        """Log each new difference between the ready replicas of a model."""
        problems = [explain_differing(*each) for each in self.differing.items()]
        for problem in problems:
            if problem not in self._logged_differing:
                log.warning("%s", problem)
        self._logged_differing = problems

    def _wake(self) -> None:
        """Make sequences that wait for a replica look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        """True if a request could be taken."""
        return not self.draining and bool(self.ready_picks())

    @property
    def models(self) -> dict[str, ModelInfo]:
        """The served models, keyed by their own name."""
        infos = [replica.info for replica in self.replicas if replica.info is not None]
        return {info.model_id: info for info in infos}

    @property
    def names(self) -> dict[str, ModelInfo]:
        """Maps each name that requests may use to a model; models' own names precede aliases."""
        models = self.models
        return models | {
            alias: info for info in models.values() for alias in info.aliases if alias not in models
        }

    @property
    def differing(self) -> dict[str, dict[str, list[str]]]:
        """Map each model whose ready replicas differ to the addresses of each fingerprint."""
        found: dict[str, dict[str, list[str]]] = {}
        for model, info, replica in self.ready_picks():
            found.setdefault(model, {}).setdefault(info.model_fingerprint, []).append(
                replica.address
            )
        return {model: groups for model, groups in found.items() if len(groups) > 1}

    def lookup(self, model: str | None) -> tuple[str, ModelInfo]:
        """Return the name of a model, and the info of its replica with the longest context.

        None or "" stands for any model. The context length bounds a request before a replica is
        picked.
        Raises OutriderError as `pick` does.
        """
        picks = self._picks(model)
        name = min(picks, key=Pick.busyness).model
        infos = [pick.info for pick in picks if pick.model == name]
        return name, max(infos, key=lambda info: info.context_length)

    def pick(self, model: str | None, prefixes: Sequence[bytes] = ()) -> Pick:
        """Return the ready replica for a request with these prompt `prefixes`; note it in `sent`.

        None or "" stands for any model. Raises OutriderError: NOT_READY, DRAINING or
        VERIFIER_UNAVAILABLE if no replica is ready, MODEL_NOT_FOUND if no replica serves the model.
        """
        picks = self._picks(model)
        pick = self._holder(picks, prefixes) or min(picks, key=Pick.busyness)
        self.sent.note(prefixes, pick.replica.address)
        return pick

    def _holder(self, picks: Sequence[Pick], prefixes: Sequence[bytes]) -> Pick | None:
        """Return the replica that got the longest of the prefixes, unless it has too much to do.

        In that case the replica that got the next shorter prefix is considered, and so on. Return
        None if no replica is left.
        """
        loads = {pick.replica.address: (pick, *pick.busyness()) for pick in picks}
        most = _MOST_LOAD * sum(load for _, _, load in loads.values()) / len(loads) + _SPARE_LOAD
        for address in self.sent.holders(prefixes):
            if address in loads:
                pick, is_full, load = loads[address]
                if not is_full and load <= most:
                    return pick
        return None

    async def pick_fallback(
        self, lost: Pick, error: OutriderError, wait_s: float = 0.0, length: int | None = None
    ) -> Pick:
        """Pick a ready replica of the model after `lost` failed with `error`.

        The picked replica may be the lost one, if a poll has found it ready again. A sequence that
        has started gives its `length`, see `Pick.continues`, and does not go to a full replica
        before the next poll. Raises `error` if no replica becomes ready within `wait_s`, or
        MODEL_CHANGED if every ready replica would write another continuation. A gateway that shuts
        down does not wait.
        """
        deadline = time.monotonic() + wait_s
        while not self._cut_off:
            changed = self._changed
            picks = self.ready_picks(lost.model)
            if length is not None:
                roomy = [pick for pick in picks if not pick.replica.full]
                picks = [pick for pick in roomy if pick.continues(lost.info, length)]
            if picks:
                return min(picks, key=Pick.busyness)
            left_s = deadline - time.monotonic()
            if self.draining or left_s <= 0:
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await changed.wait()
        others = self.ready_picks(lost.model)
        if length is not None and others and not any(pick.is_same(lost.info) for pick in others):
            message = (
                "the answer's verifier was lost, and the others have other weights, dtype, version"
                " or acceptance settings; ask again for an answer from the beginning"
            )
            raise OutriderError(Reason.MODEL_CHANGED, message) from error
        raise error

    def _picks(self, model: str | None) -> list[Pick]:
        """Return the ready replicas that serve the model, at least one. Raises as `pick` does."""
        if self.draining:
            raise _shutting_down()
        ready = self.ready_picks()
        if not ready:
            unknown = OutriderError(Reason.NOT_READY, "no verifier is ready")
            # Raise a new error for each request, because an exception collects tracebacks.
            problems = [each.problem for each in self.replicas if each.problem is not None]
            raise for_callers(problems[0] if problems else unknown)
        serving = [pick for pick in ready if model in (None, "", pick.model)]
        # Only if no model has this name itself, take models that have it as an alias.
        serving = serving or [pick for pick in ready if model in pick.info.aliases]
        if not serving:
            names = ", ".join(sorted({name for pick in ready for name in pick.info.names}))
            message = f"model {str(model)[:100]!r} is not served here; the names here are {names}"
            raise OutriderError(Reason.MODEL_NOT_FOUND, message, "model")
        return serving

    def ready_picks(self, model: str | None = None) -> list[Pick]:
        """Return the replicas of one model, or of all models, that may get requests.

        Ready replicas may get requests. A DNS name may move to a new verifier before the gateway
        has reached that verifier. So a retired replica takes requests for _HANDOVER_S, unless a
        ready replica that is not retired serves one of the retired replica's model names.
        """
        in_time = time.monotonic() - _HANDOVER_S
        picks = [
            Pick(replica.info.model_id, replica.info, replica)
            for replica in self.replicas
            if replica.problem is None and replica.info is not None
        ]
        staying = [pick for pick in picks if not pick.replica.leaving]
        served = {name for pick in staying for name in pick.info.names}
        retired = [
            pick
            for pick in picks
            if (retired_at := pick.replica.retired_at) is not None
            and retired_at > in_time
            and served.isdisjoint(pick.info.names)
        ]
        return [pick for pick in staying + retired if model in (None, pick.model)]


def _shutting_down() -> OutriderError:
    return OutriderError(Reason.DRAINING, "the gateway is shutting down")
