// Compares the noise with protos/coupled_noise.json. Once compiled, this file lies in dist/test.
import { readFileSync } from "node:fs";
import { draw, exponential, noiseKey, output } from "../src/noise.js";

function check(fact: boolean, row: object): void {
  if (!fact) throw new Error(JSON.stringify(row));
}

const file = new URL("../../../../../protos/coupled_noise.json", import.meta.url);
const vectors = JSON.parse(readFileSync(file, "utf8"));
for (const row of vectors.noise) {
  check(noiseKey(BigInt(row.seed), BigInt(row.position)) === BigInt(row.key), row);
}
for (const row of [...vectors.noise, ...vectors.edges]) {
  const z = output(BigInt(row.key), row.token);
  // Allow two units in the last place.
  const error = Math.abs(exponential(z) - row.exponential);
  check(z === BigInt(row.z) && error <= row.exponential * 2 ** -51, row);
}
for (const row of vectors.draws) {
  check(draw(row.probs, BigInt(row.seed), BigInt(row.position)) === row.token, row);
}
console.log("ok noise");
