"""Converts a verifier's answer to GetModel and a drafter's placement between proto and domain."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.errors import invalid
from outrider.protocol.checks import check_name
from outrider.protocol.limits import MAX_CORE_ID, MAX_CORES, MAX_NODE_ID
from outrider.protocol.model_info import DrafterInfo, Load, ModelInfo, Placement, Stage
from outrider.protocol.wire.settings import duration, known, optional, proto_enum, seconds
from outrider.v1 import common_pb2, verifier_pb2

# A quarter of the largest message, so that a long list of drafters leaves room for the model.
_MAX_DRAFTER_BYTES = 4 * 2**20


def model_to_proto(info: ModelInfo) -> verifier_pb2.GetModelResponse:
    """Convert the model's description; keep only as many drafters as fit in 4 MiB."""
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
        load=_load_to_proto(info.load),
        weights_fingerprint=info.weights_fingerprint,
        acceptance_settings=dict(info.acceptance_settings),
        server_version=info.server_version,
        model_fingerprint=info.model_fingerprint,
        graph_count=info.graph_count,
        graph_memory_bytes=info.graph_memory_bytes,
        engine=info.engine,
        unsupported=info.unsupported,
        aliases=info.aliases,
    )
    byte_count = 0
    for drafter in info.drafters:
        proto = _drafter_to_proto(drafter)
        byte_count += proto.ByteSize()
        if byte_count > _MAX_DRAFTER_BYTES:
            break
        response.drafters.append(proto)
    return response


def _load_to_proto(load: Load | None) -> verifier_pb2.Load | None:
    if load is None:
        return None
    return verifier_pb2.Load(
        running_count=load.running,
        waiting_count=load.waiting,
        max_running_count=load.max_running,
        max_waiting_count=load.max_waiting,
        sequence_duration=duration(load.sequence_s),
        kv_cache_usage=load.kv_cache_usage,
    )


def _load_from_proto(proto: verifier_pb2.Load | None) -> Load | None:
    if proto is None:
        return None
    # A broken verifier may send anything, and the gateway divides by the size of the batch.
    return Load(
        max(0, proto.running_count),
        max(0, proto.waiting_count),
        max(1, proto.max_running_count),
        max(0, proto.max_waiting_count),
        seconds(optional(proto, "sequence_duration")),
        # For a NaN, `max` returns 0, since no comparison with a NaN holds.
        min(1.0, max(0.0, proto.kv_cache_usage)),
    )


def _drafter_to_proto(drafter: DrafterInfo) -> verifier_pb2.DrafterInfo:
    return verifier_pb2.DrafterInfo(
        drafter_id=drafter.drafter_id,
        family=drafter.family,
        placement=placement_to_proto(drafter.placement),
        connected=drafter.connected,
        sequence_count=drafter.sequence_count,
        acceptance_rate=drafter.acceptance_rate,
        round_trip_duration=duration(drafter.round_trip_s),
        token_duration=duration(drafter.token_s),
    )


def model_from_proto(proto: verifier_pb2.GetModelResponse) -> ModelInfo:
    """Convert the model's description; raise OutriderError(INVALID_VALUE) for a wrong placement.

    A stage that only a later version knows counts as LOADING, so that the verifier gets no
    requests.
    """
    return ModelInfo(
        model_id=proto.model_id,
        stage=known(Stage, proto.stage, Stage.LOADING),
        stage_detail=proto.stage_detail,
        tokenizer_fingerprint=proto.tokenizer_fingerprint,
        vocab_size=proto.vocab_size,
        context_length=proto.context_length,
        eos_token_ids=tuple(proto.eos_token_ids),
        dtype=proto.dtype,
        device=proto.device,
        max_draft_tokens=proto.max_draft_tokens,
        drafters=tuple(_drafter_from_proto(drafter) for drafter in proto.drafters),
        load=_load_from_proto(optional(proto, "load")),
        weights_fingerprint=proto.weights_fingerprint,
        acceptance_settings=tuple(sorted(proto.acceptance_settings.items())),
        server_version=proto.server_version,
        model_fingerprint=proto.model_fingerprint,
        graph_count=proto.graph_count,
        graph_memory_bytes=proto.graph_memory_bytes,
        engine=proto.engine,
        unsupported=tuple(proto.unsupported),
        aliases=tuple(proto.aliases),
    )


def _drafter_from_proto(proto: verifier_pb2.DrafterInfo) -> DrafterInfo:
    return DrafterInfo(
        proto.drafter_id,
        proto.family,
        placement_from_proto(proto.placement),
        proto.connected,
        proto.sequence_count,
        optional(proto, "acceptance_rate"),
        seconds(optional(proto, "round_trip_duration")),
        seconds(optional(proto, "token_duration")),
    )


def placement_to_proto(placement: Placement) -> common_pb2.Placement:
    """Convert a placement; inverse of `placement_from_proto`."""
    return common_pb2.Placement(
        kind=placement.kind,
        host=placement.host,
        device=placement.device,
        cores=placement.cores,
        numa_node=placement.numa_node,
        architecture=placement.architecture,
        gpu_uuid=placement.gpu_uuid,
    )


def placement_from_proto(proto: common_pb2.Placement) -> Placement:
    """Check and convert a placement; raise OutriderError(INVALID_VALUE) that names the field."""
    for name in ("kind", "host", "device", "architecture", "gpu_uuid"):
        check_name(f"placement.{name}", getattr(proto, name), empty=True)
    _check_cores(proto.cores)
    numa_node = optional(proto, "numa_node")
    if numa_node is not None and not 0 <= numa_node <= MAX_NODE_ID:
        raise invalid("placement.numa_node", f"must be in [0, {MAX_NODE_ID}], not {numa_node}")
    return Placement(
        proto.kind,
        proto.host,
        proto.device,
        tuple(proto.cores),
        numa_node,
        proto.architecture,
        proto.gpu_uuid,
    )


def _check_cores(cores: Sequence[int]) -> None:
    if len(cores) > MAX_CORES:
        raise invalid("placement.cores", f"must hold at most {MAX_CORES} cores, not {len(cores)}")
    for core in cores:
        if not 0 <= core <= MAX_CORE_ID:
            message = f"must hold numbers in [0, {MAX_CORE_ID}], not {core}"
            raise invalid("placement.cores", message)
    if len(set(cores)) < len(cores):
        raise invalid("placement.cores", "must be distinct")
