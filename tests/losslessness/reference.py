"""The acceptance rules for one sequence in their simplest form: the oracle of the batched code.

Notation of all rules: K draft tokens are verified by K + 1 rows of the target. Row i of
`target_probs` [K + 1, V] is the target's distribution after the first i draft tokens. Row i of
`draft_probs` [K, V] is the distribution from which draft token i was drawn. A rule accepts the
first n draft tokens and adds one token: a *recovered* token if it rejected a draft token (n < K),
otherwise the *bonus* token (n = K). `tree` has the rules for trees of draft tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.sampling.noise import Purpose, coupled_draw, uniforms

Probs = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Accepted:
    """A result: the first `count` draft tokens are accepted, and `next_token` follows them."""

    count: int
    next_token: int


@dataclass(frozen=True, slots=True)
class Coins:
    """The random numbers of a step, which are functions of the two fields.

    A coin decides about a place only once: the next step has another position.
    """

    seed: int
    """The sequence's seed."""
    position: int
    """The first draft token's position, counted from the prompt's start: the committed length."""

    def accept(self, i: int) -> float:
        """Return a uniform number in [0, 1) that decides about draft token i."""
        return float(uniforms([self.seed], [self.position + i], Purpose.ACCEPT, [self.position])[0])

    def draw(self, probs: Probs, i: int) -> int:
        """Return the target's token at place i, drawn with the coupled noise of its position."""
        return coupled_draw(probs, self.seed, self.position + i)

    def recover(self, weights: Probs, i: int) -> int:
        """Return a token at place i with probability proportional to its weight."""
        number = uniforms([self.seed], [self.position + i], Purpose.RECOVER, [self.position])[0]
        cumulative = weights.cumsum()
        return int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))


def greedy(target_logits: Probs, draft: Sequence[int]) -> Accepted:
    """Accept draft tokens as long as each is the target's likeliest token."""
    own = target_logits.argmax(-1)
    for i, token in enumerate(draft):
        if token != own[i]:
            return Accepted(i, int(own[i]))
    return Accepted(len(draft), int(own[-1]))


def coupled(target_probs: Probs, draft: Sequence[int], coins: Coins) -> Accepted:
    """Accept draft tokens as long as each is the target's own draw (arXiv 2408.07978).

    The draft does not affect the output: a seed gives the same text with any drafter.
    """
    for i, token in enumerate(draft):
        own = coins.draw(target_probs[i], i)
        if token != own:
            return Accepted(i, own)
    return Accepted(len(draft), coins.draw(target_probs[-1], len(draft)))


def token_wise(
    target_probs: Probs, draft_probs: Probs, draft: Sequence[int], coins: Coins
) -> Accepted:
    """Do rejection sampling (Leviathan et al., arXiv 2211.17192, alg. 1; Chen et al., 2302.01318).

    Accept token x with probability min(1, target(x) / draft(x)). At the first rejection, draw from
    max(0, target - draft).
    """
    for i, token in enumerate(draft):
        if coins.accept(i) * draft_probs[i, token] >= target_probs[i, token]:
            return Accepted(i, coins.recover(_residual(target_probs[i], draft_probs[i], 1.0), i))
    return Accepted(len(draft), coins.draw(target_probs[-1], len(draft)))


def block(target_probs: Probs, draft_probs: Probs, draft: Sequence[int], coins: Coins) -> Accepted:
    """Do block verification (Sun et al., arXiv 2403.10444, algorithm 2).

    The weight of a prefix is w_i = min(1, w_(i-1) * target(x_i) / draft(x_i)). Prefix i is accepted
    with probability s_i / (s_i + 1 - w_i), where s_i is the sum of max(0, w_i * target - draft)
    over the next token. The whole draft is accepted with probability w_K. The longest accepted
    prefix, of n tokens, counts. The next token is drawn from max(0, w_n * target - draft).
    """
    count = 0
    scale = weight = 1.0
    for i, token in enumerate(draft, start=1):
        weight = min(1.0, weight * target_probs[i - 1, token] / draft_probs[i - 1, token])
        chance = weight
        if i < len(draft):
            excess = np.maximum(0.0, weight * target_probs[i] - draft_probs[i]).sum()
            total = excess + 1.0 - weight
            # `excess` and `total` are both 0 only if target and draft agree and no mass was lost
            # before.
            chance = excess / total if total > 0 else 1.0
        if coins.accept(i - 1) < chance:
            count = i
            scale = weight
    if count == len(draft):
        return Accepted(count, coins.draw(target_probs[-1], count))
    residual = _residual(target_probs[count], draft_probs[count], scale)
    return Accepted(count, coins.recover(residual, count))


