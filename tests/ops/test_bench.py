"""The benchmark's own parts: peers, ways of decoding, tables and records."""

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from outrider_bench.experiment.report.results import Spread
from outrider_bench.raw_client import FailedAnswer, stream
from outrider_bench.report import Results, is_disturbed, tables, write
from outrider_bench.sample import Sample
from outrider_bench.ways import line_peer

MODELS = Path(__file__).parents[2] / "models"


async def test_a_peer_that_dies_raises_an_error_with_its_last_line() -> None:
    answer = '{"tokens": 6, "seconds": 2.0}'
    turns = ["print('ready', flush=True)", "input()", f"print('{answer}', flush=True)", "input()"]
    code = "; ".join(["import sys", *turns, "sys.exit('out of cake')"])
    async with line_peer(sys.executable, "-c", code) as ask:
        assert (await ask({})).tokens_per_s == 3.0
        with pytest.raises(RuntimeError, match="out of cake"):
            await ask({})


@pytest.mark.parametrize(
    ("blocks", "code"),
    [
        ([b"data: 1\n\n", b"data: [DO", b"NE]\n\n"], None),
        ([b"data: 1\n\n"], "hung_up"),
        ([b'HTTP/1.1 429 \r\n\r\n{"error":{"code":"overloaded"}}'], "overloaded"),
        ([b'data: {"error": {"code": "slow_reader"}}\n\n', b"data: [DONE]\n\n"], "slow_reader"),
    ],
)
async def test_a_stream_is_read_to_its_end_or_raises_the_servers_error(
    blocks: list[bytes], code: str | None
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"}"))
        for block in blocks:
            await asyncio.sleep(0.05)
            writer.write(block)
        writer.close()
        await writer.wait_closed()
        answered.set()

    answered = asyncio.Event()
    asked: list[bytes] = []
    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        if code is not None:
            with pytest.raises(FailedAnswer) as caught:
                [block async for block in stream(port, {"model": "m"}, {"X-Way": "far"})]
            assert caught.value.code == code
        else:
            got = [block async for block in stream(port, {"model": "m"}, {"X-Way": "far"})]
            assert b"".join(got) == b"".join(blocks)
        await answered.wait()
    finally:
        server.close()
        await server.wait_closed()
    assert b"X-Way: far\r\n" in asked[0]
    assert asked[0].endswith(b'\r\n\r\n{"model": "m"}')


def results() -> Results:
    found = Results("tiny, 1 M, float32")
    phases = dict.fromkeys(("wait", "pack", "forward", "accept", "commit", "send"), 0.1)
    counters = {f"step_phase_seconds.{name}": seconds for name, seconds in phases.items()}
    counters |= {
        "step_seconds_count": 10,
        "step_sequences_sum": 10,
        "generation_tokens": 30,
        "spec_decode_num_accepted_tokens": 20,
    }
    counters |= {
        "decode_seconds": 2.0,
        "decode_isolated_forward_seconds": 1.5,
        "draft_lookups.chain": 3,
        "draft_lookups.miss": 1,
    }
    for batch in (1, 8):
        found.add(batch, "vllm", Sample(30, 3.0))
        # Two requests of 15 tokens. In the first second, with both under way, 15 tokens of one come
        # and 8 of the other.
        requests = [(0.0, 1.0, 15), (0.5, 1.5, 15)]
        found.add(
            batch,
            "outrider, ngram",
            Sample(30, 1.5, [0.2], [0.03], counters, requests, 1.0),
        )
    return found


def test_tables_hold_rates_latencies_and_the_share_of_the_limit(tmp_path: Path) -> None:
    console = Console(record=True, width=220, file=(tmp_path / "printed").open("w"))
    for table in tables(results(), "outrider, ngram"):
        console.print(table)
    path = write(tmp_path, "bench", {"pairs": results().as_json()})
    console.file.close()
    printed = (tmp_path / "printed").read_text()
    assert " 20.0 " in printed
    assert "0.50" in printed
    # The rate while batches are full, which is not known for the peer.
    full = next(line for line in printed.splitlines() if " 23.0 " in line)
    assert full.count("1.00") == 2
    assert "TPOT" in printed
    rows = [line for line in printed.splitlines() if "outrider, ngram" in line]
    step = next(row for row in rows if "0.75" in row)
    cells = [cell.strip() for cell in step.split("│")]
    assert {"3.00", "0.75", "0.25"} <= set(cells)
    assert len(json.loads(path.read_text())["pairs"]) == 4


def test_a_speed_beyond_its_tokens_per_forward_is_marked() -> None:
    plain = {"generation_tokens": 30.0, "step_sequences_sum": 30.0}
    drafted = {"generation_tokens": 30.0, "step_sequences_sum": 15.0}
    samples = {
        "outrider, plain": [Sample(30, 3.0, counters=plain)],
        "outrider, ngram": [Sample(30, 1.6, counters=drafted)],
        "outrider, model": [Sample(30, 1.2, counters=drafted)],
    }
    assert not is_disturbed(samples, "outrider, plain")
    assert not is_disturbed(samples, "outrider, ngram")
    assert is_disturbed(samples, "outrider, model")


def test_rounds_have_an_interval_and_one_round_has_none() -> None:
    assert Spread.of([2.0]).words(1) == "2.0"
    assert Spread.of([1.0, 2.0, 3.0]).words(1) == "2.0 (1.0–3.0)"
    middle, low, high = map(float, re.findall(r"[\d.]+", Spread.of([*range(1, 100)]).words(1)))
    assert (middle, 1.0 < low < middle < high < 99.0) == (50.0, True)
