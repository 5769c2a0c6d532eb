"""How much of a canonical text the drafter of grammars guesses, and how long a guess takes.

`PYTHONPATH=.:tests python tests/grammar/canonical_texts.py [FOLDER]` plays a verifier that takes
eight tokens a step, and commits a given text in the tokens of the tokenizer in FOLDER: the bundled
one, unless given, or `large` for a made-up one of 128 thousand tokens. It prints tokens per
forward, the share of the drafts that are right, and the processor time of a guess. No model runs.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from family_rig import Rig, opened_sequence
from large_vocabulary import END, write

from drafter_svc.families.grammar import GrammarFamily, Grammars
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.protocol.draft_messages import Window
from outrider.tokenizer import load_tokenizer
from outrider_bench.prompts import GRAMMARS

_STEP_TOKENS = 8
_PERSON = {"name": "Ada Lovelace", "age": 36, "job": "head of research", "city": "Oslo"}
_ARGUMENTS = _PERSON | {"state": "working", "notify": True}


@dataclass(slots=True)
class Counts:
    """Of one text."""

    tokens: int = 0
    forwards: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: list[float] = field(default_factory=list)


def texts() -> Iterator[tuple[str, Grammar, str]]:
    """Name, grammar and text."""
    schema = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(GRAMMARS["schema"]["json"]))
    yield "JSON, as json.dumps writes it", schema, json.dumps(_PERSON)
    yield "JSON without blanks", schema, json.dumps(_PERSON, separators=(",", ":"))
    yield "JSON, indented by 2", schema, json.dumps(_PERSON, indent=2)
    tag = json.dumps(GRAMMARS["tools"]["structural_tag"])
    call = json.dumps({"name": "save_person", "arguments": _ARGUMENTS})
    text = f"<tool_call>\n{call}\n</tool_call>"
    yield "tool call in Qwen 3's format", Grammar(GrammarKind.STRUCTURAL_TAG, tag), text


async def play(grammars: Grammars, tokens: list[int], grammar: Grammar) -> Counts:
    """Commit `tokens` as a verifier that verifies chains alone."""
    # Reading the clock takes longer than a guess on some machines.
    family = GrammarFamily(grammars, cpu_clock=lambda: 0.0)
    rig = Rig(family)
    counts = Counts(len(tokens))
    prompt = [grammars.stops[0]]
    window = Window(_STEP_TOKENS, _STEP_TOKENS)
    more: dict[str, Any] = {"grammar": grammar, "prompt_length": len(prompt)}
    rig.open(opened_sequence(1, prompt, window, _STEP_TOKENS, **more))
    await asyncio.wait([family._texts[1].compiling])
    at = 0
    while at < len(tokens):
        started = time.process_time()
        await rig.draft()
        counts.seconds.append(time.process_time() - started)
        draft = rig.guesses(1)[:_STEP_TOKENS]
        pairs = zip(draft, tokens[at:], strict=False)
        right = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        accepted = min(len(draft), len(tokens) - at) if right is None else right
        counts.forwards += 1
        counts.drafted += len(draft)
        counts.accepted += accepted
        rig.commit(1, *tokens[at : at + accepted + 1])
        at += accepted + 1
    return counts


async def measure(folder: str, ends: tuple[int, ...] = ()) -> None:
    """Print a row for each text."""
    grammars = Grammars(folder)
    if ends:
        assert grammars.stops == ends
    tokenizer = load_tokenizer(folder)
    print("| text | tokens | tokens per forward | precision | a guess, ms |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, grammar, text in texts():
        tokens = [*tokenizer.encode(text, add_special_tokens=False).ids, grammars.stops[0]]
        runs = [await play(grammars, tokens, grammar) for _ in range(20)]
        counts = runs[-1]
        ms = 1000 * statistics.mean(second for run in runs[1:] for second in run.seconds)
        rate = counts.tokens / counts.forwards
        share = counts.accepted / counts.drafted
        print(f"| {name} | {counts.tokens} | {rate:.2f} | {100 * share:.0f} % | {ms:.2f} |")


def main() -> None:
    """Measure with the tokenizer that the command names."""
    folder = sys.argv[1] if len(sys.argv) > 1 else "models/target"
    if folder != "large":
        asyncio.run(measure(folder))
        return
    with tempfile.TemporaryDirectory() as large:
        write(Path(large))
        (Path(large) / "generation_config.json").write_text(json.dumps({"eos_token_id": END}))
        asyncio.run(measure(large, (END,)))


if __name__ == "__main__":
    main()
