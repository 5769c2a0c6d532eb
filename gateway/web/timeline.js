// Forwards, drafts and waits by process, at the times at which this page gets the tokens. A lane is
// a process, and a row of the lane is a sequence.

import { author } from "./authors.js";
import { isGuess } from "./output.js";

const SHOWN_MS = 30_000;
const VERIFIER = "verifier";
const MOST_ACCEPTED = 8;
const SVG = "http://www.w3.org/2000/svg";

export class Timeline {
  constructor(parent) {
    parent.className = "timeline";
    parent.innerHTML = `<div class="lanes"></div>
      <div class="lane"><div class="axis"><span></span><span></span></div></div>
      <p class="quiet">A block of the verifier is a forward, from one arrival of tokens to the next.
      A block of a drafter is a draft that the forward above it checked; it is taller for more
      accepted guesses. A thin line means that the process waits, a grey lane that it is lost.</p>`;
    [this.list, this.axis, this.legend] = parent.children;
    this.connected = new Map();
    this.frame = 0;
    this.begin();
  }

  /** Forget what was shown. */
  begin() {
    this.started = performance.now();
    this.sequences = [];
    this.lanes = new Map();
    this.list.replaceChildren();
    this.axis.hidden = this.legend.hidden = true;
  }

  /** Add a sequence, which waits from now on; a title's next sequence goes on in the title's row.
   *  Returns `add`, which takes the sequence's tokens, and `end`, which ends it. */
  sequence(title) {
    const now = this.#now();
    let sequence = this.sequences.find((known) => known.title === title);
    if (!sequence) {
      sequence = { title, row: this.sequences.length, begun: now };
      this.sequences.push(sequence);
    }
    Object.assign(sequence, { last: now, ended: null });
    this.axis.hidden = this.legend.hidden = false;
    this.#lane(VERIFIER);
    for (const id of this.connected.keys()) this.#lane(id);
    this.#drawSoon();
    return {
      add: (tokens) => tokens.length && this.#forward(sequence, tokens),
      end: () => { sequence.ended = this.#now(); },
    };
  }

  /** Take the drafters as the gateway reports them. */
  push(readiness) {
    const drafters = readiness.verifiers.flatMap((verifier) => verifier.drafters ?? []);
    const now = new Map(drafters.map(({ id, connected }) => [id, connected]));
    for (const id of this.connected.keys()) if (!now.has(id)) now.set(id, false);
    this.connected = now;
    if (!this.sequences.some(({ ended }) => ended === null)) return;
    for (const id of now.keys()) this.#lane(id);
    this.#drawSoon();
  }

  #now() {
    return performance.now() - this.started;
  }

  #forward(sequence, tokens) {
    const [from, to] = [sequence.last, this.#now()];
    sequence.last = to;
    const accepted = new Map();
    for (const token of tokens) {
      const before = accepted.get(token.drafter) ?? 0;
      if (token.drafter) accepted.set(token.drafter, before + Number(isGuess(token)));
    }
    this.#block(this.#lane(VERIFIER), sequence, from, to, 1, tokens.length);
    for (const [drafter, count] of accepted) {
      const height = 0.25 + 0.75 * Math.min(count / MOST_ACCEPTED, 1);
      this.#block(this.#lane(drafter), sequence, from, to, height, count);
    }
    this.#drawSoon();
  }

  #block(lane, { row }, from, to, height, tokens) {
    const block = rectangle("block", from, row + 1 - 0.85 * height, to - from, 0.85 * height);
    lane.svg.append(block);
    const counts = lane.counts[row] ??= { blocks: 0, tokens: 0 };
    counts.blocks += 1;
    counts.tokens += tokens;
  }

  #lane(name) {
    if (!this.lanes.has(name)) {
      const element = document.createElement("div");
      element.className = `lane ${name === VERIFIER ? VERIFIER : author(name)}`;
      element.innerHTML = `<strong></strong><svg preserveAspectRatio="none" role="img"></svg>
        <ul></ul>`;
      const [title, svg, figures] = element.children;
      title.textContent = name;
      this.list.append(element);
      this.lanes.set(name, { element, svg, figures, waits: [], lost: null, counts: [] });
    }
    return this.lanes.get(name);
  }

  // Draw once a frame, since tokens may come more often.
  #drawSoon() {
    this.frame ||= requestAnimationFrame(() => this.#draw());
  }

  #draw() {
    this.frame = 0;
    const ended = this.sequences.every((sequence) => sequence.ended !== null);
    const now = ended ? Math.max(...this.sequences.map(({ ended }) => ended)) : this.#now();
    const from = Math.max(0, now - SHOWN_MS);
    const rows = this.sequences.length;
    const [first, last] = this.axis.querySelectorAll("span");
    [first.textContent, last.textContent] = [from, now].map((ms) => `${(ms / 1000).toFixed(1)} s`);
    for (const [name, lane] of this.lanes) {
      this.#drawWaits(lane, now);
      this.#drawLoss(name, lane, now);
      lane.svg.setAttribute("viewBox", `${from} 0 ${Math.max(now - from, 1)} ${rows}`);
      lane.svg.style.height = `${rows}rem`;
      const words = this.sequences.map((sequence) => figures(name, lane, sequence));
      lane.svg.setAttribute("aria-label", `${name}: ${words.join("; ")}`);
      lane.figures.replaceChildren(...words.map((text) => {
        const item = document.createElement("li");
        item.textContent = text;
        return item;
      }));
      for (const block of lane.svg.querySelectorAll(".block")) {
        if (Number(block.dataset.to) >= from) break;
        block.remove();
      }
    }
  }

  #drawWaits(lane, now) {
    for (const { row, begun, ended } of this.sequences) {
      if (!lane.waits[row]) {
        lane.waits[row] = rectangle("wait", begun, row + 0.92, 0, 0.08);
        lane.svg.prepend(lane.waits[row]);
      }
      stretch(lane.waits[row], ended ?? now);
    }
  }

  #drawLoss(name, lane, now) {
    const isLost = this.connected.get(name) === false;
    lane.element.classList.toggle("gone", isLost);
    if (isLost && !lane.lost) {
      lane.lost = rectangle("lost", now, 0, 0, 1);
      lane.svg.prepend(lane.lost);
    }
    if (lane.lost) {
      lane.lost.setAttribute("height", this.sequences.length);
      stretch(lane.lost, now);
    }
    if (!isLost) lane.lost = null;
  }
}

function figures(name, { counts }, { title, row }) {
  const { blocks, tokens } = counts[row] ?? { blocks: 0, tokens: 0 };
  const ending = blocks === 1 ? "" : "s";
  if (name === VERIFIER) return `${title}: ${blocks} forward${ending}`;
  return blocks ? `${blocks} draft${ending}, ${tokens} accepted` : "waits";
}

function rectangle(kind, x, y, width, height) {
  const element = document.createElementNS(SVG, "rect");
  element.setAttribute("class", kind);
  for (const [name, value] of Object.entries({ x, y, width, height })) {
    element.setAttribute(name, value);
  }
  element.dataset.to = x + width;
  return element;
}

function stretch(element, to) {
  element.setAttribute("width", Math.max(0, to - Number(element.getAttribute("x"))));
}
