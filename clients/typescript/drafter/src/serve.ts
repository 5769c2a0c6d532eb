// A drafter: it connects, waits for the model, drafts, reconnects, and leaves when it is told.
import { X509Certificate } from "node:crypto";
import { arch, hostname } from "node:os";
import { setTimeout as sleep } from "node:timers/promises";
import { durationMs } from "@bufbuild/protobuf/wkt";
import { ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";
import { type ErrorInfo, ErrorInfoSchema, RetryInfoSchema } from "../gen/google/rpc/error_details_pb.js";
import type { DraftDistribution, Opened } from "../gen/outrider/v1/drafts_pb.js";
import { ModelStage, VerifierService } from "../gen/outrider/v1/verifier_pb.js";
import type { Guesses, Strategy } from "./sequence.js";
import { draft } from "./stream.js";

const [FIRST_MS, LONGEST_MS, GOOD_MS] = [100, 2000, 60_000];
const [POLL_MS, POLL_TIMEOUT_MS] = [250, 10_000];
// The longest RetryInfo that is followed.
const LONGEST_RETRY_MS = 60_000;
// The reasons that a drafter can get and that errors.proto marks "Retry: never". They count where a
// verifier's error has no `retry`.
const FINAL = [
  "CERTIFICATE_NOT_ALLOWED",
  "INVALID_VALUE",
  "MALFORMED_REQUEST",
  "TOKENIZER_MISMATCH",
  "UNSUPPORTED_PARAMETER",
];

export interface Options {
  /** host:port */
  verifier: string;
  family: string;
  /** Made of family, host and process id unless given. */
  id?: string;
  /** Most guesses for one step; 16 unless given. */
  maxDraftTokens?: number;
  distributions?: DraftDistribution[];
  /** A strategy that keeps no state for a sequence. */
  guess?: (text: readonly number[], count: number) => Guesses;
  /**
   * Mutual TLS: this drafter's certificate, its key, and the authorities that sign the verifier's
   * certificate, as PEM. The id then begins with the common name of the drafter's certificate.
   */
  tls?: { cert: string; key: string; ca: string };
  /** Instead of `guess`: makes the strategy of each sequence. */
  open?: (opened: Opened) => Strategy;
  /** Ends `serve` when it is aborted. */
  signal?: AbortSignal;
  /** Signals of the process that end `serve`, such as ["SIGTERM"]; none unless given. */
  processSignals?: NodeJS.Signals[];
  /** Takes lines about the connection; silent unless given. */
  log?: (line: string) => void;
}

/**
 * Drafts until it is told to stop, and then says goodbye. Reconnects when the verifier restarts.
 * Throws an error that a retry cannot cure.
 */
export async function serve(options: Options): Promise<void> {
  const stop = new AbortController();
  const abort = () => stop.abort();
  if (options.signal?.aborted) abort();
  options.signal?.addEventListener("abort", abort);
  for (const name of options.processSignals ?? []) process.once(name, abort);
  try {
    await serveUntil(stop.signal, options);
  } finally {
    options.signal?.removeEventListener("abort", abort);
    for (const name of options.processSignals ?? []) process.off(name, abort);
  }
}

async function serveUntil(stop: AbortSignal, options: Options): Promise<void> {
  const { family, guess, open = () => ({ guess: guess! }), log = () => {} } = options;
  if (guess === undefined && options.open === undefined) throw new TypeError("options need guess or open");
  const { tls } = options;
  const baseUrl = `${tls ? "https" : "http"}://${options.verifier}`;
  // A verifier's certificate has the name verifier.outrider, not that of its host.
  const security = tls && { ...tls, servername: "verifier.outrider" };
  const drafterId = ownId(options.id ?? `${family}-${hostname()}-${process.pid}`, tls?.cert);
  let pause = FIRST_MS;
  while (!stop.aborted) {
    const began = Date.now();
    const sessionManager = new Http2SessionManager(baseUrl, { pingIntervalMs: 4000, pingTimeoutMs: 8000, pingIdleConnection: true }, security);
    const verifier = createClient(VerifierService, createGrpcTransport({ baseUrl, sessionManager, readMaxBytes: 2 ** 24 }));
    try {
      const model = await ready(verifier, stop);
      const hello = {
        drafterId,
        family,
        tokenizerFingerprint: model.tokenizerFingerprint,
        maxDraftTokens: options.maxDraftTokens ?? 16,
        distributions: options.distributions ?? [],
        placement: { kind: "local", host: hostname(), device: "cpu", architecture: arch() },
      };
      await draft(verifier, hello, open, stop, log);
    } catch (cause) {
      if (stop.aborted) break;
      const error = ConnectError.from(cause);
      log(`the stream to ${options.verifier} ended: ${error.message}`);
      await sleep(wait(error, pause), undefined, { signal: stop }).catch(() => {});
      pause = Math.min(LONGEST_MS, 2 * pause);
      if (Date.now() - began > GOOD_MS) pause = FIRST_MS;
    } finally {
      sessionManager.abort();
    }
  }
}

/** The id. If the drafter has a certificate, the id begins with the certificate's common name. */
function ownId(id: string, cert?: string): string {
  const name = cert && /^CN=(.*)$/m.exec(new X509Certificate(cert).subject)?.[1];
  return !name || id === name || id.startsWith(`${name}/`) ? id : `${name}/${id}`;
}

type Verifier = ReturnType<typeof createClient<typeof VerifierService>>;

/**
 * Waits until the verifier serves its model, and returns the model. Waits at any other stage, even
 * at FAILED: the verifier may be started again.
 */
async function ready(verifier: Verifier, signal: AbortSignal) {
  for (;;) {
    const model = await verifier.getModel({}, { signal, timeoutMs: POLL_TIMEOUT_MS });
    if (model.stage === ModelStage.READY) return model;
    await sleep(POLL_MS, undefined, { signal });
  }
}

/** Milliseconds to wait after an error. Throws the error if a retry cannot cure it. */
function wait(error: ConnectError, pause: number): number {
  const [info] = error.findDetails(ErrorInfoSchema);
  if (info?.domain === "outrider.dev" && isFinal(info)) throw error;
  const [retry] = error.findDetails(RetryInfoSchema);
  const wanted = retry?.retryDelay && durationMs(retry.retryDelay);
  return Math.min(wanted ?? pause * (0.5 + Math.random() / 2), LONGEST_RETRY_MS);
}

/** Whether a retry cannot cure the error, even if its reason is unknown. */
function isFinal({ metadata, reason }: ErrorInfo): boolean {
  return metadata.retry ? metadata.retry === "never" : FINAL.includes(reason);
}
