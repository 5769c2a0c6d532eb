// The live charts. They show rates, computed from differences of the gateway's sums.
/* global uPlot */

const SHOWN_S = 120;
const WINDOW_S = 5;
const LENGTHS_S = 60;
const MOST_LENGTHS = 9;

const CHARTS = {
  acceptance: { color: "--by-1-line", range: [0, 100] },
  rate: { color: "--by-2-line" },
  tpot: { color: "--by-3-line" },
};

export class Charts {
  constructor() {
    this.samples = [];
    this.plots = {};
    this.#build();
    new ResizeObserver(() => this.#resize()).observe(document.querySelector(".charts"));
  }

  /** Add the sums at a time in seconds, and draw. */
  push(seconds, activity) {
    // Sums fall only if the gateway was restarted. Then begin again.
    const last = this.samples.at(-1);
    if (last && total(activity) < total(last.activity)) this.samples = [];
    this.samples.push({ seconds, activity, ...this.#rates(seconds, activity) });
    while (this.samples[0].seconds < seconds - SHOWN_S) this.samples.shift();
    this.#draw();
  }

  /** Draw again, in the colours of the current theme. */
  recolor() {
    for (const plot of Object.values(this.plots)) plot.destroy();
    this.#build();
    if (this.samples.length) this.#draw();
  }

  #since(seconds) {
    return this.samples.find((sample) => sample.seconds >= seconds) ?? this.samples.at(-1);
  }

  #rates(seconds, now) {
    const before = this.#since(seconds - WINDOW_S);
    if (!before || before.seconds === seconds) return { acceptance: null, rate: null, tpot: null };
    const grew = (read) => read(now) - read(before.activity);
    const [drafted, accepted] = [grew((a) => a.draft_tokens), grew((a) => a.tokens.accepted)];
    const tokens = grew(total);
    const [later, laterSeconds] = [grew((a) => a.later_tokens), grew((a) => a.later_token_seconds)];
    return {
      acceptance: drafted ? 100 * accepted / drafted : null,
      rate: tokens / (seconds - before.seconds),
      tpot: later ? 1000 * laterSeconds / later : null,
    };
  }

  #lengths() {
    const last = this.samples.at(-1);
    const before = this.#since(last.seconds - LENGTHS_S).activity.accepted_counts;
    const grew = last.activity.accepted_counts.map((count, i) => count - (before[i] ?? 0));
    const counts = Array.from({ length: MOST_LENGTHS }, (_, i) => grew[i] ?? 0);
    for (const count of grew.slice(MOST_LENGTHS)) counts[MOST_LENGTHS - 1] += count;
    const total = counts.reduce((sum, count) => sum + count, 0);
    const mean = total ? counts.reduce((sum, count, i) => sum + i * count, 0) / total : null;
    return { shares: counts.map((count) => total ? 100 * count / total : 0), mean };
  }

  /** Sentences on the tokens per step from chains and from trees, and on side branches. */
  #shapes() {
    const now = this.samples.at(-1).activity;
    const before = this.#since(this.samples.at(-1).seconds - LENGTHS_S).activity;
    const grew = (name) => now[name] - before[name];
    const mean = (shape) => (grew(`${shape}_tokens`) / count(shape)).toFixed(2);
    const count = (shape) => grew(`${shape}_steps`);
    const shapes = ["chain", "tree"].filter(count);
    if (!shapes.length) return "";
    const text = shapes.map(
      (shape) => `${mean(shape)} tokens per step from ${shape}s (${count(shape)} steps)`,
    );
    const side = grew("side_draft_tokens");
    const walked = now.tokens.accepted_side - before.tokens.accepted_side;
    return `${text.join(", ")}. ${walked} of ${side} draft tokens on side branches were accepted.`;
  }

  #draw() {
    const last = this.samples.at(-1);
    const isQuiet = total(last.activity) === total(this.samples[0].activity);
    document.querySelector(".charts").hidden = isQuiet;
    document.getElementById("no-activity").hidden = !isQuiet;
    if (isQuiet) return;
    const ages = this.samples.map((sample) => sample.seconds - last.seconds);
    for (const name of Object.keys(CHARTS)) {
      this.plots[name].setData([ages, this.samples.map((sample) => sample[name])]);
    }
    const lengths = this.#lengths();
    this.plots.lengths.setData([lengths.shares.map((_, i) => i), lengths.shares]);
    document.getElementById("shapes").textContent = this.#shapes();
    this.#say("acceptance", last.acceptance, (value) => `${value.toFixed(0)} %`);
    this.#say("lengths", lengths.mean, (value) => `mean ${value.toFixed(2)}`);
    this.#say("rate", last.rate, (value) => value.toFixed(0));
    this.#say("tpot", last.tpot, (value) => value.toFixed(1));
  }

  #say(name, value, format) {
    document.getElementById(`now-${name}`).textContent = value === null ? "–" : format(value);
  }

  #build() {
    const points = { show: false };
    const ages = (_, ticks) => ticks.map((tick) => `${tick} s`);
    for (const [name, chart] of Object.entries(CHARTS)) {
      const line = { stroke: color(chart.color), width: 2, spanGaps: false, points };
      const above = chart.range ?? ((_, low, high) => [0, Math.max(high * 1.15, 1)]);
      this.plots[name] = plot(name, line, [-SHOWN_S, 0], above, ages);
    }
    const paths = uPlot.paths.bars({ size: [0.7, 60] });
    const bars = { stroke: color("--by-1-line"), fill: color("--by-1"), paths, points };
    const names = (_, ticks) => ticks.map((tick) => tick === MOST_LENGTHS - 1 ? `${tick}+` : tick);
    this.plots.lengths = plot("lengths", bars, [-0.5, MOST_LENGTHS - 0.5], [0, 100], names, [1]);
  }

  #resize() {
    for (const [name, plot] of Object.entries(this.plots)) plot.setSize(sizeOf(name));
  }
}

function total(activity) {
  return Object.values(activity.tokens).reduce((sum, count) => sum + count, 0);
}

function color(name) {
  // A canvas does not support light-dark(), so let an element resolve the colour.
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const value = getComputedStyle(probe).color;
  probe.remove();
  return value;
}

function sizeOf(name) {
  return { width: document.getElementById(`chart-${name}`).clientWidth, height: 150 };
}

function plot(name, series, x, y, labels, steps) {
  const [ink, line] = [color("--quiet"), color("--line")];
  const hidden = { show: false };
  const grid = { stroke: line, width: 1 };
  const axis = { stroke: ink, grid, ticks: hidden, font: "11px system-ui" };
  const options = {
    ...sizeOf(name),
    legend: hidden,
    cursor: hidden,
    scales: { x: { time: false, range: x }, y: { range: y } },
    axes: [
      { ...axis, values: labels, incrs: steps, size: 26, grid: hidden },
      { ...axis, size: 44 },
    ],
    series: [{}, series],
  };
  return new uPlot(options, [[], []], document.getElementById(`chart-${name}`));
}
