"""Run by ARM's Python: compare the installed kernels with torch; print a JSON object.

The model is random. `errors` compares the kernels' forward and the model's own forward in torch: it
has the mean distance of each forward's logits from float64 logits.
"""

import copy
import itertools
import json
import platform

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import verifier_svc.engine.loop
from outrider.lm.cpu.library import load_build, runnable_builds
from outrider.lm.cpu.weights import optimize_for_cpu
from outrider.lm.runner import ModelRunner, SequenceSlice

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=160,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
PAGES = [40, 3, 17, 5]
# The text is cut at these places into a chunk of 30 rows, one row, a draft, and a chunk of 14 rows.
CUTS = [0, 30, 31, 36, 50]


def made(dtype: torch.dtype) -> LlamaForCausalLM:
    """Return the model, with the same weights each time; its runner changes its configuration."""
    torch.manual_seed(0)
    return LlamaForCausalLM(copy.deepcopy(CONFIG)).to(dtype).eval()


def errors(dtype: torch.dtype) -> list[float]:
    """Return the mean distances from float64 of the kernels' logits and of torch's logits."""
    tokens = torch.randint(3, 256, (CUTS[-1],)).tolist()
    model = made(dtype)
    with torch.inference_mode():
        exact = made(dtype).double()(torch.tensor([tokens])).logits[0]
        own = made(dtype)(torch.tensor([tokens])).logits[0]
        optimize_for_cpu(model)
        runner = ModelRunner(model, page_size=16, page_count=64)
        assert runner.decoder is not None
        chunks = [
            runner.forward([SequenceSlice(tokens[start:end], start, PAGES, end - start)])
            for start, end in itertools.pairwise(CUTS)
        ]
    return [float((found - exact).abs().mean()) for found in (torch.cat(chunks), own)]


built = [name for name in runnable_builds() if load_build(name) is not None]
found = {str(dtype): errors(dtype) for dtype in (torch.float32, torch.bfloat16)}
step = verifier_svc.engine.loop.__file__
print(json.dumps({"machine": platform.machine(), "builds": built, "errors": found, "step": step}))
