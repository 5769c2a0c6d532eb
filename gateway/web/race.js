// One prompt both ways: with drafters, then without. Each way has the model to itself, so that the
// times can be compared. While the model writes the second text, the page shows the first text again
// beside it, at the pace at which it came.

import { complete } from "./completion.js";
import { Output, figures, stepCount } from "./output.js";

const MAX_SEED = 2 ** 31;
export const DRAFTED = "with drafters";
export const PLAIN = "the model alone";

/**
 * @param {object} request as for `complete`
 * @param {HTMLElement} parent takes the two texts
 * @param {Timeline} timeline
 * @param {AbortSignal} signal
 * @returns {Promise<object>} ratio: how many times as fast the drafted text was; forwards: the
 *   model's forwards with drafters and without; count: the tokens of the text; different: the first
 *   position at which the texts differ, or -1
 */
export async function race(request, parent, timeline, signal) {
  // With one seed both ways sample with the same noise, so their texts can be compared.
  const asked = { ...request, seed: newSeed() };
  const [drafted, plain] = [DRAFTED, PLAIN].map((title) => new Output(parent, title));
  const alone = { ...asked, speculation: { enabled: false } };
  // This request is not measured. After it, both ways find the prompt cached and the gateway's
  // workers started.
  await complete({ ...alone, maxTokens: 1 }, () => {}, signal);
  timeline.begin();
  const arrivals = [];
  const started = performance.now();
  const fast = await run(asked, drafted, timeline, signal, (...added) => {
    arrivals.push([performance.now() - started, added]);
  });
  const again = replay(drafted, arrivals, signal);
  const [slow] = await Promise.all([run(alone, plain, timeline, signal), again]);
  return {
    ratio: slow.totalMs / fast.totalMs,
    forwards: [stepCount(drafted.tokens), stepCount(plain.tokens)],
    count: plain.tokens.length,
    different: firstDifference(drafted.tokens, plain.tokens),
  };
}

/** Write one text into an output, and its forwards into the timeline. Returns the statistics. */
export async function run(request, output, timeline, signal, onTokens = () => {}) {
  const sequence = timeline.sequence(output.title);
  const started = performance.now();
  try {
    const statistics = await complete(request, (tokens, calls) => {
      output.add(tokens, calls);
      sequence.add(tokens);
      output.tick(performance.now() - started);
      onTokens(tokens, calls);
    }, signal);
    output.show(figures(statistics, output.tokens), statistics.paused);
    return statistics;
  } finally {
    sequence.end();
  }
}

export function newSeed() {
  return Math.floor(Math.random() * MAX_SEED);
}

async function replay(output, arrivals, signal) {
  const started = performance.now();
  output.clear();
  for (const [at, added] of arrivals) {
    const wait = at - (performance.now() - started);
    if (wait > 0) await new Promise((resolve) => setTimeout(resolve, wait));
    if (signal.aborted) return;
    output.add(...added);
    output.tick(at);
  }
}

function firstDifference(some, others) {
  const count = Math.max(some.length, others.length);
  for (let i = 0; i < count; i += 1) {
    if (some[i]?.text !== others[i]?.text) return i;
  }
  return -1;
}
