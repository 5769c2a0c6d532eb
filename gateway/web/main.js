// The page: connects the result, form, chat, charts, map and examples.

import { Charts } from "./charts.js";
import { Chat } from "./chat.js";
import { Example } from "./examples.js";
import { Output } from "./output.js";
import { Processes } from "./processes.js";
import { DRAFTED, PLAIN, newSeed, race, run } from "./race.js";
import { Timeline } from "./timeline.js";

const PRESETS = {
  "JSON (chat)": {
    prompt: "List the items as JSON: Order: 3 x lamp at 12.5, 1 x desk at 80, 2 x rope at 7.25.",
    endpoint: "chat",
  },
  rewriting: {
    prompt: repeat(`def visit_Name(self, node):
    if node.id in self.names:
        return self.names[node.id]
    self.names[node.id] = node
    return node
`),
  },
  classes: {
    prompt: repeat(`class Cache:
    def get(self, key):
        if key in self.items:
            return self.items[key]
        return None
`),
  },
  code: {
    prompt: `class Queue:
    def __init__(self, maxsize=0):
        self.maxsize = maxsize

    def put(self, item):
`,
  },
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

function repeat(source) {
  return `${source}\n\n${source}\n\n${source.split("\n")[0]}\n`;
}

/** The request that the form describes, or that of another prompt with the form's settings. */
function request(prompt = $("prompt").value, endpoint = $("endpoint").value) {
  return {
    model,
    prompt,
    messages: endpoint === "chat" ? [{ role: "user", content: prompt }] : undefined,
    maxTokens: $("tokens").valueAsNumber,
    temperature: $("temperature").valueAsNumber,
    seed: newSeed(),
    speculation: JSON.parse($("drafter").value || "{}"),
  };
}

/** Show what `write` writes into the outputs, in place of what was there. */
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
  $("asked").textContent = "four of the examples below";
  const started = performance.now();
  const all = await Promise.all(presets.map(([name, { prompt, endpoint = "completion" }]) =>
    run(request(prompt, endpoint), new Output($("outputs"), name), timeline, signal)));
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

function choose({ prompt, endpoint = "completion" }) {
  [$("prompt").value, $("endpoint").value] = [prompt, endpoint];
  showPrompt();
}

function showPrompt() {
  $("asked").textContent = $("prompt").value;
}

for (const [name, preset] of Object.entries(PRESETS)) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = name;
  button.onclick = () => choose(preset);
  $("form").querySelector(".presets").append(button);
}
choose(PRESETS["JSON (chat)"]);
$("prompt").oninput = showPrompt;
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
