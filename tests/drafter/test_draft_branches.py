"""The draft model prepares for outcomes: branches are what it would write there, and one that comes true becomes the chain."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from drafter_svc.families.model import ModelFamily
from outrider.lm.runner import ModelRunner, Slice
from outrider.messages import Opened, Proposal, Rule, SamplingParams, Verdict, Window
from outrider.tokenizer import load_tokenizer
from verifier_svc.trie import Trie

MODEL = str(Path(__file__).parents[2] / "models/draft")
PROMPT = "class Node:\n    def __init__(self, value, children):\n        self.value ="
DEPTH = 4
WINDOW = Window(node_count=100, depth=9)


@pytest.fixture(scope="module")
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as thread:
        yield thread


@pytest.fixture(scope="module")
def runner(thread: ThreadPoolExecutor) -> ModelRunner:
    return thread.submit(ModelRunner.load, MODEL, dtype="float32", device="cpu", threads=1, page_count=512).result()


@pytest.fixture
def family(runner: ModelRunner, thread: ThreadPoolExecutor) -> ModelFamily:
    return ModelFamily(runner, thread, runner.vocab_size)


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return load_tokenizer(MODEL).encode(PROMPT).ids


def greedy(runner: ModelRunner, thread: ThreadPoolExecutor, text: list[int], count: int) -> list[int]:
    """What the model writes after `text`, with nothing kept from one token to the next."""
    tokens = list(text)
    for _ in range(count):
        pages = list(range(400, 400 + -(-len(tokens) // runner.page_size)))
        logits = thread.submit(runner.forward, [Slice(tokens, 0, pages, 1)]).result()
        tokens.append(int(logits.argmax()))
    return tokens[len(text) :]


def opened(tokens: list[int], window: Window = WINDOW, sampling: SamplingParams | None = None, rule: Rule = Rule.ONE_HOT) -> Opened:
    return Opened(1, 0, tokens, sampling or SamplingParams(0.0), rule, window, DEPTH)


async def everything(family: ModelFamily, trie: Trie) -> list[Proposal]:
    """All that is proposed until the next verdict, taken by a trie that checks the window."""
    said: list[Proposal] = []
    while proposals := (await family.draft(lambda: False)).proposals:
        for proposal in proposals:
            trie.add(proposal)
        said += proposals
    return said


@pytest.mark.parametrize("rule", [Rule.ONE_HOT, Rule.SPARSE])
async def test_branches_are_what_the_model_would_write_there(
    rule: Rule, family: ModelFamily, runner: ModelRunner, thread: ThreadPoolExecutor, prompt: list[int]
) -> None:
    """Beside a sampled chain as well: as its law goes with no branch, what is drawn there would count as the likeliest."""
    family.open(opened(prompt, sampling=SamplingParams(1.0 if rule is Rule.SPARSE else 0.0, seed=3), rule=rule))
    trie = Trie(WINDOW)
    said = await everything(family, trie)
    chain = trie.path(WINDOW.depth).token_ids
    assert (chain == greedy(runner, thread, prompt, WINDOW.depth)) is (rule is Rule.ONE_HOT)
    places = {0: 0, **{number: i + 1 for i, number in enumerate(trie.favourites())}}
    branches = [proposal for proposal in said if proposal.first_node not in places]
    assert branches
    for branch in branches:
        before = [*prompt, *chain[: places[branch.parent_node]], branch.token_ids[0]]
        assert branch.token_ids[1:] == greedy(runner, thread, before, len(branch.token_ids) - 1)


@pytest.mark.parametrize("place", [0, 1, 2, 3])
async def test_an_outcome_that_comes_true_goes_on_as_if_it_had_been_the_chain(
    place: int, family: ModelFamily, runner: ModelRunner, thread: ThreadPoolExecutor, prompt: list[int]
) -> None:
    family._branch_count = 12
    family.open(opened(prompt))
    trie = Trie(WINDOW)
    said = await everything(family, trie)
    chain = trie.path(WINDOW.depth).token_ids
    numbers = [0, *trie.favourites()]
    branch = next(p for p in said if p.parent_node == numbers[place] and p.token_ids[0] != chain[place])
    new = [*chain[:place], branch.token_ids[0]]
    walk = trie.advance(new)
    assert (walk.hit.value, trie.path(9).token_ids) == ("outcome", branch.token_ids[1:])
    family.verdict(Verdict(1, trie.epoch, trie.root, len(prompt) + len(new), walk.matched, new))
    await everything(family, trie)
    expected = greedy(runner, thread, [*prompt, *new], WINDOW.depth)
    assert trie.path(WINDOW.depth).token_ids == expected
    family.close(1)
    family._pool.check_integrity()


async def test_a_miss_that_nobody_foresaw_gives_every_page_back(
    family: ModelFamily, runner: ModelRunner, thread: ThreadPoolExecutor, prompt: list[int]
) -> None:
    family.open(opened(prompt))
    trie = Trie(WINDOW)
    await everything(family, trie)
    new = [next(token for token in range(100, 200) if trie.advance([token]).hit.value == "miss")]
    family.verdict(Verdict(1, 1, 0, len(prompt) + 1, 0, new))
    trie = Trie(WINDOW)
    trie.advance(new)
    await everything(family, trie)
    assert trie.path(9).token_ids == greedy(runner, thread, [*prompt, *new], WINDOW.depth)
    family.close(1)
    family._pool.check_integrity()
    assert family._pool.used_count == 0


async def test_where_a_drafter_is_not_to_run_ahead_it_prepares_for_nothing(family: ModelFamily, prompt: list[int]) -> None:
    window = Window(DEPTH, DEPTH)
    family.open(opened(prompt, window))
    assert len(await everything(family, Trie(window))) == 1


@pytest.mark.parametrize("rule", [Rule.SPARSE, Rule.COUPLED])
async def test_outcomes_of_sampled_drafts_are_never_taken_for_samples(rule: Rule, family: ModelFamily, prompt: list[int]) -> None:
    """A path that mixes a sample with a choice would bias the output if it were judged as sampled."""
    family.open(opened(prompt, sampling=SamplingParams(1.0, seed=3), rule=rule))
    trie = Trie(WINDOW)
    said = await everything(family, trie)
    chain = set(trie.favourites())
    assert all(not p.distributions for p in said if p.first_node not in chain)
