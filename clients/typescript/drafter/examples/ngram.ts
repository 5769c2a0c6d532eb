// A whole drafter. It looks up earlier occurrences of the text's last tokens, and guesses the tokens
// that followed there; where other tokens followed at other places, it guesses them as branches.
// Usage: ngram HOST:PORT [CERT KEY CA]
// The PEM files are for a verifier with TLS.
import { readFileSync } from "node:fs";
import { type Branch, serve } from "../src/index.js";

const LONGEST_MATCH = 3;

/** The tokens that followed the longest match of the text's end. */
function guess(text: readonly number[], count: number): number[] {
  for (let size = Math.min(LONGEST_MATCH, text.length - 1); size > 0; size--) {
    let best: number[] = [];
    for (const run of followers(text, size, count)) {
      if (run.length > best.length) best = run;
      if (best.length === count) break;
    }
    if (best.length > 0) return best;
  }
  return [];
}

/** The other continuations of the committed tokens, the newest first. */
function branch(committed: readonly number[], guesses: readonly number[], room: number): Branch[] {
  const known = new Set([guesses[0]]);
  const branches: Branch[] = [];
  for (const tokens of followers(committed, LONGEST_MATCH, guesses.length)) {
    if (known.has(tokens[0]) || tokens.length > room) continue;
    known.add(tokens[0]);
    room -= tokens.length;
    branches.push({ at: 0, tokens });
  }
  return branches;
}

/** At most `count` tokens after each earlier occurrence of the last `size` tokens, newest first. */
function* followers(text: readonly number[], size: number, count: number) {
  const end = text.length - size;
  for (let start = end - 1; start >= 0; start--) {
    let same = 0;
    while (same < size && text[start + same] === text[end + same]) same++;
    if (same === size) yield text.slice(start + size, start + size + count);
  }
}

const [verifier, ...files] = process.argv.slice(2);
const [cert, key, ca] = files.map((file) => readFileSync(file, "utf8"));
const tls = files.length === 3 ? { cert, key, ca } : undefined;
await serve({
  verifier,
  family: "ts-ngram",
  open: () => ({ guess, branch }),
  tls,
  processSignals: ["SIGTERM", "SIGINT"],
  log: console.error,
}).catch((error) => {
  console.error(String(error));
  process.exit(1);
});
