// The page: connects the result, form, chat, charts, map and examples.

import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { Example } from "./examples.js";
import { Output } from "./output.js";
import { Processes } from "./processes.js";
import { DRAFTED, PLAIN, newSeed, race, run } from "./race.js";
import { Timeline } from "./timeline.js";

const ITEM = {
  name: { type: "string" }, quantity: { type: "integer" }, price: { type: "number" },
};
const ORDER = object({ items: { type: "array", items: object(ITEM) } });
const METHOD = `def visit_Name(self, node):
    if node.id in self.names:
        return self.names[node.id]
    self.names[node.id] = node
    return node
`;
const PRESETS = {
  "JSON by a schema": {
    prompt: "List the items as JSON. Order: 3 lamps at 12.5, 1 table at 80, 2 ropes at 7.25.",
    endpoint: "chat",
    schema: JSON.stringify(ORDER, null, 1),
  },
  summary: {
    prompt: "Summarize in one sentence: The meeting of the garden club was moved from Monday to"
      + " Thursday at seven in the evening, because the hall is being painted. Members should bring"
      + " seeds for the exchange. Coffee and cake will be served after the talk about roses.",
    endpoint: "chat",
  },
  explanation: { prompt: "What is photosynthesis?", endpoint: "chat" },
  "code, continued": { prompt: `${METHOD}\n\n${METHOD}\n\n${METHOD.split("\n")[0]}\n` },
};
const MOST_REASON = 160;

const $ = (id) => document.getElementById(id);
const charts = new Charts();
const timeline = new Timeline($("timeline"));
const exampleTimeline = new Timeline($("example-timeline"));
const examples = ["join", "leave"].map((kind) => new Example(kind, request, exampleTimeline));
const processes = new Processes((...change) => {
  for (const example of examples) example.onChange(...change);
});
new Chat($("chat"), request);
let model = "";
let running = null;

function object(properties) {
  return {
    type: "object",
    properties,
    required: Object.keys(properties),
    additionalProperties: false,
  };
}

/** The request that the form describes, or a request with its settings and another prompt. */
function request(
  prompt = $("prompt").value, endpoint = $("endpoint").value, schema = $("schema").value,
) {
  const isChat = endpoint === "chat";
  return {
    model,
    prompt,
    messages: isChat ? [{ role: "user", content: prompt }] : undefined,
    more: isChat && schema.trim() ? { response_format: format(schema) } : undefined,
    maxTokens: $("tokens").valueAsNumber,
    temperature: $("temperature").valueAsNumber,
    seed: newSeed(),
    speculation: JSON.parse($("drafter").value || "{}"),
  };
}

/** The `response_format` for a schema, which is given as text. */
function format(text) {
  try {
    return { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(text) } };
  } catch (error) {
    throw new Error(`The schema is not JSON: ${error.message}`);
  }
}

/** Clear the outputs, and show what `write` writes into them. */
async function show(write) {
  running?.abort();
  const stop = running = new AbortController();
  $("stop").disabled = false;
  $("problem").hidden = true;
  $("outputs").replaceChildren();
  tell("–", "–", "is the text the same?", "–");
  timeline.begin();
  showPrompt();
  scrollTo(0, 0);
  try {
    await write(stop.signal);
  } catch (error) {
    stop.abort();
    if (error.name !== "AbortError") {
      $("problem").textContent = error.message;
      $("problem").hidden = false;
    }
  } finally {
    if (running === stop) $("stop").disabled = true;
  }
}

async function bothWays(signal) {
  const { ratio, forwards, count, different } =
    await race(request(), $("outputs"), timeline, signal);
  const isSame = different < 0;
  tell(
    Number.isFinite(ratio) ? `${ratio.toFixed(1)}\u2009×` : "–",
    isSame ? "identical text" : "the texts differ",
    isSame ? `${count} of ${count} tokens compared` : `at token ${different + 1} of ${count}`,
    `${forwards[0]} instead of ${forwards[1]}`,
  );
  $("same").className = isSame ? "good" : "bad";
}

async function drafted(signal) {
  await run(request(), new Output($("outputs"), DRAFTED), timeline, signal);
}

