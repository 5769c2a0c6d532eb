"""Call Outrider's gRPC services from Python, with the stubs of the package outrider-protos.

python client.py GATEWAY VERIFIER UNAVAILABLE [CERTS]    (host:port each)

UNAVAILABLE is a gateway that has no verifier. With CERTS, a folder that `outrider certs` made, the
client uses mutual TLS as an operator.
"""

import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)
from grpc_status import rpc_status

from outrider.v1 import (
    common_pb2,
    generation_pb2,
    generation_pb2_grpc,
    verifier_pb2,
    verifier_pb2_grpc,
)


def dial(address: str, certs: str, *names: tuple[str, str]) -> grpc.Channel:
    """A channel to host:port, with TLS if `certs` names a folder; `names` are channel options."""
    if not certs:
        return grpc.insecure_channel(address)
    files = ("ca.pem", "operator.key", "operator.pem")
    pems = [Path(certs, file).read_bytes() for file in files]
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(*pems), options=names)


def stub(address: str, certs: str) -> generation_pb2_grpc.GenerationServiceStub:
    """A stub of the gateway at host:port."""
    return generation_pb2_grpc.GenerationServiceStub(dial(address, certs))


def request(**fields: object) -> generation_pb2.GenerateTextRequest:
    """A greedy request of 16 tokens, with other fields as given."""
    greedy = common_pb2.SamplingParams(temperature=0)
    given = {"prompt": "def main(", "max_tokens": 16, "sampling": greedy} | fields
    return generation_pb2.GenerateTextRequest(**given)


class Failure:
    """The end of a call: its status, and the details that every Outrider error has."""

    def __init__(self, call: grpc.Call) -> None:
        self.code = call.code()
        self.info = error_details_pb2.ErrorInfo()
        self.bad = error_details_pb2.BadRequest()
        self.retry = error_details_pb2.RetryInfo()
        status = rpc_status.from_call(call)
        for packed in status.details if status else []:
            for message in (self.info, self.bad, self.retry):
                packed.Unpack(message)


def patiently(start: Callable[[], grpc.Call], tries: int) -> Iterable[object]:
    """Return a stream's messages; retry as the error's retry rule and RetryInfo say."""
    backoff_s = 0.1
    while True:
        call = start()
        try:
            return list(call)
        except grpc.RpcError:
            failure = Failure(call)
            tries -= 1
            if tries == 0 or failure.info.metadata.get("retry", "never") == "never":
                raise
            time.sleep(failure.retry.retry_delay.ToTimedelta().total_seconds() or backoff_s)
            backoff_s = min(2 * backoff_s, 2.0)


def check(name: str, *facts: bool) -> None:
    """Print the name of a check if all its facts hold; otherwise exit."""
    if not all(facts):
        raise SystemExit(f"{name} failed: {facts}")
    print("ok", name)


def check_texts(text: generation_pb2_grpc.GenerationServiceStub) -> None:
    """Stream a text, cancel a call, and let a deadline pass."""
    # Stream a text. The last message has the token counts and the finish reason.
    parts = list(text.GenerateText(request()))
    whole = "".join(part.text for part in parts)
    check("stream", whole != "", parts[-1].usage.completion_token_count == 16)

    # Cancel a call. The server frees everything that the call held.
    call = text.GenerateText(request(max_tokens=1000))
    next(call)
    call.cancel()
    check("cancel", call.code() is grpc.StatusCode.CANCELLED)

    # Set a deadline. The server stops at the deadline as well.
    call = text.GenerateText(request(max_tokens=1900), timeout=0.05)
    check("deadline", call.code() is grpc.StatusCode.DEADLINE_EXCEEDED)


def check_errors(
    text: generation_pb2_grpc.GenerationServiceStub,
    other: generation_pb2_grpc.GenerationServiceStub,
) -> None:
    """Read the details of errors."""
    # Send bad input. The error has the reason and the field at fault.
    hot = common_pb2.SamplingParams(temperature=9)
    failure = Failure(text.GenerateText(request(sampling=hot)))
    check(
        "bad-value",
        failure.code is grpc.StatusCode.INVALID_ARGUMENT,
        (failure.info.domain, failure.info.reason) == ("outrider.dev", "INVALID_VALUE"),
        failure.bad.field_violations[0].field == "sampling.temperature",
    )
    failure = Failure(text.GenerateText(request(model="no-such-model")))
    missing = failure.code is grpc.StatusCode.NOT_FOUND
    check("unknown-model", missing, failure.info.reason == "MODEL_NOT_FOUND")

    # Twice, call a gateway that has no verifier. RetryInfo says when to try again.
    began = time.monotonic()
    try:
        patiently(lambda: other.GenerateText(request()), 2)
    except grpc.RpcError as error:
        failure = Failure(error)
    delay = failure.retry.retry_delay.ToTimedelta().total_seconds()
    waited = time.monotonic() - began
    check("unavailable", failure.code is grpc.StatusCode.UNAVAILABLE, delay > 0, waited >= delay)


def check_services(channel: grpc.Channel) -> None:
    """Use gRPC's health and reflection services."""
    asked = health_pb2.HealthCheckRequest(service="outrider.v1.GenerationService")
    health = health_pb2_grpc.HealthStub(channel).Check(asked)
    check("health", health.status == health_pb2.HealthCheckResponse.SERVING)
    services = ProtoReflectionDescriptorDatabase(channel).get_services()
    check("reflection", "outrider.v1.GenerationService" in services)


def check_tokens(verifier: grpc.Channel) -> None:
    """Generate token ids at the verifier. A seed has 64 bits."""
    tokens = verifier_pb2_grpc.VerifierServiceStub(verifier)
    ids = verifier_pb2.GenerateTokensRequest(
        prompt_token_ids=[1, 2, 3],
        max_tokens=8,
        ignore_eos=True,
        sampling=common_pb2.SamplingParams(seed=2**64 - 1),
    )
    drawn = [[i for part in tokens.GenerateTokens(ids) for i in part.token_ids] for _ in range(2)]
    check("tokens", len(drawn[0]) == 8, drawn[0] == drawn[1])


def main(gateway: str, verifier: str, unavailable: str, certs: str = "") -> None:
    """Run all checks against three addresses, host:port each."""
    text = stub(gateway, certs)
    check_texts(text)
    check_errors(text, stub(unavailable, certs))
    check_services(dial(gateway, certs))
    # A verifier's certificate has the name verifier.outrider, not the name of its host.
    check_tokens(dial(verifier, certs, ("grpc.ssl_target_name_override", "verifier.outrider")))


if __name__ == "__main__":
    main(*sys.argv[1:])
