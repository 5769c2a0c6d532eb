"""If a process of an experiment ends, the error names the process and has what it printed."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import start_http_server

from outrider.process.network.ports import free_port
from outrider_bench.experiment.child import Launch
from outrider_bench.experiment.launches import Endpoint
from outrider_bench.experiment.measuring import Bench
from outrider_bench.experiment.processes import Processes, StackFailed
from outrider_bench.experiment.records import PLAIN
from outrider_bench.experiment.spec import Experiment, Target
from outrider_bench.experiment.stack import Server
from outrider_bench.experiment.traffic import Encoder
from tests.stack import TARGET


@pytest.mark.parametrize("name", ["verifier", "gateway"])
async def test_a_process_that_ends_while_it_is_measured_is_named_with_its_last_words(
    name: str,
) -> None:
    processes = Processes()
    await processes.start(Launch(name, "", ("-c", "echo a lost GPU"), program="sh"))
    endpoint = Endpoint("", "models/target", free_port(), free_port(), "127.0.0.1:1")
    server = Server(Target.model_validate({}), endpoint, processes)
    bench = Bench(server, None, Encoder(Path(TARGET)))
    with ExitStack() as stack:
        if name == "gateway":
            metrics, _ = start_http_server(endpoint.metrics_port, "127.0.0.1")
            stack.callback(metrics.server_close)
            stack.callback(metrics.shutdown)
        with pytest.raises(StackFailed, match=f"{name} ended\n  {name}: a lost GPU"):
            await bench.warm_up(Experiment.model_validate({"name": "any"}), PLAIN)
