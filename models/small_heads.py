"""The kinds of heads that `train_heads.py` trains, with their losses, their drafts and their files.

The names of a head's modules are those of the tensors in its dialect.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, log_softmax, silu
from train_pair import MASK
from transformers import LlamaForCausalLM

BOUNDARIES = [1, 3, 5]
CONTEXT = 256
DEPTH = 4
"""Steps of its own drafting that a head is trained on."""
PROMPT = 64
BLOCK = 7
EPSILON = 1e-6
THETA = 10_000.0


class Features:
    """The target's states and logits that a head may read, for ids [B, T].

    `states` [B, T, 3 * 384]: the residual stream at BOUNDARIES. `final` [B, T, 384]: the state
    after the final norm. `logits` [B, T, V].
    """

    def __init__(self, target: LlamaForCausalLM, ids: Tensor) -> None:
        with torch.no_grad():
            out = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
            self.ids = ids
            self.states = torch.cat([out.hidden_states[k] for k in BOUNDARIES], dim=-1).float()
            self.final = out.last_hidden_state.float()
            self.logits = target.lm_head(out.last_hidden_state).float()


class Norm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, EPSILON)


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Return x [B, heads, N, D] with rotary position embeddings for positions [N] or [B, N]."""
    half = x.shape[-1] // 2
    frequencies = THETA ** (-torch.arange(half, device=x.device) / half)
    angles = positions[..., None].float() * frequencies
    if angles.ndim == 3:
        angles = angles[:, None]
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Projections(nn.Module):
    """The matrices of an attention with 6 query and 2 key heads of 64.

    Qwen2's have biases, Qwen3's norms of the queries and keys.
    """

    def __init__(self, wide: int, hidden: int, *, bias: bool = False, norms: bool = False) -> None:
        super().__init__()
        self.size, self.groups = 64, 3
        self.q_proj = nn.Linear(wide, 6 * 64, bias=bias)
        self.k_proj = nn.Linear(wide, 2 * 64, bias=bias)
        self.v_proj = nn.Linear(wide, 2 * 64, bias=bias)
        self.o_proj = nn.Linear(6 * 64, hidden, bias=False)
        if norms:
            self.q_norm, self.k_norm = Norm(64), Norm(64)

    def split(self, x: Tensor) -> Tensor:
        """Return [B, N, heads, 64] of [B, N, heads * 64]."""
        return x.unflatten(-1, (-1, self.size))

    def query(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return the queries [B, 6, N, 64], scaled."""
        query = self.split(self.q_proj(x))
        if hasattr(self, "q_norm"):
            query = self.q_norm(query)
        return rotate(query.transpose(1, 2), positions) * self.size**-0.5

    def key_value(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, 6, N, 64], each head of them three times."""
        key = self.split(self.k_proj(x))
        if hasattr(self, "k_norm"):
            key = self.k_norm(key)
        key = rotate(key.transpose(1, 2), positions)
        value = self.split(self.v_proj(x)).transpose(1, 2)
        return key.repeat_interleave(self.groups, 1), value.repeat_interleave(self.groups, 1)

    def join(self, x: Tensor) -> Tensor:
        """Return the output [B, N, hidden] for what the heads gathered, [B, 6, N, 64]."""
        return self.o_proj(x.transpose(1, 2).flatten(2))

    def copy_last(self, source: nn.Module) -> None:
        """Take the weights of an attention for the last columns of the input; the rest is small."""
        for name in ("q_proj", "k_proj", "v_proj"):
            own, other = getattr(self, name), getattr(source, name)
            nn.init.normal_(own.weight, std=0.02)
            own.weight[:, -other.in_features :] += other.weight
            if own.bias is not None:
                nn.init.zeros_(own.bias)
        self.o_proj.weight.copy_(source.o_proj.weight)


class Gate(nn.Module):
    """The gated feed-forward block of Llama."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))

    def copy_widest(self, source: nn.Module) -> None:
        """Take the inner columns of a wider block that weigh the most."""
        norms = source.down_proj.weight.norm(dim=0) * source.up_proj.weight.norm(dim=1)
        kept = norms.topk(self.gate_proj.out_features).indices.sort().values
        self.gate_proj.weight.copy_(source.gate_proj.weight[kept])
        self.up_proj.weight.copy_(source.up_proj.weight[kept])
        self.down_proj.weight.copy_(source.down_proj.weight[:, kept])


class Steps:
    """Attention of drafts: each sees the true prefix of its anchor and its own earlier steps."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return [B, heads, N, size] for step len(self.keys); each later step has fewer anchors."""
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


class Layer(nn.Module):
    """A decoder layer. EAGLE-3's reads embedding and state side by side, each with its norm."""

    def __init__(self, hidden: int, inner: int, *, eagle: bool = False, **kinds: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(hidden)
        if eagle:
            self.hidden_norm = Norm(hidden)
        self.self_attn = Projections(hidden * (2 if eagle else 1), hidden, **kinds)
        self.post_attention_layernorm = Norm(hidden)
        self.mlp = Gate(hidden, inner)

    def copy(self, source: nn.Module) -> None:
        """Start from one of the target's layers."""
        self.input_layernorm.weight.copy_(source.input_layernorm.weight)
        self.self_attn.copy_last(source.self_attn)
        self.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
        self.mlp.copy_widest(source.mlp)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output for what its attention's heads gathered."""
        x = residual + self.self_attn.join(attended)
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(nn.Module):
    """A head whose module names are the names of its dialect's tensors.

    `start(target, frequencies)` sets its first weights, `loss(embed, features)` is what it learns
    and `config(target)` gives the keys of `config.json`.
    """

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def ids(self) -> Tensor:
        """Return the target's id of each draft id."""
        return torch.arange(4096, device=self.device)

    def known(self, best: Tensor) -> Tensor:
        """Return whether the head can draft these ids of the target."""
        return torch.ones_like(best, dtype=torch.bool)

    @abstractmethod
    def drafts(
        self, embed: nn.Embedding, depth: int, features: Features, noise: Tensor | None
    ) -> Tensor:
        """Return the drafted ids [B, T, depth] after each last committed token; -1 where none.

        `noise` [B, T, V] is that of the draws of the text's tokens, None for greedy drafts.
        """

    def choose(self, logits: Tensor, noise: Tensor | None, first: int) -> Tensor:
        """Return the ids [B, N] drafted for the tokens `first` … of the text."""
        if noise is not None:
            logits = log_softmax(logits, -1)
            drawn = noise[:, first : first + logits.shape[1], self.ids()]
            logits[:, : drawn.shape[1]] += drawn
        return self.ids()[logits.argmax(-1)]


class PairHead(Head):
    """A head that pairs the feature of a token with the embedding of the next token."""

    @abstractmethod
    def first_state(self, features: Features) -> Tensor:
        """Return the state [B, T, 384] that stands for the target's features."""

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
    def scores(self, embed: nn.Embedding, state: Tensor) -> Tensor:
        """Return the logits [B, N, draft vocabulary] of a step's state."""

    def unroll(self, embed: nn.Embedding, features: Features, depth: int) -> Iterator[Tensor]:
        """Yield per step s the logits [B, T - 1 - s, draft vocabulary] of token a + 2 + s.

        Anchor a pairs the feature of token a with the embedding of token a + 1. Step 0 reads the
        target's feature, each later step the output of the step before it and the true token.
        """
        embedded = embed(features.ids[:, 1:]).float()
        state = self.first_state(features)[:, :-1]
        layer, steps = self.layer(), Steps()
        for step in range(depth):
            count = embedded.shape[1] - step
            x, residual = self.join(embedded[:, step:], state[:, :count])
            positions = torch.arange(count, device=x.device) + 1 + step
            query = layer.self_attn.query(x, positions)
            key, value = layer.self_attn.key_value(x, positions)
            state = self.end(layer.finish(residual, steps.attend(query, key, value)))
            yield self.scores(embed, state)

    def loss(self, embed: nn.Embedding, features: Features) -> Tensor:
        """Return the cross-entropy against the target's softmax over the draft vocabulary."""
        known = self.known(features.logits.argmax(-1)).float()
        goal = features.logits[..., self.ids()].softmax(-1)
        total = features.logits.new_zeros(())
        for step, logits in enumerate(self.unroll(embed, features, DEPTH)):
            rows = slice(1 + step, 1 + step + logits.shape[1])
            each = -(goal[:, rows] * log_softmax(logits.float(), -1)).sum(-1)
            weight = known[:, rows]
            total = total + 0.8**step * (each * weight).sum() / weight.sum()
        return total

    @torch.no_grad()
    def drafts(
        self, embed: nn.Embedding, depth: int, features: Features, noise: Tensor | None
    ) -> Tensor:
        # A draft counts only where all before it are the text's, so the true tokens are its own.
        drafted = features.ids.new_full((*features.ids.shape, depth), -1)
        for step, logits in enumerate(self.unroll(embed, features, depth)):
            drafted[:, 1 : 1 + logits.shape[1], step] = self.choose(logits, noise, 2 + step)
        return drafted


def shared_keys(target: LlamaForCausalLM) -> dict[str, object]:
    """Return the keys of `config.json` that all heads with a decoder layer have."""
    return {
        "hidden_act": "silu",
        "hidden_size": target.config.hidden_size,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "rope_scaling": None,
        "max_position_embeddings": target.config.max_position_embeddings,
        "bos_token_id": target.config.bos_token_id,
        "eos_token_id": target.config.eos_token_id,
        "pad_token_id": target.config.pad_token_id,
        "vocab_size": target.config.vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


class Eagle3(PairHead):
    """EAGLE-3 in SpecForge's dialect, with the 1,024 ids that the target draws most often."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(len(BOUNDARIES) * 384, 384, bias=False)
        self.midlayer = Layer(384, 768, eagle=True)
        self.norm = Norm(384)
        self.lm_head = nn.Linear(384, 1024, bias=False)
        self.register_buffer("d2t", torch.zeros(1024, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(4096, dtype=torch.bool))

    @torch.no_grad()
    def start(self, target: LlamaForCausalLM, frequencies: Tensor) -> None:
        """Start from the target's last layer and the embeddings of its most frequent ids."""
        kept = frequencies.topk(1024).indices.sort().values
        self.d2t.copy_(kept - torch.arange(1024, device=self.device))
        self.t2d[kept] = True
        self.lm_head.weight.copy_(target.lm_head.weight[kept])
        self.norm.weight.copy_(target.model.norm.weight)
        nn.init.normal_(self.fc.weight, std=0.01)
        self.fc.weight[:, -384:].diagonal().add_(0.25)
        first, last = target.model.layers[0], target.model.layers[-1]
        self.midlayer.copy(last)
        self.midlayer.hidden_norm.weight.copy_(last.input_layernorm.weight)
        self.midlayer.input_layernorm.weight.copy_(first.input_layernorm.weight)

    def ids(self) -> Tensor:
        return self.d2t + torch.arange(1024, device=self.device)

    def known(self, best: Tensor) -> Tensor:
        return self.t2d[best]

    def layer(self) -> Layer:
        return self.midlayer

    def first_state(self, features: Features) -> Tensor:
        return self.fc(features.states)

    def join(self, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        parts = [self.midlayer.input_layernorm(token), self.midlayer.hidden_norm(state)]
        return torch.cat(parts, dim=-1), state

    def end(self, state: Tensor) -> Tensor:
        return state

    def scores(self, embed: nn.Embedding, state: Tensor) -> Tensor:
        return self.lm_head(self.norm(state))

    def config(self, target: LlamaForCausalLM) -> dict[str, object]:
        """Nested layer ids count layer outputs: boundary - 1."""
        return shared_keys(target) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "target_hidden_size": target.config.hidden_size,
            "intermediate_size": 768,
            "num_hidden_layers": 1,
            "attention_bias": False,
            "draft_vocab_size": 1024,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [k - 1 for k in BOUNDARIES],
            },
        }


class DFlash(Head):
    """DFlash in z-lab's dialect: two layers draft a block of 7 in one forward.

    The block is the anchor, the last committed token, and a mask for each token that it drafts.
    """

    inner = 512
    size = BLOCK + 1
    """Rows of a block; the last BLOCK of them draft."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(len(BOUNDARIES) * 384, 384, bias=False)
        self.hidden_norm = Norm(384)
        self.layers = nn.ModuleList(Layer(384, self.inner, norms=True) for _ in range(2))
        self.norm = Norm(384)

    @torch.no_grad()
    def start(self, target: LlamaForCausalLM, frequencies: Tensor) -> None:
        """Start from the target's last two layers."""
        nn.init.normal_(self.fc.weight, std=0.01)
        self.fc.weight[:, -384:].diagonal().add_(1)
        for own, layer in zip(self.layers, target.model.layers[-2:], strict=True):
            own.copy(layer)
        self.hidden_norm.weight.copy_(target.model.layers[-1].input_layernorm.weight)
        self.norm.weight.copy_(target.model.norm.weight)

    def block(self, embed: nn.Embedding, features: Features, anchors: Tensor) -> Tensor:
        """Return the states [B, A, 7, 384] that draft after the anchors at [B, A]."""
        ids, size = features.ids, self.size
        context = self.hidden_norm(self.fc(features.states))
        masks = ids.new_full((*anchors.shape, size), MASK)
        masks[..., 0] = ids.gather(1, anchors)
        x = embed(masks.flatten(1)).float()
        positions = (anchors[..., None] + torch.arange(size, device=ids.device)).flatten(1)
        places = torch.arange(ids.shape[1], device=ids.device)
        hidden = (places >= anchors.repeat_interleave(size, 1)[..., None])[:, None]
        for layer in self.layers:
            attention, normed = layer.self_attn, layer.input_layernorm(x)
            query = attention.query(normed, positions)
            key, value = attention.key_value(context, places)
            own_key, own_value = (
                part.unflatten(2, (-1, size)) for part in attention.key_value(normed, positions)
            )
            before = (query @ key.transpose(-1, -2)).masked_fill(hidden, -torch.inf)
            inside = query.unflatten(2, (-1, size)) @ own_key.transpose(-1, -2)
            weights = torch.cat([before, inside.flatten(2, 3)], dim=-1).softmax(-1)
            own = weights[..., -size:].unflatten(2, (-1, size)) @ own_value
            x = layer.finish(x, weights[..., :-size] @ value + own.flatten(2, 3))
        return self.norm(x).unflatten(1, (-1, size))[:, :, -BLOCK:]

    def scores(self, embed: nn.Embedding, state: Tensor, before: Tensor) -> Tensor:
        """Return the logits for a state whose previous token is `before`."""
        return state @ embed.weight.T.float()

    def loss(self, embed: nn.Embedding, features: Features) -> Tensor:
        """Return the loss of the blocks of a quarter of the places.

        It is cross-entropy and total variation against the target's softmax, less at later places.
        """
        ids = features.ids
        count = ids.shape[1]
        chances = torch.rand(len(ids), count - BLOCK - 1, device=ids.device)
        picks = chances.topk(count // 4).indices + 1
        rows = picks[..., None] + torch.arange(BLOCK, device=ids.device)
        flat = rows.flatten(1)
        state = self.block(embed, features, rows[..., 0])
        before = ids.gather(1, flat).view_as(rows)
        logits = log_softmax(self.scores(embed, state, before).float(), -1)
        chosen = flat[..., None].expand(-1, -1, features.logits.shape[-1])
        goal = features.logits.gather(1, chosen).softmax(-1).view_as(logits)
        entropy = -(goal * logits).sum(-1)
        variation = (goal - logits.exp()).abs().sum(-1) / 2
        decay = torch.exp(-torch.arange(BLOCK, device=ids.device) / 4)
        learnt = ((entropy + variation) * decay).mean() / decay.mean()
        return learnt + self.doubt(state, before, 1 - variation.detach())

    def doubt(self, state: Tensor, before: Tensor, accepted: Tensor) -> Tensor:
        """Return the loss of the guess at the share [B, A, 7] that would be accepted; none here."""
        return state.new_zeros(())

    @torch.no_grad()
    def drafts(
        self, embed: nn.Embedding, depth: int, features: Features, noise: Tensor | None
    ) -> Tensor:
        ids = features.ids
        anchors = torch.arange(PROMPT - 1, ids.shape[1], device=ids.device).expand(len(ids), -1)
        state = self.block(embed, features, anchors)
        drafted = ids.new_full((*ids.shape, depth), -1)
        before = ids[:, PROMPT - 1 :]
        for n in range(min(depth, BLOCK)):
            before = self.choose(self.scores(embed, state[:, :, n], before), noise, PROMPT + n)
            drafted[:, PROMPT - 1 :, n] = before
        return drafted

    def config(self, target: LlamaForCausalLM) -> dict[str, object]:
        return self.block_keys(target) | {
            "architectures": ["DFlashDraftModel"],
            "dflash_config": {
                "mask_token_id": MASK,
                "target_layer_ids": [k - 1 for k in BOUNDARIES],
            },
        }

    def block_keys(self, target: LlamaForCausalLM) -> dict[str, object]:
        """Return the keys of `config.json` that DFlash and DSpark share."""
        return shared_keys(target) | {
            "model_type": "qwen3",
            "intermediate_size": self.inner,
            "num_hidden_layers": 2,
            "num_target_layers": target.config.num_hidden_layers,
            "layer_types": ["full_attention"] * 2,
            "attention_bias": False,
            "block_size": self.size,
        }


class DSpark(DFlash):
    """DSpark in DeepSpec's dialect: DFlash with scores that know the previous token.

    The row of the anchor drafts the token after it, and so on. A bias by the previous token (the
    Markov head) makes the block coherent, left to right.
    """

    inner = 384
    size = BLOCK

    def __init__(self) -> None:
        super().__init__()
        self.markov_head = nn.Module()
        self.markov_head.markov_w1 = nn.Embedding(4096, 32)
        self.markov_head.markov_w2 = nn.Linear(32, 4096, bias=False)
        self.confidence_head = nn.Module()
        self.confidence_head.proj = nn.Linear(384 + 32, 1)

    @torch.no_grad()
    def start(self, target: LlamaForCausalLM, frequencies: Tensor) -> None:
        """Start from the target's last two layers, with no bias by the previous token."""
        super().start(target, frequencies)
        nn.init.normal_(self.markov_head.markov_w1.weight, std=1.0)
        nn.init.zeros_(self.markov_head.markov_w2.weight)

    def scores(self, embed: nn.Embedding, state: Tensor, before: Tensor) -> Tensor:
        head = self.markov_head
        return super().scores(embed, state, before) + head.markov_w2(head.markov_w1(before))

    def doubt(self, state: Tensor, before: Tensor, accepted: Tensor) -> Tensor:
        """Return the cross-entropy of the confidence."""
        seen = torch.cat([state, self.markov_head.markov_w1(before)], dim=-1).detach()
        confidence = self.confidence_head.proj(seen).squeeze(-1)
        return binary_cross_entropy_with_logits(confidence, accepted)

    def config(self, target: LlamaForCausalLM) -> dict[str, object]:
        """Layer ids count layer outputs: boundary - 1."""
        return self.block_keys(target) | {
            "architectures": ["Qwen3DSparkModel"],
            "mask_token_id": MASK,
            "target_layer_ids": [k - 1 for k in BOUNDARIES],
            "num_anchors": CONTEXT // 4,
            "markov_rank": 32,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }


class Medusa(Head):
    """Four Medusa heads of one residual block each, which share the target's lm_head."""

    def __init__(self) -> None:
        super().__init__()
        for n in range(DEPTH):
            block = nn.Module()
            block.linear = nn.Linear(384, 384)
            self.add_module(str(n), nn.ModuleList([block]))

    @torch.no_grad()
    def start(self, target: LlamaForCausalLM, frequencies: Tensor) -> None:
        """Start from heads that repeat the target's own logits."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def scores(self, embed: nn.Embedding, features: Features, head: int) -> Tensor:
        """Return the logits [B, T, V] of token p + 2 + head at each place p."""
        x = features.final
        block = self.get_submodule(f"{head}.0.linear")
        return (x + silu(block(x))) @ embed.weight.T.float()

    def loss(self, embed: nn.Embedding, features: Features) -> Tensor:
        """Return the cross-entropy against the target's softmax, less for later heads."""
        goal = features.logits.softmax(-1)
        total = features.logits.new_zeros(())
        for n in range(DEPTH):
            logits = self.scores(embed, features, n)[:, : -1 - n]
            each = -(goal[:, 1 + n :] * log_softmax(logits.float(), -1)).sum(-1)
            total = total + 0.8**n * each.mean()
        return total

    @torch.no_grad()
    def drafts(
        self, embed: nn.Embedding, depth: int, features: Features, noise: Tensor | None
    ) -> Tensor:
        drafted = features.ids.new_full((*features.ids.shape, depth), -1)
        for n in range(min(depth, DEPTH)):
            chosen = self.choose(self.scores(embed, features, n), noise, 2 + n)
            drafted[:, 1:, n] = chosen[:, :-1]
        return drafted

    def config(self, target: LlamaForCausalLM) -> dict[str, object]:
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": target.config.hidden_size,
            "vocab_size": target.config.vocab_size,
            "medusa_num_heads": DEPTH,
            "medusa_num_layers": 1,
            "base_model_name_or_path": "models/target",
            "torch_dtype": "bfloat16",
        }


class Mtp(PairHead):
    """One layer of multi-token prediction in MiMo's dialect; it reads the final state."""

    def __init__(self) -> None:
        super().__init__()
        layer = Layer(384, 1152, bias=True)
        layer.token_layernorm, layer.hidden_layernorm = Norm(384), Norm(384)
        layer.input_proj = nn.Linear(2 * 384, 384, bias=False)
        layer.final_layernorm = Norm(384)
        self.model = nn.Module()
        self.model.mtp_layers = nn.ModuleList([layer])

    @torch.no_grad()
    def start(self, target: LlamaForCausalLM, frequencies: Tensor) -> None:
        """Start from the target's last layer."""
        layer = self.layer()
        layer.copy(target.model.layers[-1])
        layer.final_layernorm.weight.copy_(target.model.norm.weight)
        nn.init.normal_(layer.input_proj.weight, std=0.02)
        for half in layer.input_proj.weight.chunk(2, dim=1):
            half.diagonal().add_(0.25)

    def layer(self) -> Layer:
        return self.model.mtp_layers[0]

    def first_state(self, features: Features) -> Tensor:
        return features.final

    def join(self, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.layer()
        parts = [layer.hidden_layernorm(state), layer.token_layernorm(token)]
        x = layer.input_proj(torch.cat(parts, dim=-1))
        return layer.input_layernorm(x), x

    def end(self, state: Tensor) -> Tensor:
        return self.layer().final_layernorm(state)

    def scores(self, embed: nn.Embedding, state: Tensor) -> Tensor:
        return state @ embed.weight.T.float()

    def config(self, target: LlamaForCausalLM) -> dict[str, object]:
        """Return the target's keys, beside whose weights the layer would lie."""
        return shared_keys(target) | {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "mimo",
            "intermediate_size": 1152,
            "num_hidden_layers": target.config.num_hidden_layers,
            "num_nextn_predict_layers": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
        }


Drafts = Callable[[Features, Tensor | None], Tensor]
"""Features, and the noise of the draws [B, T, V] or None, to the drafts [B, T, 7]."""
HEADS = {"eagle3": Eagle3, "dflash": DFlash, "dspark": DSpark, "medusa": Medusa, "mtp": Mtp}