async function several(signal) {
  const presets = Object.entries(PRESETS);
  $("asked").textContent = "the four examples below";
  const started = performance.now();
  const all = await Promise.all(presets.map(([name, preset]) => {
    const { prompt, endpoint = "completion", schema = "" } = preset;
    const output = new Output($("outputs"), name);
    return run(request(prompt, endpoint, schema), output, timeline, signal);
  }));
  const seconds = (performance.now() - started) / 1000;
  const tokens = all.reduce((sum, statistics) => sum + statistics.tokens, 0);
  const rate = `${(tokens / seconds).toFixed(0)} tokens a second`;
  tell("", rate, `${all.length} texts at once in ${seconds.toFixed(1)} s`, "");
}

function tell(factor, same, compared, forwards) {
  const texts = { factor, same, compared, forwards };
  for (const [id, text] of Object.entries(texts)) $(id).textContent = text;
  $("same").className = "";
}

function listen() {
  const source = new EventSource("events");
  source.onmessage = (message) => {
    const state = JSON.parse(message.data);
    model = state.models[0] ?? "";
    $("model").textContent = model;
    say(state.readiness.status, state.readiness.detail);
    charts.push(state.seconds, state.activity);
    processes.push(state.readiness, state.version);
    for (const shown of [timeline, exampleTimeline]) shown.push(state.readiness);
    offerDrafters(state.readiness);
    for (const example of examples) example.explain(state.readiness);
  };
  source.onerror = () => {
    say("no answer", "the gateway does not answer");
    processes.lost();
    // After an answer other than 200, a browser does not reconnect by itself.
    if (source.readyState === EventSource.CLOSED) setTimeout(listen, 2000);
  };
}

/** Show the gateway's status, and its reason if there is one. */
function say(word, reason) {
  $("status").className = `status ${{ ready: "good", degraded: "fair" }[word] ?? "bad"}`;
  const status = $("status").lastElementChild;
  if (status.textContent !== word) status.textContent = word;
  const text = reason.length > MOST_REASON ? `${reason.slice(0, MOST_REASON)}…` : reason;
  if ($("reason").textContent !== text) $("reason").textContent = text;
  $("reason").hidden = !text;
}

function offerDrafters(readiness) {
  const known = readiness.verifiers.flatMap((verifier) => verifier.drafters ?? []);
  const drafters = known.filter((drafter) => drafter.connected);
  const families = new Set(drafters.map((drafter) => drafter.family));
  // Each option's value is the request's `speculation`.
  const options = [
    ["the verifier's choice", ""],
    ...[...families].map((name) => [name, JSON.stringify({ drafter_family: name })]),
    ...drafters.map(({ id }) => [id, JSON.stringify({ drafter_id: id })]),
    ["none: plain decoding", JSON.stringify({ enabled: false })],
  ];
  const values = options.map(([, value]) => value);
  const select = $("drafter");
  if ([...select.options].map((option) => option.value).join() === values.join()) return;
  const chosen = select.value;
  select.replaceChildren(...options.map(([words, value]) => new Option(words, value)));
  select.value = values.includes(chosen) ? chosen : "";
}

function choose({ prompt, endpoint = "completion", schema = "" }) {
  [$("prompt").value, $("endpoint").value, $("schema").value] = [prompt, endpoint, schema];
  showPrompt();
}

function showPrompt() {
  const isChat = $("endpoint").value === "chat";
  $("format").hidden = !isChat;
  const format = isChat && $("schema").value.trim() ? " The answer follows a JSON schema." : "";
  $("asked").textContent = $("prompt").value + format;
}

for (const [name, preset] of Object.entries(PRESETS)) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = name;
  button.onclick = () => choose(preset);
  $("form").querySelector(".presets").append(button);
}
choose(PRESETS["JSON by a schema"]);
for (const id of ["prompt", "endpoint", "schema"]) $(id).oninput = showPrompt;
for (const title of [DRAFTED, PLAIN]) new Output($("outputs"), title);
$("form").onsubmit = (event) => {
  event.preventDefault();
  show(bothWays);
};
$("run").onclick = () => {
  if ($("form").reportValidity()) show(drafted);
};
$("several").onclick = () => {
  if ($("form").reportValidity()) show(several);
};
$("stop").onclick = () => running?.abort();
$("theme").onclick = () => {
  const root = document.documentElement;
  const preferred = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  root.dataset.theme = (root.dataset.theme ?? preferred) === "dark" ? "light" : "dark";
  charts.recolor();
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => charts.recolor());
listen();
