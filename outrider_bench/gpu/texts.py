"""Measures whether a row's logits depend on the rows beside it, so that greedy texts part."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.lm.runner import Bounds, ModelRunner, SequenceSlice
from outrider.tokenizer import load_tokenizer
from outrider_bench.gpu.lines import Device, Lines
from outrider_bench.prompts import KINDS

_OUTPUT = 32  # tokens of each text
_DRAFT = 5  # rows of a sequence with a draft of four tokens
_DTYPE = "bfloat16"


def texts(lines: Lines, device: Device, model: Path) -> None:
    """Compare a model's plain decoding, one sequence at a time, with forwards of other shapes.

    All read the same tokens. A forward of another shape may add in another order. Where two tokens
    are all but tied, it may then choose the other token, and the texts part: between plain decoding
    at two batch sizes as between plain and drafted decoding. A largest gap of a few times `spacing`
    is rounding; more is a fault. `spacing` is that of bfloat16 numbers at the largest logit.
    """
    sizes = device.sizes
    bounds = Bounds(max(sizes.batches), _DRAFT, sizes.forward_tokens)
    tokenizer = load_tokenizer(str(model))
    known = [tokenizer.encode(text).ids for kind in KINDS.values() for _, text in kind]
    prompts = [known[i % len(known)] for i in range(bounds.sequences)]
    longest = max(map(len, prompts)) + _OUTPUT
    runner = ModelRunner.load(
        str(model),
        dtype=_DTYPE,
        device=device.device.type,
        page_count=-(-longest // 16) * len(prompts),
        bounds=bounds,
    )
    runner.capture(bounds)
    plain = Plain(runner, prompts)
    for batch in sizes.batches:
        for tokens in (1, _DRAFT):
            lines.check()
            figures = plain.beside(batch, tokens)
            what = "plain" if tokens == 1 else "drafts"
            lines.say(what, batch=batch, tokens=tokens, **figures)


class Plain:
    """The greedy texts of prompts, decoded one after the other, and their tokens' logits."""

    def __init__(self, runner: ModelRunner, prompts: list[list[int]]) -> None:
        self._runner = runner
        each = runner.page_count // len(prompts)
        self._pages = [[*range(i * each, (i + 1) * each)] for i in range(len(prompts))]
        self._lengths = [len(prompt) for prompt in prompts]
        self._outputs: list[list[int]] = []
        rows: list[torch.Tensor] = []
        for prompt, pages in zip(prompts, self._pages, strict=True):
            output: list[int] = []
            slices = [SequenceSlice(prompt, 0, pages, 1)]
            while len(output) < _OUTPUT:
                rows.append(runner.forward(slices)[0].clone())
                output.append(int(rows[-1].argmax()))
                at = len(prompt) + len(output) - 1
                slices = [SequenceSlice(output[-1:], at, pages, 1)]
            self._outputs.append(output)
        self._logits_NTV = torch.stack(rows).view(len(prompts), _OUTPUT, -1)

    def beside(self, batch: int, tokens: int) -> dict[str, float]:
        """Figures of forwards of the first `batch` texts, with `tokens` rows of each at once."""
        # The first token of a text comes from its prompt's forward.
        starts = range(1, _OUTPUT - tokens + 1, tokens)
        found = torch.cat([self._forward(batch, tokens, start) for start in starts], 1)
        alone = self._logits_NTV[:batch, 1 : 1 + found.shape[1]]
        differences = (found - alone).abs().amax(-1)
        own = alone.max(-1)
        other = found.argmax(-1)
        gaps = own.values - alone.gather(-1, other.unsqueeze(-1)).squeeze(-1)
        parted = other != own.indices
        # Seven bits of a bfloat16 number follow its first.
        spacing = 2.0 ** (int(alone.abs().amax().frexp().exponent) - 8)
        return {
            "rows": parted.numel(),
            "other_bits": int((differences > 0).sum()),
            "largest_difference": float(differences.max()),
            "other_tokens": int(parted.sum()),
            "largest_gap": float(gaps.max()),
            "spacing": spacing,
        }

    def _forward(self, batch: int, tokens: int, start: int) -> torch.Tensor:
        """The logits [batch, tokens, V] of the texts' tokens from `start` on."""
        slices = [
            SequenceSlice(output[start - 1 : start - 1 + tokens], length + start - 1, pages, tokens)
            for output, length, pages in zip(
                self._outputs[:batch], self._lengths, self._pages, strict=False
            )
        ]
        return self._runner.forward(slices).view(batch, tokens, -1).clone()
