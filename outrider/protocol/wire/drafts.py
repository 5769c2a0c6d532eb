"""Converts the messages of the draft stream between proto and domain.

Every `*_from_proto` checks its message, and raises an OutriderError that names field and limit.
"""

from __future__ import annotations

import math
from typing import cast

import numpy as np

from outrider.errors import OutriderError, Reason, invalid
from outrider.protocol import draft_messages as d
from outrider.protocol import messages as m
from outrider.protocol.checks import check_ids, check_name
from outrider.protocol.limits import (
    MAX_AUX_LAYERS,
    MAX_BATCH_ENTRIES,
    MAX_BATCH_TOKENS,
    MAX_DISTRIBUTION_ENTRIES,
    MAX_DRAFT_SECONDS,
    MAX_DRAFT_TOKENS,
    MAX_FAMILY_LENGTH,
    MAX_PROPOSAL_TOKENS,
    MAX_WINDOW_DEPTH,
    MAX_WINDOW_TOKENS,
    SUM_TOLERANCE,
)
from outrider.protocol.wire.model import placement_from_proto, placement_to_proto
from outrider.protocol.wire.settings import (
    grammar_from_proto,
    grammar_to_proto,
    known,
    proto_enum,
    sampling_from_proto,
    sampling_to_proto,
)
from outrider.v1 import drafts_pb2


def hello_from_proto(proto: drafts_pb2.Hello) -> d.Hello:
    """Check and convert a Hello; drop distributions that are unknown here.

    Raises OutriderError(INVALID_VALUE).
    """
    check_name("hello.drafter_id", proto.drafter_id)
    check_name("hello.family", proto.family, longest=MAX_FAMILY_LENGTH)
    check_name("hello.tokenizer_fingerprint", proto.tokenizer_fingerprint)
    if not 1 <= proto.max_draft_tokens <= MAX_DRAFT_TOKENS:
        message = f"must be in [1, {MAX_DRAFT_TOKENS}], not {proto.max_draft_tokens}"
        raise invalid("hello.max_draft_tokens", message)
    limit = proto.max_sequence_count if proto.HasField("max_sequence_count") else None
    if limit is not None and limit < 1:
        raise invalid("hello.max_sequence_count", f"must be at least 1, not {limit}")
    check_name("hello.weights_version", proto.weights_version, empty=True)
    offered: set[int] = set(proto.distributions)
    distributions = [kind for kind in m.DraftDistribution if kind in offered]
    return d.Hello(
        drafter_id=proto.drafter_id,
        family=proto.family,
        tokenizer_fingerprint=proto.tokenizer_fingerprint,
        max_draft_tokens=proto.max_draft_tokens,
        distributions=frozenset([m.DraftDistribution.ONE_HOT, *distributions]),
        placement=placement_from_proto(proto.placement),
        max_sequence_count=limit,
        feature_request=feature_request_from_proto(proto),
        requires_grammar=proto.requires_grammar,
        weights_version=proto.weights_version,
    )


def feature_request_from_proto(hello: drafts_pb2.Hello) -> d.FeatureRequest | None:
    """Check and convert a Hello's request for features.

    Return None if there is no such request, or if only a later version knows its type of numbers.
    Whether the target has these layers is checked elsewhere. Raises OutriderError(INVALID_VALUE).
    """
    if drafts_pb2.CAPABILITY_FEATURES not in hello.capabilities:
        return None
    proto = hello.feature_request
    name = "hello.feature_request"
    aux_layers = tuple(proto.aux_layers)
    if not aux_layers and not proto.final_state:
        raise invalid(name, "must ask for an auxiliary layer or the final state")
    if len(aux_layers) > MAX_AUX_LAYERS or len(set(aux_layers)) < len(aux_layers):
        message = f"must hold at most {MAX_AUX_LAYERS} distinct layers"
        raise invalid(f"{name}.aux_layers", message)
    last = proto.last_prompt_token_count if proto.HasField("last_prompt_token_count") else None
    if last is not None and last < 0:
        raise invalid(f"{name}.last_prompt_token_count", f"must be at least 0, not {last}")
    check_name(f"{name}.projection", proto.projection, empty=True)
    number = int(proto.dtype or drafts_pb2.FEATURE_DTYPE_BFLOAT16)
    dtypes = {int(dtype): dtype for dtype in d.FeatureDtype}
    if number not in dtypes:
        return None
    return d.FeatureRequest(aux_layers, proto.final_state, dtypes[number], last, proto.projection)


