"""A drafter in one file, with one fault on request. Usage: faulty_drafter.py ADDRESS [FAULT]"""

from __future__ import annotations

import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from outrider.v1 import drafts_pb2, verifier_pb2, verifier_pb2_grpc

ADDRESS = sys.argv[1]
FAULT = sys.argv[2] if len(sys.argv) > 2 else ""
FINAL = ("TOKENIZER_MISMATCH", "CERTIFICATE_NOT_ALLOWED")
leaving = threading.Event()
corpus: list[int] = []


def tree(text: list[int], count: int) -> tuple[list[int], list[int]]:
    """Return guesses as a tree: token ids and their parents.

    Each branch begins with a different one of the tokens that have followed the text's last token.
    """
    tokens: list[int] = []
    parents: list[int] = []
    firsts: set[int] = set()
    for start in range(len(text) - 2, -1, -1):
        run = text[start + 1 : start + 1 + count]
        if text[start] == text[-1] and run[0] not in firsts:
            firsts.add(run[0])
            at = len(tokens)
            parents += [0, *range(at + 1, at + len(run))]
            tokens += run
    return tokens, parents


def guess(text: list[int], count: int) -> list[int]:
    """Return the tokens after the previous occurrence of the last token; none if that token is new.

    With the fault "prediction-as-corpus", the guesses after a new token are the prediction without
    its first token.
    """
    for start in range(len(text) - 2, -1, -1):
        if text[start] == text[-1]:
            return text[start + 1 : start + 1 + count]
    return corpus[1 : 1 + count] if FAULT == "prediction-as-corpus" else []


class Stream:
    """Serves one stream, from Hello to its end."""

    def __init__(self, stub: verifier_pb2_grpc.VerifierServiceStub, fingerprint: str) -> None:
        self.outbox: queue.Queue[verifier_pb2.StreamDraftsRequest | None] = queue.Queue()
        self.texts: dict[int, list[int]] = {}
        self.features: dict[int, int] = {}
        hello = drafts_pb2.Hello(
            drafter_id="faulty",
            family="faulty",
            tokenizer_fingerprint="another" if FAULT == "wrong-fingerprint" else fingerprint,
            max_draft_tokens=8,
            capabilities=[drafts_pb2.CAPABILITY_FEATURES],
            feature_request={"final_state": FAULT != "asks-for-no-state"},
        )
        self.outbox.put(verifier_pb2.StreamDraftsRequest(hello=hello))
        self.call = stub.StreamDrafts(self._requests())
        threading.Thread(target=self._leave, daemon=True).start()

    def _requests(self) -> Iterator[verifier_pb2.StreamDraftsRequest]:
        while (message := self.outbox.get()) is not None:
            yield message

    def _leave(self) -> None:
        leaving.wait()
        if FAULT == "leaves-at-once":
            self.call.cancel()
        goodbye = drafts_pb2.Draining(reason="stopping")
        self.outbox.put(verifier_pb2.StreamDraftsRequest(draining=goodbye))
        self.outbox.put(None)

    def run(self) -> None:
        silence = threading.Timer(0, lambda: None)
        for message in self.call:
            silence.cancel()
            if FAULT == "drops-when-idle":
                silence = threading.Timer(1.5, self.call.cancel)
                silence.daemon = True
                silence.start()
            if message.WhichOneof("message") is None and FAULT == "dies-of-unknown-messages":
                raise SystemExit("an unknown message")
            self._apply(message.step)

    def _apply(self, step: drafts_pb2.StepBatch) -> None:
        for opened in step.opened:
            if opened.distribution > 3 and FAULT == "dies-of-unknown-values":
                raise SystemExit("an unknown distribution")
            self.texts[opened.sequence_id] = list(opened.token_ids)
            corpus[:] = opened.prediction_token_ids
        for features in step.features:
            number, first = features.sequence_id, features.first_position
            if FAULT == "dies-of-gaps" and self.features.get(number, first) != first:
                raise SystemExit("a gap in the features")
            # A feature has 16 numbers of two bytes.
            self.features[number] = first + len(features.rows) // 32
        for verdict in step.verdicts:
            text = self.texts[verdict.sequence_id]
            fresh = verdict.committed_length - len(text)
            if FAULT == "appends-all":
                fresh = len(verdict.new_token_ids)
            text += list(verdict.new_token_ids)[len(verdict.new_token_ids) - max(fresh, 0) :]
        for closed in step.closed:
            if FAULT != "forgets-closed":
                del self.texts[closed.sequence_id]
        self._answer_all(step)

    def _answer_all(self, step: drafts_pb2.StepBatch) -> None:
        every: list[drafts_pb2.Opened | drafts_pb2.Verdict] = [*step.opened, *step.verdicts]
        for asked in every:
            if asked.sequence_id in self.texts and asked.tree_tokens > asked.draft_tokens:
                self._answer_with_tree(asked.sequence_id, asked.draft_tokens)
            elif asked.sequence_id in self.texts:
                self._answer(asked.sequence_id, asked.draft_tokens, bool(step.verdicts))
        if FAULT == "forgets-closed" and step.closed:
            threading.Timer(0.55, self._answer, (step.closed[0].sequence_id, 4, False)).start()

    def _answer_with_tree(self, sequence_id: int, count: int) -> None:
        text = self.texts[sequence_id]
        tokens, parents = tree(text, count)
        if not tokens:
            self._answer(sequence_id, count, False)
            return
        forks = [i for i, parent in enumerate(parents) if parent == 0][1:]
        if FAULT == "parents-from-0":
            parents = [max(0, parent - 1) for parent in parents]
        for i in forks:
            parents[i] += FAULT == "branches-too-deep"
        place = {"sequence_id": sequence_id, "base_length": len(text)}
        proposal = drafts_pb2.Proposal(**place, token_ids=tokens, parents=parents)
        batch = drafts_pb2.DraftBatch(proposals=[proposal])
        self.outbox.put(verifier_pb2.StreamDraftsRequest(drafts=batch))

    def _answer(self, sequence_id: int, count: int, after_verdict: bool) -> None:
        text = self.texts.get(sequence_id, [])
        if not text:
            return
        place = {"sequence_id": sequence_id, "base_length": len(text)}
        found = guess(text, count)
        batch = drafts_pb2.DraftBatch(skips=[drafts_pb2.Skip(**place)])
        if found:
            proposal = drafts_pb2.Proposal(**place, token_ids=found)
            self._spoil(proposal)
            batch = drafts_pb2.DraftBatch(proposals=[proposal])
        elif FAULT == "never-skips" and after_verdict:
            return
        self.outbox.put(verifier_pb2.StreamDraftsRequest(drafts=batch))
        if FAULT == "never-falls-silent" and sequence_id in self.texts:
            timer = threading.Timer(0.3, self._answer, (sequence_id, count, False))
            timer.daemon = True
            timer.start()

    def _spoil(self, proposal: drafts_pb2.Proposal) -> None:
        if FAULT == "base-too-large":
            proposal.base_length += 1
        elif FAULT == "ids-too-large":
            proposal.token_ids[0] = 4096
        elif FAULT == "parents-behind":
            proposal.parents.extend(range(1, len(proposal.token_ids) + 1))
        elif FAULT == "confidences-of-zero":
            proposal.confidences.extend([0.0] * len(proposal.token_ids))
        elif FAULT == "useless-guesses":
            proposal.token_ids[:] = [3] * len(proposal.token_ids)
        elif FAULT == "beyond-the-window":
            proposal.token_ids.extend([5] * 500)
        elif FAULT == "implausible-durations":
            proposal.draft_duration.FromSeconds(50)
        elif FAULT == "negative-durations":
            proposal.draft_duration.FromSeconds(-1)
        elif FAULT == "short-without-skip":
            del proposal.token_ids[1:]


