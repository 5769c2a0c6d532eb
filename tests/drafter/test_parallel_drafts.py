"""A PARD model guesses all tokens of a draft in one forward, each as `transformers` would."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from drafter_svc.families.cached_draft import CachedDraft
from drafter_svc.families.forwards import Forwards
from drafter_svc.families.shared_pages import SharedPagePool
from outrider.drafter.draft_sequence import DraftSequence
from outrider.errors import OutriderError
from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider.protocol.messages import DraftDistribution, SamplingParams
from outrider.sampling.noise import coupled_draw
from tests.drafter.draft_model_rig import Greedy, Make, guesses_of, opened

UNKNOWN = 77
MODEL = "models/draft"


@pytest.fixture(scope="module")
def own() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    return model


@pytest.fixture
def forwards(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make the draft model a PARD model; return a list that gets each forward's slice count."""
    counts: list[int] = []
    forward = runner.forward

    def counted(slices: list[SequenceSlice]) -> torch.Tensor:
        counts.append(len(slices))
        return forward(slices)

    monkeypatch.setattr(runner, "parallel_token_id", UNKNOWN)
    monkeypatch.setattr(runner, "forward", counted)
    return counts


@torch.inference_mode()
def logits(own: PreTrainedModel, text: list[int], count: int) -> torch.Tensor:
    """Return the logits of `count` guesses after a text, from one forward over all of it."""
    ids = torch.tensor([[*text, *[UNKNOWN] * (count - 1)]])
    found: torch.Tensor = own(ids).logits[0, -count:]
    return found


async def test_guesses_are_those_of_one_forward_after_hits_and_misses(
    make: Make, prompts: list[list[int]], own: PreTrainedModel, forwards: list[int]
) -> None:
    rig = make(branch_count=0)
    texts = [list(prompt) for prompt in prompts]
    for i, text in enumerate(texts):
        rig.open(opened(text, i, depth=4 + i % 2, window=4 + i % 2))
    for _ in range(5):
        forwards.clear()
        guesses = await guesses_of(rig)
        assert forwards == [len(texts)]
        for i, text in enumerate(texts):
            count = 4 + i % 2
            assert guesses[i] == logits(own, text, count).argmax(-1).tolist()
            right = guesses[i][: i % 5]
            text += [*right, 7]
            rig.commit(i, *right, 7)


async def test_coupled_guesses_have_the_noise_of_their_positions(
    make: Make, prompts: list[list[int]], own: PreTrainedModel, forwards: list[int]
) -> None:
    rig = make(branch_count=0)
    sampling = SamplingParams(0.8, seed=11)
    coupled = DraftDistribution.COUPLED
    text = prompts[0]
    rig.open(opened(text, window=4, sampling=sampling, distribution=coupled))
    found = (await guesses_of(rig))[1]
    probs = (logits(own, text, 4).double() / 0.8).softmax(-1)
    wanted = [coupled_draw(row.numpy(), 11, len(text) + i) for i, row in enumerate(probs)]
    assert found == wanted
    assert len(forwards) == 1


async def test_guesses_that_depend_on_each_other_are_made_one_by_one(
    make: Make, prompts: list[list[int]], greedy: Greedy, forwards: list[int]
) -> None:
    rig = make(branch_count=0)
    sampling = SamplingParams(0.0, presence_penalty=1e-9)
    rig.open(opened(prompts[1], window=4, sampling=sampling))
    assert (await guesses_of(rig))[1] == greedy(prompts[1], 4)
    assert len(forwards) == 4


async def test_a_text_that_nothing_may_follow_leaves_the_others_guesses_as_they_are(
    make: Make,
    prompts: list[list[int]],
    own: PreTrainedModel,
    runner: ModelRunner,
    forwards: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = runner.forward

    def without_a_token(slices: list[SequenceSlice]) -> torch.Tensor:
        found = forward(slices).clone()
        found[1] = -torch.inf
        return found

    monkeypatch.setattr(runner, "forward", without_a_token)
    rig = make(branch_count=0)
    for i, text in enumerate(prompts[:2]):
        rig.open(opened(text, i, window=4))
    await rig.draft()
    assert rig.guesses(0) == logits(own, prompts[0], 4).argmax(-1).tolist()[:1]
    assert rig.guesses(1) == logits(own, prompts[1], 4).argmax(-1).tolist()


@pytest.mark.parametrize("parallel", [True, False], ids=["pard", "plain"])
def test_a_round_after_one_without_any_guess_guesses_as_usual(
    prompts: list[list[int]],
    runner: ModelRunner,
    monkeypatch: pytest.MonkeyPatch,
    parallel: bool,
) -> None:
    """A round has no guess if its forward overflows.

    The next round may begin with the same text in the draft model's tokens.
    """
    monkeypatch.setattr(runner, "parallel_token_id", UNKNOWN if parallel else None)
    monkeypatch.setattr(runner, "decoder", None)
    forward = runner.forward
    fails = False

    def failing(slices: list[SequenceSlice]) -> torch.Tensor:
        found = forward(slices)
        return torch.full_like(found, -torch.inf) if fails else found

    monkeypatch.setattr(runner, "forward", failing)
    pool = SharedPagePool(runner.page_count, runner.page_size)
    forwards = Forwards(runner, pool, 512, 32, None)
    found: list[list[int]] = []
    for rounds in ([False], [True, False]):
        draft = CachedDraft(DraftSequence(opened(prompts[3], window=4)), 1, runner.vocab_size)
        for fails in rounds:
            forwards.begin([draft])
            while wanting := forwards.wanting([draft]):
                forwards.grow(wanting)
            assert draft.stuck is fails
        found.append(draft.guessed)
        pool.free(draft.kv)
    assert len(set(found[0])) > 1
    assert found[0] == found[1]


@pytest.mark.parametrize("room", [1, 2, 3, 4, 5])
async def test_no_forward_goes_beyond_the_models_context(
    make: Make,
    prompts: list[list[int]],
    own: PreTrainedModel,
    runner: ModelRunner,
    forwards: list[int],
    monkeypatch: pytest.MonkeyPatch,
    room: int,
) -> None:
    """The model drafts until the context ends, though its placeholder tokens have no room there."""
    forward = runner.forward
    ends: list[int] = []

    def watched(slices: list[SequenceSlice]) -> torch.Tensor:
        ends.extend(part.end for part in slices)
        return forward(slices)

    text = prompts[1]
    monkeypatch.setattr(runner, "context_length", len(text) + room)
    monkeypatch.setattr(runner, "forward", watched)
    rig = make(branch_count=0)
    rig.open(opened(text, window=4))
    guesses = (await guesses_of(rig))[1]
    assert len(guesses) == min(room, 4)
    assert guesses[0] == logits(own, text, 1).argmax()
    assert max(ends) < len(text) + room


def test_a_wrong_token_for_unknown_ones_is_refused() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=50, num_attention_heads=2, **sizes)
    config.pard_token = 50
    with pytest.raises(OutriderError, match=r"its pard_token 50 is not in \[0, 50\)"):
        ModelRunner(LlamaForCausalLM(config), page_size=16, page_count=8)
