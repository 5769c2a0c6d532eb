"""The family grammar drafts the text that a request's grammar forces, in the model's tokens."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from drafter_svc.families.grammar import GrammarFamily, Grammars, GrammarSettings
from drafter_svc.metrics import DrafterMetrics
from drafter_svc.placement import PlacementPlan
from outrider.errors import OutriderError
from outrider.grammar import compiler
from outrider.grammar.backends import Compiled, Libraries
from outrider.grammar.kinds import FreeThought, Grammar, GrammarKind
from outrider.protocol.draft_messages import Skip, Window
from tests.family_rig import Rig, opened_sequence

TARGET = "models/target"
PROMPT = "<|user|>Go on.<|end|><|assistant|>"
END = 3
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "ok": {"type": "boolean"},
        "kind": {"enum": ["red", "green", "blue"]},
        "city": {"type": "string"},
    },
    "required": ["name", "ok", "kind", "city"],
    "additionalProperties": False,
}
SCHEMA = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON))


def tool_calls(**more: Any) -> Grammar:
    """Return a grammar of calls of `get_weather` and `get_time` in Qwen 3's format.

    Both functions take a person.
    """
    tags = [
        {
            "type": "tag",
            "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
            "content": {"type": "json_schema", "json_schema": PERSON},
            "end": "}\n</tool_call>",
        }
        for name in ("get_weather", "get_time")
    ]
    tags_at = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": tags, **more}
    text = json.dumps({"type": "structural_tag", "format": tags_at})
    return Grammar(GrammarKind.STRUCTURAL_TAG, text)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TARGET)


class Writer:
    """A rig with one sequence whose grammar is compiled."""

    def __init__(self, grammars: Grammars, **clocks: Any) -> None:
        self.grammars = grammars
        self.family = GrammarFamily(grammars, **clocks)
        self.rig = Rig(self.family)
        self.tree_tokens = 0

    def encoded(self, text: str) -> list[int]:
        tokenizer = self.grammars.speller._tokenizer
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    async def open(
        self, grammar: Grammar | None, text: str = "", sequence_id: int = 1, **more: Any
    ) -> None:
        """Open a sequence whose text so far is `text`, and wait for its grammar."""
        self.tree_tokens = more.get("tree_tokens", 0)
        prompt = self.encoded(PROMPT)
        tokens = [*prompt, *self.encoded(text)]
        more |= {"grammar": grammar, "prompt_length": len(prompt)}
        self.rig.open(opened_sequence(sequence_id, tokens, Window(64, 24), 24, **more))
        if sequence_id in self.family._texts:
            await asyncio.wait([self.family._texts[sequence_id].compiling])

    def write(self, text: str) -> None:
        self.rig.commit(1, *self.encoded(text), tree_tokens=self.tree_tokens)

    async def paths(self, sequence_id: int = 1) -> list[tuple[str, float]]:
        """Return the paths of the next proposal as texts, each with its last token's confidence."""
        proposals = (await self.rig.draft()).proposals
        if not proposals:
            return []
        [proposal] = proposals
        count = len(proposal.token_ids)
        parents = proposal.parents or range(count)
        runs: list[list[int]] = [[]]
        for token, parent in zip(proposal.token_ids, parents, strict=True):
            runs.append([*runs[parent], token])
        leaves = [i for i in range(1, count + 1) if i not in parents]
        decode = self.grammars.bytes_of
        return [(decode(runs[i]).decode(), proposal.confidences[i - 1]) for i in leaves]

    async def chain(self) -> str:
        """Return the text of the next proposal's chain; empty for a skip."""
        await self.rig.draft()
        return self.grammars.bytes_of(self.rig.guesses(1)).decode()