def hello_to_proto(hello: d.Hello) -> drafts_pb2.Hello:
    """Convert a Hello; inverse of `hello_from_proto`."""
    proto = drafts_pb2.Hello(
        drafter_id=hello.drafter_id,
        family=hello.family,
        tokenizer_fingerprint=hello.tokenizer_fingerprint,
        max_draft_tokens=hello.max_draft_tokens,
        distributions=[proto_enum(kind) for kind in sorted(hello.distributions)],
        placement=placement_to_proto(hello.placement),
        max_sequence_count=hello.max_sequence_count,
        requires_grammar=hello.requires_grammar,
        weights_version=hello.weights_version,
    )
    request = hello.feature_request
    if request is not None:
        proto.capabilities.append(drafts_pb2.CAPABILITY_FEATURES)
        proto.feature_request.aux_layers.extend(request.aux_layers)
        proto.feature_request.final_state = request.final_state
        proto.feature_request.dtype = proto_enum(request.dtype)
        if request.last_prompt_token_count is not None:
            proto.feature_request.last_prompt_token_count = request.last_prompt_token_count
        proto.feature_request.projection = request.projection
    return proto


def welcome_to_proto(welcome: d.Welcome) -> drafts_pb2.Welcome:
    """Convert a Welcome; inverse of `welcome_from_proto`."""
    granted = [drafts_pb2.CAPABILITY_FEATURES] if welcome.feature_width else []
    return drafts_pb2.Welcome(
        model_id=welcome.model_id,
        vocab_size=welcome.vocab_size,
        context_length=welcome.context_length,
        capabilities=granted,
        feature_width=welcome.feature_width,
        projects_features=welcome.projects_features,
    )


def welcome_from_proto(proto: drafts_pb2.Welcome) -> d.Welcome:
    """Check and convert a Welcome; raise OutriderError(PROTOCOL_VIOLATION)."""
    width = 0
    if drafts_pb2.CAPABILITY_FEATURES in proto.capabilities:
        width = proto.feature_width
        if width < 1:
            raise _violation("welcome.feature_width", f"must be at least 1, not {width}")
    return d.Welcome(
        proto.model_id, proto.vocab_size, proto.context_length, width, proto.projects_features
    )


def drafts_from_proto(proto: drafts_pb2.DraftBatch, vocab_size: int) -> d.DraftBatch:
    """Check and convert a batch of drafts; raise OutriderError(PROTOCOL_VIOLATION).

    Ids must be in [0, vocab_size). Base lengths and windows depend on the committed tokens; the
    trie checks them.
    """
    if len(proto.proposals) + len(proto.skips) > MAX_BATCH_ENTRIES:
        raise _violation("drafts", f"must hold at most {MAX_BATCH_ENTRIES} proposals and skips")
    token_count = sum([len(proposal.token_ids) for proposal in proto.proposals])
    if token_count > MAX_BATCH_TOKENS:
        message = f"must hold at most {MAX_BATCH_TOKENS} tokens together, not {token_count}"
        raise _violation("drafts.proposals", message)
    proposals = []
    for index, proposal in enumerate(proto.proposals):
        try:
            proposals.append(_proposal_from_proto(proposal, vocab_size))
        except OutriderError as error:
            raise error.within(f"drafts.proposals[{index}]") from None
    skips = [d.Skip(skip.sequence_id, skip.base_length) for skip in proto.skips]
    return d.DraftBatch(proposals, skips)


def _proposal_from_proto(proto: drafts_pb2.Proposal, vocab_size: int) -> d.Proposal:
    ids = list(proto.token_ids)
    count = len(ids)
    if not 1 <= count <= MAX_PROPOSAL_TOKENS:
        message = f"must hold 1 to {MAX_PROPOSAL_TOKENS} tokens, not {count}"
        raise _violation("token_ids", message)
    if max(ids) >= vocab_size:
        raise _violation("token_ids", f"must be in [0, {vocab_size}), not {max(ids)}")
    for name in ("parents", "distributions", "confidences"):
        given = len(getattr(proto, name))
        if given not in (0, count):
            message = f"must be empty or one for each of {count} tokens, not {given}"
            raise _violation(name, message)
    parents = list(proto.parents)
    for place, parent in enumerate(parents):
        if parent > place:
            limit = f"at most {place} at place {place}, not {parent}"
            message = f"must name a token before its child: {limit}"
            raise _violation("parents", message)
    confidences = list(proto.confidences)
    # The comparison is written so that it refuses a NaN too.
    wrong = [value for value in confidences if not 0.0 < value <= 1.0]
    if wrong:
        raise _violation("confidences", f"must be in (0, 1], not {wrong[0]:g}")
    distributions = [
        _distribution(given, token, vocab_size, place) if given.token_ids else None
        for place, (given, token) in enumerate(zip(proto.distributions, ids, strict=False))
    ]
    seconds = proto.draft_duration.seconds + proto.draft_duration.nanos * 1e-9
    if seconds < 0:
        raise _violation("draft_duration", f"must be at least 0 s, not {seconds:g} s")
    seconds = min(seconds, MAX_DRAFT_SECONDS)
    return d.Proposal(
        proto.sequence_id, proto.base_length, ids, parents, distributions, seconds, confidences
    )


