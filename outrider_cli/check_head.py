"""`outrider check-head`: describes a draft head, and tells how often its first guesses are right.

The command loads the target, which a head's drafter process does not. So if the head's file may
mean several sets of the target's layers, the command can tell which interpretation fits. A verifier
with a head in its process uses the same text to choose the interpretation.
"""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console

from outrider.heads.loading import load, target_weights
from outrider.heads.reading import read, read_target_config
from outrider.heads.reading_choice import ReadingChoice, choose_reading, states_of
from outrider.heads.spec import Head, HeadSpec
from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider.tokenizer import load_tokenizer
from outrider_cli.prompts import DEMO_PROMPTS
from outrider_cli.start_log import start_status

_TOKENS = 256
_PAGE_SIZE = 16
# The least share of right first guesses. A head that was trained for the target is right far more
# often, on some targets even when it reads the wrong layers.
_FIT = 0.1


def run(
    head: Path, target: str, dtype: str, device: str, *, trust_remote_code: bool = False
) -> int:
    """Print what the head is, and which interpretation of its file fits the target best.

    Returns the exit status: 1 if the head does not fit the target.
    Raises OutriderError(INVALID_VALUE) for a head or target that cannot be read.
    """
    found = read(head, read_target_config(target, trust_remote_code))
    with start_status(Console(stderr=True), f"loading {target}, and reading a text with it ..."):
        choice = check(found, target, dtype, device, trust_remote_code=trust_remote_code)
    spec = found.spec
    print(f"kind: {spec.kind}")
    print(f"features: {spec.feature_width} numbers a token; draft ids: {spec.draft_vocab_size}")
    print(f"right guesses after {choice.tried} tokens of a text, by what the file may mean:")
    for number, (words, matches) in enumerate(zip(choice.shown, choice.matches, strict=True), 1):
        later = f", and {matches.later} later ones" if matches.later else ""
        share = f"{matches.first / choice.tried:.0%}"
        print(f"  {number}. {words}: {matches.first} ({share}){later}")
    if max(matches.first for matches in choice.matches) < _FIT * choice.tried:
        print("The head is hardly ever right about this target: it was made for another target.")
        return 1
    number = [matches.spec for matches in choice.matches].index(choice.spec) + 1
    if number > 1:
        print("The file's own first reading is worse. Start its drafter with")
        print(f"  --head-reading {number}")
    elif not choice.clear:
        print("That does not tell the readings apart. The file's likeliest reading comes first.")
    return 0


def check(
    head: Head, target: str, dtype: str, device: str, *, trust_remote_code: bool = False
) -> ReadingChoice:
    """Choose the interpretation of the head's file with the most right guesses about a text."""
    pages = 2 * _TOKENS // _PAGE_SIZE
    runner = ModelRunner.load(
        target,
        dtype=dtype,
        device=device,
        page_count=pages,
        trust_remote_code=trust_remote_code,
    )
    model = load(
        head,
        target_weights(target),
        page_count=pages * (1 + len(head.spec.other_aux_layers)),
        page_size=_PAGE_SIZE,
    )
    return choose_reading(model, *read_text(runner, target, head.spec))


def read_text(
    runner: ModelRunner, target: str, spec: HeadSpec
) -> tuple[list[int], dict[int, torch.Tensor], list[int]]:
    """Run the target over a text; return tokens, states and answers for `choose_reading`.

    The answers are the target's likeliest next tokens. Overwrites the first pages of the runner's
    cache. The runner watches the states from now on.
    """
    tokenizer = load_tokenizer(target)
    most = min(_TOKENS, runner.context_length, runner.page_count * runner.page_size)
    text = [i for _, prompt in DEMO_PROMPTS for i in tokenizer.encode(prompt).ids][:most]
    wanted = states_of(spec)
    runner.watch(wanted)
    pages = [*range(-(-len(text) // runner.page_size))]
    with torch.inference_mode():
        logits = runner.forward([SequenceSlice(text, 0, pages, len(text))])
        answers = logits.argmax(-1).tolist()
        rows = range(len(text))
        states = {state: runner.pick_states([state], rows, "float32").cpu() for state in wanted}
    return text, states, answers
