"""How much of the prompts of chats the verifiers' prefix caches hold, by the way of routing.

The production router picks a replica for each turn, and production page pools hold the caches.
Time is virtual: a turn takes its place for a while, and its user thinks before the next turn.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from functools import partial
from random import Random

from gateway.upstream.prefixes import prefixes
from gateway.upstream.replica import Replica
from gateway.upstream.routing import Router
from outrider.lm.pages import KVSequence, PagePool
from outrider.protocol.model_info import Load, ModelInfo, Stage
from outrider_bench.simulator.events import Events

PLACES = 64
_PAGES = 4096
"""Pages of each replica's KV cache."""
_PAGE_TOKENS = 16
_USERS = 24
"""Users of each replica with a chat under way; after its last turn they begin another one."""
_TURNS = 8
_SYSTEM_PROMPT = 256
"""Tokens of the beginning that all chats share."""
_QUESTION, _ANSWER = (20, 200), (50, 400)
"""The least and the most tokens."""
_THINK_S = 20.0
"""Mean time between an answer and the next question."""
_TOKEN_S = 0.02
"""Time of an answer's token."""
_PROMPT_TOKEN_S = 0.0002
"""Time of a prompt's token that is not in the cache."""
_VOCABULARY = 50_000
_MODEL = "chats"


@dataclass(slots=True)
class Outcome:
    """What the replicas were asked, and how evenly."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    largest_excess: float = 0.0
    """The most by which a replica's load exceeded the mean load, in places."""

    @property
    def hit_share(self) -> float:
        """Share of the prompts' tokens that a prefix cache held."""
        return self.cached_tokens / self.prompt_tokens


@dataclass(eq=False, slots=True)
class _Server:
    replica: Replica
    pool: PagePool
    running: set[KVSequence] = field(default_factory=set)


async def simulate(replicas: int, requests: int, *, affinity: bool) -> Outcome:
    """Serve `requests` requests of chats, to the least busy replicas unless `affinity`."""
    router = Router([f"replica-{i}:1" for i in range(replicas)], "")
    try:
        servers = {
            replica.address: _Server(replica, PagePool(_PAGES, _PAGE_TOKENS))
            for replica in router.replicas
        }
        for server in servers.values():
            server.replica.problem = None
        return _Simulation(router, servers, requests, affinity=affinity).run()
    finally:
        await router.close()


class _Simulation:
    """The turns of one simulation."""

    def __init__(
        self, router: Router, servers: dict[str, _Server], requests: int, *, affinity: bool
    ) -> None:
        self._router = router
        self._servers = servers
        self._left = requests
        self._affinity = affinity
        self._events = Events()
        self._random = Random(1)
        self._system = self._tokens(_SYSTEM_PROMPT)
        self._outcome = Outcome()

    def _tokens(self, length: int) -> list[int]:
        return self._random.choices(range(_VOCABULARY), k=length)

    def run(self) -> Outcome:
        """Play the users' turns in the order of their times."""
        for _ in range(_USERS * len(self._servers)):
            began = self._random.uniform(0.0, _THINK_S)
            self._events.at(began, partial(self._begin, self._system, 0))
        self._events.run(math.inf)
        return self._outcome

    def _begin(self, text: list[int], turn: int) -> None:
        """Send a user's next prompt to a replica, unless all requests were sent."""
        if not self._left:
            return
        self._left -= 1
        prompt = [*text, *self._tokens(self._random.randint(*_QUESTION))]
        server = self._picked(prompt)
        sequence = KVSequence()
        cached = server.pool.match_prefix(sequence, prompt, "")
        _reserve(server, sequence, len(prompt))
        server.running.add(sequence)
        server.replica.sequences.add(sequence)
        self._outcome.prompt_tokens += len(prompt)
        self._outcome.cached_tokens += cached
        counts = [len(each.running) for each in self._servers.values()]
        excess = max(counts) - sum(counts) / len(counts)
        self._outcome.largest_excess = max(self._outcome.largest_excess, excess)
        answer = self._tokens(self._random.randint(*_ANSWER))
        seconds = (len(prompt) - cached) * _PROMPT_TOKEN_S + len(answer) * _TOKEN_S
        end = partial(self._end, server, sequence, [*prompt, *answer], turn + 1)
        self._events.after(seconds, end)

    def _picked(self, prompt: list[int]) -> _Server:
        """The replica that the production router sends a prompt to."""
        for server in self._servers.values():
            load = Load(len(server.running), 0, PLACES, 1024, None, server.pool.usage)
            server.replica.info = ModelInfo(_MODEL, Stage.READY, load=load)
        pick = self._router.pick(_MODEL, prefixes("", prompt) if self._affinity else ())
        return self._servers[pick.replica.address]

    def _end(self, server: _Server, sequence: KVSequence, text: list[int], turn: int) -> None:
        """Leave a text's pages to the cache; its user thinks, or begins another chat."""
        _reserve(server, sequence, len(text))
        sequence.num_computed_tokens = len(text)
        server.pool.cache_pages(sequence, text, "")
        server.pool.free(sequence)
        server.running.discard(sequence)
        server.replica.sequences.discard(sequence)
        is_last = turn == _TURNS
        begin = partial(self._begin, self._system if is_last else text, 0 if is_last else turn)
        self._events.after(self._random.expovariate(1.0 / _THINK_S), begin)


def _reserve(server: _Server, sequence: KVSequence, length: int) -> None:
    if not server.pool.reserve(sequence, length):
        raise ValueError("pages: the running sequences do not fit")


def main() -> None:
    """Print both ways' shares of cached tokens for several numbers of replicas."""
    for replicas in (2, 4, 8):
        for way in ("least busy", "affinity"):
            outcome = asyncio.run(simulate(replicas, 500 * replicas, affinity=way == "affinity"))
            print(
                f"{replicas} replicas, {way}: {outcome.hit_share:.3f} of the prompts' tokens "
                f"cached; at most {outcome.largest_excess:.1f} sequences above the mean"
            )


if __name__ == "__main__":
    main()