@pytest.mark.parametrize(
    ("grammar", "text", "expected"),
    [
        (SCHEMA, '{"', 'name": "'),
        (SCHEMA, '{"name": "Ada",', ' "ok": '),
        (SCHEMA, '{"name":"Ada",', '"ok":'),
        (SCHEMA, '{\n  "name": "Ada",', '\n  "ok": '),
        (SCHEMA, '{"name": "A", "ok": true, "kind": "g', 'reen", "city": "'),
        (Grammar(GrammarKind.JSON_OBJECT), "", "{"),
        (Grammar(GrammarKind.REGEX, "id-[0-9]{2}-(?:one)?x"), "id", "-"),
        (Grammar(GrammarKind.REGEX, "id-[0-9]{2}-end"), "id-12", "-end<|end|>"),
        (Grammar(GrammarKind.CHOICE, choices=("north", "south")), "so", "uth<|end|>"),
        (Grammar(GrammarKind.EBNF, 'root ::= "go " ("up" | "down") "!"'), "go d", "own!<|end|>"),
        (tool_calls(at_least_one=True), "", '<tool_call>\n{"name": "get_'),
        (tool_calls(), '<tool_call>\n{"name": "get_t', 'ime", "arguments": {"name": "'),
    ],
)
async def test_what_must_follow_is_drafted(
    grammars: Grammars, grammar: Grammar, text: str, expected: str
) -> None:
    writer = Writer(grammars)
    await writer.open(grammar, text)
    assert (await writer.chain()).startswith(expected)


async def test_a_forced_text_has_the_tokens_that_the_tokenizer_gives_the_whole(
    grammars: Grammars,
) -> None:
    writer = Writer(grammars)
    begin, whole = '{"name": "Ada",', '{"name": "Ada", "ok": true, "kind": "red", "city": "Bo"}'
    await writer.open(SCHEMA, begin)
    await writer.chain()
    tokens = [*writer.encoded(begin), *writer.rig.guesses(1)]
    same = [a == b for a, b in zip(tokens, writer.encoded(whole), strict=False)]
    assert sum(same) > len(writer.encoded(begin)) + 3
    assert grammars.bytes_of(tokens).decode().startswith('{"name": "Ada", "ok": ')


async def test_the_last_token_of_a_forced_text_is_the_least_sure(grammars: Grammars) -> None:
    writer = Writer(grammars)
    await writer.open(SCHEMA, '{"name": "A", "ok": true, "kind": "red", "c')
    [(text, last)] = await writer.paths()
    assert text == 'ity": "'
    sequence = writer.rig.session.sequences[1]
    assert last == sequence.confidences[-1] < 0.8 < min(sequence.confidences[:-1])


async def test_layouts_that_agree_with_the_text_are_branches(grammars: Grammars) -> None:
    writer = Writer(grammars)
    await writer.open(SCHEMA, '{"name"', tree_tokens=64)
    texts = [text for text, _ in await writer.paths()]
    assert texts == [': "', ':"']


@pytest.mark.parametrize(
    ("grammar", "text", "values"),
    [
        (SCHEMA, '{"name": "A", "ok": ', ["true,", "false,"]),
        (SCHEMA, '{"name": "A", "ok": true, "kind": "', ['red"', 'green"', 'blue"']),
        (tool_calls(), '<tool_call>\n{"name": "', ['get_weather"', 'get_time"']),
        (Grammar(GrammarKind.CHOICE, choices=("yes", "no")), "", ["yes<|end|>", "no<|end|>"]),
    ],
)
async def test_each_of_a_few_values_is_a_branch(
    grammars: Grammars, grammar: Grammar, text: str, values: list[str]
) -> None:
    writer = Writer(grammars)
    await writer.open(grammar, text, tree_tokens=64)
    found = [path for path, _ in await writer.paths()]
    for value in values:
        assert any(path.startswith(value) for path in found), (value, found)


async def test_many_values_and_free_text_are_not_guessed(grammars: Grammars) -> None:
    many = tuple(f"{first}{second}" for first in "abcdefghij" for second in "xy")
    for grammar, text in ((Grammar(GrammarKind.CHOICE, choices=many), ""), (SCHEMA, '{"name": "')):
        writer = Writer(grammars)
        await writer.open(grammar, text, tree_tokens=64)
        assert await writer.paths() == []


