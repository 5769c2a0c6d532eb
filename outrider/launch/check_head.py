"""`outrider check-head`: says what a draft head is, and how often its first guesses are right.

It loads the target, which the drafter of a head does not. So it can tell which of the target's
layers the head was trained on, where the head's file may mean several.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig

from outrider.heads.layer_choice import LayerChoice, candidates, choose_layers
from outrider.heads.loading import target_weights
from outrider.heads.reading import read
from outrider.heads.spec import Head
from outrider.launch.prompts import DEMO_PROMPTS
from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider.protocol.draft_messages import FINAL_STATE
from outrider.tokenizer import load_tokenizer

_TOKENS = 256
_PAGE_SIZE = 16
# A head of the target is right far more often, even on the wrong layers of some targets.
_FIT = 0.1


def run(head: Path, target: str, dtype: str, device: str) -> int:
    """Print the facts and the choice; return the exit status, 1 if the head does not fit.

    Raises OutriderError(INVALID_VALUE) for a head or target that cannot be read.
    """
    found = read(head, AutoConfig.from_pretrained(target))
    choice = check(found, target, dtype, device)
    spec = found.spec
    print(f"kind: {spec.kind}")
    print(f"features: {spec.feature_width} numbers a token; draft ids: {spec.draft_vocab_size}")
    print(f"right first guesses behind {choice.tried} tokens of a text, by the boundaries read:")
    for boundaries, count in choice.matches.items():
        print(f"  {_shown(boundaries)}: {count} ({count / choice.tried:.0%})")
    if max(choice.matches.values()) < _FIT * choice.tried:
        print("The head hardly guesses this target: it was made for another one.")
        return 1
    if choice.boundaries != spec.boundaries:
        print(f"The file says {_shown(spec.boundaries)}. Start its drafter with")
        print(f"  --layers {','.join(map(str, choice.boundaries))}")
    elif not choice.clear:
        print("That does not tell them apart. The file's own come first.")
    return 0


def check(head: Head, target: str, dtype: str, device: str) -> LayerChoice:
    """Compare the head's first guesses with the target's likeliest tokens of a text."""
    runner = ModelRunner.load(
        target, dtype=dtype, device=device, page_count=2 * _TOKENS // _PAGE_SIZE
    )
    tokenizer = load_tokenizer(target)
    text = [i for _, prompt in DEMO_PROMPTS for i in tokenizer.encode(prompt).ids][:_TOKENS]
    wanted = {state for boundaries in candidates(head) for state in boundaries}
    if head.spec.final_state:
        wanted.add(FINAL_STATE)
    runner.watch(wanted)
    pages = [*range(-(-len(text) // runner.page_size))]
    with torch.inference_mode():
        logits = runner.forward([SequenceSlice(text, 0, pages, len(text))])
        answers = logits.argmax(-1).tolist()
        rows = range(len(text))
        states = {state: runner.pick_states([state], rows, "float32").cpu() for state in wanted}
    return choose_layers(head, target_weights(target), text, states, answers)


def _shown(boundaries: tuple[int, ...]) -> str:
    return f"layers {list(boundaries)}" if boundaries else "the final state"
