"""A loaded head: its sequences, their pages, and the two calls that a drafter makes.

`extend` reads committed tokens with their features, `propose` guesses what follows. Both methods
take several sequences at once. Nothing here knows gRPC.

A head's row i belongs to the feature of the sequence's token i. In the kinds that pair the feature
with the token after it, row i holds (feature of token i, embedding of token i + 1) and predicts
token i + 2. So the keys and values of a row depend on the text up to token i + 1, and a page is
shared among texts that are equal that far: the page pool gets the text without its first token.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import ClassVar

import torch
from torch.nn.functional import embedding

from outrider.heads.modules import HeadCache, HeadRows, fill
from outrider.heads.projection import Projection, projection_name, projection_tensors
from outrider.heads.spec import Head, HeadSpec
from outrider.lm.cpu.weights import optimize_for_cpu
from outrider.lm.fused_linear import SIBLINGS, linear_of
from outrider.lm.layout import SequenceSlice
from outrider.lm.pages import KVSequence, PagePool
from outrider.sampling.tensors import fetch, on

Place = tuple[int, Sequence[int]]
"""Where a token is guessed: a sequence's number in the batch, and the guesses before the token."""
Rank = Callable[[Sequence[Place], torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]
"""Ranks the next tokens. It gets R places, scores [R, V] of all target ids and a width, and returns
the first `width` target ids of each place and their shares, [R, width]. The first id is chosen. A
drafter that draws with the verifier's noise does so here."""


# The number of rows that the cache has room for after a full context, for guesses.
_ROWS_AFTER = 64


class NoPages(Exception):
    """The head's cache has too few free pages; no token was committed and no row was read."""


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """The two matrices [V, target hidden size] that a head may share with its target."""

    embeddings: torch.Tensor
    lm_head: torch.Tensor


@dataclass(eq=False, slots=True)
class HeadSequence:
    """The state that a head keeps for one sequence.

    `tokens` are all committed tokens. `origin` is the position of the first token that the head
    read: above 0 if earlier features never came. `salt` keeps pages from being shared with other
    tenants' texts; None shares nothing.
    """

    tokens: list[int]
    salt: str | None = None
    origin: int = 0
    kv: KVSequence = field(default_factory=KVSequence)
    state: torch.Tensor | None = None
    """The last row's state, in the kind's own form; None until the head has read a row."""

    @property
    def wanted(self) -> int:
        """The position of the next feature that the head needs."""
        return self.origin + self.kv.num_computed_tokens

    @property
    def ready(self) -> bool:
        """True if the features of all committed tokens but the last were read."""
        return self.state is not None and self.wanted == len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class Extension:
    """An update of a sequence: newly committed tokens, and features of committed tokens.

    `features` [m, feature_width] belong to the tokens from `first_position` on. If `projected`, the
    rows are already the head's projection, [m, projected_width]. The last committed token must have
    no row in `features`, because the token after it is not committed yet.
    """

    sequence: HeadSequence
    tokens: Sequence[int]
    features: torch.Tensor
    first_position: int
    projected: bool = False


@dataclass(frozen=True, slots=True)
class HeadProposal:
    """Guesses for B sequences, `count` each, as target ids.

    `tokens` [B, count] are chains: each token was guessed after the tokens before it. `best` [B,
    count, width] are the likeliest tokens at each position, and `shares`, float32 of the same
    shape, are the head's estimates of the probability that each token of `best` is the next token.
    `confidences` [B, count] estimate the probability that a chain's token is accepted if the tokens
    before it are accepted.
    """

    tokens: torch.Tensor
    best: torch.Tensor
    shares: torch.Tensor
    confidences: torch.Tensor
    deeper: Sequence[Sequence[Branch]] = ()
    """For each sequence, branches that go on after a token of `best`; empty without trees."""

    def on_host(self) -> HeadProposal:
        """Return the same numbers on the host, after one wait for the device."""
        parts = [self.tokens, self.best, self.shares, self.confidences]
        tokens, best, shares, confidences = map(torch.from_numpy, fetch(parts))
        return HeadProposal(tokens, best, shares.float(), confidences.float(), self.deeper)


@dataclass(frozen=True, slots=True)
class Branch:
    """Tokens after the first `at` guesses of a chain; `shares` are estimated probabilities."""

    at: int
    run: list[int]
    shares: list[float]


class HeadModel(torch.nn.Module):
    """A head on a device. Not thread-safe. A kind adds modules, `read_rows` and `guess`."""

    pairs = True
    """True if a row pairs its feature with the token after the feature's token."""
    siblings: ClassVar[Sequence[Sequence[str]]] = SIBLINGS
    """Groups of names of layers. A CPU computes each group as one product."""
    exact: tuple[str, ...] = ()
    """Suffixes of the names of weights that stay float32 for every `dtype`."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.spec: HeadSpec = head.spec
        self.projection = Projection(head.spec) if projection_tensors(head) else None
        self._projection = head.spec.aux_layers, projection_name(head)

    @property
    def projection_name(self) -> str:
        """The name of the head's projection, for a verifier that may apply it for the head.

        Empty if the head has no projection, or if `read_as` has changed the auxiliary layers.
        """
        aux_layers, name = self._projection
        return name if aux_layers == self.spec.aux_layers else ""

    @property
    def projected_width(self) -> int:
        """The size of a feature row after the projection; without a projection `feature_width`."""
        if self.projection is None:
            return self.spec.feature_width
        return self.projection.fc.out_features

    def load(
        self,
        head: Head,
        target: TargetWeights,
        *,
        page_count: int,
        page_size: int = 16,
        batch_rows: int = 1024,
        dtype: torch.dtype = torch.float32,
        int8: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """Load the head's weights and make its cache of `page_count` pages.

        `extend` reads at most `batch_rows` rows in a forward. The target's matrices are shared as
        they are if they have this dtype and device; on a CPU, lm_head is a copy in the kernels'
        order. On a CPU, `int8` keeps bfloat16 weights in int8, except the weights of the
        projection.
        """
        device = device or torch.device("cpu")
        projection = projection_tensors(head)
        tensors = {
            f"projection.{name}" if name in projection else name: tensor
            for name, tensor in head.tensors.items()
        }
        own = tensors.pop("embed_tokens.weight", None), tensors.pop("lm_head.weight", None)
        # Without the copy, a tensor that has this type already would be a view of its file, which
        # may be overwritten.
        theirs = target.embeddings, target.lm_head
        embeddings, matrix = map(_shared, own, theirs)
        self.embeddings = embeddings.to(device, dtype, copy=embeddings is not theirs[0])
        matrix = matrix.to(device, dtype, copy=matrix is not theirs[1])
        types = {name: torch.float32 if name.endswith(self.exact) else dtype for name in tensors}
        copies = {name: each.to(device, types[name], copy=True) for name, each in tensors.items()}
        fill(self, copies)
        self.lm_head = linear_of(matrix)
        if device.type == "cpu":
            if int8 and self.projection is not None:
                # The verifier may compute the projection instead, and the guesses must then be the
                # same.
                optimize_for_cpu(self.projection)
            optimize_for_cpu(self, self.siblings, int8=int8)
        self.target_ids = None if head.target_ids is None else head.target_ids.to(device)
        self.dtype, self.device = dtype, device
        self._batch_rows = batch_rows
        self.pool = PagePool(page_count, page_size)
        self.cache: HeadCache | None = None
        if self.spec.decoder is not None:
            longest = self.spec.target.context_length + _ROWS_AFTER
            decoder = self.spec.decoder
            self.cache = HeadCache(decoder, page_count, page_size, longest, dtype, device)

    def read_as(self, spec: HeadSpec) -> None:
        """Use another interpretation of the head's file from now on. No sequence may be open."""
        if (
            self.cache is not None
            and spec.decoder is not None
            and spec.decoder != self.spec.decoder
        ):
            self.cache.set_rotary(spec.decoder)
        self.spec = spec

    def open(self, tokens: Sequence[int], salt: str | None = None) -> HeadSequence:
        """Open a sequence with its committed tokens, on cached pages if there are any."""
        # Without a cache there is nothing to share.
        sequence = HeadSequence(list(tokens), None if self.cache is None else salt)
        if sequence.salt is not None:
            salt = self._page_salt(sequence)
            self.pool.match_prefix(sequence.kv, self._page_ids(sequence), salt)
        return sequence

    def close(self, sequence: HeadSequence) -> None:
        """Free the sequence's pages."""
        self.pool.free(sequence.kv)
        sequence.state = None

    @torch.inference_mode()
    def extend(self, batch: Sequence[Extension]) -> None:
        """Commit tokens and read features; features that were read before are skipped.

        After a gap the head starts anew with the features after the gap. Raises NoPages, and
        ValueError for rows of another width or beyond the committed text.
        """
        self._check(batch)
        self._reserve_rows(batch)
        work = [_Work(extension.sequence, self._accept(extension)) for extension in batch]
        while work:
            self._read_some(work)
            work = [part for part in work if len(part.features)]
        for extension in batch:
            sequence = extension.sequence
            if sequence.salt is not None:
                salt = self._page_salt(sequence)
                self.pool.cache_pages(sequence.kv, self._page_ids(sequence), salt)

    @torch.inference_mode()
    def propose(
        self,
        sequences: Sequence[HeadSequence],
        count: int,
        width: int = 1,
        rank: Rank | None = None,
    ) -> HeadProposal:
        """Guess `count` tokens for each sequence, and the `width` likeliest in each place.

        Without `rank` the likeliest tokens come first. A head that guesses a whole block at once
        may guess fewer tokens. Raises NoPages, and ValueError for a sequence whose features are not
        all read.
        """
        if not all(sequence.ready for sequence in sequences):
            raise ValueError("a sequence is not ready: some of its features were not read")
        if self.cache is not None:
            rows = max(self.spec.block_size, count - 1)
            if width > 1:
                rows = max(rows, self.tree_rows(count))
            self._reserve([(s, s.kv.num_computed_tokens + rows) for s in sequences])
        return self.guess(sequences, count, Picker(self, width, rank))

    def tree_rows(self, count: int) -> int:
        """Count the rows that `guess` reads for a tree of `count` levels; 0 if it grows no tree."""
        return 0

    def capture(self, width: int) -> None:
        """Capture CUDA graphs for rounds with 1 or `width` tokens a place, if the kind has graphs.

        Call this after the file's interpretation is chosen, on the thread that runs the head.
        Raises torch.AcceleratorError if the device failed.
        """

    def read_rows(self, slices: list[SequenceSlice], features: torch.Tensor) -> torch.Tensor:
        """Read rows [T, projected_width] of the slices; return each slice's last state [S, ·].

        The slices have the tokens after the features, or with `pairs` False the features' own
        tokens. A kind without keys and values keeps each slice's last feature as its state.
        """
        ends = accumulate(len(part.token_ids) for part in slices)
        return features.index_select(0, on(features.device, [end - 1 for end in ends]))

    @abstractmethod
    def guess(self, sequences: Sequence[HeadSequence], count: int, pick: Picker) -> HeadProposal:
        """Guess for sequences that are ready and have pages."""

    def project(self, features: torch.Tensor) -> torch.Tensor:
        """Bring feature rows [..., feature_width] to the head's own, [..., projected_width]."""
        if self.projection is None:
            return features
        projected: torch.Tensor = self.projection(features)
        return projected

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of target ids."""
        return embedding(tokens, self.embeddings)

    def rows(self, slices: list[SequenceSlice]) -> HeadRows:
        """Prepare a forward of these slices."""
        if self.cache is None:
            raise RuntimeError("this kind has no cache")
        return self.cache.rows(slices)

    def scores(self, states: torch.Tensor) -> torch.Tensor:
        """Return the float32 scores of the draft vocabulary for states [..., hidden size]."""
        found: torch.Tensor = self.lm_head(states)
        return found.float()

    def _page_ids(self, sequence: HeadSequence) -> list[int]:
        """Return ids that identify the contents of the sequence's pages, one for each row.

        The last id belongs to the row on which the guesses rest. `match_prefix` never covers the
        last id, so this row is always read anew.
        """
        return sequence.tokens[1:] if self.pairs else sequence.tokens[:-1]

    def _page_salt(self, sequence: HeadSequence) -> str:
        """Return a salt with the first token.

        Every row depends on the first token, but with `pairs` no row's id shows it.
        """
        return f"{sequence.salt}/{sequence.tokens[0]}"

    def _check(self, batch: Sequence[Extension]) -> None:
        for extension in batch:
            rows, width = extension.features.shape
            length = len(extension.sequence.tokens) + len(extension.tokens)
            wanted = self.projected_width if extension.projected else self.spec.feature_width
            if width != wanted:
                raise ValueError(f"features have {width} numbers, not {wanted}")
            if extension.first_position + rows >= length:
                raise ValueError("the last committed token, and those after it, have no feature")

    def _reserve_rows(self, batch: Sequence[Extension]) -> None:
        """Give all sequences pages for their rows; raise NoPages before any token is committed."""
        if self.cache is None:
            return
        lengths = []
        for extension in batch:
            sequence, end = extension.sequence, extension.first_position + len(extension.features)
            is_gap = extension.first_position > sequence.wanted
            origin = extension.first_position if is_gap else sequence.origin
            lengths.append((sequence, end - origin))
        self._reserve(lengths)

    def _reserve(self, lengths: Sequence[tuple[HeadSequence, int]]) -> None:
        for sequence, length in lengths:
            if not self.pool.reserve(sequence.kv, length):
                raise NoPages

    def _accept(self, extension: Extension) -> torch.Tensor:
        """Commit the tokens; return the projected features that the head has not read yet."""
        sequence = extension.sequence
        sequence.tokens += extension.tokens
        if extension.first_position > sequence.wanted and len(extension.features):
            pages = len(sequence.kv.pages)
            self.pool.free(sequence.kv)
            sequence.origin, sequence.salt, sequence.state = extension.first_position, None, None
            self.pool.reserve(sequence.kv, pages * self.pool.page_size)
        known = max(0, sequence.wanted - extension.first_position)
        features = extension.features[known:].to(self.device, self.dtype)
        return features if extension.projected else self.project(features)

    def _read_some(self, work: list[_Work]) -> None:
        """Read as many of the rows as a forward may have."""
        budget = self._batch_rows
        slices, features, read = [], [], []
        for part in work:
            rows = min(budget, len(part.features))
            if not rows:
                continue
            sequence = part.sequence
            first = sequence.wanted + self.pairs
            start = sequence.kv.num_computed_tokens
            tokens = sequence.tokens[first : first + rows]
            slices.append(SequenceSlice(tokens, start, sequence.kv.pages, 1, kv=sequence.kv))
            features.append(part.features[:rows])
            read.append((part, rows))
            budget -= rows
        if not slices:
            return
        states = self.read_rows(slices, torch.cat(features))
        for (part, rows), state in zip(read, states, strict=True):
            part.sequence.kv.num_computed_tokens += rows
            part.sequence.state = state
            part.features = part.features[rows:]


@dataclass(slots=True)
class _Work:
    """Features of a sequence that are still to be read."""

    sequence: HeadSequence
    features: torch.Tensor


def _shared(own: torch.Tensor | None, targets: torch.Tensor) -> torch.Tensor:
    """Return the head's own matrix, or the target's if the head has none or only a copy of it."""
    if own is None:
        return targets
    if own.shape == targets.shape and torch.equal(own.to(targets), targets):
        return targets
    return own


class Picker:
    """Turns scores of the draft vocabulary into tokens, and collects them for a HeadProposal."""

    def __init__(self, model: HeadModel, width: int, rank: Rank | None) -> None:
        self.width = min(width, model.spec.draft_vocab_size)
        self._ids = model.target_ids
        self._vocab_size = model.spec.vocab_size
        self.rank = rank
        self._chosen: list[list[int]] = []
        self._tokens: list[torch.Tensor] = []
        self._best: list[torch.Tensor] = []
        self._shares: list[torch.Tensor] = []
        self._confidences: list[torch.Tensor] = []

    def __call__(
        self, scores_BV: torch.Tensor, confidences_B: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Choose the next token of each sequence, as target ids [B].

        Without `confidences_B` the confidence is the chosen token's estimated probability.
        """
        places: list[Place] = []
        if self.rank is not None:
            # Earlier tokens are on the host already, so only the newly chosen tokens are copied.
            new = [tokens.tolist() for tokens in self._tokens[len(self._chosen) :]]
            self._chosen += new
            places = [(i, [chosen[i] for chosen in self._chosen]) for i in range(len(scores_BV))]
        best, shares = self.ranked(places, scores_BV)
        self.take(best, shares, confidences_B)
        return best[:, 0]

    def take(
        self,
        best_BK: torch.Tensor,
        shares_BK: torch.Tensor,
        confidences_B: torch.Tensor | None = None,
    ) -> None:
        """Take the first of the ranked tokens as each sequence's next token."""
        self._tokens.append(best_BK[:, 0])
        self._best.append(best_BK)
        self._shares.append(shares_BK)
        self._confidences.append(shares_BK[:, 0] if confidences_B is None else confidences_B)

    def ranked(
        self, places: Sequence[Place], scores_RV: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rank scores of the draft vocabulary; return target ids and estimated probabilities."""
        if self.rank is not None:
            return self.rank(places, self._spread(scores_RV), self.width)
        top = scores_RV.softmax(-1).topk(self.width)
        return top.indices if self._ids is None else self._ids[top.indices], top.values

    def _spread(self, scores_RV: torch.Tensor) -> torch.Tensor:
        """Spread scores of the draft vocabulary over target ids; all other ids get -inf."""
        if self._ids is None:
            return scores_RV
        spread = scores_RV.new_full((len(scores_RV), self._vocab_size), -torch.inf)
        return spread.index_copy_(1, self._ids, scores_RV)

    def proposal(self, deeper: Sequence[Sequence[Branch]] = ()) -> HeadProposal:
        """Return the tokens chosen so far, as a HeadProposal."""
        lists = (self._tokens, self._best, self._shares, self._confidences)
        tokens, best, shares, confidences = (torch.stack(part, dim=1) for part in lists)
        return HeadProposal(tokens, best, shares, confidences, deeper)