async def test_where_calls_are_optional_nothing_is_guessed_before_the_trigger(
    grammars: Grammars,
) -> None:
    writer = Writer(grammars)
    await writer.open(tool_calls(), "")
    for text in ("Let me", " see:", ' {"name": "get_weather"', "\n<tool", "_call"):
        assert await writer.chain() == ""
        writer.write(text)
    assert await writer.chain() == ""
    writer.write(">")
    assert (await writer.chain()).startswith('\n{"name": "get_')


async def test_nothing_is_guessed_within_a_thought_and_the_answer_after_it_is(
    grammars: Grammars,
) -> None:
    writer = Writer(grammars)
    await writer.open(replace(SCHEMA, thought=FreeThought("", "</think>", "\n\n")), "")
    for text in ("Let me", " see:", ' {"name": ', '[1, 2, "', "</thi", "nk"):
        assert await writer.chain() == ""
        writer.write(text)
    writer.write(">")
    assert (await writer.chain()).startswith("\n\n{")
    writer.write('\n\n{"name":')
    # The drafter learns whitespace from the answer, but not from the thought.
    writer.write('"A",')
    assert (await writer.chain()).startswith('"ok":')


async def test_a_thought_that_may_be_left_out_is_a_branch_beside_the_answer(
    grammars: Grammars,
) -> None:
    writer = Writer(grammars)
    await writer.open(replace(SCHEMA, thought=FreeThought("<think>", "</think>")), tree_tokens=64)
    texts = [text for text, _ in await writer.paths()]
    assert "<think>" in texts
    assert any(text.startswith("{") for text in texts)


async def test_the_end_is_the_one_that_the_prompt_has(grammars: Grammars) -> None:
    assert grammars.stops[0] != END
    writer = Writer(grammars)
    await writer.open(SCHEMA, '{"name": "A", "ok": true, "kind": "red", "city": "B"')
    assert (await writer.chain()) == "}<|end|>"


async def test_it_is_silent_about_joints_after_misses_and_comes_back(grammars: Grammars) -> None:
    names = [f"k{i}" for i in range(20)]
    value: dict[str, Any] = {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in names},
    }
    value |= {"required": names, "additionalProperties": False}
    writer = Writer(grammars)
    await writer.open(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(value)), '{"k0": 1')
    said = []
    for i, name in enumerate(names[1:], 1):
        # The whitespace changes at each of the first eight joints, and then stays the same.
        whitespace = " " if i > 8 else ("\n    ", "", " ", "\n")[i % 4]
        writer.write(",")
        said.append(await writer.chain())
        writer.write(f'{whitespace}"{name}":')
        await writer.chain()
        writer.write("1")
        await writer.chain()
    assert 1 in writer.family._texts
    assert said[0].startswith(' "k1')
    assert said[3:8] == [""] * 5
    assert all(text.startswith(' "k') for text in said[-5:])


async def test_it_says_that_it_needs_the_target() -> None:
    place = PlacementPlan("local", (), None, None)
    with pytest.raises(OutriderError) as refused:
        await GrammarFamily.load(GrammarSettings(), place, DrafterMetrics("d", "grammar"))
    assert refused.value.field == "target"


async def test_a_sequence_without_a_grammar_is_skipped(grammars: Grammars) -> None:
    writer = Writer(grammars)
    await writer.open(None, "")
    assert (await writer.rig.draft()).skips == [Skip(1, len(writer.encoded(PROMPT)))]


async def test_a_sequence_that_ends_while_its_grammar_is_compiled_costs_nothing(
    grammars: Grammars,
) -> None:
    writer = Writer(grammars)
    prompt = writer.encoded(PROMPT)
    writer.rig.open(
        opened_sequence(1, prompt, Window(64, 24), 24, grammar=SCHEMA, prompt_length=len(prompt))
    )
    assert (await writer.rig.draft()).skips
    compiling = writer.family._texts[1].compiling
    writer.rig.close(1)
    await asyncio.wait([compiling])
    assert compiling.cancelled()
    assert writer.family._texts == {}


