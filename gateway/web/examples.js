// Two examples of what a drafter's coming and going does to a text that is being written: nothing but its speed.

import { complete } from "./completion.js";
import { Output, figures } from "./output.js";

const TOKENS = 480;
const PROMPT = "class Cache:\n    def __init__(self, size):\n        self.size = size\n        self.items = {}\n\n    def get(self, key):\n";

export class Example {
  /** `kind` is "join" or "leave"; `request` gives the model's name. */
  constructor(kind, request) {
    this.kind = kind;
    this.request = request;
    const card = document.getElementById(`example-${kind}`);
    [this.code, this.button, this.outcome] = ["code", "button", ".outcome"].map((part) => card.querySelector(part));
    this.output = null;
    this.happening = null;
    this.stop = null;
    this.button.onclick = () => this.stop ? this.stop.abort() : this.#start();
  }

  /** Put the addresses of this very stack into the commands. */
  explain(readiness) {
    const verifier = readiness.verifiers[0];
    const victim = (verifier.drafters ?? []).find((drafter) => drafter.connected);
    const [serve, compose] = this.kind === "join"
      ? [`.venv/bin/python -m drafter_svc --family ngram --id ngram-new --verifier ${verifier.address}`, "docker compose up -d --scale drafter-ngram=3"]
      : [`pkill -KILL -f -- '--id ${victim?.id ?? "DRAFTER"}'`, "docker kill CONTAINER   # docker compose ps lists them"];
    const text = `# beside outrider serve\n${serve}\n\n# with docker compose\n${compose}`;
    if (this.code.textContent !== text) this.code.textContent = text;
  }

  /** A drafter joined, left or was lost. */
  heard(drafter, what) {
    if (this.output && !this.happening && (what === "joined") === (this.kind === "join")) {
      this.happening = { id: drafter.id, what, at: this.output.tokens.length };
    }
  }

  async #start() {
    this.stop = new AbortController();
    this.button.textContent = "Stop";
    this.happening = null;
    document.getElementById("outputs").replaceChildren();
    document.getElementById("verdict").textContent = "";
    this.output = new Output(document.getElementById("outputs"), this.kind === "join" ? "a drafter joins" : "a drafter is lost");
    const common = { ...this.request(), endpoint: "completions", prompt: PROMPT, maxTokens: TOKENS, temperature: 0, ignoreEnd: true };
    try {
      let text = null;
      do {
        // Again and again until something happened, each time from the beginning.
        this.output.tokens.length = 0;
        this.output.pane.replaceChildren();
        this.outcome.textContent = this.kind === "join" ? "Writing; waiting for a drafter to join." : "Writing; waiting for a drafter to be lost.";
        const statistics = await complete({ ...common, speculation: {} }, (tokens) => this.output.add(tokens), this.stop.signal);
        this.output.show(figures(statistics));
        text = this.output.text;
      } while (!this.happening);
      await this.#conclude(common, text);
    } catch (error) {
      this.outcome.textContent = error.name === "AbortError" ? "Stopped." : error.message;
    } finally {
      this.button.textContent = "Start the text";
      this.stop = null;
      this.output = null;
    }
  }

  async #conclude(common, text) {
    let plain = "";
    await complete({ ...common, speculation: { enabled: false } }, (tokens) => tokens.forEach((token) => { plain += token.text; }), this.stop.signal);
    const { id, what, at } = this.happening;
    const after = this.output.tokens.slice(at);
    const own = after.filter((token) => token.source === "accepted" && token.drafter === id).length;
    const share = after.length ? Math.round(100 * own / after.length) : 0;
    const then = this.kind === "join" ? `${share} % of the ${after.length} tokens since are its guesses` : `${after.length} more tokens came without it`;
    const same = plain === text ? "The text is the one of plain decoding." : "The text differs from plain decoding.";
    this.outcome.textContent = `${id} ${what === "joined" ? "joined" : "was lost"} after ${at} tokens; ${then}. ${same}`;
  }
}