def _residual(target: Probs, draft: Probs, scale: float) -> Probs:
    """Return max(0, scale * target - draft).

    If rounding makes this residual 0 everywhere, return the target itself.
    """
    left = np.maximum(0.0, scale * target - draft)
    return left if left.sum() > 0 else target


def typical(target_probs: Probs, draft: Sequence[int], coins: Coins, epsilon: float) -> Accepted:
    """Apply Medusa's typical acceptance (Cai et al., arXiv 2401.10774, section 3.3.1). Lossy.

    Accept token x if target(x) > min(epsilon, sqrt(epsilon) * exp(-entropy)), or if the coupled
    rule accepts it.
    """
    for i, token in enumerate(draft):
        probs = target_probs[i]
        own = coins.draw(probs, i)
        if not is_typical(probs, token, epsilon) and token != own:
            return Accepted(i, own)
    return Accepted(len(draft), coins.draw(target_probs[-1], len(draft)))


def is_typical(probs: Probs, token: int, epsilon: float) -> bool:
    """Return whether TYPICAL accepts a token by the target's distribution."""
    entropy = -np.sum(probs[probs > 0] * np.log(probs[probs > 0]))
    return bool(probs[token] > min(epsilon, np.sqrt(epsilon) * np.exp(-entropy)))


def relaxed(
    target_probs: Probs, draft: Sequence[int], coins: Coins, topk: int, delta: float
) -> Accepted:
    """Apply TensorRT-LLM's relaxed acceptance for thinking tokens. Lossy.

    Accept token x if fewer than `topk` tokens are likelier, target(x) >= max(target) - delta and
    target(x) > 0, or if the coupled rule accepts it.
    """
    for i, token in enumerate(draft):
        probs = target_probs[i]
        own = coins.draw(probs, i)
        if not is_near(probs, token, topk, delta) and token != own:
            return Accepted(i, own)
    return Accepted(len(draft), coins.draw(target_probs[-1], len(draft)))


def is_near(probs: Probs, token: int, topk: int, delta: float) -> bool:
    """Return whether RELAXED accepts a thinking token by the target's distribution."""
    return bool(
        (probs > probs[token]).sum() < topk
        and probs[token] >= probs.max() - delta
        and probs[token] > 0
    )


@dataclass(frozen=True, slots=True)
class AcceptedPath:
    """A result for a tree: the draft tokens of these rows are accepted, then `next_token` comes."""

    rows: list[int]
    next_token: int


def tree(
    parents: Sequence[int],
    draft: Sequence[int],
    own: Callable[[int, int], int],
    likes: Callable[[int, int], bool] = lambda row, token: False,
) -> AcceptedPath:
    """Walk a tree, whose rows are as in `protocol.token_tree`, along the target's own tokens.

    `own(row, depth)` is the target's own token after a row: its likeliest token (GREEDY), or its
    draw with the coupled noise of place `depth` (COUPLED). The next row is the child with this
    token. `likes(row, token)` tells whether a lossy rule accepts a token after a row. `likes` is
    asked only about a row's first child, before the other children are looked at: if `likes` could
    choose among several children, the output would follow the drafter even more.
    """
    rows: list[int] = []
    row = 0
    while True:
        token = own(row, len(rows))
        below = [child for child, parent in enumerate(parents, 1) if parent == row]
        equal = [child for child in below if draft[child - 1] == token]
        if below and likes(row, draft[below[0] - 1]):
            row = below[0]
        elif equal:
            row = equal[0]
        else:
            return AcceptedPath(rows, token)
        rows.append(row)
