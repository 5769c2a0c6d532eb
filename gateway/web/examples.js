// Two examples: a drafter joins or is lost while a text is generated. Only the speed changes.

import { complete } from "./completion.js";
import { Output, stepCount } from "./output.js";
import { run } from "./race.js";

// Enough tokens to start a drafter meanwhile. Together with the prompt and DRAFTED_TOKENS, they fit
// into the bundled model's context.
const WAITING_TOKENS = 1400;
const DRAFTED_TOKENS = 400;
const TOKENS = 480;
// `outrider serve` restarts a lost drafter within seconds; without it, a drafter may stay away.
const MOST_AWAY_MS = 120_000;
// The prompt repeats this method, so that an n-gram drafter has something to guess.
const METHOD = `    def get(self, key):
        if key in self.items:
            return self.items[key]
        return None

`;
const PROMPT = `class Cache:\n${METHOD}\nclass Store:\n${METHOD}\nclass Table:\n`;
// Drafters choose their ids. The page puts ids and the verifier's address into shell commands and
// patterns, and these characters are safe in both.
const SAFE = /^[A-Za-z0-9_][A-Za-z0-9_.:-]{0,99}$/;
const PLAIN = { enabled: false };
const TITLES = { join: "a drafter joins", leave: "a drafter is lost" };

export class Example {
  /** `kind` is "join" or "leave". `request` returns a prompt's request with the form's settings. */
  constructor(kind, request, timeline) {
    this.kind = kind;
    this.request = request;
    this.timeline = timeline;
    const card = document.getElementById(`example-${kind}`);
    this.commands = card.querySelector(".commands");
    this.button = card.querySelector(".start");
    this.outcome = card.querySelector(".outcome");
    this.output = null;
    this.happening = null;
    this.stop = null;
    this.button.onclick = () => this.stop ? this.stop.abort() : this.#start();
  }

  /** Show the commands with the addresses of this stack. */
  explain(readiness) {
    const verifier = readiness.verifiers[0];
    // A gateway with keys shows its processes only to operators.
    if (!verifier) return;
    const commands = this.kind === "join" ? joining(verifier) : leaving(verifier);
    const text = JSON.stringify(commands);
    if (this.commands.dataset.shown === text) return;
    this.commands.dataset.shown = text;
    this.commands.replaceChildren(...commands.map(([where, line]) => command(where, line)));
  }

  /** Continue if the example waits for this change of a drafter: joined, left or lost. */
  onChange(drafter, change) {
    if (!this.output) return;
    const isJoined = change === "joined";
    if (!this.happening && isJoined === (this.kind === "join")) {
      const at = this.output.tokens.length;
      this.happening = { id: drafter.id, words: isJoined ? "joined" : "was lost", at };
      this.happening.since = performance.now();
      this.#say(this.kind === "join" ? "It drafts the rest." : "The text continues.");
      this.onHappening?.();
    } else if (isJoined && drafter.id === this.happening?.id && this.kind === "leave") {
      this.happening.back = (performance.now() - this.happening.since) / 1000;
      this.#say(this.#back());
    }
  }

  async #start() {
    this.stop = new AbortController();
    this.button.textContent = "Stop";
    this.happening = null;
    this.timeline.begin();
    const place = document.getElementById("example-output");
    place.replaceChildren();
    this.output = new Output(place, TITLES[this.kind]);
    try {
      await (this.kind === "join" ? this.#join() : this.#leave());
    } catch (error) {
      this.outcome.textContent = error.name === "AbortError" ? "Stopped." : error.message;
    } finally {
      this.button.textContent = "Start the text";
      this.stop = null;
      this.output = null;
      this.onHappening = null;
    }
  }

