// One streamed completion over the OpenAI API: its tokens with their sources, its tool calls, and
// its statistics.

/**
 * @param {object} request model, maxTokens, temperature, seed, speculation, ignoreEnd; the prompt
 *   of a completion, or a chat's messages and `more`, further fields of its body
 * @param {(tokens: {text: string, source: string, drafter: string | null, part?: string | null}[],
 *   calls: object[]) => void} onTokens takes new tokens, and the new pieces of calls
 * @param {AbortSignal} signal
 * @returns {Promise<object>} tokens, totalMs, firstMs, tokensPerSecond; content: the text
 *   of a chat's answer without its thought and calls; speculative: vLLM's speculative_decoding, or
 *   null if no draft was verified; paused: why most steps had no draft, or null
 */
export async function complete(request, onTokens, signal) {
  const started = performance.now();
  const response = await fetch(request.messages ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(bodyOf(request)),
    signal,
  });
  if (!response.ok) throw new Error(await reason(response));
  let first = 0, last = started, content = "", final = null;
  for await (const event of events(response.body)) {
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices[0];
    const tokens = choice?.speculation?.tokens ?? [];
    if (tokens.length) {
      last = performance.now();
      first ||= last;
    }
    content += choice?.delta?.content ?? "";
    const calls = choice?.delta?.tool_calls ?? [];
    if (tokens.length || calls.length) onTokens(tokens, calls);
    if (event.usage) final = event;
  }
  if (!final) throw new Error("The stream ended before the answer was complete.");
  const count = final.usage.completion_tokens;
  const tokenMs = count > 1 ? (last - first) / (count - 1) : 0;
  return {
    tokens: count,
    content,
    totalMs: last - started,
    firstMs: (first || last) - started,
    tokensPerSecond: tokenMs ? 1000 / tokenMs : 0,
    speculative: final.metrics?.speculative_decoding ?? null,
    paused: final.speculation?.paused ?? null,
  };
}

function bodyOf(request) {
  const { prompt, messages, more, maxTokens } = request;
  const input = messages
    ? { messages, ...more, max_completion_tokens: maxTokens }
    : { prompt, max_tokens: maxTokens };
  return {
    ...input,
    model: request.model,
    temperature: request.temperature,
    seed: request.seed,
    ignore_eos: request.ignoreEnd ?? false,
    stream: true,
    stream_options: { include_usage: true },
    speculation: { ...request.speculation, tokens: true, metrics: true },
  };
}

async function reason(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The gateway answered ${response.status} ${response.statusText}.`;
  }
}

/** The JSON of each server-sent event up to [DONE]. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.slice("data: ".length);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
