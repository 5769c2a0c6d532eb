"""Cost tables for hardware that is not here, for `outrider profile --hardware NAME`.

The tables are rooflines on published figures (Williams et al., Roofline, CACM 2009). A forward
takes a step's overhead and the longer of two times: that of reading its bytes (the weights once,
and each sequence's keys and values) and that of its operations (two for each parameter and token).
No figure was measured here. Each has its source or is called assumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from outrider_bench.simulator.costs import Costs, DraftingCost, Forward, LinkCost

TARGET, DRAFT = "llama-70b", "llama-1b"
_BYTES_EACH = 2
"""bfloat16."""
_ATTAINED = 0.8
_OVERHEAD_S = 0.0003
_CONTEXT = 1024
_ASSUMED = (
    f"Assumed: {_ATTAINED:.0%} of the published bandwidth and rate are attained, a step's host "
    f"work and launches take {1000 * _OVERHEAD_S:g} ms, {_CONTEXT} tokens of context in bfloat16; "
    "a target that one device cannot hold is split over 2, 4 or 8 with no cost of its own."
)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128)
_TOKENS = (1, 2, 3, 5, 9)
# A loopback round trip on a gRPC stream by `outrider profile`. It is the hosts' part of every link.
_GRPC_MS = 0.23


@dataclass(frozen=True, slots=True)
class Device:
    """Published figures: bytes and bfloat16 operations a second, and bytes of memory."""

    name: str
    bytes_per_s: float
    flops: float
    memory_bytes: float
    source: str
    attained: float = _ATTAINED
    """Share of the bandwidth that is attained; 1 where it was published as attained."""


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a decoder-only model."""

    name: str
    parameters: float
    layers: int
    kv_heads: int
    head_size: int
    source: str

    @property
    def weight_bytes(self) -> float:
        """Bytes of the weights."""
        return self.parameters * _BYTES_EACH

    @property
    def kv_bytes(self) -> float:
        """Bytes of a token's keys and values in all layers."""
        return 2.0 * self.layers * self.kv_heads * self.head_size * _BYTES_EACH


@dataclass(frozen=True, slots=True)
class Way:
    """A network between two hosts, without the hosts' own time."""

    round_trip_ms: float
    mbit_s: float
    source: str


@dataclass(frozen=True, slots=True)
class Deployment:
    """The devices of the target and of the draft model, and the network between them."""

    target: Device
    drafter: Device
    way: Way


B200 = Device(
    "a B200 of a GB200",
    8.0e12,
    2500e12,
    192e9,
    "8 TB/s, 192 GB, 2,500 dense bfloat16 TFLOPS as GB200: Glenn K. Lockwood, B200, "
    "https://glennklockwood.com/garden/processors/B200",
)
H100 = Device(
    "an H100 SXM",
    3.35e12,
    989.4e12,
    80e9,
    "3.35 TB/s, 80 GB, 989.4 dense bfloat16 TFLOPS: Glenn K. Lockwood, H100, "
    "https://glennklockwood.com/garden/processors/h100",
)
GRACE = Device(
    "a Grace CPU",
    410e9,
    72 * 3.1e9 * 32,
    480e9,
    "STREAM TRIAD from 410 GB/s: NVIDIA, Grace Performance Tuning Guide, "
    "https://docs.nvidia.com/grace-perf-tuning-guide/health-checks.html; 480 GB, 72 cores: NVIDIA, "
    "Grace CPU Delivers High Bandwidth, https://developer.nvidia.com/blog/"
    "nvidia-grace-cpu-delivers-high-bandwidth-and-efficiency-for-modern-data-centers; 3.1 GHz: "
    "MLPerf Inference 6.1, GB200-NVL72, https://github.com/mlcommons/inference_results_v6.1; "
    "assumed: 32 operations a core and cycle",
    attained=1.0,
)
XEON = Device(
    "a Xeon of the fourth generation with 56 cores",
    8 * 8 * 4800e6,
    56 * 1024 * 1.9e9,
    1e12,
    "8 channels of 8 bytes at DDR5-4800: VideoCardz by GamersInfotech, "
    "https://gamersinfotech.com/2021/04/08/"
    "intel-sapphire-rapids-to-feature-up-to-56-cores-350w-tdp-and-64gb-of-hbm2-memory-"
    "videocardz-com/; "
    "1,024 bfloat16 operations a core and cycle: Advanced Matrix Extensions, "
    "https://artikel.siakadpt.com/en/Advanced_Matrix_Extensions; "
    "56 cores: MLPerf Inference 4.1, H200-SXM, "
    "https://github.com/mlcommons/inference_results_v4.1; 1.9 GHz: Tom's Hardware, "
    "https://www.tomshw.it/hardware/avvistata-una-cpu-intel-sapphire-rapids-sp-con-56-core-puo-arrivare-sino-a-420w/",
)
ORIN_NANO = Device(
    "a Jetson Orin Nano Super",
    102e9,
    67e12 / 4,
    8e9,
    "102 GB/s, 8 GB, 67 sparse INT8 TOPS, of which a quarter is dense 16-bit: "
    "Jetson Orin Nano Super, https://www.brojogopalsapui.com/ai-foundations/sub_contents/AI_hardware/jetson_orin_nano_light.html",
)

