"""Features in the verifier's process pass from the target's CUDA stream to the drafter's."""

from __future__ import annotations

from random import Random
from typing import Any, cast

import numpy as np
import pytest
import torch

from drafter_svc.families.head_worker import HeadDraft, _joined
from outrider.lm.streams import SharedRows
from outrider.protocol.messages import TokenRequest
from tests.late_streams import LateStreams
from tests.verifier.fake_model import GREEDY, Client, ScriptedDrafter, make_engine
from tests.verifier.test_features import PROMPT, REQUEST, wanted


class Text:
    """A sequence; a head reads only its tokens."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens


class Head:
    """Reads the features of two texts on its own stream, as a head does."""

    def __init__(self, late: LateStreams, drafter: ScriptedDrafter, text: list[int]) -> None:
        self._late = late
        self._drafter = drafter
        self._text = cast(Any, Text(text))
        self._drafts: dict[int, HeadDraft] = {}
        self.read: dict[int, list[torch.Tensor]] = {}
        """The features that were read, keyed by sequence and in order."""

    def follow(self) -> None:
        """Read the messages to the drafter, and the features that came."""
        for message in self._drafter.received:
            for entry in message.features:
                assert isinstance(entry.rows, SharedRows)
                self._draft(entry.sequence_id).keep(entry.first_position, entry.rows)
        self._drafter.received.clear()
        for number, draft in self._drafts.items():
            if draft.kept:
                with self._late.on("head"):
                    self.read[number].append(_joined(draft.take_news().features, draft))
        self._late.free("target", "head")

    def _draft(self, number: int) -> HeadDraft:
        self.read.setdefault(number, [])
        width = self._drafter.handle.feature_width
        return self._drafts.setdefault(
            number, HeadDraft(self._text, 0, width, torch.float32, projected=False)
        )


@pytest.mark.parametrize("seed", range(3))
def test_a_head_reads_features_after_they_are_made_and_before_their_memory_is_used_again(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = make_engine(eos_bias=-99, always_draft=True)
    late, random = LateStreams(seed, monkeypatch), Random(seed)
    pick = model.pick_states

    def pick_late(*asked: Any) -> torch.Tensor:
        with late.on("target"):
            return late.made(pick(*asked))

    monkeypatch.setattr(model, "pick_states", pick_late)
    drafter = ScriptedDrafter(engine, feature_request=REQUEST, is_local=True)
    truth = model.greedy(PROMPT, 24)
    head = Head(late, drafter, [*PROMPT, *truth])
    clients = [Client(), Client()]
    numbers = [engine.submit(TokenRequest(PROMPT, 24, GREEDY), each).id for each in clients]
    while engine.sequences:
        with late.on("target"):
            engine.step()
        late.run(random.randrange(4))
        head.follow()
        for number, client in zip(numbers, clients, strict=True):
            done = len(client.tokens)
            drafter.propose(number, truth[done : done + 2], anew=True)
    late.run()
    assert list(head.read) == numbers
    for parts in head.read.values():
        found = torch.cat(parts).numpy()
        assert len(found) > len(PROMPT) + 8
        np.testing.assert_array_equal(found, wanted([*PROMPT, *truth])[: len(found)])


def test_rows_in_memory_of_their_own_are_ready_after_their_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numbers = torch.arange(12.0).reshape(4, 3)
    for seed in range(30):
        late = LateStreams(seed, monkeypatch)
        with late.on("target"):
            rows = SharedRows.of(late.made(numbers))[1:3].alone()
        with late.on("head"):
            found = torch.cat([rows.read()])
        late.run()
        torch.testing.assert_close(found, numbers[1:3])
