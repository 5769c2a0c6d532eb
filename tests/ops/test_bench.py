"""The benchmark's own parts: its measurements, other programs, and streams of answers."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

from outrider_bench import grown
from outrider_bench.commands import bench
from outrider_bench.experiment.report.results import Spread
from outrider_bench.experiment.spec import load
from outrider_bench.raw_client import FailedAnswer, stream
from outrider_bench.table.peer_process import PeerDied, line_peer

EXPERIMENTS = Path(__file__).parents[2] / "bench/experiments"


async def test_a_peer_that_dies_raises_an_error_with_its_last_line() -> None:
    answer = '{"tokens": 6}'
    turns = ["print('ready', flush=True)", "input()", f"print('{answer}', flush=True)", "input()"]
    code = "; ".join(["import sys", *turns, "sys.exit('out of cake')"])
    async with line_peer(sys.executable, "-c", code) as ask:
        assert await ask({}) == {"tokens": 6}
        with pytest.raises(PeerDied, match="out of cake"):
            await ask({})


async def test_a_peer_that_dies_within_a_line_has_died_as_well() -> None:
    code = "print('ready', flush=True); input(); print('{\"tok', end='', flush=True)"
    async with line_peer(sys.executable, "-c", code) as ask:
        with pytest.raises(PeerDied):
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


def test_bench_measures_the_checkpoint_that_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    measured: list[list[str]] = []

    def run(arguments: list[str]) -> int:
        measured.append(arguments)
        return 0

    monkeypatch.setattr(grown, "make_checkpoint", lambda small, out, *_: made.append(out))
    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(Path, "is_dir", lambda _: False)
    assert bench.main(["--only", "grown"]) == 0
    assert measured == [["bench/experiments/grown.yaml"]]
    assert [load(EXPERIMENTS / "grown.yaml").target.model] == made


def test_rounds_have_an_interval_and_one_round_has_none() -> None:
    assert Spread.of([2.0]).words(1) == "2.0"
    assert Spread.of([1.0, 2.0, 3.0]).words(1) == "2.0 (1.0–3.0)"
    middle, low, high = map(float, re.findall(r"[\d.]+", Spread.of([*range(1, 100)]).words(1)))
    assert (middle, 1.0 < low < middle < high < 99.0) == (50.0, True)
