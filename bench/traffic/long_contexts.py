"""Send long chats to a running gateway, and print a table of times, tokens, cache hits and memory.

    outrider serve smollm2 &
    python bench/traffic/long_contexts.py --port 8000 1024 4096 7900

A length is the number of tokens of a file in the user's message. The first turn is asked without
drafts, then with drafts where they pay, then with drafts in every step. The second and third time,
its prompt is in the prefix cache. A second turn follows. At last a short chat streams beside new
prompts of these lengths. Begin with a new verifier, whose cache has none of the prompts. On a busy
machine, give the verifier one thread, and its process as --pid: the verifier's processor time says
more than the clock.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx

QUESTIONS = {
    "repeat": "Write the last function of this file again, word for word.",
    "explain": "What is this file for? Answer in a few sentences.",
}
FOLLOW_UP = "Say that again in one sentence."
PLAIN = {"temperature": 0, "speculation": {"enabled": False}}
WAYS: Mapping[str, dict[str, Any]] = {
    "plain": {"enabled": False},
    "where it pays": {},
    "always": {"always_draft": True},
}
MAX_TOKENS = 96
TIMEOUT_S = 600.0


class Moment(NamedTuple):
    """The time, and the processor time of the verifier, in seconds."""

    clock: float
    processor: float

    def since(self, other: Moment) -> Moment:
        return Moment(self.clock - other.clock, self.processor - other.processor)

    def each(self, count: int) -> str:
        """Divide both times by `count` tokens; return milliseconds per token."""
        return " | ".join(f"{1000 * seconds / max(1, count):.0f}" for seconds in self)


class Answer(NamedTuple):
    """A streamed answer, and the costs of its first token and of its later tokens."""

    text: str
    first: Moment
    rest: Moment
    usage: dict[str, Any]

    @property
    def prompt(self) -> str:
        """The prompt's tokens, and how many of them the prefix cache held."""
        cached = self.usage["prompt_tokens_details"]["cached_tokens"]
        return f"{self.usage['prompt_tokens']:,} ({cached:,})"

    @property
    def per_forward(self) -> float:
        """The number of the answer's tokens for each forward that sampled tokens."""
        tokens = self.usage["completion_tokens"]
        details = self.usage["completion_tokens_details"]
        forwards = tokens - details["accepted_prediction_tokens"]
        return float(tokens / forwards)


class Verifier:
    """Reads the processor time and memory of the verifier's process from /proc."""

    def __init__(self, pid: int | None) -> None:
        self._folder = None if pid is None else Path(f"/proc/{pid}")

    def now(self) -> Moment:
        """The present time, and the process's processor time: 0 without a process."""
        ticks = 0
        if self._folder is not None:
            # The name before the last parenthesis may have spaces.
            fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
            ticks = int(fields[11]) + int(fields[12])
        return Moment(time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK"))

    def resident_mib(self) -> str:
        """The resident memory of the process; a dash without a process."""
        if self._folder is None:
            return "–"
        found = re.search(r"VmRSS:\s+(\d+) kB", (self._folder / "status").read_text())
        return f"{int(found[1]) / 1024:,.0f}" if found else "–"


def ask(
    client: httpx.Client, verifier: Verifier, messages: list[dict[str, str]], how: dict[str, Any]
) -> Answer:
    """Stream a greedy answer."""
    body = {
        "messages": messages,
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "speculation": how,
    }
    started = verifier.now()
    first: Moment | None = None
    text = ""
    usage: dict[str, Any] = {}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.is_error:
            raise SystemExit(f"the gateway refused: {response.read().decode()}")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise SystemExit(f"the answer failed: {chunk['error']['message']}")
            for choice in chunk["choices"]:
                text += choice["delta"].get("content") or ""
            if text and first is None:
                first = verifier.now()
            usage = chunk.get("usage") or usage
    if not usage or first is None:
        raise SystemExit("the answer has no text")
    return Answer(text, first.since(started), verifier.now().since(first), usage)


def file_of(client: httpx.Client, tokens: int) -> str:
    """The first tokens of the sources of some Python modules."""
    source = "\n".join(map(inspect.getsource, (argparse, inspect)))
    ids = client.post("/tokenize", json={"prompt": source}).json()["tokens"]
    text: str = client.post("/detokenize", json={"tokens": ids[:tokens]}).json()["prompt"]
    return text


def measure(client: httpx.Client, verifier: Verifier, length: int, kind: str) -> None:
    """Ask one chat in all decoding modes, then its second turn; print a row for each answer."""
    content = f"# {kind}, {length} tokens\n{file_of(client, length)}\n\n{QUESTIONS[kind]}"
    messages = [{"role": "user", "content": content}]
    texts = set()
    for way, how in WAYS.items():
        answer = ask(client, verifier, messages, how)
        texts.add(answer.text)
        show(verifier, length, f"{kind}, {way}", answer)
    messages += [{"role": "assistant", "content": answer.text}]
    messages += [{"role": "user", "content": FOLLOW_UP}]
    show(verifier, length, f"{kind}, second turn", ask(client, verifier, messages, {}))
    if len(texts) > 1:
        print(f"{kind}: the texts differ: {texts}")


def measure_beside(client: httpx.Client, verifier: Verifier, length: int) -> None:
    """Send a new prompt beside a chat, and print how long the chat waited for its tokens."""
    gaps: list[float] = []
    over = threading.Event()

    def chat() -> None:
        body = {"prompt": "Once", "max_tokens": 1000, "stream": True, "ignore_eos": True} | PLAIN
        last = time.perf_counter()
        with client.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if over.is_set():
                    return
                if line.startswith("data: "):
                    gaps.append(time.perf_counter() - last)
                    last = time.perf_counter()

    content = f"# beside a chat, {length} tokens\n{file_of(client, length)}"
    beside = threading.Thread(target=chat)
    beside.start()
    while len(gaps) < 20:
        time.sleep(0.01)
    alone = median(gaps[1:])
    gaps.clear()
    messages = [{"role": "user", "content": content}]
    answer = ask(client, verifier, messages, WAYS["plain"])
    over.set()
    beside.join()
    print(
        f"a chat beside a new prompt of {length:,}: {1000 * alone:.0f} ms a token before, then"
        f" {1000 * median(gaps):.0f}, at most {1000 * max(gaps):.0f};"
        f" the prompt's first token after {answer.first.clock:.2f} s\n"
    )


def show(verifier: Verifier, length: int, name: str, answer: Answer) -> None:
    """Print a row."""
    tokens = answer.usage["completion_tokens"]
    cells = [
        f"{length:,}",
        name,
        answer.prompt,
        *(f"{seconds:.2f}" for seconds in answer.first),
        tokens,
        answer.rest.each(tokens - 1),
        f"{answer.per_forward:.2f}",
        verifier.resident_mib(),
    ]
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def main() -> None:
    """Measure all lengths, the shortest first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lengths", nargs="+", type=int)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument(
        "--pid", type=int, help="The verifier's process, to show its times and memory."
    )
    given = parser.parse_args()
    print(
        "| file | asked | prompt (cached) | first token, s | processor s | tokens | ms a token "
        "| processor ms | tokens per forward | verifier, MiB |\n"
        "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    )
    verifier = Verifier(given.pid)
    with httpx.Client(base_url=f"http://127.0.0.1:{given.port}", timeout=TIMEOUT_S) as client:
        for length in sorted(given.lengths):
            for kind in QUESTIONS:
                measure(client, verifier, length, kind)
        for length in sorted(given.lengths):
            measure_beside(client, verifier, length)


if __name__ == "__main__":
    main()
