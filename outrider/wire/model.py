"""Proto ⇄ domain for what a verifier says of itself and its drafters."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.duration_pb2 import Duration

from outrider import messages as m
from outrider.errors import invalid
from outrider.v1 import common_pb2, verifier_pb2
from outrider.wire.settings import check_name, known, proto_enum

_MAX_CORES = 1024
# Linux numbers at most 8192 logical processors, and 1024 nodes.
_MAX_CORE_ID, _MAX_NODE_ID = 65_535, 65_535
# The longest that a Duration may be, ten thousand years.
_LONGEST_S = 315_576_000_000.0
# A quarter of the largest message: who drafts is not worth losing sight of the model for.
_MAX_DRAFTER_BYTES = 4 * 2**20


def model_to_proto(info: m.ModelInfo) -> verifier_pb2.GetModelResponse:
    """Of the drafters, the first as many as fit into a message together with all else."""
    response = verifier_pb2.GetModelResponse(
        model_id=info.model_id,
        stage=proto_enum(info.stage.value),
        stage_detail=info.stage_detail,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        eos_token_ids=info.eos_token_ids,
        dtype=info.dtype,
        device=info.device,
        max_draft_tokens=info.max_draft_tokens,
    )
    byte_count = 0
    for drafter in info.drafters:
        proto = _drafter_to_proto(drafter)
        byte_count += proto.ByteSize()
        if byte_count > _MAX_DRAFTER_BYTES:
            break
        response.drafters.append(proto)
    return response


def _drafter_to_proto(drafter: m.DrafterInfo) -> verifier_pb2.DrafterInfo:
    return verifier_pb2.DrafterInfo(
        drafter_id=drafter.drafter_id,
        family=drafter.family,
        placement=placement_to_proto(drafter.placement),
        connected=drafter.connected,
        sequence_count=drafter.sequence_count,
        acceptance_rate=drafter.acceptance_rate,
        round_trip_time=_duration(drafter.round_trip_s),
        token_time=_duration(drafter.token_s),
    )


def model_from_proto(proto: verifier_pb2.GetModelResponse) -> m.ModelInfo:
    """Raises OutriderError(INVALID_VALUE). A stage that only a later version knows counts as LOADING: no requests are sent."""
    return m.ModelInfo(
        model_id=proto.model_id,
        stage=known(m.Stage, proto.stage, m.Stage.LOADING),
        stage_detail=proto.stage_detail,
        tokenizer_fingerprint=proto.tokenizer_fingerprint,
        vocab_size=proto.vocab_size,
        context_length=proto.context_length,
        eos_token_ids=tuple(proto.eos_token_ids),
        dtype=proto.dtype,
        device=proto.device,
        max_draft_tokens=proto.max_draft_tokens,
        drafters=tuple(
            m.DrafterInfo(
                drafter.drafter_id,
                drafter.family,
                placement_from_proto(drafter.placement),
                drafter.connected,
                drafter.sequence_count,
                drafter.acceptance_rate if drafter.HasField("acceptance_rate") else None,
                _seconds(drafter.round_trip_time) if drafter.HasField("round_trip_time") else None,
                _seconds(drafter.token_time) if drafter.HasField("token_time") else None,
            )
            for drafter in proto.drafters
        ),
    )


def placement_to_proto(placement: m.Placement) -> common_pb2.Placement:
    return common_pb2.Placement(
        kind=placement.kind,
        host=placement.host,
        device=placement.device,
        cores=placement.cores,
        numa_node=placement.numa_node,
        architecture=placement.architecture,
    )


def placement_from_proto(proto: common_pb2.Placement) -> m.Placement:
    for name in ("kind", "host", "device", "architecture"):
        check_name(f"placement.{name}", getattr(proto, name), empty=True)
    _check_cores(proto.cores)
    numa_node = proto.numa_node if proto.HasField("numa_node") else None
    if numa_node is not None and not 0 <= numa_node <= _MAX_NODE_ID:
        raise invalid("placement.numa_node", f"must be in [0, {_MAX_NODE_ID}], not {numa_node}")
    return m.Placement(
        proto.kind, proto.host, proto.device, tuple(proto.cores), numa_node, proto.architecture
    )


def _check_cores(cores: Sequence[int]) -> None:
    if len(cores) > _MAX_CORES:
        raise invalid("placement.cores", f"must hold at most {_MAX_CORES} cores, not {len(cores)}")
    for core in cores:
        if not 0 <= core <= _MAX_CORE_ID:
            raise invalid(
                "placement.cores", f"must hold numbers in [0, {_MAX_CORE_ID}], not {core}"
            )
    if len(set(cores)) < len(cores):
        raise invalid("placement.cores", "must be distinct")


def _duration(seconds: float | None) -> Duration | None:
    return None if seconds is None else Duration(seconds=int(seconds), nanos=int(seconds % 1 * 1e9))


def _seconds(duration: Duration) -> float:
    return min(max(duration.seconds + duration.nanos / 1e9, 0.0), _LONGEST_S)
