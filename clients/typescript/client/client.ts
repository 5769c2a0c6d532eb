// Calls Outrider's gRPC services from TypeScript.
// Usage: client.ts GATEWAY VERIFIER UNAVAILABLE [CERTS] (host:port each)
// UNAVAILABLE is a gateway that has no verifier. With CERTS, a folder that `outrider certs` made,
// the client uses mutual TLS as an operator.
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
import { durationMs } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import {
  BadRequestSchema,
  ErrorInfoSchema,
  RetryInfoSchema,
} from "./build/gen/google/rpc/error_details_pb.ts";
import { Health, HealthCheckResponse_ServingStatus } from "./build/gen/grpc/health/v1/health_pb.ts";
import { ServerReflection } from "./build/gen/grpc/reflection/v1/reflection_pb.ts";
import { GenerationService } from "./build/gen/outrider/v1/generation_pb.ts";
import { VerifierService } from "./build/gen/outrider/v1/verifier_pb.ts";

type Change = { maxTokens?: number; model?: string; sampling?: { temperature: number } };

const certs = process.argv[5];

/** With TLS the server's certificate must have `servername`, or by default the host's name. */
function dial(address: string, servername?: string) {
  if (certs === undefined) return createGrpcTransport({ baseUrl: `http://${address}` });
  const [ca, cert, key] = ["ca.pem", "operator.pem", "operator.key"].map((file) => readFileSync(`${certs}/${file}`));
  return createGrpcTransport({ baseUrl: `https://${address}`, nodeOptions: { ca, cert, key, servername } });
}

const [gateway, unavailable] = [dial(process.argv[2]), dial(process.argv[4])];
// A verifier's certificate has the name verifier.outrider, not that of its host.
const verifier = dial(process.argv[3], "verifier.outrider");
const text = createClient(GenerationService, gateway);

function request(change: Change = {}) {
  const input = { case: "prompt" as const, value: "def main(" };
  return { input, maxTokens: 16, sampling: { temperature: 0 }, ...change };
}

function check(name: string, ...facts: boolean[]): void {
  if (!facts.every(Boolean)) throw new Error(`${name} failed: ${facts}`);
  console.log("ok", name);
}

/** All messages of a stream. */
async function all<T>(stream: AsyncIterable<T>): Promise<T[]> {
  const parts: T[] = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

/** The failure of a call: its status, and the details that every Outrider error has. */
async function failure(call: Promise<unknown>) {
  const error = await call.then(() => undefined, ConnectError.from);
  if (error === undefined) throw new Error("the call did not fail");
  const [info] = error.findDetails(ErrorInfoSchema);
  const [bad] = error.findDetails(BadRequestSchema);
  const [retry] = error.findDetails(RetryInfoSchema);
  const field = bad?.fieldViolations[0]?.field;
  return { code: error.code, info, field, retryDelay: retry?.retryDelay };
}

/** A call's result, after at most `tries` tries, as the error's retry rule and RetryInfo say. */
async function patiently<T>(call: () => Promise<T>, tries: number): Promise<T> {
  for (let backoff = 100; ; backoff = Math.min(2 * backoff, 2000)) {
    try {
      return await call();
    } catch (cause) {
      const error = ConnectError.from(cause);
      const rule = error.findDetails(ErrorInfoSchema)[0]?.metadata.retry;
      if (--tries === 0 || rule === undefined || rule === "never") throw error;
      const delay = error.findDetails(RetryInfoSchema)[0]?.retryDelay;
      await sleep(delay ? durationMs(delay) : backoff);
    }
  }
}

// Stream a text. The last message has the token counts and the finish reason.
const parts = await all(text.generateText(request()));
const count = parts.at(-1)?.usage?.completionTokenCount;
check("stream", parts.some((part) => part.text !== ""), count === 16);

// Cancel a call. The server frees everything that the call held.
const abort = new AbortController();
const cancelled = (async () => {
  const endless = text.generateText(request({ maxTokens: 1000 }), { signal: abort.signal });
  for await (const _ of endless) abort.abort();
})();
check("cancel", (await failure(cancelled)).code === Code.Canceled);

// Set a deadline. The server stops at it as well.
const late = await failure(all(text.generateText(request({ maxTokens: 1900 }), { timeoutMs: 50 })));
check("deadline", late.code === Code.DeadlineExceeded);

// Send bad input. The error has the reason and the field at fault.
const hot = await failure(all(text.generateText(request({ sampling: { temperature: 9 } }))));
check(
  "bad-value",
  hot.code === Code.InvalidArgument,
  hot.info.domain === "outrider.dev" && hot.info.reason === "INVALID_VALUE",
  hot.field === "sampling.temperature",
);
const unknown = await failure(all(text.generateText(request({ model: "no-such-model" }))));
check("unknown-model", unknown.code === Code.NotFound, unknown.info.reason === "MODEL_NOT_FOUND");

// Call a gateway without a verifier twice. RetryInfo says when to try again.
const lonely = createClient(GenerationService, unavailable);
const began = performance.now();
const gone = await failure(patiently(() => all(lonely.generateText(request())), 2));
const delay = gone.retryDelay ? durationMs(gone.retryDelay) : 0;
const waited = performance.now() - began;
check("unavailable", gone.code === Code.Unavailable, delay > 0, waited >= delay);

// Use gRPC's health and reflection services.
const service = "outrider.v1.GenerationService";
const health = await createClient(Health, gateway).check({ service });
check("health", health.status === HealthCheckResponse_ServingStatus.SERVING);
const asked = async function* () {
  yield { messageRequest: { case: "listServices" as const, value: "" } };
};
const [listed] = await all(createClient(ServerReflection, gateway).serverReflectionInfo(asked()));
const answer = listed.messageResponse;
const services = answer.case === "listServicesResponse" ? answer.value.service : [];
check("reflection", services.some((listed) => listed.name === service));

// Generate token ids at the verifier. A seed has 64 bits, so it is a bigint.
const sampling = { seed: 2n ** 64n - 1n };
const ids = { promptTokenIds: [1, 2, 3], maxTokens: 8, ignoreEos: true, sampling };
const tokens = createClient(VerifierService, verifier);
const draw = async () => (await all(tokens.generateTokens(ids))).flatMap((part) => part.tokenIds);
const drawn = [await draw(), await draw()];
check("tokens", drawn[0].length === 8, drawn[0].join() === drawn[1].join());
process.exit(0); // Do not wait for idle connections.
