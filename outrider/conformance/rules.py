"""The rules of the draft stream for drafters, with hints. docs/protocol.md explains them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    """The result of one rule."""

    PASS = "pass"
    FAIL = "FAIL"
    NOT_SEEN = "not seen"
    """No scene tested the rule, or the drafter does not use the feature."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule. `says` states the rule, and `mend` says where to look when the rule is broken."""

    says: str
    mend: str


@dataclass(slots=True)
class Result:
    """The outcome of one rule, and why it failed."""

    outcome: Outcome = Outcome.NOT_SEEN
    reason: str = ""


RULES: dict[str, Rule] = {
    "waits-until-ready": Rule(
        "Opens no stream while GetModel says LOADING, and opens one when it says READY.",
        "Poll GetModel every 0.25 s or so.",
    ),
    "hello": Rule(
        "Sends Hello first: id, family, the tokenizer's fingerprint, 1 to 64 draft tokens.",
        "Repeat GetModel's tokenizer_fingerprint if you work on ids alone.",
    ),
    "answers-opened": Rule(
        "Answers each opened sequence with a proposal or a skip.",
        "Guess after the tokens of Opened, or send a Skip with their number.",
    ),
    "answers-verdicts": Rule(
        "Answers a verdict with a proposal or a skip, unless draft_tokens guesses are valid.",
        "Send a Skip with committed_length when there is nothing to offer.",
    ),
    "valid-base": Rule(
        "base_length lies between the lengths of Opened and of the committed tokens.",
        "It is the number of committed tokens that you know, from Opened and verdicts.",
    ),
    "valid-tokens": Rule(
        "A proposal has 1 to 1024 tokens, all below vocab_size; a message has at most 4096 entries"
        " and 16384 tokens.",
        "Welcome.vocab_size is the limit for tokens; split what is longer into several messages.",
    ),
    "valid-parents": Rule(
        "parents is empty, or has for each token a parent that comes before it.",
        "0 is the base; j is the j-th token, counted from 1.",
    ),
    "trees": Rule(
        "In a tree, a branch follows the token that it follows in the text.",
        "parents names each token's parent: 0 is the base, j is token_ids[j - 1].",
    ),
    "valid-distributions": Rule(
        "For SPARSE, a proposal has the distribution of each sampled token; otherwise it has none.",
        "Send distributions only where Opened.distribution is SPARSE.",
    ),
    "valid-confidences": Rule(
        "confidences is empty, or has for each token a number above 0 and at most 1.",
        "It estimates how probably a token is committed if its parent is; leave it out if unsure.",
    ),
    "valid-durations": Rule(
        "draft_duration is not negative.",
        "Measure it with a monotonic clock.",
    ),
    "knows-its-sequences": Rule(
        "Sends nothing for unknown sequences, and nothing later than 0.5 s after Closed.",
        "Drop a sequence at Closed, and all sequences when the stream ends.",
    ),
    "falls-silent": Rule(
        "Falls silent once the window is full or nothing is left to offer.",
        "Send only what is new; wait for a message otherwise.",
    ),
    "keeps-the-stream": Rule(
        "Keeps its stream while all is well, also in silence.",
        "Ping after 4 s of silence (10 s in Go); gRPC ends a connection with pings more often than "
        "once a second.",
    ),
    "many-at-once": Rule(
        "Accepts a step that opens, continues and closes several sequences, or one sequence.",
        "Apply opened, then verdicts, then closed; then answer the open sequences.",
    ),
    "repeated-verdicts": Rule(
        "Ignores a repeated verdict, and the known tokens of a verdict that overlaps.",
        "Append only the tokens up to committed_length that you lack.",
    ),
    "unknown-values": Rule(
        "Takes an unknown distribution for ONE_HOT, an unknown reason for ENDED.",
        "Give every switch over an enum a default.",
    ),
    "unknown-grammars": Rule(
        "Drafts without the grammar if it does not know the grammar's kind.",
        "Accept a oneof that is not set.",
    ),
    "unknown-messages": Rule(
        "Ignores a message whose kind it does not know.",
        "Do nothing when no field of the message's oneof is set.",
    ),
    "large-numbers": Rule(
        "Takes sequence ids up to 2^53 - 1, long prompts, and prompts of one token.",
        "Keep ids in 64 bits; allow messages of 16 MiB.",
    ),
    "windows": Rule(
        "Continues when the window shrinks to one token, and when draft_tokens is 0.",
        "The window and draft_tokens of a verdict apply from this verdict on.",
    ),
    "predictions": Rule(
        "Takes prediction_token_ids as a guess of the output, from the output's first token.",
        "The output begins after prompt_token_count tokens.",
    ),
    "features": Rule(
        "Takes features in parts, before the verdict of their tokens, and after a gap.",
        "first_position says which token the first row belongs to; missing features never come.",
    ),
    "serves-while-draining": Rule(
        "Continues to guess after the verifier's Draining, until the stream ends.",
        "Ignore Draining; react to the end of the stream.",
    ),
    "honours-retry-info": Rule(
        "Reconnects no sooner than RetryInfo says.",
        "Read google.rpc.RetryInfo from the status' details.",
    ),
    "comes-back": Rule(
        "Reconnects within 8 s after a lost stream, a taken id and unknown errors.",
        "Wait at most 2 s between attempts; set gRPC's own maximum backoff too.",
    ),
    "begins-anew": Rule(
        "Forgets all sequences when it opens a new stream.",
        "The verifier opens every sequence again; begin with an empty table.",
    ),
    "leaves-politely": Rule(
        "On SIGTERM sends Draining, half-closes, reads to the end, and exits with 0 within 5 s.",
        "Read on until the stream ends; a process that exits at once loses its last message.",
    ),
    "gives-up": Rule(
        "Exits with a status other than 0 when it is refused for good, and does not reconnect.",
        "A refusal is final if `retry` in ErrorInfo.metadata is never, whatever its reason.",
    ),
}

NOTES: dict[str, str] = {
    "no-skip": "Send a Skip if your longest branch is shorter than draft_tokens.",
    "useless-guesses": "Compare what you send with the verdicts: is base_length right? A "
    "model may not know this text.",
    "beyond-the-window": "The verifier cuts off what its window has no room for.",
    "implausible-durations": "draft_duration is the time that this proposal's guesses took.",
}
"""Hints about behaviour that the contract allows but that makes drafts less useful."""
