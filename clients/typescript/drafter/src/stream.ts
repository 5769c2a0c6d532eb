// One stream, from Hello to its end. Messages to send go into an outbox. Messages of the verifier
// are applied between two rounds of drafting.
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { DurationSchema } from "@bufbuild/protobuf/wkt";
import type { Client } from "@connectrpc/connect";
import { DraftBatchSchema, type Opened, type StepBatch } from "../gen/outrider/v1/drafts_pb.js";
import { StreamDraftsRequestSchema, type VerifierService } from "../gen/outrider/v1/verifier_pb.js";
import { Sequence, type Strategy } from "./sequence.js";

type Message = MessageInitShape<typeof StreamDraftsRequestSchema>["message"];
const MOST_ENTRIES = 512; // most proposals and skips in a message; the verifier takes 4096
const GOODBYE_MS = 1000;

/** A queue of messages, which ends after `end`. */
class Outbox {
  private waiting: Message[] = [];
  private ended = false;
  private wake = () => {};

  put(message: Message): void {
    this.waiting.push(message);
    this.wake();
  }

  end(): void {
    this.ended = true;
    this.wake();
  }

  async *[Symbol.asyncIterator]() {
    for (;;) {
      for (const message of this.waiting.splice(0)) {
        yield create(StreamDraftsRequestSchema, { message });
      }
      if (this.waiting.length > 0) continue;
      if (this.ended) return;
      await new Promise<void>((resolve) => (this.wake = resolve));
    }
  }
}

/**
 * The Duration since `began`. Its nanoseconds are whole: a fraction would silently end the stream.
 */
function since(began: number) {
  const nanoseconds = Math.round((performance.now() - began) * 1e6);
  const seconds = BigInt(Math.floor(nanoseconds / 1e9));
  return create(DurationSchema, { seconds, nanos: nanoseconds % 1e9 });
}

/** The sequences of a stream. */
export class Session {
  readonly sequences = new Map<bigint, Sequence>();

  constructor(private readonly open: (opened: Opened) => Strategy) {}

  apply(step: StepBatch): void {
    for (const opened of step.opened) {
      this.sequences.set(opened.sequenceId, new Sequence(opened, this.open(opened)));
    }
    for (const verdict of step.verdicts) this.sequences.get(verdict.sequenceId)?.follow(verdict);
    for (const closed of step.closed) this.sequences.delete(closed.sequenceId);
  }

  /**
   * Makes one message; undefined if there is nothing to send before the next step. Sequences that
   * the verifier may be waiting for come first.
   */
  round() {
    for (;;) {
      const began = performance.now();
      const all = [...this.sequences.values()];
      const urgent = all.filter((sequence) => sequence.urgent);
      const asked = urgent.length > 0 ? urgent : all.filter((sequence) => sequence.room > 0);
      for (const sequence of asked) sequence.extend();
      const batch = create(DraftBatchSchema);
      for (const sequence of all) {
        if (batch.proposals.length + batch.skips.length >= MOST_ENTRIES) break;
        const proposal = sequence.proposal();
        if (proposal) batch.proposals.push(Object.assign(proposal, { draftDuration: since(began) }));
        const skip = sequence.skip();
        if (skip) batch.skips.push(skip);
      }
      if (batch.proposals.length + batch.skips.length > 0) return batch;
      if (asked.length === 0) return undefined;
    }
  }
}

/** Drafts until the verifier ends the stream, or until `stop` is aborted and Draining is sent. */
export async function draft(
  verifier: Client<typeof VerifierService>,
  hello: NonNullable<Extract<Message, { case: "hello" }>>["value"],
  open: (opened: Opened) => Strategy,
  stop: AbortSignal,
  log: (line: string) => void,
): Promise<void> {
  const outbox = new Outbox();
  const life = new AbortController();
  const leave = () => {
    outbox.put({ case: "draining", value: { reason: "the drafter is stopping" } });
    outbox.end();
    // Read to the end. If the process exited at once, the message could be lost.
    setTimeout(() => life.abort(), GOODBYE_MS).unref();
  };
  outbox.put({ case: "hello", value: hello });
  if (stop.aborted) return;
  stop.addEventListener("abort", leave);
  const session = new Session(open);
  let scheduled = false;
  const speak = () => {
    scheduled = false;
    const batch = stop.aborted ? undefined : session.round();
    if (batch === undefined) return;
    outbox.put({ case: "drafts", value: batch });
    schedule();
  };
  // Draft only once all messages that have arrived are applied.
  const schedule = () => {
    if (!scheduled) setImmediate(speak);
    scheduled = true;
  };
  try {
    for await (const { message } of verifier.streamDrafts(outbox, { signal: life.signal })) {
      if (message.case === "welcome") log(`drafting for ${message.value.modelId}`);
      if (message.case === "draining") {
        log(`the verifier is draining: ${message.value.reason}`);
      }
      if (message.case !== "step") continue;
      session.apply(message.value);
      schedule();
    }
  } finally {
    session.sequences.clear();
    outbox.end();
    stop.removeEventListener("abort", leave);
  }
}
