// The coupled noise of docs/coupling.md.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

namespace outrider {

// Philox4x32-10 of (position, 3, 0) under the seed: the key of a position's noise.
inline uint64_t NoiseKey(uint64_t seed, uint64_t position) {
  std::array<uint32_t, 4> c = {uint32_t(position), uint32_t(position >> 32), 3, 0};
  uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; round++) {
    uint64_t a = uint64_t{0xD2511F53} * c[0], b = uint64_t{0xCD9E8D57} * c[2];
    c = {uint32_t(b >> 32) ^ c[1] ^ k0, uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ k1, uint32_t(a)};
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  return c[0] | uint64_t(c[1]) << 32;
}

// Output number `token` of SplitMix64 with the state `key`, counted from 0.
inline uint64_t NoiseOutput(uint64_t key, uint32_t token) {
  uint64_t z = key + (uint64_t(token) + 1) * 0x9E3779B97F4A7C15;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}

inline double Exponential(uint64_t z) { return -std::log((double(z >> 12) + 0.5) * 0x1p-52); }

// The token that the verifier draws from these probabilities. The lowest id wins a tie.
inline uint32_t CoupledDraw(const std::vector<float>& probs, uint64_t seed, uint64_t position) {
  uint64_t key = NoiseKey(seed, position);
  uint32_t token = 0;
  double best = -1;
  for (uint32_t id = 0; id < probs.size(); id++) {
    double score = probs[id] / Exponential(NoiseOutput(key, id));
    if (score > best) best = score, token = id;
  }
  return token;
}

}  // namespace outrider