async def test_a_grammar_that_cannot_be_compiled_costs_its_sequence_the_drafts(
    grammars: Grammars, caplog: pytest.LogCaptureFixture
) -> None:
    writer = Writer(grammars)
    await writer.open(Grammar(GrammarKind.REGEX, "(("))
    assert await writer.chain() == ""
    assert "sequence 1 is not drafted for" in caplog.text


async def test_a_text_beyond_its_grammar_is_not_drafted(grammars: Grammars) -> None:
    writer = Writer(grammars)
    await writer.open(SCHEMA, '{"name')
    assert await writer.chain() != ""
    writer.write("xyz")
    assert await writer.chain() == ""
    writer.write('": "')
    assert await writer.chain() == ""


async def test_grammars_that_take_long_lose_their_drafts_and_those_of_their_tenant(
    grammars: Grammars,
) -> None:
    """A guess takes 0.25 s of processor time.

    One guess exceeds a sequence's allowance, and three guesses exceed a tenant's allowance.
    """
    now = [0.0]
    ticks = itertools.count()
    clocks = {"cpu_clock": lambda: 0.25 * next(ticks), "clock": lambda: now[0]}
    writer = Writer(grammars, **clocks)

    async def is_drafted(sequence_id: int, tenant: str) -> bool:
        await writer.open(SCHEMA, '{"', sequence_id, tenant=tenant)
        return bool((await writer.rig.draft()).proposals)

    assert [await is_drafted(i, "a") for i in range(1, 5)] == [True, True, True, False]
    assert await is_drafted(5, "b")
    # The family drops the grammar of a sequence that has used up its time.
    assert writer.family._texts == {}
    now[0] = 60.0
    assert await is_drafted(6, "a")


@pytest.mark.parametrize(
    ("grammar", "begin"),
    [
        (SCHEMA, ""),
        (Grammar(GrammarKind.JSON_OBJECT), ""),
        (tool_calls(), "<tool_call>"),
        (tool_calls(at_least_one=True), ""),
        (replace(SCHEMA, thought=FreeThought("<think>", "</think>", "\n\n")), ""),
        (replace(SCHEMA, thought=FreeThought("", "</think>", "\n\n")), "so</think>"),
    ],
    ids=["schema", "object", "auto", "call", "may think", "has thought"],
)
async def test_no_guess_is_forbidden_by_the_grammar(
    grammars: Grammars, grammar: Grammar, begin: str
) -> None:
    """The texts are random, but with probability 0.5 the next token is the drafter's guess."""
    compiled = grammars.compiler.compile(grammar)
    checked = 0
    for seed in range(4):
        rng = random.Random(seed)
        writer = Writer(grammars)
        await writer.open(grammar, begin, tree_tokens=64)
        matcher = compiled.matcher()
        assert all(matcher.accept(token) for token in writer.encoded(begin))
        mask = np.zeros((1, grammars.compiler.mask_width), np.int32)
        for _ in range(40):
            first = -1
            for proposal in (await writer.rig.draft()).proposals:
                checked += await _check(matcher, proposal.token_ids, proposal.parents)
                first = proposal.token_ids[0]
            matcher.fill(mask, 0)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = first if first >= 0 and rng.random() < 0.5 else int(rng.choice(allowed))
            assert matcher.accept(token)
            if matcher.ended:
                break
            writer.rig.commit(1, token, tree_tokens=64)
    assert checked > 20


async def _check(matcher: Any, tokens: list[int], parents: list[int]) -> int:
    states = [matcher]
    for token, parent in zip(tokens, parents or range(len(tokens)), strict=True):
        state = states[parent].fork()
        assert state.accept(token)
        states.append(state)
    return len(tokens)


