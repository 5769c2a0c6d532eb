"""The benchmark's own parts: its experiment, peers beside it, and streams of answers."""

import asyncio
import re
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
from rich.console import Console

from outrider_bench.bench import experiment_of
from outrider_bench.experiment.places import Places
from outrider_bench.experiment.records import DRAFTED, PLAIN, Folder, Measurement
from outrider_bench.experiment.report.results import Spread, read
from outrider_bench.experiment.report.tables import Table, tables
from outrider_bench.experiment.run import Runner, missing
from outrider_bench.experiment.spec import Experiment
from outrider_bench.experiment.traffic import Request
from outrider_bench.raw_client import FailedAnswer, stream
from outrider_bench.sample import Sample
from outrider_bench.settings import BenchSettings
from outrider_bench.vllm_ways import Pair, line_peer

MODELS = Path(__file__).parents[2] / "models"


async def test_a_peer_that_dies_raises_an_error_with_its_last_line() -> None:
    answer = '{"tokens": 6}'
    turns = ["print('ready', flush=True)", "input()", f"print('{answer}', flush=True)", "input()"]
    code = "; ".join(["import sys", *turns, "sys.exit('out of cake')"])
    async with line_peer(sys.executable, "-c", code) as ask:
        assert await ask({}) == {"tokens": 6}
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


def test_a_pair_is_an_experiment_over_the_drafters_and_batches_that_are_named() -> None:
    pair = Pair("bundled", MODELS / "target", MODELS / "draft", "float32", 4, 1)
    settings = BenchSettings(ways=["ngram", "model", "vllm*"], batches=[1, 8], rounds=2)
    experiment = experiment_of(pair, settings, Console(quiet=True))
    points = [cell.point for cell in experiment.cells()]
    assert points == [
        {"use": [name], "workload.batch": batch} for name in ("ngram", "model") for batch in (1, 8)
    ]
    assert (experiment.repetitions, experiment.workload.kinds) == (2, ["code", "rewriting", "json"])
    alone = experiment_of(pair, BenchSettings(ways=["vllm"], batches=[1]), Console(quiet=True))
    assert [cell.point["use"] for cell in alone.cells()] == [[]]
    with pytest.raises(ValueError, match="ways: no way is called 'vlm'; there are ngram; suffix;"):
        experiment_of(pair, BenchSettings(ways=["vlm"]), Console(quiet=True))


async def test_peers_decode_each_workload_once_a_round_and_their_rates_are_reported(
    tmp_path: Path,
) -> None:
    asked: list[tuple[int, int]] = []

    async def peer(requests: Sequence[Request], batch: int) -> Sample:
        asked.append((len(requests), batch))
        return Sample(100, 2.0 / batch, tpot=[0.02])

    settings = {
        "name": "beside",
        "target": {"model": MODELS / "target"},
        "drafters": {"a": {}, "b": {}},
        "sweep": {"use": [["a"], ["b"]], "workload.batch": [1, 4]},
        "repetitions": 2,
    }
    experiment = Experiment.model_validate(settings)
    cells = experiment.cells()
    folder = Folder(tmp_path)
    folder.begin({"experiment": experiment.model_dump(mode="json")})
    for cell in cells:
        for number, way in product(range(2), (PLAIN, DRAFTED)):
            folder.save(cell.key, number, Measurement(way, [Sample(100, 1.0)]))
    peers = {"vllm": peer}
    assert len(missing(experiment, cells, folder, peers)) == len(cells) * 2
    done: list[int] = []
    await Runner(experiment, cells, folder, Places(), peers, lambda _, n: done.append(n)).run()
    assert missing(experiment, cells, folder, peers) == []
    # Each measurement comes after a warm-up, which does not count.
    assert sorted(asked[1::2]) == [(8, 1), (8, 1), (16, 4), (16, 4)]
    assert [batch for _, batch in asked[::2]] == [batch for _, batch in asked[1::2]]
    assert sum(done) == len(cells) * 2
    found = {table.title: table for table in tables(read(folder))}
    speed = found["Speed"]
    shown = {name: column(speed, name) for name in speed.columns}
    assert shown["vllm, tokens/s"] == ["50.0", "200.0"] * 2
    assert shown["plain ÷ vllm"] == shown["drafted ÷ vllm"] == ["2.00", "0.50"] * 2
    assert column(found["Latency"], "vllm: TPOT p50, ms") == ["20.0"] * 4


def column(table: Table, name: str) -> list[str]:
    """The medians of a column."""
    place = table.columns.index(name)
    return [line[place].partition(" ")[0] for line in table.lines]


def test_rounds_have_an_interval_and_one_round_has_none() -> None:
    assert Spread.of([2.0]).words(1) == "2.0"
    assert Spread.of([1.0, 2.0, 3.0]).words(1) == "2.0 (1.0–3.0)"
    middle, low, high = map(float, re.findall(r"[\d.]+", Spread.of([*range(1, 100)]).words(1)))
    assert (middle, 1.0 < low < middle < high < 99.0) == (50.0, True)
