// An answer's tokens, coloured by who wrote them: its thought, its content, and its tool calls.
// The pointer and the arrow keys show the drafter.

import { author } from "./authors.js";

const SOURCES = {
  accepted: "accepted: guessed by",
  accepted_side: "side: guessed on a side branch of a draft by",
  recovered: "recovered: the target's token, in place of a guess by",
  bonus: "bonus: the target's token, after a fully accepted draft by",
  plain: "plain: the target's token, without a draft",
};
const PAUSES = {
  no_drafter: "no drafter works on this text",
  too_slow: "too few guesses would be accepted to pay for the longer steps that check them",
  low_acceptance: "too few guesses for this text are accepted",
  no_guess: "no drafter had a guess in time",
  budget: "drafting made the steps slower",
  measuring: "steps without drafts were measured",
};
// How each part of the answer is shown. All other parts are calls.
const PARTS = {
  content: "<div><pre></pre></div>",
  reasoning_content:
    `<details class="thought" open><summary>Thought</summary><pre></pre></details>`,
};
const CALL = `<div class="call"><code></code><pre></pre></div>`;
const tip = document.getElementById("tip");

export class Output {
  constructor(parent, title) {
    const article = document.createElement("article");
    article.className = "output";
    article.innerHTML = `<h3><span></span><time></time></h3>
      <div class="answer" tabindex="0" role="group"></div><dl></dl><p class="paused" hidden></p>`;
    const [heading, ...below] = article.children;
    [this.pane, this.list, this.paused] = below;
    const [name, clock] = heading.children;
    this.clock = clock;
    this.title = name.textContent = title;
    const help = "The left and right arrow keys show each token's source.";
    this.pane.setAttribute("aria-label", `${title}: text. ${help}`);
    this.tokens = [];
    this.spans = [];
    this.clear();
    this.current = -1;
    this.frame = 0;
    this.pane.addEventListener("pointerover", (event) => this.#point(event.target));
    this.pane.addEventListener("pointerleave", () => { tip.hidden = true; });
    this.pane.addEventListener("keydown", (event) => this.#key(event));
    this.pane.addEventListener("focusout", () => this.#select(-1));
    parent.append(article);
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  /** Add tokens to their parts of the answer, and pieces of calls to the calls' headings. */
  add(tokens, calls = []) {
    for (const token of tokens) {
      const span = document.createElement("span");
      span.className = `token ${token.source}`;
      if (isGuess(token)) span.classList.add(author(token.drafter));
      span.textContent = token.text;
      span.dataset.index = this.tokens.length;
      this.tokens.push(token);
      this.spans.push(span);
      this.#place(span, token.part);
    }
    for (const call of calls) {
      const { heading } = this.#part(`tool_calls[${call.index}]`);
      heading.dataset.name ??= call.function.name;
      heading.dataset.arguments = (heading.dataset.arguments ?? "") + call.function.arguments;
      heading.textContent = `${heading.dataset.name}(${heading.dataset.arguments})`;
    }
    // Scroll once a frame, since scrolling makes the browser lay out the whole text.
    this.frame ||= requestAnimationFrame(() => this.#follow());
  }

  /** Show a token in its part of the answer. A token without a part waits for the next part. */
  #place(span, part = "content") {
    // Blanks between two parts are better seen at the end of the first part.
    const isBlank = !this.waiting.length && !span.textContent.trim();
    if (part === null && isBlank && this.latest) {
      this.latest.append(span);
      return;
    }
    this.waiting.push(span);
    if (part === null) return;
    this.latest = this.#part(part).text;
    this.latest.append(...this.waiting);
    this.waiting = [];
  }

  /** The elements of a part of the answer: its text, and the heading of a call. */
  #part(name) {
    if (!this.parts.has(name)) {
      this.pane.insertAdjacentHTML("beforeend", PARTS[name] ?? CALL);
      const added = this.pane.lastElementChild;
      const [heading, text] = [added.querySelector("code"), added.querySelector("pre")];
      this.parts.set(name, { heading, text });
    }
    return this.parts.get(name);
  }

  /** Scroll to the end, unless the reader has scrolled back. */
  #follow() {
    this.frame = 0;
    if (this.pane.scrollTop < this.end) return;
    this.pane.scrollTop = this.pane.scrollHeight;
    this.end = this.pane.scrollTop;
  }

  clear() {
    this.tokens.length = 0;
    this.spans.length = 0;
    this.pane.replaceChildren();
    this.parts = new Map();
    // The text of the last token's part, and the tokens whose part is not known yet.
    this.latest = null;
    this.waiting = [];
    this.end = 0;
  }

  /** Show how long the answer has taken so far. */
  tick(ms) {
    this.clock.textContent = `${(ms / 1000).toFixed(2)} s`;
  }

  /** Show figures below the text, as [name, value] pairs, and why most steps had no draft. */
  show(figures, paused = null) {
    if (this.waiting.length) (this.latest ?? this.#part("content").text).append(...this.waiting);
    this.waiting = [];
    this.paused.textContent = paused ? explanation(paused) : "";
    this.paused.hidden = !paused;
    this.list.replaceChildren(...figures.map(([name, value]) => {
      const item = document.createElement("div");
      const [term, detail] = [document.createElement("dt"), document.createElement("dd")];
      [term.textContent, detail.textContent] = [name, value];
      item.append(term, detail);
      return item;
    }));
  }

  #point(target) {
    const index = target.dataset?.index;
    if (index === undefined) tip.hidden = true;
    else this.#name(Number(index), target);
  }

  #key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") this.#select(-1);
    if (!step || !this.tokens.length) return;
    event.preventDefault();
    this.#select(Math.min(Math.max(this.current + step, 0), this.tokens.length - 1));
  }

  #select(index) {
    this.spans[this.current]?.classList.remove("current");
    this.current = index;
    if (index < 0) {
      tip.hidden = true;
      return;
    }
    const span = this.spans[index];
    span.closest("details")?.setAttribute("open", "");
    span.classList.add("current");
    span.scrollIntoView({ block: "nearest" });
    this.#name(index, span);
  }

