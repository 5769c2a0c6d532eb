"""A draft model with another vocabulary guesses as many of the target's tokens as it can."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from drafter_svc.families.draft_model import DraftModel
from drafter_svc.families.forwards import Columns
from drafter_svc.families.model import ModelFamily
from drafter_svc.families.vocabulary import OwnText, Vocabulary, load_vocabulary
from outrider.grammar.compiler import GrammarCompiler
from outrider.grammar.kinds import Grammar, GrammarKind
from outrider.grammar.tokens import token_bytes
from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider.protocol.draft_messages import DraftBatch
from outrider.protocol.messages import DraftDistribution, SamplingParams
from outrider.tokenizer import load_tokenizer
from tests.drafter.draft_model_rig import guesses_of, opened
from tests.family_rig import GREEDY, Rig
from tests.other_vocabularies import MODEL, order_of, save_llama_like, save_model

SAMPLED = SamplingParams(0.8, seed=11)
ORDERS = {"permuted": order_of(1), "smaller": order_of(2, 0.3)}
Make = Callable[..., Rig]
Folder = Callable[[str], str]
BYTES = token_bytes(str(MODEL))
LONG = (
    "def add(first, second):\n    return first + second\n\n\nclass Node:\n    def __init__(self):\n"
    * 3
)
TEXTS = [
    LONG,
    "The list is sorted in place, which means that the method returns None, as most of them do.",
    '{"name": "outrider", "kind": "server", "port": 8000, "hosts": ["a", "b"], "tls": false}',
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """Write the draft models; return a function that maps a model's name to its folder."""
    root = tmp_path_factory.mktemp("models")
    for name, order in ORDERS.items():
        save_model(root / name, order)
    return lambda name: str(root / name)


@pytest.fixture(scope="module")
def make_other(folder: Folder, thread: ThreadPoolExecutor) -> Make:
    """Return a function that makes a rig of the draft model whose vocabulary has a given name."""
    runners: dict[str, tuple[ModelRunner, Vocabulary]] = {}
    ends = (0, 3)
    grammars = GrammarCompiler(str(MODEL), 4096, ends, trusted=True)

    def load(name: str) -> tuple[ModelRunner, Vocabulary]:
        runner = ModelRunner.load(
            folder(name), dtype="float32", device="cpu", threads=1, page_count=512
        )
        return runner, load_vocabulary(
            folder(name), runner.vocab_size, runner.eos_token_ids, str(MODEL)
        )

    def make(name: str, *, branch_count: int = 0) -> Rig:
        if name not in runners:
            runners[name] = thread.submit(load, name).result()
        runner, vocabulary = runners[name]
        model = DraftModel(runner, thread, grammars=grammars, vocabulary=vocabulary)
        return Rig(ModelFamily(model, 4096, branch_count=branch_count))

    return make


@pytest.fixture(scope="module")
def make_for(folder: Folder, runner: ModelRunner, thread: ThreadPoolExecutor) -> Make:
    """Return a function that makes a rig of the bundled draft model.

    The rig is for a target whose vocabulary has a given name.
    """

    def make(name: str) -> Rig:
        of_target = folder(name)
        vocabulary = load_vocabulary(str(MODEL), runner.vocab_size, runner.eos_token_ids, of_target)
        model = DraftModel(runner, thread, vocabulary=vocabulary)
        return Rig(ModelFamily(model, vocabulary.vocab_size, branch_count=0))

    return make


@pytest.fixture(scope="module")
def make_bundled(runner: ModelRunner, thread: ThreadPoolExecutor) -> Make:
    """Return a function that makes a rig of the bundled draft model with grammars."""
    grammars = GrammarCompiler(str(MODEL), 4096, (0, 3), trusted=True)

    def make(*, branch_count: int = 0) -> Rig:
        model = DraftModel(runner, thread, grammars=grammars)
        return Rig(ModelFamily(model, 4096, branch_count=branch_count))

    return make


