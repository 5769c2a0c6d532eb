"""On a CPU in bfloat16, a request has the same text with every drafter. Drafters are processes.

`python -m pytest -m slow -s tests/e2e/test_bfloat16_texts.py` prints a row for each drafter.
OUTRIDER_TEST_CHATS sets the number of chats. tests/losslessness/test_same_request.py tests
the ways of drafting in one engine, and texts that continue at another engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

import pytest

from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.protocol.messages import SamplingParams, SpeculationOptions, TokenRequest
from outrider.tokenizer import load_tokenizer
from tests.smollm2_texts import answers, smollm2, tokens_of
from tests.stack import DRAFT, ROOT, TARGET, Client, Stack, prompt_texts, running

pytestmark = pytest.mark.slow  # A process for each drafter, and two targets.

CHATS = int(os.environ.get("OUTRIDER_TEST_CHATS", "8"))
TOKENS = 32
PLAIN = SpeculationOptions(enabled=False)
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
GRAMMAR = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON))


@dataclass
class Target:
    """A target, its drafters, and its chat format."""

    model: str
    chat: str
    draft: str
    heads: dict[str, str]
    """The paths of heads, keyed by name."""
    stack: Stack = field(init=False)

    def start(self) -> Stack:
        """Start the verifier and its drafters."""
        self.stack = stack = Stack("--max-sequences", "8", target=self.model, dtype="bfloat16")
        stack.add_drafter("ngram", "ngram")
        stack.add_drafter("model", "model", "--model", self.draft, "--target", self.model)
        stack.add_drafter("grammar", "grammar", "--target", self.model)
        if find_spec("arctic_inference") is not None:
            stack.add_drafter("suffix", "suffix")
        for name, path in self.heads.items():
            own = ["--head", path, "--target", self.model, "--threads", "1"]
            stack.add_drafter(name, "head", *own)
        return stack

    def requests(self, grammar: Grammar | None) -> list[TokenRequest]:
        """Return chats, alternately greedy and with a seed."""
        contents = [text[:600] for text in prompt_texts() * (CHATS // 40 + 1)][:CHATS]
        texts = [self.chat.format(f"{i}. Go on: {text}") for i, text in enumerate(contents)]
        return [
            TokenRequest(
                encoding.ids,
                TOKENS,
                SamplingParams(0.8, seed=i) if i % 2 else SamplingParams(0.0),
                ignore_eos=grammar is None,
                speculation=PLAIN,
                grammar=grammar,
            )
            for i, encoding in enumerate(load_tokenizer(self.model).encode_batch(texts))
        ]


def heads_in(folder: str) -> dict[str, str]:
    """Return the heads that come with Outrider for a target, keyed by name."""
    found = sorted((ROOT / "models" / folder).glob("*/config.json"))
    return {path.parent.name: str(path.parent) for path in found if path.parent.name != "draft"}


def bundled() -> Target:
    return Target(TARGET, "<|user|>{}<|end|><|assistant|>", DRAFT, heads_in("heads"))


def published() -> Target:
    own = ROOT / "models/smollm2/draft"
    draft = own if own.is_dir() else ROOT / "models/draft-2048"
    chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    return Target(smollm2(), chat, str(draft), heads_in("smollm2"))


@pytest.fixture(scope="module", params=[bundled, published])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    found: Target = request.param()
    with running(found.start()):
        yield found


@pytest.mark.parametrize("grammar", [None, GRAMMAR], ids=["free", "JSON"])
async def test_a_text_is_the_same_with_every_drafter(
    target: Target, grammar: Grammar | None, request: pytest.FixtureRequest
) -> None:
    """Each text is first written alone without drafts, then in batches with each drafter.

    The first answers without a grammar find no prompt in the prefix cache.
    """
    requests = target.requests(grammar)
    names = [name for name in target.stack.drafters if grammar or name != "grammar"]
    ways = {name: SpeculationOptions(drafter_id=name, always_draft=True) for name in names}
    ways["all at once"] = SpeculationOptions(always_draft=True)
    differing: dict[str, int] = {}
    async with Client(target.stack.address) as client:
        fresh = [tokens_of(await client.generate(each)) for each in requests]
        for name, options in ways.items():
            asked = [replace(each, speculation=options) for each in requests]
            found = await answers(client, asked)
            pairs = zip(map(tokens_of, found), fresh, strict=True)
            differing[name] = sum(text != other for text, other in pairs)
            drafts = sum(chunk.draft_token_count for chunks in found for chunk in chunks)
            print(
                f"\n{request.node.callspec.id}: {name}: {differing[name]} of {CHATS} differ,"
                f" {drafts} tokens drafted"
            )
            assert drafts > 0, name
    assert not any(differing.values()), differing
