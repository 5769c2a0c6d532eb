// A whole drafter. It looks up an earlier occurrence of the text's last tokens, and guesses the
// tokens that followed there.
// Usage: ngram HOST:PORT [CERT KEY CA]
// The PEM files are for a verifier with TLS.
import { readFileSync } from "node:fs";
import { serve } from "../src/index.js";

const LONGEST_MATCH = 3;

function guess(text: readonly number[], count: number): number[] {
  for (let size = Math.min(LONGEST_MATCH, text.length - 1); size > 0; size--) {
    const found = followers(text, size, count);
    if (found.length > 0) return found;
  }
  return [];
}

/**
 * The tokens that followed an earlier occurrence of the last `size` tokens. Takes the newest one
 * that `count` tokens follow, else the one that the most tokens follow.
 */
function followers(text: readonly number[], size: number, count: number): number[] {
  let best: number[] = [];
  const end = text.length - size;
  for (let start = end - 1; start >= 0 && best.length < count; start--) {
    let same = 0;
    while (same < size && text[start + same] === text[end + same]) same++;
    if (same < size) continue;
    const found = text.slice(start + size, start + size + count);
    if (found.length > best.length) best = found;
  }
  return best;
}

const [verifier, ...files] = process.argv.slice(2);
const [cert, key, ca] = files.map((file) => readFileSync(file, "utf8"));
const tls = files.length === 3 ? { cert, key, ca } : undefined;
await serve({ verifier, family: "ts-ngram", guess, tls }).catch((error) => {
  console.error(String(error));
  process.exit(1);
});