KINDS = {
    "greedy": (GREEDY, DraftDistribution.ONE_HOT),
    "coupled": (SAMPLED, DraftDistribution.COUPLED),
    "sparse": (SAMPLED, DraftDistribution.SPARSE),
    "penalised": (SamplingParams(0.0, repetition_penalty=1.3), DraftDistribution.ONE_HOT),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("branch_count", [0, 3])
async def test_a_permuted_vocabulary_changes_no_guess(
    make_bundled: Make, make_other: Make, kind: str, branch_count: int
) -> None:
    """Commits end where the tokenizer divides the text, so both draft models read the same text."""
    sampling, distribution = KINDS[kind]
    rigs = (
        make_bundled(branch_count=branch_count),
        make_other("permuted", branch_count=branch_count),
    )
    texts = [divided(text) for text in TEXTS]
    for rig in rigs:
        for i, counts in enumerate(texts):
            start = opened(counts[0], i, sampling=sampling, distribution=distribution)
            rig.open(start)
    right = 0
    for step in range(1, 8):
        expected, found = [await rig.drafts() for rig in rigs]
        assert paths(found) == paths(expected)
        for i, counts in enumerate(texts):
            new = counts[step][len(counts[step - 1]) :]
            right += rigs[0].guesses(i)[:1] == new[:1]
            for rig in rigs:
                rig.commit(i, *new)
    assert right > 2


def divided(text: str) -> list[list[int]]:
    """Return eight prefixes of a text, a few tokens apart, each longer than the one before.

    A prefix has the same tokens by itself as within the text.
    """
    tokenizer = load_tokenizer(str(MODEL))
    ids = tokenizer.encode(3 * text).ids
    source = random.Random(3)
    found: list[list[int]] = []
    count = 0
    while len(found) < 8:
        count += source.randint(1, 5)
        while tokenizer.encode(tokenizer.decode(ids[:count])).ids != ids[:count]:
            count += 1
        assert count <= len(ids)
        found.append(ids[:count])
    return found


def paths(batch: DraftBatch) -> list[tuple[int, list[int], list[int]]]:
    return [(each.sequence_id, each.token_ids, each.parents) for each in batch.proposals]


@pytest.mark.parametrize("lacking", ["draft model", "target"])
async def test_guesses_are_the_likeliest_that_both_vocabularies_have(
    make_other: Make, make_for: Make, folder: Folder, lacking: str
) -> None:
    """Guesses are checked after right and wrong guesses, and after characters of several tokens.

    The draft model encodes parts of characters anew. If the target lacks the draft model's
    likeliest token, the draft goes on from the guess, not from that token.
    """
    draft, other = folder("smaller"), str(MODEL)
    if lacking == "target":
        draft, other = other, draft
    model = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    own, target, bytes_of = load_tokenizer(draft), load_tokenizer(other), token_bytes(other)
    vocabulary = load_vocabulary(draft, model.config.vocab_size, (), other)
    own_of = vocabulary.own_of
    columns = torch.from_numpy((own_of >= 0).nonzero()[0])

    @torch.inference_mode()
    def logits(ids: list[int]) -> torch.Tensor:
        found: torch.Tensor = model(torch.tensor([ids])).logits[0, -1]
        return found

    tokens = target.encode(
        "The list — naïve, 🙂🙂 — is sorted in place.\n\n  for line in lines:"
    ).ids
    rig = make_other("smaller") if lacking == "draft model" else make_for("smaller")
    rig.open(opened(tokens[:2], window=4))
    compared = strayed = 0
    for count in range(2, len(tokens)):
        await rig.drafts()
        guesses = rig.guesses(1)
        assert all(own_of[guess] >= 0 for guess in guesses)
        written = b"".join(bytes_of[token] for token in tokens[:count])
        if written.decode(errors="ignore").encode() == written:
            ids = own.encode(written.decode()).ids
            for guess in guesses:
                row = logits(ids)
                assert guess == columns[row[own_of[columns]].argmax()]
                ids.append(int(own_of[guess]))
                strayed += int(row.argmax()) != ids[-1]
            compared += len(guesses)
        rig.commit(1, tokens[count])
    assert compared > 60
    assert strayed > 10 or lacking == "draft model"
    rig.close(1)


def test_a_token_that_the_draft_model_lacks_is_never_its_likeliest(folder: Folder) -> None:
    vocabulary = load_vocabulary(folder("smaller"), len(ORDERS["smaller"]), (), str(MODEL))
    columns = Columns(vocabulary, torch.device("cpu"))
    lacking = torch.from_numpy(vocabulary.own_of < 0)
    assert lacking.sum() > 100
    for likeliest in (0, 7, len(ORDERS["smaller"]) - 1):
        logits = torch.zeros(1, len(ORDERS["smaller"]))
        logits[0, likeliest] = 5.0
        picked = columns.pick(logits)[0]
        assert picked[lacking].max() == -torch.inf
        assert picked[~lacking].isfinite().all()


def own_bytes(tokens: list[int]) -> bytes:
    return b"".join(BYTES[token] for token in tokens)


async def test_a_grammar_is_that_of_the_targets_tokens(make_other: Make) -> None:
    rig = make_other("smaller")
    tokens = load_tokenizer(str(MODEL)).encode("Number: ").ids
    grammar = Grammar(GrammarKind.REGEX, "[0-9]{12}")
    rig.open(replace(opened(tokens), grammar=grammar, prompt_length=len(tokens)))
    await rig.drafts()
    guesses = rig.guesses(1)
    assert guesses
    assert own_bytes(guesses).isdigit()


async def test_sequences_of_a_tenant_share_the_pages_of_a_prefix(
    make_other: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_other("smaller")
    tokens = load_tokenizer(str(MODEL)).encode(LONG).ids
    rig.open(opened(tokens, 1))
    await rig.drafts()
    rig.open(opened([*tokens, 7], 2))
    strategy: Any = rig.session._strategy
    runner = strategy._model.runner
    forward = runner.forward
    starts: list[int] = []

    def watched(slices: Sequence[SequenceSlice]) -> torch.Tensor:
        starts.extend(part.start for part in slices)
        logits: torch.Tensor = forward(slices)
        return logits

    monkeypatch.setattr(runner, "forward", watched)
    assert (await guesses_of(rig))[2]
    assert starts
    assert starts[0] > 32
    rig.close(2)
    starts.clear()
    rig.open(replace(opened([*tokens, 7], 3), tenant="another"))
    assert (await guesses_of(rig))[3]
    assert starts[0] == 0


async def test_a_prompt_is_encoded_off_the_event_loop(
    make_other: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoding a long prompt takes long, and the event loop serves all other sequences."""
    begin, threads = Vocabulary.begin, []

    def watched(vocabulary: Vocabulary, tokens: Sequence[int]) -> OwnText:
        threads.append(threading.current_thread())
        return begin(vocabulary, tokens)

    monkeypatch.setattr(Vocabulary, "begin", watched)
    rig = make_other("smaller")
    rig.open(opened(load_tokenizer(str(MODEL)).encode(LONG).ids, 1))
    assert (await guesses_of(rig))[1]
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


async def test_a_text_with_ids_that_the_targets_tokenizer_lacks_is_not_drafted(
    make_other: Make,
) -> None:
    rig = make_other("smaller")
    rig.open(opened([5, 4096], 1))
    rig.open(opened([5, 6], 2))
    batch = await rig.drafts()
    assert {proposal.sequence_id for proposal in batch.proposals} == {2}
    rig.commit(2, 4097)
    assert (await rig.drafts()).proposals == []
    rig.commit(2, 8)
    assert (await rig.drafts()).proposals == []
    assert rig.abandoned == set()


async def test_a_text_without_a_token_of_the_draft_model_is_not_drafted_yet(
    runner: ModelRunner, thread: ThreadPoolExecutor, tmp_path: Path
) -> None:
    """Here the text is only <s>, from a target like Llama."""
    save_llama_like(tmp_path / "llama", [LONG])
    target = str(tmp_path / "llama")
    vocabulary = load_vocabulary(str(MODEL), runner.vocab_size, runner.eos_token_ids, target)
    model = DraftModel(runner, thread, vocabulary=vocabulary)
    rig = Rig(ModelFamily(model, vocabulary.vocab_size, branch_count=0))
    rig.open(opened([1]))
    assert (await rig.drafts()).proposals == []
    rig.commit(1, *load_tokenizer(target).encode("def add(").ids[1:])
    assert (await guesses_of(rig))[1]
    rig.close(1)
