"""What a drafter has to keep, by name, and what to mend when it does not. docs/protocol.md explains each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Outcome(Enum):
    PASS = "pass"
    FAIL = "FAIL"
    NOT_SEEN = "not seen"
    """No scene led there, or the drafter does not do what the rule is about."""


@dataclass(frozen=True, slots=True)
class Rule:
    """`says` is what the contract asks for, `mend` what to look at when it is broken."""

    says: str
    mend: str


@dataclass(slots=True)
class Result:
    outcome: Outcome = Outcome.NOT_SEEN
    reason: str = ""


RULES: dict[str, Rule] = {
    "waits-until-ready": Rule(
        "Opens no stream while GetModel says LOADING, and one once it says READY.",
        "Poll GetModel every 0.25 s or so.",
    ),
    "hello": Rule(
        "Says Hello first: id, family, the tokenizer's fingerprint, 1 to 64 draft tokens.",
        "Repeat GetModel's tokenizer_fingerprint if you work on ids alone.",
    ),
    "answers-opened": Rule(
        "Answers a sequence that is opened with a proposal or a skip.",
        "Guess behind the tokens of Opened, or send a Skip with their number.",
    ),
    "answers-verdicts": Rule(
        "Has draft_tokens guesses standing behind each verdict, or answers with a proposal or a skip.",
        "Send a Skip with committed_length when there is nothing to offer.",
    ),
    "valid-base": Rule(
        "base_length lies between the tokens of Opened and those committed.",
        "It is the number of committed tokens that you know, from Opened and verdicts.",
    ),
    "valid-tokens": Rule(
        "A proposal has 1 to 1024 tokens, all below vocab_size, and a message 4096 entries.",
        "Welcome.vocab_size is the limit; cut what is longer into several messages.",
    ),
    "valid-parents": Rule(
        "parents is empty, or names for each token one before it.",
        "0 is the base; j is the j-th token, counted from 1.",
    ),
    "valid-distributions": Rule(
        "SPARSE: a distribution for each token that it was sampled from; otherwise none.",
        "Send distributions only where Opened.distribution is SPARSE.",
    ),
    "knows-its-sequences": Rule(
        "Speaks only of sequences that are open, 0.5 s after Closed at the latest.",
        "Drop a sequence with Closed, and all of them when the stream ends.",
    ),
    "falls-silent": Rule(
        "Falls silent once the window is full or nothing is left to offer.",
        "Send only what is new; wait for a message otherwise.",
    ),
    "many-at-once": Rule(
        "Takes steps that open, move and close several sequences, one of them all three.",
        "Apply opened, then verdicts, then closed; then answer those that are open.",
    ),
    "repeated-verdicts": Rule(
        "A verdict that comes twice, or overlaps with what is known, changes nothing.",
        "Append only the tokens up to committed_length that you lack.",
    ),
    "unknown-values": Rule(
        "Takes an unknown distribution for ONE_HOT, an unknown reason for ENDED.",
        "Give every switch over an enum a default.",
    ),
    "unknown-grammars": Rule(
        "Drafts without a grammar whose kind it does not know.",
        "A oneof that is not set is no error.",
    ),
    "unknown-messages": Rule(
        "Ignores a message whose kind it does not know.",
        "Do nothing when none of the message's kinds is set.",
    ),
    "large-numbers": Rule(
        "Takes sequence ids up to 2^53 - 1, long prompts, and prompts of one token.",
        "Keep ids in 64 bits; allow messages of 16 MiB.",
    ),
    "windows": Rule(
        "Goes on when the window shrinks to one token, and when no draft tokens are wanted.",
        "Window and draft_tokens hold from the verdict on that brings them.",
    ),
    "predictions": Rule(
        "Takes prediction_token_ids for the output from its first token on.",
        "The output begins behind prompt_token_count tokens.",
    ),
    "serves-while-draining": Rule(
        "Goes on guessing after the verifier's Draining, until the stream ends.",
        "Draining asks for nothing; the end of the stream is what counts.",
    ),
    "honours-retry-info": Rule(
        "Comes back no sooner than RetryInfo says.",
        "Read google.rpc.RetryInfo from the status' details.",
    ),
    "comes-back": Rule(
        "Dials again within 8 s of a lost stream, of a taken id and of an unknown error.",
        "Wait at most 2 s between attempts; set gRPC's own maximum backoff too.",
    ),
    "begins-anew": Rule(
        "Knows nothing of earlier sequences on a new stream.",
        "Every sequence is opened again; begin with an empty table.",
    ),
    "leaves-politely": Rule(
        "On SIGTERM sends Draining, half-closes, reads to the end, and exits with 0 within 5 s.",
        "Read on until the stream ends; a process that exits at once loses its last message.",
    ),
    "gives-up": Rule(
        "Exits with another status than 0 when it is refused for ever, and dials no more.",
        'Reasons with "Retry: never" in errors.proto are final.',
    ),
}
