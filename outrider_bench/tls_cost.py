"""`outrider bench --only tls`: the cost of mutual TLS between all processes and to the client.

Two stacks have no TLS; their difference is the error of such a comparison. The third runs on a
folder of certificates, as `outrider serve --certs` does. Each decodes plainly, and with n-gram
drafts, which send more messages.
"""

from __future__ import annotations

import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.launch import certs
from outrider_bench.paired import compare, task_of
from outrider_bench.ways import Measure, Pair, outrider_stack

_DECODINGS: dict[str, dict[str, Any]] = {"plain": {"enabled": False}, "ngram": {}}


async def measure(pair: Pair, rounds: int, tokens: int, console: Console) -> dict[str, Any]:
    """Measure tokens/s with and without TLS, and ratios within rounds."""
    with tempfile.TemporaryDirectory(prefix="outrider-certs-") as directory:
        folder = Path(directory)
        certs.run(folder, [], [], None, 1, new_authority=True)
        stacks: dict[str, dict[str, Any]] = {
            "without TLS": {},
            "without TLS, another stack": {},
            "mutual TLS": {"certs": folder},
        }
        async with AsyncExitStack() as stack:
            ways: dict[str, Measure] = {}
            for name, files in stacks.items():
                # A policy would learn another number of draft tokens in each stack.
                fixed = {"draft_tokens": "fixed:4", **files}
                make = await stack.enter_async_context(
                    outrider_stack(pair, ["ngram"], pair.shared_threads, **fixed)
                )
                for decoding, speculation in _DECODINGS.items():
                    ways[f"{decoding}, {name}"] = make(speculation)
            bases = {name: f"{name.partition(',')[0]}, without TLS" for name in ways}
            return await compare(ways, bases, task_of(pair, tokens), rounds, console, "TLS")
