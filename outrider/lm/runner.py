"""Runs a decoder-only model of `transformers` on packed slices of many sequences, over a paged KV cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from outrider.errors import OutriderError, Reason, invalid
from outrider.lm import attention, support
from outrider.lm.cpu.decoder import CpuDecoder
from outrider.lm.cpu.weights import settle_on_cpu
from outrider.lm.gpu.graphs import Bounds, CacheShape, Graphs
from outrider.lm.layout import BatchLayout, SequenceSlice, StaticLayout

__all__ = ["Bounds", "ModelRunner", "SequenceSlice"]

# Small ones waste little, and nothing that reads pages wants larger ones.
_PAGE_SIZE = 16
_CPU_CACHE_BYTES = 2**30
_SEQUENCES_AT_FULL_CONTEXT = 64


class ModelRunner:
    """A model and its cache. Not thread-safe: one thread calls `forward`."""

    def __init__(
        self,
        model: torch.nn.Module,
        model_id: str = "",
        *,
        page_size: int | None = None,
        page_count: int | None = None,
        cache_share: float = 0.85,
    ) -> None:
        """Take over a loaded `transformers` model.

        `page_size` is in tokens, `page_count` defaults to what memory allows. Raises OutriderError(INVALID_VALUE) for a model that
        cannot be served.
        """
        self.model_id = model_id
        self._model = cast(Any, model.eval())
        config = self._model.config.get_text_config(decoder=True)
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.vocab_size: int = config.vocab_size
        name = model_id or type(model).__name__
        self._model.set_attn_implementation(attention.NAME)
        self._layers = attention.install(model)
        support.try_out(self._model, name, config, self._layers)
        self.context_length = support.context_length(name, config)
        # Ids that no logit is for can neither be drawn nor banned.
        self.eos_token_ids = tuple(
            token for token in _eos_token_ids(self._model, config) if token < self.vocab_size
        )
        self.page_size = page_size or _PAGE_SIZE
        self.page_count = page_count or self._default_page_count(cache_share)
        self._graphs = self._make_graphs() if self._takes_graphs() else None
        # The page behind the last one takes what pads a graph's batch.
        spare = int(self._graphs is not None)
        most_keys = min(self.context_length, self.page_count * self.page_size)
        for layer in self._layers.values():
            layer.allocate(
                self.page_count + spare, self.page_size, most_keys, self.dtype, self.device
            )
        self.decoder = (
            CpuDecoder.of(self._model, self._layers, self.page_size)
            if self.device.type == "cpu"
            else None
        )
        """What runs in place of the model's own forward, where there is such a thing."""

    @classmethod
    def load(
        cls,
        model: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        page_size: int | None = None,
        page_count: int | None = None,
        cache_share: float = 0.85,
        threads: int | None = None,
        trust_remote_code: bool = False,
        progress: Callable[[str], None] | None = None,
    ) -> ModelRunner:
        """Load a directory or hub id; safetensors only, so that no foreign pickle is ever opened.

        `dtype` is auto (the checkpoint's), float32, bfloat16 or float16; `threads` are torch's on a CPU; `cache_share` is the
        cache's share of a GPU's memory that is free once the weights are there, unless `page_count` says otherwise. Raises
        OutriderError: MODEL_NOT_FOUND, or INVALID_VALUE for a model or setting that cannot be served.
        """
        report = progress or (lambda detail: None)
        if threads is not None:
            torch.set_num_threads(threads)
        where = _device(device)
        report(f"reading {model}")
        try:
            config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
            if config.is_encoder_decoder:
                raise support.unsupported(model, "it is an encoder-decoder")
            if (quantization := getattr(config, "quantization_config", None)) is not None:
                method = dict(quantization).get("quant_method", "in a way it does not name")
                raise support.unsupported(model, f"its weights are quantised ({method})")
            loaded = AutoModelForCausalLM.from_pretrained(
                model,
                dtype=_dtype(dtype),
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
            )
        except (OSError, ValueError, SafetensorError) as cause:
            raise OutriderError(
                Reason.MODEL_NOT_FOUND,
                f"cannot load {model}: {' '.join(str(cause).split())}",
                "model",
            ) from cause
        report(f"moving the weights to {where}")
        if where.type == "cpu":
            settle_on_cpu(loaded)
        else:
            # Streams and graphs are the current device's, which is a matter of this thread.
            torch.cuda.set_device(where)
        return cls(
            cast(Any, loaded).to(where),
            model,
            page_size=page_size,
            page_count=page_count,
            cache_share=cache_share,
        )

    def warm_up(self) -> None:
        """Run forwards of several sizes, so that the first request does not pay for choosing kernels; page 0 on is overwritten."""
        for count in (1, 2, 4, 8, 16, 32, 64):
            if count <= min(self.context_length, self.page_count * self.page_size):
                self.forward(
                    [SequenceSlice([0] * count, 0, list(range(-(-count // self.page_size))), 1)]
                )

    @torch.inference_mode()
    def capture(self, bounds: Bounds) -> None:
        """Warm up, and make forwards of at most this size CUDA graphs where all layers' attention is the GPU's kernel."""
        self.warm_up()
        if self._graphs is not None:
            self._graphs.prepare(bounds)

    @torch.inference_mode()
    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        """Float32 logits [R, V] of the last `logit_count` tokens of each slice, in order; keys and values go into the cache.

        They may be overwritten by the next call.
        """
        if self._graphs is not None and (found := self._graphs.forward(slices)) is not None:
            return found
        layout = self._layout(slices)
        if self.decoder is not None:
            return self.decoder.forward(layout)
        return self._call(layout.token_ids, layout.positions, layout, layout.logit_rows).float()

    def _call(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        layout: BatchLayout | StaticLayout,
        rows: torch.Tensor | int = 0,
    ) -> torch.Tensor:
        """The model's own logits of some rows, or of all."""
        for layer in self._layers.values():
            layer.layout = layout
        output = self._model(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=rows,
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _takes_graphs(self) -> bool:
        """Whether a forward can be captured: nothing in it may depend on lengths, so that gathering pages is out."""
        return all(layer.takes_kernel(self.device) for layer in self._layers.values())

    def _make_graphs(self) -> Graphs:
        pages_each = min(self.page_count, -(-self.context_length // self.page_size))
        return Graphs(
            self._call,
            CacheShape(self.page_size, pages_each, self.page_count),
            self.vocab_size,
            self.device,
        )

    def continue_greedily(
        self, slices: Sequence[SequenceSlice], count: int, limit: int
    ) -> list[list[int]] | None:
        """`count` rows of one token for every slice, as `CpuDecoder.continue_greedily`; None where that is not to be had.

        One call in place of many spares a small model more than its forwards take.
        """
        if self.decoder is None or any(
            len(part.token_ids) != 1 or part.logit_count != 1 for part in slices
        ):
            return None
        tokens: list[list[int]] = self.decoder.continue_greedily(
            self._layout(slices), count, limit
        ).tolist()
        return tokens

    def _layout(self, slices: Sequence[SequenceSlice]) -> BatchLayout:
        return BatchLayout(slices, self.page_size, self.device)

    def _default_page_count(self, cache_share: float) -> int:
        shapes = [layer.shape for layer in self._layers.values() if layer.shape is not None]
        token_bytes = (
            sum(shape.heads * (shape.key_size + shape.value_size) for shape in shapes)
            * self.dtype.itemsize
        )
        if self.device.type == "cuda":
            budget = int(torch.cuda.mem_get_info(self.device)[0] * cache_share)
        else:
            budget = min(
                _CPU_CACHE_BYTES, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") // 4
            )
        affordable = budget // (token_bytes * self.page_size)
        useful = _SEQUENCES_AT_FULL_CONTEXT * -(-self.context_length // self.page_size)
        return max(1, min(affordable, useful))


def _eos_token_ids(model: Any, config: Any) -> tuple[int, ...]:
    """The ids that end a text: the generation config's, which chat models extend, else the model's."""
    generation: GenerationConfig | None = getattr(model, "generation_config", None)
    ids = generation.eos_token_id if generation is not None else None
    ids = getattr(config, "eos_token_id", None) if ids is None else ids
    return tuple(ids) if isinstance(ids, list | tuple) else () if ids is None else (int(ids),)


def _device(name: str) -> torch.device:
    """One that exists; of CUDA's devices with its number, since not all of torch takes one without."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as cause:
        raise invalid("device", f"must be auto, cpu or cuda:N, not {name}") from cause
    if device.type != "cuda":
        return device
    if (device.index or 0) >= torch.cuda.device_count():
        raise invalid(
            "device", f"is {name}, but torch finds {torch.cuda.device_count()} CUDA devices"
        )
    return torch.device("cuda", device.index or 0)


def _dtype(name: str) -> torch.dtype | str:
    names: dict[str, torch.dtype | str] = {
        "auto": "auto",
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
    if name not in names:
        raise invalid("dtype", f"must be one of {', '.join(names)}, not {name}")
    return names[name]