def is_final(info: error_details_pb2.ErrorInfo) -> bool:
    """Return whether the refusal is final."""
    if FAULT == "gives-up-for-known-reasons-only":
        return info.reason in FINAL
    return info.metadata.get("retry") == "never" and FAULT != "never-gives-up"


def pause(error: grpc.RpcError, backoff_s: float) -> float:
    """Return the seconds to wait before the next attempt; exits after a final refusal."""
    status = rpc_status.from_call(error)
    retry_s = backoff_s
    for packed in status.details if status else []:
        info = error_details_pb2.ErrorInfo()
        retry = error_details_pb2.RetryInfo()
        if packed.Unpack(info) and is_final(info):
            raise SystemExit(f"refused: {info.reason}")
        if packed.Unpack(retry) and FAULT != "ignores-retry-info":
            retry_s = retry.retry_delay.ToTimedelta().total_seconds()
    return retry_s


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: leaving.set())
    options = [("grpc.max_reconnect_backoff_ms", 2000), ("grpc.max_receive_message_length", 2**24)]
    stub = verifier_pb2_grpc.VerifierServiceStub(grpc.insecure_channel(ADDRESS, options=options))
    backoff_s = 0.1
    while not leaving.is_set():
        try:
            model = stub.GetModel(verifier_pb2.GetModelRequest())
            if model.stage != 3 and FAULT != "does-not-wait":
                time.sleep(0.1)
                continue
            Stream(stub, model.tokenizer_fingerprint).run()
        except grpc.RpcError as error:
            if leaving.is_set():
                break
            if FAULT == "never-comes-back":
                raise SystemExit("the stream ended") from error
            time.sleep(pause(error, backoff_s))
            backoff_s = min(2.0, 2 * backoff_s)


if __name__ == "__main__":
    main()
