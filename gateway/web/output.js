// A pane of tokens, coloured by their source. The pointer and the arrow keys show the drafter.

const SOURCES = {
  accepted: "accepted: guessed by",
  accepted_side: "side: guessed on a side branch of a draft by",
  recovered: "recovered: the target's token, in place of a guess by",
  bonus: "bonus: the target's token, after a fully accepted draft by",
  plain: "plain: the target's token, without a draft",
};
const PAUSES = {
  no_drafter: "no drafter works on this text",
  too_slow: "drafts would cost more time than they save",
  low_acceptance: "too few guesses for this text are accepted",
  no_guess: "no drafter had a guess in time",
  budget: "drafting made the steps slower",
  measuring: "steps without drafts were measured",
};
const tip = document.getElementById("tip");

export class Output {
  constructor(parent, title) {
    const article = document.createElement("article");
    article.className = "output";
    article.innerHTML = `<h3></h3><pre tabindex="0" role="group"></pre><dl></dl>
      <p class="paused" hidden></p>`;
    [this.heading, this.pane, this.list, this.paused] = article.children;
    this.heading.textContent = title;
    const help = "The left and right arrow keys show each token's source.";
    this.pane.setAttribute("aria-label", `${title}: text. ${help}`);
    this.tokens = [];
    this.current = -1;
    this.frame = 0;
    this.end = 0;
    this.pane.addEventListener("pointerover", (event) => this.#point(event.target));
    this.pane.addEventListener("pointerleave", () => { tip.hidden = true; });
    this.pane.addEventListener("keydown", (event) => this.#key(event));
    this.pane.addEventListener("blur", () => this.#select(-1));
    parent.append(article);
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  add(tokens) {
    const spans = new DocumentFragment();
    for (const token of tokens) {
      this.tokens.push(token);
      const span = document.createElement("span");
      span.className = `token ${token.source}`;
      span.textContent = token.text;
      span.dataset.index = this.tokens.length - 1;
      spans.append(span);
    }
    this.pane.append(spans);
    // Once a frame, since it makes the browser lay out the whole text.
    this.frame ||= requestAnimationFrame(() => this.#follow());
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
    this.pane.replaceChildren();
    this.end = 0;
  }

  /** Show figures below the text, as [name, value] pairs, and why most steps had no draft. */
  show(figures, paused = null) {
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
    this.pane.children[this.current]?.classList.remove("current");
    this.current = index;
    if (index < 0) {
      tip.hidden = true;
      return;
    }
    const span = this.pane.children[index];
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
    ["tokens", statistics.tokens],
    ["tokens/s", statistics.tokensPerSecond.toFixed(1)],
    ["to first token", `${statistics.firstMs.toFixed(0)} ms`],
    ["per output token", `${statistics.tokenMs.toFixed(1)} ms`],
  ];
  const speculative = statistics.speculative;
  if (!speculative?.num_spec_steps) return known;
  return [
    ...known,
    ["drafts accepted", `${(100 * speculative.draft_acceptance_rate).toFixed(0)} %`],
    ["from side branches", tokens.filter((token) => token.source === "accepted_side").length],
    ["tokens per step", (tokens.length / stepCount(tokens)).toFixed(2)],
  ];
}

/** The number of the target's steps, with and without a draft, that generated the tokens. */
export function stepCount(tokens) {
  // Each step ends with a token of the target, except the last one if the text's end cuts it.
  const last = tokens.at(-1);
  return tokens.filter((token) => !token.source.startsWith("accepted") || token === last).length;
}