  /** Generate without drafts until a drafter joins, then continue with only that drafter. */
  async #join() {
    this.outcome.textContent = "Writing without drafts; waiting for a drafter to join.";
    const first = new AbortController();
    const joined = new Promise((resolve, reject) => {
      this.onHappening = resolve;
      this.stop.signal.addEventListener("abort", () => reject(this.stop.signal.reason));
    });
    joined.finally(() => first.abort()).catch(() => {});
    const waiting = { maxTokens: WAITING_TOKENS, speculation: PLAIN };
    await this.#write(waiting, first.signal).catch((error) => {
      if (!this.happening) throw error;
    });
    if (!this.happening) {
      this.outcome.textContent =
        "Written without drafts. The text continues when a drafter joins.";
    }
    await joined;
    const before = this.output.text;
    const rest = { prompt: PROMPT + before, maxTokens: DRAFTED_TOKENS };
    await this.#write({ ...rest, speculation: { drafter_id: this.happening.id } });
    const verdict = await this.#compare(rest, this.output.text.slice(before.length));
    const after = this.output.tokens.slice(-DRAFTED_TOKENS);
    const own = after.filter((token) => token.source === "accepted").length;
    const share = Math.round(100 * own / after.length);
    const steps = stepCount(after);
    const saved = `${steps} steps of the model instead of ${after.length}`;
    const part = `${share} % of the next ${after.length} tokens are its guesses`;
    this.#say(`${part}: ${saved}. ${verdict}`);
  }

  /** Generate the same text again and again, until a lost drafter is back or stays away. */
  async #leave() {
    this.outcome.textContent = "Writing; waiting for a drafter to be lost.";
    const texts = [];
    let wasBack = false;
    do {
      wasBack = this.happening?.back !== undefined;
      this.output.clear();
      await this.#write({ maxTokens: TOKENS, speculation: {} });
      texts.push(this.output.text);
    } while (!wasBack && !this.#staysAway());
    const verdict = await this.#compare({ maxTokens: TOKENS }, ...texts);
    this.#say(`${this.#back()} ${verdict}`);
  }

  #staysAway() {
    const { since, back } = this.happening ?? {};
    return since && back === undefined && performance.now() - since > MOST_AWAY_MS;
  }

  #back() {
    const { back } = this.happening;
    return back === undefined ? "It stayed away." : `It was back after ${back.toFixed(1)} s.`;
  }

  async #write(change, signal = this.stop.signal) {
    const either = AbortSignal.any([signal, this.stop.signal]);
    await run({ ...this.#common(), ...change }, this.output, this.timeline, either);
  }

  /** Repeat the request with plain decoding. Returns a sentence on whether the texts agree. */
  async #compare(change, ...texts) {
    this.#say("Comparing with plain decoding.");
    let plain = "";
    const take = (tokens) => tokens.forEach((token) => { plain += token.text; });
    await complete({ ...this.#common(), ...change, speculation: PLAIN }, take, this.stop.signal);
    const same = texts.every((text) => text === plain) ? "the same" : "another";
    return `Plain decoding gives ${same} text.`;
  }

  #common() {
    return { ...this.request(PROMPT, "completion"), temperature: 0, ignoreEnd: true };
  }

  #say(sentence) {
    const { id, words, at } = this.happening;
    this.outcome.textContent = `${id} ${words} after ${at} tokens. ${sentence}`;
  }
}

/** The commands that add a drafter, as [where, line] pairs. */
function joining(verifier) {
  const connected = (verifier.drafters ?? []).filter((drafter) => drafter.connected);
  const taken = connected.map((drafter) => drafter.id);
  let id = "ngram-new";
  for (let i = 2; taken.includes(id); i += 1) id = `ngram-new-${i}`;
  const address = SAFE.test(verifier.address) ? verifier.address : "HOST:PORT";
  const flags = `--verifier ${address} --family ngram --id ${id}`;
  return [
    ["with outrider serve, in its directory", `.venv/bin/outrider drafter ${flags}`],
    ["with Compose, in the repository", "compose/compose.sh up -d --scale drafter-ngram=3"],
  ];
}

/** The commands that kill a drafter, as [where, line] pairs. The verifier's address in the pattern
 *  protects the drafters of other stacks. */
function leaving(verifier) {
  const connected = (verifier.drafters ?? []).filter((drafter) => drafter.connected);
  const safe = connected.filter((drafter) => SAFE.test(drafter.id));
  // A drafter without a model to load is back soon.
  const victim = safe.find((drafter) => drafter.family === "ngram") ?? safe[0];
  const compose = "with Compose; docker ps lists the containers";
  const commands = [[compose, "docker kill CONTAINER"]];
  if (!victim || !SAFE.test(verifier.address)) return commands;
  const [address, id] = [verifier.address, victim.id].map((text) => text.replaceAll(".", "\\."));
  const line = `pkill -KILL -f -- '--verifier ${address} .*--id ${id}( |$)'`;
  const serve = `with outrider serve: kills ${victim.id} of this stack only; serve restarts it`;
  return [[serve, line], ...commands];
}

function command(where, line) {
  const row = document.createElement("div");
  row.className = "command";
  row.innerHTML = `<p></p><pre tabindex="0"><code></code></pre><button type="button">Copy</button>`;
  const [label, pre, button] = row.children;
  label.textContent = where;
  pre.firstElementChild.textContent = line;
  button.setAttribute("aria-label", `Copy the command ${where}`);
  button.onclick = async () => {
    getSelection().selectAllChildren(pre.firstElementChild);
    // Without TLS and from another host, there is no clipboard. The reader can copy the selection.
    await navigator.clipboard?.writeText(line);
    button.textContent = navigator.clipboard ? "Copied" : "Selected";
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  };
  return row;
}
