"""vLLM's scheduler with drafts that a test makes from the texts that it knows."""

from __future__ import annotations

import random
from typing import Any, ClassVar

from vllm.v1.core.sched.scheduler import Scheduler

VOCAB = 4096


class OutriderScheduler(Scheduler):  # type: ignore[misc]
    """Places drafts of one kind; see `draft`."""

    kind: ClassVar[str] = "none"
    texts: ClassVar[dict[int, list[int]]] = {}
    """The text of each sequence, prompt included, keyed by the sequence's id."""
    drafted: ClassVar[int] = 0
    accepted: ClassVar[int] = 0
    padded: ClassVar[int] = 0

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        for request in self.running:
            decodes = request.num_tokens - request.num_computed_tokens == 1
            room = min(self.num_spec_tokens, request.max_tokens - request.num_output_tokens - 1)
            request.spec_token_ids = draft(request, room) if decodes and room > 0 else []
        return super().schedule(*args, **kwargs)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        before = {each.request_id: (each, each.num_output_tokens) for each in self.running}
        result = super().update_from_output(scheduler_output, model_runner_output)
        for request_id, tokens in scheduler_output.scheduled_spec_decode_tokens.items():
            if tokens[0] < 0:
                OutriderScheduler.padded += 1
                continue
            request, had = before[request_id]
            OutriderScheduler.drafted += len(tokens)
            committed = list(request.output_token_ids[had:])
            OutriderScheduler.accepted += next(
                (i for i, token in enumerate(tokens) if committed[i : i + 1] != [token]),
                len(tokens),
            )
        return result

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        pass


def draft(request: Any, room: int) -> list[int]:
    """Return the draft of a request's next step, of at most `room` tokens.

    "right" drafts are long; "ragged" drafts have any length, and about a fifth of the tokens are
    random.
    """
    scheduler = OutriderScheduler
    chance = random.Random(request.num_tokens)
    if scheduler.kind == "none":
        return []
    ours = request.sampling_params.extra_args["outrider"]["sequence_id"]
    right = scheduler.texts[ours][request.num_tokens :][:room]
    if scheduler.kind == "right":
        return right
    if scheduler.kind == "wrong":
        return [(token + 1 + chance.randrange(VOCAB - 1)) % VOCAB for token in right]
    ragged = right[: chance.randint(0, room)]
    return [token if chance.random() < 0.8 else chance.randrange(VOCAB) for token in ragged]
