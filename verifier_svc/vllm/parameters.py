from __future__ import annotations
def sequence_id_of(parameters):
    return ((parameters.extra_args or {}).get("outrider") or {}).get("sequence_id")
def check(request): pass
def vllm_parameters(sequence):
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind
    r = sequence.request
    left = r.max_tokens - len(r.committed)
    return SamplingParams(temperature=0, max_tokens=left, ignore_eos=r.ignore_eos, stop_token_ids=list(r.stop_token_ids), detokenize=False, output_kind=RequestOutputKind.DELTA, logprobs=r.top_logprobs, prompt_logprobs=r.prompt_logprobs, extra_args={"outrider": {"sequence_id": sequence.id}})
