"""`outrider lab table`: all decoding modes get the same prompts in turns; the table is right."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.http.openai.schema import StructuredOutputs
from outrider_bench.commands.table import main
from outrider_bench.experiment.traffic import Encoder, Request
from outrider_bench.prompt_files import Prompt, read
from outrider_bench.sample import Sample
from outrider_bench.settings import TABLE_MODES, TableSettings
from outrider_bench.table.measure import (
    BY_GRAMMAR,
    FREE,
    Compared,
    measured,
    mixed,
    prompts_of,
    turns,
)
from outrider_bench.table.modes import Mode, stacks
from outrider_bench.table.peer_process import PeerDied
from outrider_bench.table.report import markdown
from outrider_bench.table.rows import Answer, Row, Turn

TARGET = Path("models/target")
ABOUT = {
    "settings": {"target": "smollm2"},
    "machine": {"processor": "EPYC", "cores": [0, 1]},
    "began": "2026-11-29",
    "commit": "abc",
    "command": "outrider lab table",
    "warnings": ["the machine is busy"],
    "missing": ["mtp: models/smollm2/mtp is not a model"],
}


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder(TARGET)


def _settings(**values: Any) -> TableSettings:
    return TableSettings.model_validate(values)


def _row(kind: str, mode: str, seconds: float, number: int = 0, **more: Any) -> Row:
    turn = Turn(0, kind, 1, 0.0, number)
    usual = {"always": False, "tokens": 60, "forwards": 60, "drafts": 0, "accepted": ()}
    return Row(turn, mode, seconds=seconds, **{"texts": ("a",), **usual, **more})


def test_speeds_are_relative_to_plain_in_the_same_turns_and_losses_are_marked() -> None:
    rows = [
        _row("chat", "plain", 1.0),
        _row("chat", "ngram", 2.0, forwards=50),
        _row("chat", "plain", 3.0, number=1),
        _row("chat", "ngram", 6.0, number=1, forwards=50),
        _row("code", "plain", 4.0),
    ]
    lines = markdown(rows, ABOUT).splitlines()
    assert "| plain | 30.0 | 15.0 | 22.5 |" in lines
    assert "| ngram | 0.50 (0.50–0.50) ▼ · 1.20 | – | – |" in lines
    assert "- Left out: mtp: models/smollm2/mtp is not a model." in lines
    with_code = markdown([*rows, _row("code", "ngram", 2.0, forwards=30)], ABOUT)
    # The ratio of the speeds over all turns: the same number of tokens took 8 s with plain decoding
    # and 10 s with n-grams.
    assert "| 2.00 · 2.00 | 0.80 (0.50–2.00) · 1.38 |" in with_code


def test_guesses_are_those_of_rows_in_which_every_step_had_a_draft() -> None:
    rows = [
        _row("chat", "plain", 1.0),
        _row("chat", "ngram", 1.0, forwards=60),
        _row("chat", "ngram", 1.0, always=True, forwards=30, drafts=20, accepted=(15, 10, 5)),
        _row("chat", "ngram", 1.0, 1, always=True, forwards=30, drafts=20, accepted=(5,)),
        _row("chat", "plain", 1.0, 1),
        _row("chat", "vllm", 1.0, forwards=60),
        _row("chat", "interrupted", 1.0, 2),
    ]
    text = markdown(rows, ABOUT)
    assert "interrupted" not in text
    guesses = text[text.index("## Every step drafted") :]
    assert "| ngram | 2.00: .50 .25 .12 | 2.00: .50 .25 .12 |" in guesses
    assert "| vllm | 1.00 | 1.00 |" in guesses


def test_greedy_texts_are_compared_with_those_of_plain_decoding() -> None:
    rows = [
        _row("chat", "plain", 1.0),
        _row("chat", "plain", 1.0, 1),
        _row("chat", "ngram", 1.0),
        _row("chat", "ngram", 1.0, 1, always=True),
    ]
    assert "| ngram | 2 of 2 | 2 of 2 |" in markdown(rows, ABOUT)
    rows[2] = replace(rows[2], texts=("b",))
    assert "| ngram | 1 of 2 | 1 of 2 |" in markdown(rows, ABOUT)


def test_kinds_alternate_and_batches_have_all_of_them() -> None:
    settings = _settings(count=5, batches=[1, 2], temperatures=[0.0], rounds=2)
    chats = [Prompt(kind="chat", text=str(i)) for i in range(6)]
    codes = [Prompt(kind="code", text=str(i)) for i in range(4)]
    calls = [Prompt(kind="call", text=str(i), structured_outputs={"json": True}) for i in range(2)]
    kinds = {"chat": chats, "code": codes, "call": calls}
    found = list(turns(settings, kinds))
    first = [(turn.kind, turn.number) for turn in found if turn.batch == 1 and not turn.round]
    assert first[:5] == [("chat", 0), ("code", 0), ("call", 0), ("chat", 1), ("code", 1)]
    # The last prompt of a kind is kept for warming up.
    assert first[-2:] == [("chat", 3), ("chat", 4)]
    assert [turn.kind for turn in found if turn.batch == 2] == [FREE, BY_GRAMMAR] * 2
    assert len(set(found)) == len(found)
    groups = mixed(kinds)
    assert [prompt.kind for prompt in groups[FREE]] == ["chat", "code"] * 3 + ["chat"] * 2
    assert groups[BY_GRAMMAR] == calls[:1]


async def test_every_way_is_asked_the_same_and_the_first_one_changes(encoder: Encoder) -> None:
    asked: list[tuple[str, list[int | None], int, str]] = []

    def mode(name: str, **more: Any) -> Mode:
        async def ask(
            requests: Sequence[Request], batch: int, temperature: float, tenant: str
        ) -> Answer:
            asked.append((name, [request.seed for request in requests], batch, tenant))
            return Answer(Sample(4, 1.0), {}, ("x",) * len(requests))

        return Mode(name, ask, **more)

    settings = _settings(count=2, batches=[1, 2], temperatures=[0.0], rounds=2)
    prompts = {"a": [Prompt(kind="a", text=text) for text in ("one", "two", "three")]}
    modes = [mode("plain"), mode("b", most=1), mode("grammar", grammars="needed")]
    modes.append(mode("b, always", always=True, most=1))
    rows = [
        row async for row in measured(settings, prompts, encoder, Compared(modes, []), math.inf)
    ]
    assert [row.mode for row in rows] == [
        *("plain", "b", "b, always"),
        *("b", "b, always", "plain"),
        "plain",
        *("plain", "b"),
        *("plain", "b"),
        "plain",
    ]
    measured_tenants = [tenant for *_, tenant in asked if tenant != "warm-up"]
    sizes = [(len(seeds), batch) for name, seeds, batch, _ in asked if name == "plain"]
    # A warm-up comes before the first turn of each batch.
    assert sizes == [(1, 1)] * 3 + [(2, 2)] * 2 + [(1, 1)] * 2 + [(2, 2)]
    assert len(set(measured_tenants)) == 2 * 2 + 2 + 1
    compared = Compared(modes, [])
    assert not [row async for row in measured(settings, prompts, encoder, compared, 0.0)]


async def test_a_peer_that_dies_costs_its_own_rows_alone(encoder: Encoder) -> None:
    def mode(name: str, answers: int) -> Mode:
        left = iter(range(answers))

        async def ask(
            requests: Sequence[Request], batch: int, temperature: float, tenant: str
        ) -> Answer:
            if next(left, None) is None:
                raise PeerDied(f"{name} died: out of memory")
            return Answer(Sample(4, 1.0), {}, ("x",) * len(requests))

        return Mode(name, ask)

    settings = _settings(count=3, temperatures=[0.0])
    prompts = {"a": [Prompt(kind="a", text=text) for text in ("one", "two", "three", "four")]}
    # The first answer of each decoding mode warms its process up.
    compared = Compared([mode("plain", 99), mode("vllm", 2), mode("never", 0)], [])
    rows = [row async for row in measured(settings, prompts, encoder, compared, math.inf)]
    assert sorted(row.mode for row in rows) == ["plain", "plain", "plain", "vllm"]
    assert [line.partition(",")[0] for line in compared.missing] == [
        "never from here on",
        "vllm from here on",
    ]
    assert "out of memory" in compared.missing[0]


async def test_grammars_are_compiled_before_any_answer_counts(encoder: Encoder) -> None:
    asked: list[tuple[str, object, str]] = []

    def mode(name: str, **more: Any) -> Mode:
        async def ask(
            requests: Sequence[Request], batch: int, temperature: float, tenant: str
        ) -> Answer:
            asked.append((name, requests[0].grammar, tenant))
            return Answer(Sample(4, 1.0), {}, ("x",))

        return Mode(name, ask, **more)

    grammars = [{"json": True}, {"json_object": True}]
    prompts = {
        "a": [Prompt(kind="a", text="one", structured_outputs=each) for each in grammars * 2],
        "b": [Prompt(kind="b", text="two")] * 2,
    }
    modes = [mode("plain"), mode("transformers", grammars="none")]
    settings = _settings(count=1, temperatures=[0.0])
    [row async for row in measured(settings, prompts, encoder, Compared(modes, []), math.inf)]
    assert asked[:2] == [("plain", each, "warm-up") for each in grammars]
    assert all(grammar is None for name, grammar, _ in asked if name == "transformers")


def test_prompts_that_are_too_long_or_too_few_are_not_asked(
    encoder: Encoder, tmp_path: Path
) -> None:
    path = tmp_path / "own.jsonl"
    rows = [{"category": "x", "prompt": text} for text in ("word " * 3000, "a", "b", "c")]
    path.write_text("\n".join(map(json.dumps, rows)))
    found = prompts_of(_settings(prompts=[path], count=2), encoder)
    assert [prompt.text for prompt in found["x"]] == ["a", "b", "c"]
    with pytest.raises(ValueError, match="there are 2 without a grammar; ask more with --count"):
        prompts_of(_settings(prompts=[path], count=4, batches=[4]), encoder)
    short = tmp_path / "short.jsonl"
    short.write_text("\n".join(map(json.dumps, rows[:2])))
    with pytest.raises(ValueError, match="kind x has 1 of at most 1984 tokens; it needs 2"):
        prompts_of(_settings(prompts=[short], count=4), encoder)


def test_the_tables_own_prompts_have_nine_of_a_kind_and_grammars_of_requests() -> None:
    kinds = read(Path("bench/traffic/table-prompts.jsonl"))
    assert {kind: len(prompts) for kind, prompts in kinds.items()} == dict.fromkeys(kinds, 9)
    assert len(kinds) == 6
    for kind in kinds:
        grammars = [prompt.structured_outputs for prompt in kinds[kind]]
        assert all(grammars) == (kind in ("JSON by schema", "tool call"))
        for grammar in filter(None, grammars):
            StructuredOutputs.model_validate(grammar)


def test_a_missing_drafter_is_named_and_a_pattern_leaves_plain_decoding(tmp_path: Path) -> None:
    found, missing = stacks(_settings(eagle3=tmp_path, modes=["draft*", "grammar"]))
    assert f"eagle3: {tmp_path} is not a model" in missing
    modes = [name for stack in found for name in stack.modes]
    assert modes[:2] == ["plain", "grammar"]
    assert "ngram" not in modes
    here = {"eagle3": "models/heads/eagle3", "mtp": "models/heads/mtp", "draft": "models/draft"}
    found, _ = stacks(_settings(**here))
    names = {name for stack in found for name in stack.modes} - {"plain"}
    assert {"eagle3", "ngram + eagle3", "mtp", "draft model"} <= names <= {*TABLE_MODES}
    with pytest.raises(ValueError, match=r"no mode is called 'ngram,grammar'; there are ngram; "):
        _settings(modes=["ngram,grammar"])


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_command_measures_all_of_our_modes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = ["--eagle3", "models/heads/eagle3", "--mtp", "models/heads/mtp"]
    size = ["--count", "1", "--tokens", "16", "--temperatures", "0", "--minutes", "0"]
    own = ["--target", str(TARGET), *here, "--draft", "models/draft", "--transformers"]
    assert main([*own, *size, "--out", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    texts = table[table.index("## Greedy texts") :].splitlines()
    for mode in ("ngram", "eagle3", "ngram + eagle3", "mtp", "ngram + mtp", "draft model"):
        [line] = [line for line in texts if line.startswith(f"| {mode} |")]
        figures = [cell.strip(" |").split(" of ") for cell in line.split(" | ") if " of " in cell]
        assert figures
        assert all(equal == count for equal, count in figures)
    # In bfloat16 transformers does not round as Outrider does, so its texts may differ.
    assert any(line.startswith("| transformers, assisted |") for line in texts)
    [run] = tmp_path.iterdir()
    assert json.loads((run / "run.json").read_text())["command"].startswith("outrider lab table")
    drafted = [json.loads(line) for line in (run / "rows.jsonl").read_text().splitlines()]
    assert any(row["mode"] == "mtp" and row["always"] and row["accepted"][0] for row in drafted)
