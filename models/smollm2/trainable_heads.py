"""The heads that `train.py` trains, EAGLE-3 and MTP, with their loss and their files.

The modules of a head have the names of the tensors in its dialect.
"""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax, rms_norm, silu
from transformers import LlamaConfig, LlamaForCausalLM

DEPTH = 4
"""Steps of its own drafting that a head is trained on."""


class Norm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.epsilon = config.rms_norm_eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight.shape, self.weight, self.epsilon)

    def copy(self, source: nn.Module) -> None:
        """Take the weights of a norm of the target."""
        self.weight.copy_(source.weight)


class Attention(nn.Module):
    """The projections of the target's attention, for an input of `wide` features."""

    def __init__(self, config: LlamaConfig, wide: int, *, bias: bool) -> None:
        super().__init__()
        self.size = config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.theta = config.rope_parameters["rope_theta"]
        queries = config.num_attention_heads * self.size
        keys = config.num_key_value_heads * self.size
        self.q_proj = nn.Linear(wide, queries, bias=bias)
        self.k_proj = nn.Linear(wide, keys, bias=bias)
        self.v_proj = nn.Linear(wide, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return x [B, heads, N, D] with rotary position embeddings for positions [N]."""
        half = self.size // 2
        frequencies = self.theta ** (-torch.arange(half, device=x.device) / half)
        angles = positions[:, None].float() * frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def read(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [B, heads, N, D] of x [B, N, wide]."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query = self.rotate(query, positions) * self.size**-0.5
        key = self.rotate(key, positions)
        return query, key.repeat_interleave(self.groups, 1), value.repeat_interleave(self.groups, 1)

    def join(self, x: Tensor) -> Tensor:
        """Return the output [B, N, hidden] for what the heads gathered, [B, heads, N, D]."""
        return self.o_proj(x.transpose(1, 2).flatten(2))

    def copy(self, source: nn.Module) -> None:
        """Take the target's weights for the input's last columns, and add small noise to all."""
        for name in ("q_proj", "k_proj", "v_proj"):
            own, other = getattr(self, name), getattr(source, name)
            nn.init.normal_(own.weight, std=0.02)
            own.weight[:, -other.in_features :] += other.weight
            if own.bias is not None:
                nn.init.zeros_(own.bias)
        self.o_proj.weight.copy_(source.o_proj.weight)


class Steps:
    """Attention of drafts: each sees the true prefix of its anchor and its own earlier steps."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return [B, heads, N, D] for step len(self.keys); each later step has fewer anchors."""
        self.keys.append(key)
        self.values.append(value)
        count = query.shape[2]
        scores = query @ self.keys[0][:, :, :count].transpose(-1, -2)
        hidden = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
        own = [(query * k[:, :, :count]).sum(-1, keepdim=True) for k in self.keys[1:]]
        weights = torch.cat([scores, *own], dim=-1).softmax(-1)
        out = weights[..., :count] @ self.values[0][:, :, :count]
        for n, v in enumerate(self.values[1:]):
            out = out + weights[..., count + n, None] * v[:, :, :count]
        return out


class FeedForward(nn.Module):
    """The gated feed-forward block of Llama."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer. EAGLE-3's layer reads embedding and state side by side, each with a norm."""

    def __init__(self, config: LlamaConfig, *, eagle: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(config)
        if eagle:
            self.hidden_norm = Norm(config)
        wide = config.hidden_size * (2 if eagle else 1)
        self.self_attn = Attention(config, wide, bias=not eagle)
        self.post_attention_layernorm = Norm(config)
        self.mlp = FeedForward(config)

    def copy(self, source: nn.Module) -> None:
        """Take the weights of one of the target's layers."""
        self.input_layernorm.copy(source.input_layernorm)
        self.self_attn.copy(source.self_attn)
        self.post_attention_layernorm.copy(source.post_attention_layernorm)
        self.mlp.load_state_dict(source.mlp.state_dict())

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output for what its attention's heads gathered."""
        x = residual + self.self_attn.join(attended)
        return x + self.mlp(self.post_attention_layernorm(x))


@dataclass(frozen=True)
class Batch:
    """Rows [B, T] with what a head may read and must learn.

    `embedded` [B, T, hidden]: the target's embeddings. `states` [B, T, 4 * hidden] as in `Rows`.
    `counts` [B, T]: whether the next token is in an answer, and the target's likeliest token among
    the ids that the head learns. `goal` [B, T, D]: the target's softmax over those ids, where
    `counts` is true, else zeros. `rows` [D, hidden]: the target's output embeddings of those ids.
    """

    embedded: Tensor
    states: Tensor
    goal: Tensor
    counts: Tensor
    rows: Tensor


class Head(nn.Module):
    """A head that pairs the feature of a token with the embedding of the next token."""

    has_own_ids: bool
    """Whether the head's output has only the ids that it learns."""

    @abstractmethod
    def start(self, target: LlamaForCausalLM, ids: Tensor) -> None:
        """Set the first weights; `ids` [D] are the ids that the head learns."""

    @abstractmethod
    def first_state(self, states: Tensor) -> Tensor:
        """Return the state [B, T, hidden] that stands for the target's states."""

    @abstractmethod
    def join(self, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the attention reads of a pair, and the residual stream."""

    @abstractmethod
    def layer(self) -> Layer:
        """Return the head's layer."""

    @abstractmethod
    def end(self, state: Tensor) -> Tensor:
        """Return what the next step reads in place of the target's feature."""

    @abstractmethod
    def scores(self, state: Tensor, rows: Tensor) -> Tensor:
        """Return the logits [..., D] of a step's state [..., hidden].

        `rows` [D, hidden]: the target's output embeddings of the ids that the head learns.
        """

    @abstractmethod
    def config(self, target: LlamaForCausalLM) -> dict[str, object]:
        """Return the keys of `config.json`."""

    def unroll(self, batch: Batch, depth: int) -> Iterator[Tensor]:
        """Yield the head's states [B, T - 1 - s, hidden] of each step s.

        Anchor a pairs the feature of token a with the embedding of token a + 1; its state in step s
        guesses token a + 2 + s. Step 0 reads the target's feature. Each later step reads the output
        of the step before it, and the true token.
        """
        embedded = batch.embedded[:, 1:]
        state = self.first_state(batch.states)[:, :-1]
        layer, steps = self.layer(), Steps()
        for step in range(depth):
            count = embedded.shape[1] - step
            x, residual = self.join(embedded[:, step:], state[:, :count])
            positions = torch.arange(count, device=x.device) + 1 + step
            state = self.end(
                layer.finish(residual, steps.attend(*layer.self_attn.read(x, positions)))
            )
            yield state

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy against the target's softmax; later steps have less weight."""
        total = batch.states.new_zeros((), dtype=torch.float32)
        for step, state in enumerate(self.unroll(batch, DEPTH)):
            places = slice(1 + step, 1 + step + state.shape[1])
            counts = batch.counts[:, places]
            logits = self.scores(state[counts], batch.rows)
            goal = batch.goal[:, places][counts]
            each = -(goal * log_softmax(logits.float(), -1)).sum(-1)
            total = total + 0.8**step * each.mean()
        return total


def shared_keys(target: LlamaForCausalLM) -> dict[str, object]:
    """Return the keys of `config.json` that both heads have."""
    names = (
        "hidden_act|hidden_size|intermediate_size|num_attention_heads|num_key_value_heads|head_dim|"
        "rms_norm_eps|max_position_embeddings|bos_token_id|eos_token_id|pad_token_id|vocab_size"
    ).split("|")
    return {name: getattr(target.config, name) for name in names} | {
        "rope_theta": target.config.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
    }


class Eagle3(Head):
    """EAGLE-3 in SpecForge's dialect (arXiv 2503.01840), with a vocabulary of its own."""

    has_own_ids = True

    def __init__(self, config: LlamaConfig, boundaries: list[int], count: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.boundaries = boundaries
        self.fc = nn.Linear(len(boundaries) * hidden, hidden, bias=False)
        self.midlayer = Layer(config, eagle=True)
        self.norm = Norm(config)
        self.lm_head = nn.Linear(hidden, count, bias=False)
        self.register_buffer("d2t", torch.zeros(count, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))

    @torch.no_grad()
    def start(self, target: LlamaForCausalLM, ids: Tensor) -> None:
        """Start from the target's last layer and its output embeddings of the ids."""
        self.d2t.copy_(ids - torch.arange(len(ids)))
        self.t2d[ids] = True
        self.lm_head.weight.copy_(target.lm_head.weight[ids])
        self.norm.copy(target.model.norm)
        nn.init.normal_(self.fc.weight, std=0.01)
        self.fc.weight[:, -self.fc.out_features :].diagonal().add_(0.25)
        first, last = target.model.layers[0], target.model.layers[-1]
        self.midlayer.copy(last)
        self.midlayer.hidden_norm.copy(last.input_layernorm)
        self.midlayer.input_layernorm.copy(first.input_layernorm)

    def layer(self) -> Layer:
        return self.midlayer

    def first_state(self, states: Tensor) -> Tensor:
        return self.fc(states[..., : self.fc.in_features])

    def join(self, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        parts = [self.midlayer.input_layernorm(token), self.midlayer.hidden_norm(state)]
        return torch.cat(parts, dim=-1), state

    def end(self, state: Tensor) -> Tensor:
        return state

    def scores(self, state: Tensor, rows: Tensor) -> Tensor:
        return self.lm_head(self.norm(state))

    def config(self, target: LlamaForCausalLM) -> dict[str, object]:
        """Return keys without layer ids: SpecForge, vLLM and Outrider have equal default layers."""
        return shared_keys(target) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "target_hidden_size": target.config.hidden_size,
            "num_hidden_layers": 1,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "draft_vocab_size": len(self.d2t),
            "eagle_config": {"use_aux_hidden_state": True},
        }


class Mtp(Head):
    """One layer of multi-token prediction in MiMo's dialect; it reads the final state."""

    has_own_ids = False

    def __init__(self, config: LlamaConfig, boundaries: list[int], count: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        layer = Layer(config, eagle=False)
        layer.token_layernorm, layer.hidden_layernorm = Norm(config), Norm(config)
        layer.input_proj = nn.Linear(2 * hidden, hidden, bias=False)
        layer.final_layernorm = Norm(config)
        self.model = nn.Module()
        self.model.mtp_layers = nn.ModuleList([layer])

    @torch.no_grad()
    def start(self, target: LlamaForCausalLM, ids: Tensor) -> None:
        """Start from the target's last layer."""
        layer = self.layer()
        layer.copy(target.model.layers[-1])
        layer.final_layernorm.copy(target.model.norm)
        nn.init.normal_(layer.input_proj.weight, std=0.02)
        for half in layer.input_proj.weight.chunk(2, dim=1):
            half.diagonal().add_(0.25)

    def layer(self) -> Layer:
        layer: Layer = self.model.mtp_layers[0]
        return layer

    def first_state(self, states: Tensor) -> Tensor:
        return states[..., -self.layer().input_proj.out_features :]

    def join(self, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layer()
        parts = [layer.hidden_layernorm(state), layer.token_layernorm(token)]
        x = layer.input_proj(torch.cat(parts, dim=-1))
        return layer.input_layernorm(x), x

    def end(self, state: Tensor) -> Tensor:
        return self.layer().final_layernorm(state)

    def scores(self, state: Tensor, rows: Tensor) -> Tensor:
        return state @ rows.T

    def config(self, target: LlamaForCausalLM) -> dict[str, object]:
        """Return the keys of a checkpoint that has the target's layers and this layer."""
        return shared_keys(target) | {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "mimo",
            "num_hidden_layers": target.config.num_hidden_layers,
            "num_nextn_predict_layers": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
        }


HEADS = {"eagle3": Eagle3, "mtp": Mtp}
