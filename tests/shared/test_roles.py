"""The table of roles names every RPC, and a peer may call only its role's RPCs."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from outrider.errors import OutriderError, Reason
from outrider.internal.v1 import token_streams_pb2
from outrider.process.security.roles import (
    CALLERS,
    Peer,
    Role,
    check_call,
    check_http,
    peer_of_grpc,
)
from outrider.v1 import generation_pb2, verifier_pb2

FILES: list[FileDescriptor] = [
    generation_pb2.DESCRIPTOR,
    health_pb2.DESCRIPTOR,
    reflection_pb2.DESCRIPTOR,
    token_streams_pb2.DESCRIPTOR,
    verifier_pb2.DESCRIPTOR,
]
V1ALPHA = "/grpc.reflection.v1alpha."


def rpcs() -> set[str]:
    """Return the full names of all methods; reflection is served as v1 too."""
    names = {
        f"/{service.full_name}/{method.name}"
        for file in FILES
        for service in file.services_by_name.values()
        for method in service.methods
    }
    return names | {name.replace("v1alpha", "v1") for name in names if name.startswith(V1ALPHA)}


def test_the_table_names_every_rpc_and_no_other() -> None:
    assert set(CALLERS) == rpcs()


def test_every_proto_with_a_service_is_looked_at() -> None:
    root = Path(__file__).parents[2] / "protos"
    with_service = {
        str(path.relative_to(root))
        for path in root.rglob("*.proto")
        if "\nservice " in path.read_text()
    }
    assert with_service == {file.name for file in FILES if file.name.startswith("outrider/")}


WHO = {
    Role.GATEWAY: {"AgreeVersion", "GenerateTokens", "GetModel", "StreamTokens"},
    Role.VERIFIER: set[str](),
    Role.REDIS: set[str](),
    Role.DRAFTER: {"GetModel", "StreamDrafts"},
    Role.TRUSTED_DRAFTER: {"GetModel", "StreamDrafts"},
    Role.CLIENT: {"GenerateText", "ServerReflectionInfo"},
}
HEALTH = {"Check", "List", "Watch"}


@pytest.mark.parametrize("role", WHO, ids=lambda role: role.value)
def test_a_role_may_call_what_it_needs_and_no_more(role: Role) -> None:
    allowed = {name.rpartition("/")[2] for name, roles in CALLERS.items() if role in roles}
    assert allowed == WHO[role] | HEALTH


@pytest.mark.parametrize("method", ["/outrider.v1.VerifierService/New", "/x.Y/Z"])
@pytest.mark.parametrize("role", Role)
def test_nobody_may_call_a_method_that_is_not_in_the_table(method: str, role: Role) -> None:
    with pytest.raises(OutriderError, match="which is for nobody"):
        check_call(method, Peer(role, "x"))


def test_the_refusal_names_the_role_the_certificate_and_the_call() -> None:
    with pytest.raises(OutriderError) as caught:
        check_call("/outrider.v1.VerifierService/StreamDrafts", Peer(Role.GATEWAY, "edge"))
    assert caught.value.reason is Reason.CERTIFICATE_NOT_ALLOWED
    assert caught.value.message == (
        "role gateway ('edge') may not call outrider.v1.VerifierService/StreamDrafts, "
        "which is for drafter, trusted-drafter"
    )
    with pytest.raises(OutriderError, match=r"role drafter .* may not call the gateway's HTTP API"):
        check_http(Peer(Role.DRAFTER, "d"))


def test_a_peer_without_tls_may_call_nothing_where_roles_hold() -> None:
    assert peer_of_grpc({"transport_security_type": [b"insecure"]}) is None
    with pytest.raises(OutriderError, match="a peer without TLS may not call"):
        check_call("/grpc.health.v1.Health/Check", None)


@pytest.mark.parametrize(
    "uris", [[b"outrider://role/king"], [b"outrider://role/drafter", b"outrider://role/gateway"]]
)
def test_a_certificate_with_an_unknown_role_or_two_is_refused(uris: list[bytes]) -> None:
    context = {"transport_security_type": [b"ssl"], "peer_uri": uris}
    with pytest.raises(OutriderError, match="must have one role of gateway"):
        peer_of_grpc(context)


IDS = [("cpu1", True), ("cpu1/ngram", True), ("cpu10", False), ("cpu", False), ("", False)]


@pytest.mark.parametrize(("given", "fits"), IDS)
def test_an_id_is_the_common_name_or_begins_with_it_and_a_slash(given: str, fits: bool) -> None:
    peer = Peer(Role.DRAFTER, "cpu1")
    if fits:
        peer.check_id("hello.drafter_id", given)
        return
    with pytest.raises(OutriderError, match="the certificate's common name is 'cpu1'"):
        peer.check_id("hello.drafter_id", given)
