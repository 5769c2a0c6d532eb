"""How much of the prompts of chats the verifiers' prefix caches hold, by the way of routing.

The production router picks a replica for each turn, and production page pools hold the caches.
Time is virtual: a turn takes its place for a while, and its user thinks before the next turn.
"""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass, field
from itertools import count
from random import Random

from gateway.upstream.prefixes import prefixes
from gateway.upstream.replica import Replica
from gateway.upstream.routing import Router
from outrider.lm.pages import KVSequence, PagePool
from outrider.protocol.model_info import Load, ModelInfo, Stage

PLACES = 64
_PAGE_TOKENS = 16
_VOCABULARY = 50_000
_MODEL = "chats"


@dataclass(frozen=True, slots=True)
class Chats:
    """The traffic, and the replicas that serve it. Lengths are in tokens."""

    replicas: int = 8
    pages: int = 4096
    """Pages of each replica's KV cache."""
    users: int = 24
    """Users of each replica with a chat under way; after its last turn they begin another one."""
    turns: int = 8
    system_prompt: int = 256
    """Length of the beginning that all chats share."""
    question: tuple[int, int] = (20, 200)
    answer: tuple[int, int] = (50, 400)
    think_s: float = 20.0
    """Mean time between an answer and the next question."""
    token_s: float = 0.02
    """Time of an answer's token."""
    prompt_token_s: float = 0.0002
    """Time of a prompt's token that is not in the cache."""
    seed: int = 1


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


_Place = tuple[_Server, KVSequence]


async def simulate(chats: Chats, requests: int, *, affinity: bool) -> Outcome:
    """Serve `requests` requests of chats, to the least busy replicas unless `affinity`."""
    router = Router([f"replica-{i}:1" for i in range(chats.replicas)], "")
    try:
        servers = {
            replica.address: _Server(replica, PagePool(chats.pages, _PAGE_TOKENS))
            for replica in router.replicas
        }
        for server in servers.values():
            server.replica.problem = None
        return _Simulation(chats, router, servers, affinity=affinity).run(requests)
    finally:
        await router.close()


class _Simulation:
    """The events of one simulation."""

    def __init__(
        self, chats: Chats, router: Router, servers: dict[str, _Server], *, affinity: bool
    ) -> None:
        self._chats = chats
        self._router = router
        self._servers = servers
        self._affinity = affinity
        self._random = Random(chats.seed)
        self._system = self._tokens(chats.system_prompt)
        self._numbers = count()
        self._now = 0.0
        self._outcome = Outcome()

    def _tokens(self, length: int) -> list[int]:
        return self._random.choices(range(_VOCABULARY), k=length)

    def run(self, requests: int) -> Outcome:
        """Play the users' turns in the order of their times."""
        chats = self._chats
        events: list[tuple[float, int, list[int], int, _Place | None]] = []

        def at(time: float, text: list[int], turn: int, ends: _Place | None = None) -> None:
            """Note that a turn begins at `time`, or that it `ends` at its place."""
            heapq.heappush(events, (time, next(self._numbers), text, turn, ends))

        for _ in range(chats.users * chats.replicas):
            at(self._random.uniform(0.0, chats.think_s), self._system, 0)
        begun = 0
        while begun < requests:
            self._now, _, text, turn, ends = heapq.heappop(events)
            if ends is not None:
                self._end(*ends, text)
                think_s = self._random.expovariate(1.0 / chats.think_s)
                is_last = turn == chats.turns
                at(self._now + think_s, self._system if is_last else text, 0 if is_last else turn)
                continue
            begun += 1
            prompt = [*text, *self._tokens(self._random.randint(*chats.question))]
            server, sequence, seconds = self._begin(prompt)
            answer = self._tokens(self._random.randint(*chats.answer))
            seconds += len(answer) * chats.token_s
            at(self._now + seconds, [*prompt, *answer], turn + 1, (server, sequence))
        return self._outcome

    def _begin(self, prompt: list[int]) -> tuple[_Server, KVSequence, float]:
        """Send a prompt to a replica. Returns it, the sequence and the seconds of the prefill."""
        for server in self._servers.values():
            load = Load(len(server.running), 0, PLACES, 1024, None, server.pool.usage)
            server.replica.info = ModelInfo(_MODEL, Stage.READY, load=load)
        pick = self._router.pick(_MODEL, prefixes("", prompt) if self._affinity else ())
        server = self._servers[pick.replica.address]
        sequence = KVSequence()
        cached = server.pool.match_prefix(sequence, prompt, "")
        if not server.pool.reserve(sequence, len(prompt)):
            raise ValueError("pages: the running sequences do not fit")
        server.running.add(sequence)
        server.replica.sequences.add(sequence)
        self._outcome.prompt_tokens += len(prompt)
        self._outcome.cached_tokens += cached
        counts = [len(each.running) for each in self._servers.values()]
        excess = max(counts) - sum(counts) / len(counts)
        self._outcome.largest_excess = max(self._outcome.largest_excess, excess)
        return server, sequence, (len(prompt) - cached) * self._chats.prompt_token_s

    def _end(self, server: _Server, sequence: KVSequence, text: list[int]) -> None:
        """Leave a text's pages to the cache."""
        if not server.pool.reserve(sequence, len(text)):
            raise ValueError("pages: the running sequences do not fit")
        sequence.num_computed_tokens = len(text)
        server.pool.cache_pages(sequence, text, "")
        server.pool.free(sequence)
        server.running.discard(sequence)
        server.replica.sequences.discard(sequence)


def main() -> None:
    """Print both ways' shares of cached tokens for several numbers of replicas."""
    for replicas in (2, 4, 8):
        chats = Chats(replicas=replicas)
        for way in ("least busy", "affinity"):
            outcome = asyncio.run(simulate(chats, 500 * replicas, affinity=way == "affinity"))
            print(
                f"{replicas} replicas, {way}: {outcome.hit_share:.3f} of the prompts' tokens "
                f"cached; at most {outcome.largest_excess:.1f} sequences above the mean"
            )


if __name__ == "__main__":
    main()
