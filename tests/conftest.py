"""Sets Hypothesis' profile, and variables that each library reads once, when it is imported.

PyTorch gets one thread, since several test processes run at once. Garbage is collected seldom.

Without a GPU, Triton interprets its kernels. gRPC must not handle forks. `outrider` turns that off
too, but a test may import gRPC before `outrider`.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
torch.set_num_threads(1)
# With the default thresholds, the search for cycles takes a fifth of the time of imports and up to
# a third of a test's time.
gc.set_threshold(200_000, 50, 100)


def _is_not_of_an_ended_test(record: logging.LogRecord) -> bool:
    """Return False for a record in which gRPC logs that an earlier test's event loop is closed.

    gRPC has one completion queue for all loops of a process. A call that a test cancels may end
    later than the test's loop. gRPC then logs this during a later test.
    """
    error = record.exc_info and record.exc_info[1]
    late = "PollerCompletionQueue._handle_events" in record.getMessage()
    return not (late and isinstance(error, RuntimeError) and str(error) == "Event loop is closed")


logging.getLogger("asyncio").addFilter(_is_not_of_an_ended_test)

# On a busy machine some examples take long, which is not the tested code's fault.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# For `--hypothesis-profile=long`: `hostile_messages.fuzzing` then takes many random examples.
settings.register_profile("long", settings.get_profile("patient"))
settings.load_profile("patient")


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Yield the spans that have ended. Tracing is on during the test."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from outrider.process.observability import telemetry

    exporter = InMemorySpanExporter()
    telemetry.setup("test", SimpleSpanProcessor(exporter))
    yield exporter
    telemetry.shutdown()
