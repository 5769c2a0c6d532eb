"""Decoder layers of heads, over our paged cache. Shapes: T rows, H heads, C channels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Linear, Module, RMSNorm
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from outrider.heads.spec import Decoder
from outrider.lm.attention import NAME, LayerCache, LayerShape, attach
from outrider.lm.gpu.inputs import CacheShape
from outrider.lm.layout import BatchLayout, SequenceSlice, StaticLayout
from outrider.lm.softmax import Softmax

# The number of positions whose cosines and sines are computed at first. A longer sequence makes the
# number grow.
_FIRST_POSITIONS = 1024


@dataclass(frozen=True, slots=True)
class RotaryRows:
    """The rotary embedding of T packed rows: `cos` and `sin` are [T, 1, head size]."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True, slots=True)
class HeadRows(RotaryRows):
    """The places in the cache, and the rotary embedding, of T packed rows of a forward."""

    layout: BatchLayout


class HeadCache:
    """Keys and values of a head's layers, in pages of its own.

    A head rotates queries and keys by their place among its own rows, from 0 on. The scores are the
    same as with the tokens' positions: two rows are as far apart as their tokens, and attention
    depends only on the distance.
    """

    def __init__(
        self,
        decoder: Decoder,
        page_count: int,
        page_size: int,
        longest: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Make room for `page_count` pages; no sequence has more than `longest` rows."""
        longest_pages = -(-longest // page_size)
        # Graphs write their padding to one more page, the last.
        self.shape = CacheShape(page_size, longest_pages, page_count)
        self.page_size = page_size
        self._device = device
        self._dtype = dtype
        self.layers: list[LayerCache] = []
        for _ in range(decoder.layer_count):
            layer = LayerCache()
            layer.shape = LayerShape(decoder.kv_head_count, decoder.head_size, decoder.head_size)
            layer.allocate(page_count + 1, page_size, longest, dtype, device)
            self.layers.append(layer)
        self._longest = longest
        self.set_rotary(decoder)

    def set_rotary(self, decoder: Decoder) -> None:
        """Use a decoder's rotary embedding from now on."""
        config = LlamaConfig(
            hidden_size=decoder.hidden_size,
            num_attention_heads=decoder.head_count,
            head_dim=decoder.rotary_size or decoder.head_size,
            rope_parameters=dict(decoder.rope),
            # A head may have been trained on shorter sequences than its target.
            max_position_embeddings=self._longest,
        )
        self._rope = dict(decoder.rope)
        self._rotary = LlamaRotaryEmbedding(config).to(self._device)
        self._cos, self._sin = self._cos_and_sin(_FIRST_POSITIONS)

    def rows(self, slices: list[SequenceSlice]) -> HeadRows:
        """Prepare a forward of these slices; every layer then uses their layout for attention."""
        layout = BatchLayout(slices, self.page_size, self._device)
        for layer in self.layers:
            layer.layout = layout
        end = max(part.end for part in slices)
        if end > len(self._cos):
            self._cos, self._sin = self._cos_and_sin(max(end, 2 * len(self._cos)))
        return HeadRows(self._cos[layout.positions], self._sin[layout.positions], layout)

    def static_rows(self, layout: StaticLayout) -> RotaryRows:
        """Prepare a forward whose positions are in fixed tensors; layers then use `layout`.

        All cosines and sines are kept from now on: 64 MiB for 131,072 positions of 128 channels in
        bfloat16.
        """
        for layer in self.layers:
            layer.layout = layout
        if len(self._cos) < self._longest:
            self._cos, self._sin = self._cos_and_sin(self._longest)
        at = layout.positions
        return RotaryRows(self._cos.index_select(0, at), self._sin.index_select(0, at))

    @property
    def can_capture(self) -> bool:
        """True if graphs can be captured: forwards use the GPU kernel, frequencies are fixed."""
        rope = self._rope.get("rope_type", "default")
        frequencies_are_fixed = rope not in ("dynamic", "longrope")
        return frequencies_are_fixed and all(
            one.supports_kernel(self._device) for one in self.layers
        )

    def _cos_and_sin(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines [count, 1, head size] of the positions from 0 on.

        The results are kept, because a forward of few rows would spend much of its time on them.
        """
        like = torch.empty(0, dtype=self._dtype, device=self._device)
        cos, sin = self._rotary(like, torch.arange(count, device=self._device).unsqueeze(0))
        return cos[0].unsqueeze(1), sin[0].unsqueeze(1)


def _rotate(x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding to the first channels of queries or keys, or to all."""
    rotated, rest = x_THD[..., : cos.shape[-1]], x_THD[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


class Attention(Module):
    """The attention of one layer; `forward` and `attend_blocks` differ in what a row sees."""

    def __init__(self, decoder: Decoder, input_size: int, window: int | None) -> None:
        super().__init__()
        self._size = decoder.head_size
        self.softmax = Softmax(decoder.head_size**-0.5, window)
        queries, keys = (
            count * decoder.head_size for count in (decoder.head_count, decoder.kv_head_count)
        )
        bias = decoder.projection_bias
        self.q_proj = Linear(input_size, queries, bias=bias)
        self.k_proj = Linear(input_size, keys, bias=bias)
        self.v_proj = Linear(input_size, keys, bias=bias)
        self.o_proj = Linear(queries, decoder.hidden_size, bias=decoder.output_bias)
        if decoder.head_norms:
            self.q_norm: Module = RMSNorm(decoder.head_size, eps=decoder.norm_eps)
            self.k_norm: Module = RMSNorm(decoder.head_size, eps=decoder.norm_eps)
        else:
            self.q_norm = self.k_norm = torch.nn.Identity()

    def keys_and_values(
        self, x_TC: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys, rotated by their positions, and values [T, KV heads, D]."""
        key = self.k_norm(self._by_head(self.k_proj(x_TC)))
        return _rotate(key, cos, sin), self._by_head(self.v_proj(x_TC))

    def queries(self, x_TC: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Return queries, rotated by their positions, [T, H, D]."""
        return _rotate(self.q_norm(self._by_head(self.q_proj(x_TC))), cos, sin)

    def _by_head(self, x_TC: torch.Tensor) -> torch.Tensor:
        return x_TC.view(len(x_TC), -1, self._size)

    def forward(self, x_TC: torch.Tensor, rows: RotaryRows, cache: LayerCache) -> torch.Tensor:
        """Store the rows' keys and values; let each row see all rows up to itself."""
        # Compute the queries first: on a CPU the three projections are one product, and the call of
        # v_proj drops the product's outputs.
        query = self.queries(x_TC, rows.cos, rows.sin)
        key, value = self.keys_and_values(x_TC, rows.cos, rows.sin)
        query, key, value = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        out = cache.attend(query, key, value, self.softmax)
        attended: torch.Tensor = self.o_proj(out[0].flatten(-2))
        return attended

    def attend_blocks(
        self, x_TC: torch.Tensor, rows: HeadRows, cache: LayerCache, seen_BQK: torch.Tensor
    ) -> torch.Tensor:
        """Let Q rows of each of B sequences see their cached tokens, and each other.

        The last Q of the K keys are the rows' own, which are not stored. The keys before them are
        those in the pages of each sequence. `seen_BQK` tells which keys a row sees.
        """
        batch, queries, _ = seen_BQK.shape
        query = self.queries(x_TC, rows.cos, rows.sin)
        own = self.keys_and_values(x_TC, rows.cos, rows.sin)
        pages_BP = rows.layout.kernel.block_table
        key, value = (
            torch.cat(
                (
                    _gather(array, pages_BP, rows.layout.page_size),
                    part.view(batch, queries, *part.shape[1:]),
                ),
                dim=1,
            ).transpose(1, 2)
            for array, part in zip(cache.arrays, own, strict=True)
        )
        out = scaled_dot_product_attention(
            query.view(batch, queries, *query.shape[1:]).transpose(1, 2),
            key,
            value,
            attn_mask=seen_BQK.unsqueeze(1),
            scale=self.softmax.scale,
            enable_gqa=True,
        )
        attended: torch.Tensor = self.o_proj(out.transpose(1, 2).flatten(-2).flatten(0, 1))
        return attended


def _gather(array: torch.Tensor, pages_BP: torch.Tensor, page_size: int) -> torch.Tensor:
    """Copy pages out of a flattened cache, [B, P * page size, heads, D]."""
    by_page = array.view(-1, page_size, *array.shape[1:])
    return by_page[pages_BP].flatten(1, 2)


class Mlp(Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.gate_proj = Linear(decoder.hidden_size, decoder.intermediate_size, bias=False)
        self.up_proj = Linear(decoder.hidden_size, decoder.intermediate_size, bias=False)
        self.down_proj = Linear(decoder.intermediate_size, decoder.hidden_size, bias=False)
        self._activation: Any = ACT2FN[decoder.activation]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the feed-forward part."""
        out: torch.Tensor = self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(Module):
    """One decoder layer. The layer's attention reads `input_size` numbers for each row.

    `self_attn` and `finish` are the two halves of the layer. A caller that uses them in place of
    `forward` adds the result of `self_attn` to the residual stream itself.
    """

    def __init__(
        self, decoder: Decoder, index: int, input_size: int | None = None, *, norm: bool = True
    ) -> None:
        """Make layer `index`; without `norm` its input is not normalised."""
        super().__init__()
        hidden, eps = decoder.hidden_size, decoder.norm_eps
        self.index = index
        self.self_attn = Attention(decoder, input_size or hidden, decoder.windows[index])
        self.mlp = Mlp(decoder)
        self.input_layernorm: Module = RMSNorm(hidden, eps=eps) if norm else torch.nn.Identity()
        self.post_attention_layernorm = RMSNorm(hidden, eps=eps)

    def forward(self, x: torch.Tensor, rows: RotaryRows, cache: LayerCache) -> torch.Tensor:
        """Return the residual stream after the layer."""
        return self.finish(x + self.self_attn(self.input_layernorm(x), rows, cache))

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after the feed-forward part; `x` is the stream before it."""
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class TargetsLayer(Module):
    """A decoder layer from `transformers`, of the target's kind, which reads our pages."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        config._attn_implementation = NAME
        # The eager implementation loops over only the experts that the few rows of a draft choose.
        config._experts_implementation = "eager"
        self.block = Glm4MoeDecoderLayer(config, 0)

    def forward(self, x: torch.Tensor, rows: RotaryRows, cache: LayerCache) -> torch.Tensor:
        """Return the residual stream after the layer."""
        attach(self.block, cache)
        rotary = rows.cos.transpose(0, 1), rows.sin.transpose(0, 1)
        out: torch.Tensor = self.block(x.unsqueeze(0), position_embeddings=rotary)
        return out[0]


def fill(module: Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Set the weights of a module on the meta device. Raises RuntimeError if they do not fit."""
    module.load_state_dict(dict(tensors), strict=True, assign=True)
    module.requires_grad_(False)
