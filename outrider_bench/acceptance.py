"""`outrider bench --only acceptance`: accepted tokens by rule, drafter and grammar.

It measures rates, so other load on the machine does not matter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from rich.console import Group
from rich.table import Table

from outrider.launch.prompts import DEMO_PROMPTS
from outrider.lm.runner import ModelRunner, SequenceSlice
from outrider.protocol.draft_messages import SparseDistribution
from outrider.protocol.messages import AcceptanceRule, SamplingParams
from outrider.sampling.logits import Context
from outrider.tokenizer import load_tokenizer
from outrider_bench.console import table_of
from outrider_bench.ways import counters, serving
from verifier_svc.verification.acceptance import accept
from verifier_svc.verification.draft import Draft

_DRAFT_TOKENS = 4
_ROUNDS = 3
_PAIRED_ROUNDS = 20
_PAIRED_SEEDS = 10
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def tables(models: Path, tokens: int) -> Group:
    """Measure everything; returns tables to print."""
    return Group(*asyncio.run(_measure(models, tokens)), _same_drafts(models))


async def _measure(models: Path, tokens: int) -> list[Table]:
    target = models / "target"
    draft = models / "draft"
    free: dict[str, Any] = {"temperature": 1.0, "max_tokens": tokens}
    guided: dict[str, Any] = {
        "temperature": 0.7,
        "max_tokens": 300,
        "response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}},
    }
    rules = _table("temperature 1, no grammar", "rule, drafter")
    masks = _table("temperature 0.7, under a JSON schema", "drafter")
    model = f"model={draft},threads=1"
    for rule in ("token-wise", "block"):
        async with _stack(target, [model], sampled_drafts=True, sampled_rule=rule) as stack:
            rules.add_row(f"{rule}, model, sampled and trusted", *await stack(free, "model"))
    async with _stack(target, [model, "ngram"]) as stack:
        rules.add_row("coupled, model", *await stack(free, "model"))
        rules.add_row("coupled, ngram", *await stack(free, "ngram"))
        masks.add_row("model, masked", *await stack(guided, "model"))
        masks.add_row("ngram", *await stack(guided, "ngram"))
    async with _stack(target, [f"{model},mask_drafts=false"]) as stack:
        masks.add_row("model, not masked", *await stack(guided, "model"))
    return [rules, masks]


def _table(title: str, first: str) -> Table:
    measured = ("mean accepted length", "accepted / drafted", "draft bytes / accepted token")
    return table_of(f"{title}, {_DRAFT_TOKENS} draft tokens", (first, *measured))


@asynccontextmanager
async def _stack(target: Path, drafters: list[str], **settings: Any) -> AsyncIterator[Any]:
    """Start a stack.

    Call it with a request's settings and a drafter; it returns a table's row.
    """
    settings |= {"dtype": "float32", "draft_tokens": _DRAFT_TOKENS, "always_draft": True}
    async with serving(target, drafters, **settings) as (client, metrics_port):

        async def measure(request: dict[str, Any], family: str) -> list[str]:
            return await _row(client, metrics_port, {**request, "model": str(target)}, family)

        yield measure


async def _row(
    client: httpx.AsyncClient, metrics_port: int, request: dict[str, Any], family: str
) -> list[str]:
    before = (await counters(metrics_port)).get("draft_bytes", 0.0)
    steps = drafted = accepted = 0
    for _ in range(_ROUNDS):
        speculation = {"drafter_family": family, "metrics": True}
        bodies = [
            {**request, "prompt": prompt, "speculation": speculation} for _, prompt in DEMO_PROMPTS
        ]
        for response in await asyncio.gather(
            *(client.post("/v1/completions", json=body) for body in bodies)
        ):
            response.raise_for_status()
            metrics = response.json()["metrics"]["speculative_decoding"]
            steps += metrics["num_spec_steps"]
            drafted += metrics["num_draft_tokens"]
            accepted += metrics["num_accepted_draft_tokens"]
    size = ((await counters(metrics_port)).get("draft_bytes", 0.0) - before) / max(accepted, 1)
    return [
        f"{1 + accepted / max(steps, 1):.3f} ({steps} steps)",
        f"{accepted / max(drafted, 1):.3f}",
        f"{size:.0f}",
    ]


def _same_drafts(models: Path) -> Table:
    """Compare both rules for sampled drafts on the same drafts with the same noise."""
    tokenizer = load_tokenizer(str(models / "target"))
    texts = [tokenizer.encode(prompt).ids for _, prompt in DEMO_PROMPTS]
    contexts = [ids[: len(ids) * part // 8] for ids in texts for part in range(2, 9)]
    target, draft = (
        ModelRunner.load(str(models / name), dtype="float32", page_count=4096)
        for name in ("target", "draft")
    )
    accepted = dict.fromkeys((AcceptanceRule.TOKEN_WISE, AcceptanceRule.BLOCK), 0)
    judged = 0
    for round_number in range(_PAIRED_ROUNDS):
        drafts = _sampled_drafts(draft, contexts, torch.Generator().manual_seed(round_number))
        logits = target.forward(
            _slices(
                [[*c, *d[0]] for c, d in zip(contexts, drafts, strict=True)],
                target.page_size,
                _DRAFT_TOKENS + 1,
            )
        )
        for seed in range(_PAIRED_SEEDS):
            for rule in accepted:
                batch = [
                    Draft(
                        Context(SamplingParams(), context, len(context), tokens),
                        seed * 10_000 + i,
                        rule,
                        laws,
                    )
                    for i, (context, (tokens, laws)) in enumerate(
                        zip(contexts, drafts, strict=True)
                    )
                ]
                accepted[rule] += sum(outcome.accepted_count for outcome in accept(logits, batch))
            judged += len(contexts)
    count = _PAIRED_ROUNDS * len(contexts)
    compared = f"both rules on the same {count} drafts"
    table = Table(title=f"temperature 1, {_DRAFT_TOKENS} draft tokens: {compared}")
    table.add_column("rule")
    table.add_column("mean accepted length", justify="right")
    for rule, count in accepted.items():
        table.add_row(rule.name.lower().replace("_", "-"), f"{1 + count / judged:.4f}")
    return table


def _sampled_drafts(
    draft: ModelRunner, contexts: list[list[int]], generator: torch.Generator
) -> list[tuple[list[int], list[SparseDistribution]]]:
    """Draft `_DRAFT_TOKENS` tokens for each context, and keep the distribution of each token."""
    drafts: list[tuple[list[int], list[SparseDistribution]]] = [([], []) for _ in contexts]
    for _ in range(_DRAFT_TOKENS):
        texts = [[*context, *tokens] for context, (tokens, _) in zip(contexts, drafts, strict=True)]
        top = draft.forward(_slices(texts, draft.page_size, 1)).softmax(-1).topk(32)
        weights = (top.values / top.values.sum(-1, keepdim=True)).double()
        picks = torch.multinomial(weights, 1, generator=generator)
        chosen = top.indices.gather(-1, picks).squeeze(-1).tolist()
        for (tokens, laws), token, ids, law in zip(
            drafts, chosen, top.indices, weights, strict=True
        ):
            tokens.append(token)
            laws.append(SparseDistribution(ids.numpy(), law.numpy() / law.sum().item()))
    return drafts


def _slices(texts: list[list[int]], page_size: int, logit_count: int) -> list[SequenceSlice]:
    slices = []
    first = 0
    for text in texts:
        count = -(-len(text) // page_size)
        slices.append(SequenceSlice(text, 0, list(range(first, first + count)), logit_count))
        first += count
    return slices
