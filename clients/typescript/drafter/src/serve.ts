// A drafter process: it connects, waits for the model, drafts, reconnects, and leaves on SIGTERM.
import { X509Certificate } from "node:crypto";
import { arch, hostname } from "node:os";
import { setTimeout as sleep } from "node:timers/promises";
import { durationMs } from "@bufbuild/protobuf/wkt";
import { ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";
import { ErrorInfoSchema, RetryInfoSchema } from "../gen/google/rpc/error_details_pb.js";
import type { DraftDistribution, Opened } from "../gen/outrider/v1/drafts_pb.js";
import { ModelStage, VerifierService } from "../gen/outrider/v1/verifier_pb.js";
import type { Guesses, Strategy } from "./sequence.js";
import { draft } from "./stream.js";

const [FIRST_MS, LONGEST_MS, GOOD_MS] = [100, 2000, 60_000];
// Reasons that errors.proto marks "Retry: never" and that a drafter can get.
const FINAL = ["TOKENIZER_MISMATCH", "INVALID_VALUE", "MALFORMED_REQUEST", "UNSUPPORTED_PARAMETER"];

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
   * Mutual TLS: this drafter's certificate, its key, and the authorities of the verifier's, as PEM.
   * The id then begins with the certificate's common name.
   */
  tls?: { cert: string; key: string; ca: string };
  /** Instead of `guess`: makes the strategy of each sequence. */
  open?: (opened: Opened) => Strategy;
}

/**
 * Drafts until SIGTERM or SIGINT, and reconnects when the verifier restarts. Throws an error that a
 * retry cannot cure.
 */
export async function serve(options: Options): Promise<void> {
  const { family, guess, open = () => ({ guess: guess! }) } = options;
  if (guess === undefined && options.open === undefined) throw new TypeError("options need guess or open");
  const stop = new AbortController();
  for (const signal of ["SIGTERM", "SIGINT"]) process.once(signal, () => stop.abort());
  const { tls } = options;
  const baseUrl = `${tls ? "https" : "http"}://${options.verifier}`;
  // A verifier's certificate has the name verifier.outrider, not that of its host.
  const security = tls && { ...tls, servername: "verifier.outrider" };
  const drafterId = ownId(options.id ?? `${family}-${hostname()}-${process.pid}`, tls?.cert);
  let pause = FIRST_MS;
  while (!stop.signal.aborted) {
    const began = Date.now();
    const sessionManager = new Http2SessionManager(baseUrl, { pingIntervalMs: 4000, pingTimeoutMs: 8000, pingIdleConnection: true }, security);
    const verifier = createClient(VerifierService, createGrpcTransport({ baseUrl, sessionManager, readMaxBytes: 2 ** 24 }));
    try {
      const model = await ready(verifier, stop.signal);
      const hello = {
        drafterId,
        family,
        tokenizerFingerprint: model.tokenizerFingerprint,
        maxDraftTokens: options.maxDraftTokens ?? 16,
        distributions: options.distributions ?? [],
        placement: { kind: "local", host: hostname(), device: "cpu", architecture: arch() },
      };
      await draft(verifier, hello, open, stop.signal);
    } catch (cause) {
      if (stop.signal.aborted) break;
      const error = ConnectError.from(cause);
      console.error(`the stream to ${options.verifier} ended: ${error.message}`);
      await sleep(wait(error, pause), undefined, { signal: stop.signal }).catch(() => {});
      pause = Math.min(LONGEST_MS, 2 * pause);
      if (Date.now() - began > GOOD_MS) pause = FIRST_MS;
    } finally {
      sessionManager.abort();
    }
  }
}

/** The id, which begins with the common name of the drafter's certificate if it has one. */
function ownId(id: string, cert?: string): string {
  const name = cert && /^CN=(.*)$/m.exec(new X509Certificate(cert).subject)?.[1];
  return !name || id === name || id.startsWith(`${name}/`) ? id : `${name}/${id}`;
}

type Verifier = ReturnType<typeof createClient<typeof VerifierService>>;

/** The model, once the verifier serves it. */
async function ready(verifier: Verifier, signal: AbortSignal) {
  for (;;) {
    const model = await verifier.getModel({}, { signal });
    if (model.stage === ModelStage.READY) return model;
    await sleep(250, undefined, { signal });
  }
}

/** Milliseconds to wait after an error. Throws the error if a retry cannot cure it. */
function wait(error: ConnectError, pause: number): number {
  const [info] = error.findDetails(ErrorInfoSchema);
  if (info?.domain === "outrider.dev" && FINAL.includes(info.reason)) throw error;
  const [retry] = error.findDetails(RetryInfoSchema);
  return retry?.retryDelay ? durationMs(retry.retryDelay) : pause * (0.5 + Math.random() / 2);
}