MODELS = {
    model.name: model
    for model in (
        Model(
            "llama-70b", 70.6e9, 80, 8, 128,
            "70.6 B parameters, 80 layers, 8 KV heads of 8192 / 64: Llama 3.1 70B, "
            "https://fitmygpu.com/models/llama-3.1-70b",
        ),
        Model(
            "llama-8b", 8.0e9, 32, 8, 128,
            "8 B parameters, 32 layers, 8 KV heads of 4096 / 32: Llama 3.1 8B, "
            "https://apxml.com/models/llama-3-1-8b",
        ),
        Model(
            "llama-1b", 1.23e9, 16, 8, 64,
            "1.23 B parameters, 16 layers: Llama 3.2 1B, https://apxml.com/models/llama-3-2-1b; "
            "assumed: 8 KV heads of 64",
        ),
    )
}  # fmt: skip

_TEN_GBE = Way(
    2 * 0.0178,
    10_000,
    "17.8 µs one way for 1,500 bytes by the kernel's TCP on 10 GbE: F-Stack issue 540, "
    "https://github.com/F-Stack/f-stack/issues/540",
)
WAYS = {
    "local": Way(
        0.0,
        0.0,
        "the loopback interface; NVLink-C2C and PCIe carry logits and tokens within the host",
    ),
    "10gbe": _TEN_GBE,
    "100gbe": Way(
        # 1,500 bytes leave in 0.12 µs in place of 1.2 µs, in each direction.
        2 * (0.0178 - 0.00108),
        100_000,
        f"{_TEN_GBE.source}; less the time that 1,500 bytes take to leave at 10 in place of "
        "100 Gbit/s",
    ),
    "region": Way(
        52.55,
        1_000,
        "52.55 ms from AWS ap-east-1 to ap-northeast-1: AWS Region Latency Matrix, "
        "https://cloudping.co/; assumed: 1 Gbit/s",
    ),
    "edge": Way(
        5.387,
        100,
        "5.387 ms from UK South to UK West: Simon Painter, Exploring Azure Network Latency, "
        "https://www.simonpainter.com/azure-latency-1/; assumed: 100 Mbit/s",
    ),
}
DEPLOYMENTS = {
    "gb200": Deployment(B200, GRACE, WAYS["local"]),
    "h100-xeon": Deployment(H100, XEON, WAYS["local"]),
    "h100-100gbe": Deployment(H100, XEON, WAYS["100gbe"]),
    "h100-10gbe": Deployment(H100, XEON, WAYS["10gbe"]),
    "h100-region": Deployment(H100, XEON, WAYS["region"]),
    "edge": Deployment(H100, ORIN_NANO, WAYS["edge"]),
}


def names() -> list[str]:
    """The names of the known hardware."""
    return sorted(DEPLOYMENTS)


def table(name: str, target: str, draft: str) -> Costs:
    """The cost table of a deployment for two models, all by name.

    Raises ValueError that lists the known names, and if the drafter's memory is too small.
    """
    deployment = _known("hardware", name, DEPLOYMENTS)
    big = _known("target", target, MODELS)
    small = _known("draft", draft, MODELS)
    device = deployment.target
    drafter = deployment.drafter
    way = deployment.way
    devices = _device_count(device, big)
    if _device_count(drafter, small) > 1:
        memory = f"{drafter.memory_bytes / 1e9:g} GB of {drafter.name}"
        raise ValueError(f"draft: {draft} needs more than the {memory}")
    first = f"not measured; {target} on {devices} × {device.name}, {draft} on {drafter.name}"
    sources = (device.source, drafter.source, big.source, small.source, way.source)
    forwards = [
        Forward(
            sequences=count,
            tokens=tokens,
            seconds=forward_s(device, devices, big, count, count * tokens),
        )
        for count in _SEQUENCES
        for tokens in _TOKENS
    ]
    return Costs(
        source=". ".join([first, *dict.fromkeys(sources), _ASSUMED]),
        measured=False,
        forwards=forwards,
        prompt_step_s=0.0,
        prompt_token_s=_token_s(device, devices, big),
        host_step_s=0.0,
        host_sequence_s=0.0,
        drafting={
            "model": _drafting(drafter, small),
            "model-on-target": _drafting(device, small),
            "ngram": DraftingCost(round_s=0.0001, token_s={1: 0.0}),
        },
        links={"drafter": LinkCost(round_trip_ms=_GRPC_MS + way.round_trip_ms, mbit_s=way.mbit_s)},
    )


def _drafting(device: Device, model: Model) -> DraftingCost:
    """The costs of a draft model on one device."""
    return DraftingCost(
        round_s=0.0,
        token_s={count: forward_s(device, 1, model, count, count) for count in _SEQUENCES},
        prompt_token_s=_token_s(device, 1, model),
    )


def forward_s(device: Device, count: int, model: Model, sequences: int, tokens: int) -> float:
    """Seconds of a forward on `count` devices; `tokens` is the total of all sequences."""
    read_bytes = model.weight_bytes + sequences * _CONTEXT * model.kv_bytes
    reading_s = read_bytes / (device.attained * count * device.bytes_per_s)
    return _OVERHEAD_S + max(reading_s, tokens * _token_s(device, count, model))


def _token_s(device: Device, count: int, model: Model) -> float:
    """Seconds of the operations of one token."""
    return 2.0 * model.parameters / (_ATTAINED * count * device.flops)


def _device_count(device: Device, model: Model) -> int:
    """The least power of two of devices that holds the weights and 20 % for the KV cache."""
    return int(2 ** math.ceil(math.log2(max(1.0, 1.2 * model.weight_bytes / device.memory_bytes))))


def _known(field: str, name: str, known: dict[str, Any]) -> Any:
    if name not in known:
        raise ValueError(f"{field} must be one of {', '.join(sorted(known))}, not {name!r}")
    return known[name]
