"""Takes features from vLLM, and compares them with the states that transformers computes.

    python -m tests.vllm.take_features v1 < asked.json

The program has a process of its own, since a process has one runner. Its answer is JSON, see
`Taken`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tests.vllm.write_texts import choose_runner

if TYPE_CHECKING:
    import torch

    from outrider.heads.projection import ServedProjection
    from outrider.protocol.draft_messages import StepBatch
    from tests.verifier.fake_model import ScriptedDrafter
    from verifier_svc.config import VerifierSettings
    from verifier_svc.vllm.engine import VllmEngine

STATES = (3, 1)
DRAFT_TOKENS = 4


@dataclass
class Taken:
    """The features that two drafters got of one text."""

    text: list[int]
    """The tokens behind the prompt."""
    positions: list[int]
    """The tokens whose states the first drafter got."""
    error: float
    """The largest error of these states, in standard deviations of all states."""
    projected_positions: list[int]
    """The tokens whose projected states the drafter in vLLM's process got."""
    projected_error: float


def main() -> None:
    """Answer the asked groups of prompts, one group after the other."""
    v2 = sys.argv[1] == "v2"
    choose_runner(v2=v2)
    asked = json.load(sys.stdin)
    # What vLLM and its libraries print goes to standard error.
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        json.dump(_take(asked, v2), answer)


def _take(asked: dict[str, Any], v2: bool) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    from tests.vllm.cases import MODEL

    reference = AutoModelForCausalLM.from_pretrained(MODEL).float()
    engine = _engine(asked, v2)
    drafters = _drafters(engine)
    groups = []
    for prompts in asked["groups"]:
        truths = [_greedy(reference, prompt, asked["tokens"]) for prompt in prompts]
        groups.append(_answer(engine, drafters, prompts, truths))
    states = engine._hub._states
    assert states is not None
    [projection] = states.projections.values()
    taken = [
        [asdict(_compare(reference, projection, drafters, *each)) for each in group]
        for group in groups
    ]
    count = drafters[0].handle
    return {
        "groups": taken,
        "drafted": count.verified_count,
        "accepted": count.accepted_count,
        "preempted": engine._hub.preemption_count,
    }


def _engine(asked: dict[str, Any], v2: bool) -> VllmEngine:
    """Return vLLM in this process, with our hub."""
    from tests.vllm.cases import MODEL
    from verifier_svc.config import VerifierSettings

    settings = VerifierSettings(
        target=MODEL,
        engine="vllm",
        feature_states=[*STATES],
        feature_projection=[asked["head"]],
    )
    return make_engine(settings, v2=v2, max_model_len=320, block_size=32, **asked["settings"])


def make_engine(settings: VerifierSettings, *, v2: bool, **arguments: Any) -> VllmEngine:
    """Return vLLM in this process, in float32, with a hub that asks for every draft."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from outrider.protocol.draft_tokens_policy import DraftTokensPolicy
    from verifier_svc.metrics import VerifierMetrics
    from verifier_svc.policy.draft_policy import EVERY_DRAFT
    from verifier_svc.vllm import features, plugin, runner
    from verifier_svc.vllm.engine import VllmEngine
    from verifier_svc.vllm.hub import DraftHub, Limits

    assert runner.uses_v2() == v2
    runner.install()
    hubs: list[DraftHub] = []

    def make_hub(config: Any) -> DraftHub:
        limits = Limits(config.model_config.get_vocab_size(), max_sequences=8)
        policy = DraftTokensPolicy("fixed", DRAFT_TOKENS)
        metrics = VerifierMetrics("m")
        states = features.states_for(config, settings)
        hubs.append(DraftHub(limits, policy, metrics, _deliver, EVERY_DRAFT, states=states))
        return hubs[0]

    arguments |= runner.engine_arguments(DRAFT_TOKENS, v2=v2)
    with plugin.own_hub(settings, make_hub):
        llm = LLMEngine.from_engine_args(
            EngineArgs(settings.target, dtype="float32", max_num_seqs=8, **arguments)
        )
    return VllmEngine(llm, hubs[0], ())


def _deliver(deliveries: list[Any]) -> None:
    for sink, message in deliveries:
        sink(message)


def _drafters(engine: VllmEngine) -> tuple[ScriptedDrafter, ScriptedDrafter]:
    """Return a drafter that guesses, and one in vLLM's process that reads projected states."""
    from types import SimpleNamespace

    from outrider.protocol.draft_messages import FeatureDtype, FeatureRequest
    from tests.verifier.fake_model import ScriptedDrafter

    ours: Any = SimpleNamespace(drafting=engine.drafting, drain_inbox=lambda: None)
    wanted = FeatureRequest(STATES, final_state=True, dtype=FeatureDtype.FLOAT32)
    guesser = ScriptedDrafter(ours, "a", "a", feature_request=wanted)
    [(name, projection)] = engine._hub._states.projections.items()  # type: ignore[union-attr]
    projected = FeatureRequest(
        tuple(projection.states), dtype=FeatureDtype.FLOAT32, projection=name
    )
    reader = ScriptedDrafter(ours, "b", "b", is_local=True, feature_request=projected)
    assert reader.handle.projects_features
    return guesser, reader


