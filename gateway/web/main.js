// The page: connects the form, outputs, charts, map and examples.

import { Charts } from "./charts.js";
import { complete } from "./completion.js";
import { Example } from "./examples.js";
import { Output, figures } from "./output.js";
import { Processes } from "./processes.js";
import { TOOLS } from "./tools.js";

const PRESETS = {
  code: {
    prompt: `class Queue:
    def __init__(self, maxsize=0):
        self.maxsize = maxsize

    def put(self, item):
`,
  },
  rewriting: {
    prompt: repeat(`def visit_Name(self, node):
    if node.id in self.names:
        return self.names[node.id]
    self.names[node.id] = node
    return node
`),
  },
  "JSON (chat)": {
    prompt: "List the items as JSON: Order: 3 x lamp at 12.5, 1 x desk at 80, 2 x rope at 7.25.",
    endpoint: "chat/completions",
  },
  "tool call (chat)": {
    prompt: "What is the weather in Oslo?",
    endpoint: "chat/completions",
    toolChoice: "required",
  },
};
const MAX_SEED = 2 ** 31;
const MOST_REASON = 160;
const SPECULATIVE = ["with speculation", {}];
const PLAIN = ["plain decoding", { speculation: { enabled: false } }];

const $ = (id) => document.getElementById(id);
const charts = new Charts();
const examples = [new Example("join", request), new Example("leave", request)];
const processes = new Processes((...change) => {
  for (const example of examples) example.onChange(...change);
});
let model = "";
let running = null;

function repeat(source) {
  return `${source}\n\n${source}\n\n${source.split("\n")[0]}\n`;
}

/** The request that the form describes. */
function request() {
  return {
    endpoint: $("endpoint").value,
    model,
    prompt: $("prompt").value,
    maxTokens: $("tokens").valueAsNumber,
    temperature: $("temperature").valueAsNumber,
    toolChoice: $("tools").value,
    speculation: JSON.parse($("drafter").value || "{}"),
  };
}

async function run(titles) {
  running?.abort();
  const stop = running = new AbortController();
  $("stop").disabled = false;
  $("problem").hidden = true;
  $("verdict").textContent = "";
  $("outputs").replaceChildren();
  // With one seed all outputs sample with the same noise, so their texts can be compared.
  const seed = Math.floor(Math.random() * MAX_SEED);
  const outputs = titles.map(([title]) => new Output($("outputs"), title));
  $("outputs").scrollIntoView({ block: "nearest" });
  try {
    const jobs = titles.map(async ([, change], i) => {
      const asked = { ...request(), seed, ...change };
      const take = (...added) => outputs[i].add(...added);
      const statistics = await complete(asked, take, stop.signal);
      outputs[i].show(figures(statistics, outputs[i].tokens), statistics.paused);
      return statistics;
    });
    const found = await Promise.all(jobs);
    if (outputs.length > 1) $("verdict").textContent = comparison(outputs, found);
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

function comparison([speculative, plain], [fast, slow]) {
  const same = speculative.text === plain.text ? "Both texts are identical." : "The texts differ.";
  // Compare total times: on a busy machine a browser may get a whole text at once.
  if (!fast.totalMs) return same;
  const ratio = (slow.totalMs / fast.totalMs).toFixed(2);
  return `${same} With speculation it was ${ratio} times as fast.`;
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

/** Show the choice of tools for chats, and the tools if they may be called. */
function showTools() {
  const isChat = $("endpoint").value !== "completions";
  $("tools").parentElement.hidden = !isChat;
  $("offered").hidden = !isChat || $("tools").value === "none";
}

for (const [name, preset] of Object.entries(PRESETS)) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = name;
  button.onclick = () => {
    $("prompt").value = preset.prompt;
    $("endpoint").value = preset.endpoint ?? "completions";
    $("tools").value = preset.toolChoice ?? "none";
    showTools();
  };
  document.querySelector(".presets").append(button);
}
$("prompt").value = PRESETS.rewriting.prompt;
const signatures = TOOLS.map(({ function: { name, parameters } }) =>
  `${name}(${parameters.required.join(", ")})`);
$("offered").textContent = `The model may call ${signatures.join(" or ")}. Nobody runs the calls.`;
$("endpoint").onchange = $("tools").onchange = showTools;
// A browser may fill in the choices of an earlier visit.
showTools();
$("form").onsubmit = (event) => {
  event.preventDefault();
  run([SPECULATIVE, PLAIN]);
};
$("run").onclick = () => {
  if ($("form").reportValidity()) run([SPECULATIVE]);
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
