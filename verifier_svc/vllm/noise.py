"""Our coupled noise in vLLM's samplers, so that a seed gives the same text on either engine.

vLLM takes the likeliest token of each row, and accepts a draft token that equals it. So the tokens
are drawn here, as our own engine draws them, from the logits as they come from the model and the
grammar; then each drawn token is made its row's likeliest. vLLM measures log probabilities before
that. If no request of a batch needs our noise, the batch costs only a look at its requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

from outrider.sampling.context import Context
from outrider.sampling.logits import Adjustments
from outrider.sampling.penalties import TokenCounts
from outrider.sampling.sampler import TargetProbs, coupled_sample, note_short
from outrider.sampling.tensors import Staging, argmax, fetch, on
from verifier_svc.verification.draft import Draft
from verifier_svc.verification.rows import Rows
from verifier_svc.vllm.parameters import Drawing, drawing_of

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
    from vllm.v1.worker.gpu.sample.logits_processor.interface import (
        LogitsContext,
        LogitsProcRequestState,
    )


class _Text:
    """The state of one request whose tokens this module draws."""

    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing
        self.tokens: list[int] = []
        """The committed tokens, only if the request has penalties."""

    @property
    def is_read(self) -> bool:
        """True if drawing needs the tokens, not only their number."""
        return self.drawing.sampling.penalised

    def draft(self, length: int, drafted: Sequence[int]) -> Draft:
        """Return the rows of this text in a step.

        One row comes after `length` committed tokens, and one after each drafted token.
        """
        drawing = self.drawing
        tokens = self.tokens if self.is_read else range(length)
        # The ids of a padded row are -1. Whatever is drawn there, vLLM rejects it.
        drafted = [max(token, 0) for token in drafted]
        context = Context(drawing.sampling, tokens, drawing.prompt_length, drafted, drawing.end_ids)
        return Draft(context, drawing.seed)


class _Batch:
    """The rows of a step that are drawn here, among all its rows."""

    def __init__(self) -> None:
        self._drafts: list[Draft] = []
        self._rows: list[int] = []
        self._row_count = 0

    def add(self, row_count: int, draft: Draft | None) -> None:
        """Add the next request's rows; `draft` is None if vLLM draws the request's tokens."""
        if draft is not None:
            self._drafts.append(draft)
            self._rows += range(self._row_count, self._row_count + row_count)
        self._row_count += row_count

    def draw(self, logits_RV: torch.Tensor, counts: TokenCounts) -> torch.Tensor | None:
        """Return the drawn token of each row, int64 [R], -1 where vLLM draws.

        Return None if vLLM draws all.
        """
        if not self._drafts:
            return None
        if len(self._rows) == self._row_count:
            return draw_tokens(logits_RV, self._drafts, counts)
        rows = on(logits_RV.device, self._rows, torch.long)
        chosen_R = torch.full((self._row_count,), -1, device=logits_RV.device)
        chosen_R[rows] = draw_tokens(logits_RV[rows], self._drafts, counts)
        return chosen_R


def draw_tokens(
    logits_RV: torch.Tensor, drafts: Sequence[Draft], counts: TokenCounts
) -> torch.Tensor:
    """Return the target's own tokens for the drafts' R rows, int64 [R], by rule GREEDY or COUPLED.

    A row without a finite logit gets some token too.
    """
    staging = Staging(logits_RV.device)
    rows = Rows(drafts, staging)
    adjustments = Adjustments([draft.context for draft in drafts], staging, counts)
    samplings = [draft.context.sampling for draft in rows.of_row]
    settings = TargetProbs(samplings, staging)
    keys_R = staging.add(rows.keys(range(len(samplings))))
    greedy_R = staging.add([sampling.greedy for sampling in samplings])
    staging.send()
    logits_RV = adjustments.apply(logits_RV.float(), [None] * len(drafts))
    whole: dict[int, list[int]] = {}
    while True:
        probs_RV, sufficed = settings.probs(logits_RV, whole)
        found = fetch(list(sufficed.values()))
        if not note_short(whole, zip(sufficed, found, strict=True)):
            break
    drawn_R = coupled_sample(probs_RV.nan_to_num(0.0), keys_R.tensor)
    return torch.where(greedy_R.tensor, argmax(logits_RV), drawn_R)


def _prefer(logits_RV: torch.Tensor, chosen_R: torch.Tensor) -> torch.Tensor:
    """Make each row's chosen token its likeliest, in place; -1 changes nothing."""
    at_R1 = chosen_R.clamp(min=0).unsqueeze(-1)
    largest = torch.finfo(logits_RV.dtype).max
    kept_R1 = logits_RV.gather(-1, at_R1)
    return logits_RV.scatter_(-1, at_R1, torch.where(chosen_R.unsqueeze(-1) < 0, kept_R1, largest))


