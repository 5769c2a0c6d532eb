from __future__ import annotations
class NoProposer:
    def __init__(self, vllm_config): pass
    def load_model(self, model): pass
    def propose(self, sampled_token_ids, *a, **k): return [[] for _ in sampled_token_ids]
def install(): pass
def engine_arguments(draft_tokens):
    return {"speculative_config": {"method": "custom_class", "model": "verifier_svc.vllm.runner.NoProposer", "num_speculative_tokens": draft_tokens}}