def _greedy(reference: Any, prompt: list[int], tokens: int) -> list[int]:
    import torch

    ids = torch.tensor([prompt])
    out = reference.generate(
        ids, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
    )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def _answer(
    engine: VllmEngine,
    drafters: tuple[ScriptedDrafter, ScriptedDrafter],
    prompts: Sequence[list[int]],
    truths: Sequence[list[int]],
) -> list[tuple[int, list[int], list[int]]]:
    """Answer prompts together; after a multiple of 3 tokens, a draft's last guess is wrong.

    Returns each sequence's id, its prompt, and its text.
    """
    from outrider.protocol.messages import SamplingParams, TokenRequest

    guesser, reader = drafters
    sequences = [
        engine.submit(
            TokenRequest(prompt, len(truth), SamplingParams(temperature=0.0), ignore_eos=True),
            lambda _: None,
        )
        for prompt, truth in zip(prompts, truths, strict=True)
    ]
    while engine._llm.has_unfinished_requests():
        engine.step()
        for sequence, truth in zip(sequences, truths, strict=True):
            done = len(sequence.tokens) - len(sequence.request.prompt)
            if not done or sequence.id not in engine._hub.sequences:
                continue
            guesses = truth[done : done + DRAFT_TOKENS]
            if guesses and done % 3 == 0:
                guesses[-1] = (guesses[-1] + 1) % 4096
            if guesses and guesser.length.get(sequence.id) == len(sequence.tokens):
                guesser.propose(sequence.id, guesses, anew=True)
            if reader.length.get(sequence.id) == len(sequence.tokens):
                reader.skip(sequence.id)
    return [
        (each.id, each.request.prompt, each.tokens[len(each.request.prompt) :])
        for each in sequences
    ]


def _compare(
    reference: Any,
    projection: ServedProjection,
    drafters: tuple[ScriptedDrafter, ScriptedDrafter],
    number: int,
    prompt: list[int],
    text: list[int],
) -> Taken:
    import torch

    with torch.inference_mode():
        ids = torch.tensor([[*prompt, *text]])
        states = reference(ids, output_hidden_states=True).hidden_states
        wanted = torch.cat([states[k][0] for k in (*STATES, -1)], dim=1)
        projected = projection(torch.cat([states[k][0] for k in projection.states], dim=1))
    found = [_rows(each.received, number, each.handle.feature_width) for each in drafters]
    errors = [_error(rows, truth) for rows, truth in zip(found, (wanted, projected), strict=True)]
    return Taken(text, [*found[0]], errors[0], [*found[1]], errors[1])


def _rows(messages: Sequence[StepBatch], number: int, width: int) -> dict[int, torch.Tensor]:
    """Return the features of a sequence, keyed by position."""
    import torch

    found: dict[int, torch.Tensor] = {}
    for message in messages:
        for entry in message.features:
            if entry.sequence_id != number:
                continue
            rows = entry.rows
            if isinstance(rows, bytes):
                tensor = torch.frombuffer(bytearray(rows), dtype=torch.float32)
            else:
                tensor = rows.read()
            for at, row in enumerate(tensor.reshape(-1, width), entry.first_position):
                assert at not in found, f"the features of token {at} came twice"
                found[at] = row
    return found


def _error(found: dict[int, torch.Tensor], wanted: torch.Tensor) -> float:
    """Return the largest difference of a number, in standard deviations."""
    differences = [(row - wanted[at]).abs().max() for at, row in found.items()]
    return float(max(differences) / wanted.std())


if __name__ == "__main__":
    main()
