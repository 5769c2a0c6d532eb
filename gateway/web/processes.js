// The map of the processes, and a list of the drafters that joined or left.

import { author } from "./authors.js";

const NEW_MS = 6000;
const MOST_HAPPENINGS = 12;

/** A text with the time in milliseconds, and with as many digits as are significant. */
function ms(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const value = 1000 * seconds;
  if (value > 0 && value < 0.01) return "< 0.01 ms";
  return `${value < 10 ? value.toFixed(2) : value.toFixed(0)} ms`;
}

export class Processes {
  /** `onChange(drafter, "joined" | "left" | "lost")` is called for each change of a drafter. */
  constructor(onChange) {
    this.map = document.getElementById("map");
    this.happened = document.getElementById("happened");
    this.onChange = onChange;
    this.known = null;
    this.joinedAt = new Map();
    this.shown = "";
  }

  /** Show the processes as the gateway reports them. */
  push(readiness, version) {
    this.#compare(readiness);
    const state = readiness.status;
    const gateway = {
      name: "gateway",
      state,
      good: state === "ready",
      fair: state === "degraded",
      lines: [`version ${version}`],
    };
    const tree = branch(gateway, readiness.verifiers.map((verifier) => this.#verifier(verifier)));
    if (tree.outerHTML === this.shown) return;
    this.shown = tree.outerHTML;
    this.map.replaceChildren(tree);
  }

  /** Show that the gateway does not answer. */
  lost() {
    this.shown = "";
    const gateway = { name: "gateway", state: "does not answer", good: false, lines: [] };
    this.map.replaceChildren(branch(gateway, []));
  }

  #verifier(verifier) {
    const lines = [
      `${verifier.model ?? ""}`,
      `${verifier.dtype ?? ""} on ${verifier.device ?? "?"}`,
      `round trip ${ms(verifier.round_trip_seconds)}`,
      `sequences of this gateway ${verifier.running}`,
    ];
    if (verifier.problem) lines.push(verifier.problem);
    const state = verifier.ready ? "ready" : verifier.stage ?? "lost";
    const node = { name: `verifier ${verifier.address}`, state, good: verifier.ready, lines };
    return branch(node, (verifier.drafters ?? []).map((drafter) => this.#drafter(drafter)));
  }

  #drafter(drafter) {
    const cores = drafter.cores ? `, ${drafter.cores} cores` : "";
    const numa = drafter.numa_node === null ? "" : `, NUMA node ${drafter.numa_node}`;
    const share = drafter.acceptance_rate;
    const rate = share === null ? "–" : `${(100 * share).toFixed(0)} %`;
    const lines = [
      `${drafter.family} · ${drafter.placement} · ${drafter.device}${cores}${numa}`,
      `${drafter.host} ${drafter.architecture}`,
      `round trip ${ms(drafter.round_trip_seconds)} · token ${ms(drafter.token_seconds)}`,
      `accepted ${rate} · sequences ${drafter.sequences}`,
    ];
    const fresh = performance.now() - (this.joinedAt.get(drafter.id) ?? -Infinity) < NEW_MS;
    const state = drafter.connected ? "connected" : "lost";
    const color = author(drafter.id);
    return box({ name: drafter.id, color, state, good: drafter.connected, fresh, lines });
  }

  #compare(readiness) {
    const drafters = readiness.verifiers.flatMap((verifier) => verifier.drafters ?? []);
    const now = new Map(drafters.map((drafter) => [drafter.id, drafter]));
    const before = this.known ?? now;
    this.known = now;
    for (const [id, drafter] of now) {
      const was = before.get(id)?.connected ?? false;
      if (drafter.connected && !was) this.#tell(drafter, "joined");
      if (!drafter.connected && was) this.#tell(drafter, "lost");
    }
    for (const [id, drafter] of before) {
      if (!now.has(id) && drafter.connected) this.#tell(drafter, "left");
    }
  }

  #tell(drafter, what) {
    if (what === "joined") this.joinedAt.set(drafter.id, performance.now());
    const words = { joined: "joined", left: "left", lost: "was lost" };
    const item = document.createElement("li");
    item.textContent = `${new Date().toLocaleTimeString()} ${drafter.id} ${words[what]}.`;
    this.happened.querySelector(".quiet")?.remove();
    this.happened.prepend(item);
    while (this.happened.children.length > MOST_HAPPENINGS) this.happened.lastElementChild.remove();
    this.onChange(drafter, what);
  }
}

function box({ name, color, state, good, fair, fresh, lines }) {
  const element = document.createElement("div");
  element.className = `process ${good ? "good" : fair ? "fair" : "bad"}${fresh ? " new" : ""}`;
  const status = document.createElement("span");
  status.className = "state";
  const dot = document.createElement("span");
  dot.className = "dot";
  status.append(dot, ` ${state}`);
  const title = document.createElement("strong");
  title.textContent = name;
  if (color) title.className = `token ${color}`;
  element.append(status, title);
  for (const line of lines) {
    const row = document.createElement("div");
    row.textContent = line;
    element.append(row);
  }
  return element;
}

function branch(node, children) {
  const element = document.createElement("div");
  element.className = "branch";
  element.append(box(node));
  if (children.length) {
    const below = document.createElement("div");
    below.className = "below";
    below.append(...children);
    element.append(below);
  }
  return element;
}
