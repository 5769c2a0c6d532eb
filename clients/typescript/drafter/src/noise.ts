// The coupled noise of docs/protocol.md.

const MASK32 = 2n ** 32n - 1n;

/** Philox4x32-10 of (position, 3, 0) under the seed: the key of a position's noise. */
export function noiseKey(seed: bigint, position: bigint): bigint {
  let c = [position & MASK32, position >> 32n, 3n, 0n];
  let k = [seed & MASK32, seed >> 32n];
  for (let round = 0; round < 10; round++) {
    const [a, b] = [0xd2511f53n * c[0], 0xcd9e8d57n * c[2]];
    c = [(b >> 32n) ^ c[1] ^ k[0], b & MASK32, (a >> 32n) ^ c[3] ^ k[1], a & MASK32];
    k = [(k[0] + 0x9e3779b9n) & MASK32, (k[1] + 0xbb67ae85n) & MASK32];
  }
  return c[0] | (c[1] << 32n);
}

/** SplitMix64 starts with the state `key`; returns its output number `token`, counted from 0. */
export function output(key: bigint, token: number): bigint {
  let z = BigInt.asUintN(64, key + BigInt(token + 1) * 0x9e3779b97f4a7c15n);
  z = BigInt.asUintN(64, (z ^ (z >> 30n)) * 0xbf58476d1ce4e5b9n);
  z = BigInt.asUintN(64, (z ^ (z >> 27n)) * 0x94d049bb133111ebn);
  return z ^ (z >> 31n);
}

export function exponential(z: bigint): number {
  return -Math.log((Number(z >> 12n) + 0.5) * 2 ** -52);
}

/** The token that the verifier draws from these probabilities. The lowest id wins a tie. */
export function draw(probs: readonly number[], seed: bigint, position: bigint): number {
  const key = noiseKey(seed, position);
  let [best, token] = [-1, 0];
  probs.forEach((p, id) => {
    const score = p / exponential(output(key, id));
    if (score > best) [best, token] = [score, id];
  });
  return token;
}
