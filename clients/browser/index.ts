// Streams text from Outrider's gateway into a page, over Connect or gRPC-Web. See README.md.
import { durationMs } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createConnectTransport, createGrpcWebTransport } from "@connectrpc/connect-web";
import {
  BadRequestSchema,
  ErrorInfoSchema,
  RetryInfoSchema,
} from "./gen/google/rpc/error_details_pb";
import { FinishReason } from "./gen/outrider/v1/common_pb";
import { GenerationService } from "./gen/outrider/v1/generation_pb";

const form = document.querySelector("form")!;
const [run, cancel] = form.querySelectorAll("button");
const text = document.querySelector("pre")!;
const status = document.querySelector("[role=status]")!;
let call = new AbortController();

form.addEventListener("submit", (event) => {
  event.preventDefault();
  void generate(new FormData(form));
});
// Aborting the call also ends it at the gateway, which frees what the sequence held.
cancel.addEventListener("click", () => call.abort());

async function generate(settings: FormData): Promise<void> {
  const options = { baseUrl: String(settings.get("gateway")) };
  // The protocols differ only here. Connect sends JSON, which a browser's network tab can show;
  // `useBinaryFormat` sends protobuf instead.
  const isConnect = settings.get("protocol") === "Connect";
  const transport = isConnect ? createConnectTransport(options) : createGrpcWebTransport(options);
  const client = createClient(GenerationService, transport);
  call = new AbortController();
  [run.disabled, cancel.disabled] = [true, false];
  [text.textContent, status.textContent] = ["", "running"];
  try {
    const request = {
      input: { case: "prompt" as const, value: String(settings.get("prompt")) },
      maxTokens: Number(settings.get("tokens")),
      sampling: { temperature: 0 },
    };
    const deadline = { signal: call.signal, timeoutMs: Number(settings.get("deadline")) };
    for await (const response of client.generateText(request, deadline)) {
      text.textContent += response.text;
      // Only the last message has a finish reason and the token counts.
      if (response.finishReason !== FinishReason.UNSPECIFIED) {
        const count = response.usage?.completionTokenCount;
        status.textContent = `${FinishReason[response.finishReason]}: ${count} tokens`;
      }
    }
  } catch (cause) {
    status.textContent = explain(ConnectError.from(cause));
  } finally {
    [run.disabled, cancel.disabled] = [false, true];
  }
}

/** Describes an error: its status, its reason, the field at fault, and when to try again. */
function explain(error: ConnectError): string {
  const lines = [`${Code[error.code]}: ${error.rawMessage}`];
  for (const { reason } of error.findDetails(ErrorInfoSchema)) lines.push(`reason: ${reason}`);
  for (const { fieldViolations } of error.findDetails(BadRequestSchema)) {
    for (const { field } of fieldViolations) lines.push(`field: ${field}`);
  }
  for (const { retryDelay } of error.findDetails(RetryInfoSchema)) {
    if (retryDelay !== undefined) lines.push(`try again in ${durationMs(retryDelay)} ms`);
  }
  return lines.join("\n");
}