def _distribution(
    proto: drafts_pb2.SparseDistribution, token: int, vocab_size: int, place: int
) -> d.SparseDistribution:
    """Check the distribution of the token at `place` and renormalise it in float64."""
    name = f"distributions[{place}]"
    count = len(proto.token_ids)
    given = len(proto.probabilities)
    if not 1 <= count <= MAX_DISTRIBUTION_ENTRIES or count != given:
        entries = f"1 to {MAX_DISTRIBUTION_ENTRIES} ids and as many probabilities"
        raise _violation(name, f"must hold {entries}, not {count} and {given}")
    ids = np.fromiter(proto.token_ids, np.int64, count)
    weights = np.fromiter(proto.probabilities, np.float64, count)
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise _violation(name, "must be finite and not negative")
    total = float(weights.sum())
    if not math.isclose(total, 1.0, abs_tol=SUM_TOLERANCE):
        raise _violation(name, f"must sum to 1 within {SUM_TOLERANCE}, not to {total:.6f}")
    if ids.max() >= vocab_size or np.unique(ids).size != count:
        raise _violation(name, f"must hold distinct ids in [0, {vocab_size})")
    if not weights[ids == token].any():
        raise _violation(name, f"must give the proposed token {token} a probability above 0")
    return d.SparseDistribution(ids, weights / total)


def drafts_to_proto(batch: d.DraftBatch) -> drafts_pb2.DraftBatch:
    """Convert a batch of drafts; inverse of `drafts_from_proto`. Probabilities become float32."""
    proto = drafts_pb2.DraftBatch()
    for proposal in batch.proposals:
        out = proto.proposals.add(
            sequence_id=proposal.sequence_id,
            base_length=proposal.base_length,
            token_ids=proposal.token_ids,
            parents=proposal.parents,
            confidences=proposal.confidences,
        )
        for given in proposal.distributions:
            if given is None:
                out.distributions.add()
            else:
                out.distributions.add(
                    token_ids=given.token_ids.tolist(), probabilities=given.probabilities.tolist()
                )
        if proposal.draft_seconds > 0:
            out.draft_duration.FromNanoseconds(int(proposal.draft_seconds * 1e9))
    for skip in batch.skips:
        proto.skips.add(sequence_id=skip.sequence_id, base_length=skip.base_length)
    return proto


def step_to_proto(step: d.StepBatch) -> drafts_pb2.StepBatch:
    """Convert a step; inverse of `step_from_proto`."""
    return drafts_pb2.StepBatch(
        opened=[_opened_to_proto(opened) for opened in step.opened],
        features=[
            drafts_pb2.Features(
                sequence_id=features.sequence_id,
                first_position=features.first_position,
                # Tensors go only to drafters of the verifier's process, without a message.
                rows=cast(bytes, features.rows),
            )
            for features in step.features
        ],
        verdicts=[_verdict_to_proto(verdict) for verdict in step.verdicts],
        closed=[
            drafts_pb2.Closed(sequence_id=closed.sequence_id, reason=drafts_pb2.CLOSE_REASON_ENDED)
            for closed in step.closed
        ],
    )


def _opened_to_proto(opened: d.Opened) -> drafts_pb2.Opened:
    return drafts_pb2.Opened(
        sequence_id=opened.sequence_id,
        token_ids=opened.token_ids,
        sampling=sampling_to_proto(opened.sampling),
        distribution=proto_enum(opened.distribution),
        window=_window_to_proto(opened.window),
        draft_tokens=opened.draft_tokens,
        tenant=opened.tenant,
        traceparent=opened.traceparent,
        grammar=grammar_to_proto(opened.grammar),
        prediction_token_ids=opened.prediction,
        prompt_token_count=opened.prompt_length,
        tree_tokens=opened.tree_tokens,
    )


def _verdict_to_proto(verdict: d.Verdict) -> drafts_pb2.Verdict:
    return drafts_pb2.Verdict(
        sequence_id=verdict.sequence_id,
        committed_length=verdict.committed_length,
        new_token_ids=verdict.new_token_ids,
        matched_token_count=verdict.matched_token_count,
        draft_tokens=verdict.draft_tokens,
        window=None if verdict.window is None else _window_to_proto(verdict.window),
        traceparent=verdict.traceparent,
        tree_tokens=verdict.tree_tokens,
    )


