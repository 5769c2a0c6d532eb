"""Records texts for the simulator: the target's answers, and where draft models guess right.

Simulated n-gram drafters look up the recorded tokens. This module uses no experiment and no costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider_bench.experiment.traffic import Request
from outrider_bench.simulator.recorded import RecordedRequest
from outrider_bench.simulator.world import RIGHT

WRONG = "-"
# Drafts go on after the end of an answer, so this many more tokens are recorded.
_BEYOND = 32
# In a chain, a draft model remembers this many alternatives to a guess, as in
# drafter_svc.families.forwards.
_ALTERNATIVES = 3


@dataclass(slots=True)
class RecordedText:
    """The target's greedy tokens after a prompt, and the `model_guesses` of each draft model."""

    output: list[int]
    guesses: dict[str, str] = field(default_factory=dict)


class Recorder:
    """Runs a target and draft models once for each prompt."""

    def __init__(self, target: Path, dtype: str, draft_models: dict[str, Path]) -> None:
        """`draft_models` maps the name that a model's guesses get to the model's directory."""
        self._target = target
        self._dtype = dtype
        self._draft_models = draft_models
        self._known: dict[tuple[int, ...], RecordedText] = {}

    def record(self, requests: Sequence[Request]) -> list[RecordedRequest]:
        """Record requests with their answers."""
        longest = max([request.output_tokens for request in requests]) + _BEYOND
        prompts = dict.fromkeys([tuple(request.prompt) for request in requests])
        nothing = RecordedText([])
        short = [p for p in prompts if len(self._known.get(p, nothing).output) < longest]
        self._learn([list(prompt) for prompt in short], longest)
        return [self._recorded(request) for request in requests]

    def _recorded(self, request: Request) -> RecordedRequest:
        text = self._known[tuple(request.prompt)]
        return RecordedRequest(
            time=0.0,
            prompt_tokens=len(request.prompt),
            output_tokens=request.output_tokens,
            kind=request.kind,
            guesses=text.guesses,
            grammar=request.grammar is not None,
            prompt_ids=request.prompt,
            output_ids=text.output[: request.output_tokens + _BEYOND],
        )

    def _learn(self, prompts: list[list[int]], count: int) -> None:
        if not prompts:
            return
        pages = -(-(max(map(len, prompts)) + count) // 16) * len(prompts)
        target = ModelRunner.load(str(self._target), dtype=self._dtype, page_count=pages)
        for prompt, output in zip(prompts, greedy(target, prompts, count), strict=True):
            self._known[tuple(prompt)] = RecordedText(output)
        for name, path in self._draft_models.items():
            draft = ModelRunner.load(str(path), dtype=self._dtype, int8=None, page_count=pages)
            for prompt in prompts:
                text = self._known[tuple(prompt)]
                text.guesses[name] = model_guesses(draft, prompt, text.output)


def greedy(target: ModelRunner, prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    """Return `count` greedy tokens after each prompt, even beyond an end token."""
    pages = -(-(max(map(len, prompts)) + count) // target.page_size)
    own = [[*range(i * pages, (i + 1) * pages)] for i in range(len(prompts))]
    last = [
        int(target.forward([SequenceSlice(prompt, 0, held, 1)])[0].argmax())
        for prompt, held in zip(prompts, own, strict=True)
    ]
    outputs = [[token] for token in last]
    while len(outputs[0]) < count:
        slices = [
            SequenceSlice([output[-1]], len(prompt) + len(output) - 1, held, 1)
            for prompt, output, held in zip(prompts, outputs, own, strict=True)
        ]
        for output, token in zip(outputs, target.forward(slices).argmax(-1).tolist(), strict=True):
            output.append(token)
    return outputs


def model_guesses(draft: ModelRunner, prompt: list[int], output: list[int]) -> str:
    """Rank each token of `output` among the draft model's likeliest tokens at its position.

    Each character of the result judges a token: right, the rank of an alternative, or wrong. The
    model reads the target's tokens, not its own guesses.
    """
    text = [*prompt, *output[:-1]]
    logits_RV = draft.forward(
        [SequenceSlice(text, 0, [*range(-(-len(text) // draft.page_size))], len(output))]
    )
    likeliest_RK = logits_RV.topk(1 + _ALTERNATIVES).indices
    found_RK = likeliest_RK == torch.tensor(output).unsqueeze(1)
    characters = [RIGHT, *map(str, range(1, 1 + _ALTERNATIVES))]
    guesses = ""
    for row in found_RK.tolist():
        guesses += characters[row.index(True)] if True in row else WRONG
    return guesses
