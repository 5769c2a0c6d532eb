"""With a vocabulary as large as Llama 3's, everyday schemas compile, and get masks, in time.

`python -m tests.grammar.test_large_vocabulary FIGURES.csv` measures masks with a made-up vocabulary
(see `large_vocabulary`), or with a tokenizer's vocabulary: `… FIGURES.csv FOLDER`. All times are
processor time, so that a busy machine matters less.
"""

from __future__ import annotations

import csv
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.grammar import guard
from outrider.grammar.backends import Compiled, Libraries, Mask, Matcher
from outrider.grammar.guard import Walker
from outrider.grammar.trial import Trial, compile_only
from tests.grammar.everyday import EVERYDAY, grammar_for
from tests.grammar.large_vocabulary import write

# The number of texts in a measurement; a test uses fewer texts.
TEXTS = 20
REPETITIONS = 3
# Half of the compiler's 5 s, since a worker shares the processors with the engine.
ADMISSION_S = 5.0 / 2
# Sequences with slower masks get no drafts.
SLOW_MS = 5.0


@dataclass(frozen=True)
class Figures:
    """One schema: times of compiling in seconds, times of masks and tokens in milliseconds."""

    vocabulary: int
    schema: str
    admission_s: float
    compile_s: float
    masks: int
    mask_p50_ms: float
    mask_p99_ms: float
    mask_most_ms: float
    advance_p50_ms: float
    advance_p99_ms: float


class Timed:
    """A compiled grammar whose matchers note the time of each mask and each token."""

    def __init__(self, compiled: Compiled) -> None:
        self.size_bytes = compiled.size_bytes
        self.masks_ms: list[float] = []
        self.advances_ms: list[float] = []
        self._compiled = compiled

    def matcher(self) -> Matcher:
        """Return a timed matcher."""
        return _TimedMatcher(self._compiled.matcher(), self)


class _TimedMatcher:
    def __init__(self, matcher: Matcher, times: Timed) -> None:
        self._matcher, self._times = matcher, times
        self.rollback = matcher.rollback

    def accept(self, token_id: int) -> bool:
        started = time.thread_time()
        accepted = self._matcher.accept(token_id)
        self._times.advances_ms.append(1000 * (time.thread_time() - started))
        return accepted

    def fill(self, mask_RW: Mask, row: int) -> None:
        started = time.thread_time()
        self._matcher.fill(mask_RW, row)
        self._times.masks_ms.append(1000 * (time.thread_time() - started))

    @property
    def ended(self) -> bool:
        return self._matcher.ended


class Vocabulary:
    """LLGuidance with one tokenizer loaded."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.size = len(tokenizer)
        self.ends = (tokenizer.eos_token_id,)
        self.libraries = Libraries(folder, self.size, self.ends)
        self.trial = Trial(self.libraries, self.size, self.ends)
        self.walker = Walker(self.libraries.token_bytes, self.ends)

    def figures(self, name: str, repetitions: int = 1, texts: int = 5) -> Figures:
        """Measure a schema; raise OutriderError if it is refused."""
        grammar = grammar_for(EVERYDAY[name])
        admissions, compilations = [], []
        for _ in range(repetitions):
            started = time.thread_time()
            translated = self.trial.translated(grammar)
            admissions.append(time.thread_time() - started)
            started = time.thread_time()
            timed = Timed(compile_only(self.libraries, translated))
            compilations.append(time.thread_time() - started)
        for seed in range(texts):
            self.walker.text(timed, random.Random(seed))
        masks, advances = np.array(timed.masks_ms), np.array(timed.advances_ms)
        mask_p50_ms, mask_p99_ms = np.percentile(masks, (50, 99)).tolist()
        advance_p50_ms, advance_p99_ms = np.percentile(advances, (50, 99)).tolist()
        return Figures(
            self.size,
            name,
            float(np.median(admissions)),
            float(np.median(compilations)),
            len(masks),
            mask_p50_ms,
            mask_p99_ms,
            masks.max().item(),
            advance_p50_ms,
            advance_p99_ms,
        )


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    folder = tmp_path_factory.mktemp("vocabulary")
    write(folder)
    return Vocabulary(str(folder))


@pytest.mark.slow
def test_everyday_schemas_are_admitted_and_masked_in_time(vocabulary: Vocabulary) -> None:
    for name in EVERYDAY:
        found = vocabulary.figures(name)
        assert found.admission_s < ADMISSION_S, found
        assert found.mask_p50_ms < SLOW_MS, found
        assert found.mask_p99_ms < SLOW_MS, found


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERYDAY)
def test_the_guard_has_time_for_half_of_its_texts_and_more(
    vocabulary: Vocabulary, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[Any] = []
    write_text = Walker.text

    def text(self: Walker, *arguments: Any) -> bytes | None:
        ends.append(write_text(self, *arguments))
        return ends[-1]

    monkeypatch.setattr(Walker, "text", text)
    grammar = grammar_for(EVERYDAY[name])
    vocabulary.trial.translated(grammar)
    vocabulary.trial.check_texts(grammar)
    assert len(ends) > guard._MAX_TEXTS // 2
    assert any(ends)


def _rows(folder: str) -> Iterator[dict[str, Any]]:
    vocabulary = Vocabulary(folder)
    for name in EVERYDAY:
        found = vocabulary.figures(name, REPETITIONS, TEXTS)
        yield {
            key: f"{value:.4g}" if isinstance(value, float) else value
            for key, value in vars(found).items()
        }


def _measure(path: str, folder: str | None = None) -> None:
    with tempfile.TemporaryDirectory() as made, open(path, "w", newline="") as file:
        if folder is None:
            write(Path(made))
        table = csv.DictWriter(file, [field.name for field in fields(Figures)])
        table.writeheader()
        for row in _rows(folder or made):
            table.writerow(row)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    _measure(*sys.argv[1:])