class V1Noise:
    """The noise of vLLM's first runner, in the two samplers of that runner."""

    def __init__(self, runner: Any) -> None:
        """Hook the samplers of a `vllm.v1.worker.gpu_model_runner.GPUModelRunner`."""
        self._runner = runner
        self._counts = TokenCounts()
        self._chosen_R: torch.Tensor | None = None
        self._metadata: Any = None
        sampler, rejection_sampler = runner.sampler, runner.rejection_sampler
        self._process_own = sampler.apply_logits_processors
        self._process_drafted = rejection_sampler.apply_logits_processors
        sampler.apply_logits_processors = self._own
        rejection_sampler.apply_logits_processors = self._drafted

    def draw(self, logits_RV: torch.Tensor, metadata: SpecDecodeMetadata | None) -> None:
        """Draw a step's tokens. `metadata` is None if no request has a draft."""
        self._metadata = metadata
        batch = _Batch()
        runner, requests = self._runner, self._runner.input_batch
        for i, request_id in enumerate(requests.req_ids):
            drafted = requests.spec_token_ids[i] if metadata is not None else []
            draft = None
            text = self._text(runner.requests[request_id])
            # vLLM discards the row after a part of a prompt, unless this is the last part.
            if text is not None and not runner.discard_request_mask.np[i]:
                length = int(requests.num_tokens_no_spec[i])
                if text.is_read:
                    new = requests.token_ids_cpu[i, len(text.tokens) : length]
                    text.tokens += new.tolist()
                draft = text.draft(length, drafted)
            batch.add(1 + len(drafted), draft)
        self._chosen_R = batch.draw(logits_RV, self._counts)

    def clear(self) -> None:
        """Forget the step's tokens."""
        self._chosen_R = self._metadata = None

    def _text(self, request: Any) -> _Text | None:
        """Return the kept text of one of the runner's requests; None if vLLM draws its tokens."""
        kept = vars(request)
        if "outrider_text" not in kept:
            parameters = request.sampling_params
            drawing = drawing_of(parameters) if parameters is not None else None
            kept["outrider_text"] = None if drawing is None else _Text(drawing)
        text: _Text | None = kept["outrider_text"]
        return text

    def _own(
        self, logits_RV: torch.Tensor, sampling_metadata: Any, predict_bonus_token: bool
    ) -> torch.Tensor:
        """Return the sampler's logits: for each request, the row after its draft."""
        logits_RV = self._process_own(logits_RV, sampling_metadata, predict_bonus_token)
        chosen_R = self._chosen_R
        if chosen_R is None:
            return logits_RV
        if self._metadata is not None:
            chosen_R = chosen_R[self._metadata.bonus_logits_indices]
        return _prefer(logits_RV, chosen_R)

    def _drafted(
        self, logits_RV: torch.Tensor, sampling_metadata: Any, metadata: SpecDecodeMetadata
    ) -> torch.Tensor:
        """Return the rejection sampler's logits: the rows that judge draft tokens."""
        logits_RV = self._process_drafted(logits_RV, sampling_metadata, metadata)
        if self._chosen_R is None:
            return logits_RV
        return _prefer(logits_RV, self._chosen_R[metadata.target_logits_indices])


class CoupledNoise(LogitsProcessor):  # type: ignore[misc]  # vLLM may be missing here
    """The noise of the second runner: `--logits-processors verifier_svc.vllm.noise:CoupledNoise`.

    vLLM calls it after its own processors, which do not change the logits of our requests.
    """

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:
        self._states = req_states
        self._counts = TokenCounts()
        self._texts: dict[int, _Text] = {}
        self._steps: dict[int, tuple[int, Sequence[int]]] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Note a request's place; return whether its tokens are drawn here."""
        drawing = drawing_of(sampling_params)
        if drawing is None:
            self._texts.pop(req_idx, None)
            return False
        self._texts[req_idx] = _Text(drawing)
        return True

    def begin_step(self, output: SchedulerOutput, places: Mapping[str, int]) -> None:
        """Note the committed length and the draft of the request at each place of a step.

        Call it before the forward is launched, so that reading the tokens waits for nothing.
        """
        self._steps.clear()
        if self._texts.keys().isdisjoint(places[each] for each in output.num_scheduled_tokens):
            return
        cached = output.scheduled_cached_reqs
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for request_id, token_count in output.num_scheduled_tokens.items():
            drafted = output.scheduled_spec_decode_tokens.get(request_id, ())
            place = places[request_id]
            length = computed[request_id] + token_count - len(drafted)
            self._steps[place] = length, drafted
            text = self._texts.get(place)
            if text is not None and text.is_read:
                new = self._states.all_token_ids.gpu[place, len(text.tokens) : length]
                text.tokens += new.tolist()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Make the drawn tokens the likeliest of their rows, in place."""
        batch = _Batch()
        for place in ctx.idx_mapping_np.tolist():
            if place not in self._steps:
                return logits  # a batch of vLLM's own, such as those of its warm-up
            length, drafted = self._steps[place]
            text = self._texts.get(place)
            # vLLM discards the row after a part of a prompt, unless this is the last part.
            is_drawn = text is not None and length >= int(self._states.prefill_len.np[place])
            batch.add(1 + len(drafted), text.draft(length, drafted) if text and is_drawn else None)
        chosen_R = batch.draw(logits, self._counts)
        return logits if chosen_R is None else _prefer(logits, chosen_R)