  #name(index, span) {
    const { source, drafter } = this.tokens[index];
    tip.textContent = drafter ? `${SOURCES[source]} ${drafter}` : SOURCES[source];
    tip.hidden = false;
    const [box, own] = [span.getBoundingClientRect(), tip.getBoundingClientRect()];
    tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - own.width - 4))}px`;
    tip.style.top = `${box.top > own.height + 8 ? box.top - own.height - 6 : box.bottom + 6}px`;
  }
}

/** Sentences on why most steps of a text had no draft, and the times that decide it. */
function explanation({ reason, steps, forward_seconds: forward, draft_seconds: draft }) {
  const why = PAUSES[reason] ?? reason;
  const ms = (seconds) => `${(1000 * seconds).toFixed(1)} ms`;
  const times = forward === null || draft === null ? "" :
    ` A step without a draft takes ${ms(forward)}, and the quickest draft ${ms(draft)}.`;
  return `${steps} steps had no draft: ${why}.${times}`;
}

/** The figures of a completion for `Output.show`, from its statistics and tokens. */
export function figures(statistics, tokens) {
  const known = [
    ["tokens/s", statistics.tokensPerSecond.toFixed(1)],
    ["to first token", `${statistics.firstMs.toFixed(0)} ms`],
  ];
  const speculative = statistics.speculative;
  if (!speculative?.num_spec_steps) return known;
  return [
    ...known,
    ["drafts accepted", `${(100 * speculative.draft_acceptance_rate).toFixed(0)} %`],
    ["tokens per step", (tokens.length / stepCount(tokens)).toFixed(2)],
  ];
}

/** Whether a drafter guessed the token, and the target accepted it. */
export function isGuess(token) {
  return token.source.startsWith("accepted");
}

/** The number of the target's steps, with and without a draft, that generated the tokens. */
export function stepCount(tokens) {
  // Each step ends with a token of the target, unless the text ends within the last step.
  const last = tokens.at(-1);
  return tokens.filter((token) => !isGuess(token) || token === last).length;
}