def _window_to_proto(window: d.Window) -> drafts_pb2.Window:
    return drafts_pb2.Window(token_count=window.token_count, depth=window.depth)


def step_from_proto(proto: drafts_pb2.StepBatch, vocab_size: int) -> d.StepBatch:
    """Check and convert a step; raise OutriderError that names the field.

    Values that only a later version knows can cost only guesses: an unknown distribution counts as
    ONE_HOT, and a grammar of an unknown kind counts as no grammar. The reason of a Closed is
    ignored.
    """
    return d.StepBatch(
        [_opened_from_proto(opened, vocab_size) for opened in proto.opened],
        [_features_from_proto(features) for features in proto.features],
        [_verdict_from_proto(verdict, vocab_size) for verdict in proto.verdicts],
        [d.Closed(closed.sequence_id) for closed in proto.closed],
    )


def _features_from_proto(proto: drafts_pb2.Features) -> d.Features:
    """Check and convert features.

    The session, which knows the width, checks the size of the rows.
    """
    if proto.first_position < 0:
        message = f"must be at least 0, not {proto.first_position}"
        raise _violation("features.first_position", message)
    return d.Features(proto.sequence_id, proto.first_position, proto.rows)


def _verdict_from_proto(proto: drafts_pb2.Verdict, vocab_size: int) -> d.Verdict:
    check_ids("verdict.new_token_ids", proto.new_token_ids, vocab_size)
    window = _window_from_proto(proto.window) if proto.HasField("window") else None
    return d.Verdict(
        proto.sequence_id,
        proto.committed_length,
        list(proto.new_token_ids),
        proto.matched_token_count,
        _draft_tokens_from_proto(proto.draft_tokens, window),
        window,
        proto.traceparent,
        _tree_tokens_from_proto(proto.tree_tokens),
    )


def _opened_from_proto(proto: drafts_pb2.Opened, vocab_size: int) -> d.Opened:
    if not proto.token_ids:
        raise _violation("opened.token_ids", "must hold at least 1 token")
    check_ids("opened.token_ids", proto.token_ids, vocab_size)
    check_ids("opened.prediction_token_ids", proto.prediction_token_ids, vocab_size)
    if not 0 <= proto.prompt_token_count <= len(proto.token_ids):
        message = f"must be in [0, {len(proto.token_ids)}], not {proto.prompt_token_count}"
        raise _violation("opened.prompt_token_count", message)
    window = _window_from_proto(proto.window)
    return d.Opened(
        sequence_id=proto.sequence_id,
        token_ids=list(proto.token_ids),
        sampling=sampling_from_proto(proto.sampling, vocab_size, "opened.sampling"),
        distribution=known(m.DraftDistribution, proto.distribution, m.DraftDistribution.ONE_HOT),
        window=window,
        draft_tokens=_draft_tokens_from_proto(proto.draft_tokens, window),
        tenant=proto.tenant,
        traceparent=proto.traceparent,
        grammar=grammar_from_proto(proto.grammar if proto.grammar.WhichOneof("kind") else None),
        prediction=list(proto.prediction_token_ids),
        prompt_length=proto.prompt_token_count,
        tree_tokens=_tree_tokens_from_proto(proto.tree_tokens),
    )


def _window_from_proto(proto: drafts_pb2.Window) -> d.Window:
    for name, most in (("token_count", MAX_WINDOW_TOKENS), ("depth", MAX_WINDOW_DEPTH)):
        value = getattr(proto, name)
        if not 1 <= value <= most:
            raise _violation(f"window.{name}", f"must be in [1, {most}], not {value}")
    return d.Window(proto.token_count, proto.depth)


def _draft_tokens_from_proto(count: int, window: d.Window | None) -> int:
    # A verdict without a window leaves the earlier window unchanged.
    most = window.depth if window else MAX_WINDOW_DEPTH
    if not 0 <= count <= most:
        raise _violation("draft_tokens", f"must be in [0, {most}], not {count}")
    return count


def _tree_tokens_from_proto(count: int) -> int:
    if not 0 <= count <= MAX_PROPOSAL_TOKENS:
        raise _violation("tree_tokens", f"must be in [0, {MAX_PROPOSAL_TOKENS}], not {count}")
    return count


def _violation(field: str, message: str) -> OutriderError:
    return OutriderError(Reason.PROTOCOL_VIOLATION, f"{field} {message}", field)