async def test_of_a_text_longer_than_a_guess_every_guessed_token_is_the_whole_texts(
    grammars: Grammars,
) -> None:
    """A guess is cut after a fixed number of bytes, which may be in the middle of a token."""
    lengths = [len(text) for text in grammars.token_bytes]
    words = [grammars.token_bytes[i] for i, n in enumerate(lengths) if n > 8]
    words = sorted({word for word in words if word.isascii() and word.strip().isalpha()})
    assert len(words) > 30
    for seed in range(20):
        chosen = random.Random(seed).sample(words, 30)
        text = b" ".join(word.strip() for word in chosen).decode()
        writer = Writer(grammars)
        await writer.open(Grammar(GrammarKind.CHOICE, choices=(text,)))
        await writer.chain()
        guesses = writer.rig.guesses(1)
        assert len(guesses) > 10
        assert guesses == writer.encoded(text)[: len(guesses)]


async def test_guesses_that_outlive_a_commit_are_not_joined_to_another_text(
    grammars: Grammars,
) -> None:
    """The verifier ranks old guesses first, so it would prefer a false mixture of two texts."""
    writer = Writer(grammars)
    choices = ("yes, of course", "no, never at all")
    await writer.open(Grammar(GrammarKind.CHOICE, choices=choices))
    likeliest = await writer.chain()
    assert likeliest[0] in "yn"
    for text in choices:
        other = Writer(grammars)
        await other.open(Grammar(GrammarKind.CHOICE, choices=choices))
        sequence = other.rig.session.sequences[1]
        sequence.extend(other.encoded(text)[:2], confidences=[0.9, 0.9])
        found = await other.chain()
        assert any(each.startswith(found.removesuffix("<|end|>")) for each in choices), found


async def test_one_tenants_grammars_that_compile_for_long_delay_no_others(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    compile_only = compiler.compile_only

    def slowly(libraries: Libraries, grammar: Grammar) -> Compiled:
        if "slow" in grammar.text:
            release.wait(60)
        return compile_only(libraries, grammar)

    monkeypatch.setattr(compiler, "compile_only", slowly)
    writer = Writer(grammars)
    prompt = writer.encoded(PROMPT)

    def open_for(tenant: str, sequence_id: int, pattern: str) -> asyncio.Task[Any]:
        more = {"prompt_length": len(prompt), "tenant": tenant}
        grammar = Grammar(GrammarKind.REGEX, pattern)
        opened = opened_sequence(sequence_id, prompt, Window(64, 24), 24, grammar=grammar, **more)
        writer.rig.open(opened)
        return writer.family._texts[sequence_id].compiling

    slow = [open_for("a", i, f"slow{i}") for i in range(1, 5)]
    try:
        quick = open_for("b", 9, "quick[0-9]")
        done, _ = await asyncio.wait([quick], timeout=4.0)
        assert done == {quick}
        assert not any(task.done() for task in slow)
        assert [each.sequence_id for each in (await writer.rig.draft()).proposals] == [9]
    finally:
        release.set()
    await asyncio.wait(slow)


@pytest.mark.parametrize("tree_tokens", [0, 64], ids=["chain", "tree"])
async def test_what_is_mostly_wrong_is_not_offered_until_it_is_right_again(
    grammars: Grammars, tree_tokens: int
) -> None:
    """The model first writes the forced word in one-byte tokens, and later in one token.

    At first, the family takes the last word of a forced text to be right in 70 % of all cases.
    """
    writer = Writer(grammars)
    word = writer.encoded("return")
    letters = [token for letter in "return" for token in writer.encoded(letter)]
    assert (len(word), len(letters)) == (1, 6)
    pattern = Grammar(GrammarKind.REGEX, "(?:return[0-9]){30}")
    await writer.open(pattern, "return1", tree_tokens=tree_tokens)
    offered = []
    for written in [letters] * 5 + [word] * 3:
        offered.append(await writer.chain() != "")
        writer.rig.commit(1, *written, *writer.encoded("1"), tree_tokens=tree_tokens)
    assert offered == [True] * 2 + [False] * 5 + [True]
