// Package noise computes the coupled noise of docs/protocol.md.
package noise

import "math"

// Key is Philox4x32-10 of (position, 3, 0) under the seed: the key of a position's noise.
func Key(seed, position uint64) uint64 {
	c := [4]uint32{uint32(position), uint32(position >> 32), 3, 0}
	k := [2]uint32{uint32(seed), uint32(seed >> 32)}
	for round := 0; round < 10; round++ {
		a, b := 0xD2511F53*uint64(c[0]), 0xCD9E8D57*uint64(c[2])
		c = [4]uint32{uint32(b>>32) ^ c[1] ^ k[0], uint32(b), uint32(a>>32) ^ c[3] ^ k[1], uint32(a)}
		k = [2]uint32{k[0] + 0x9E3779B9, k[1] + 0xBB67AE85}
	}
	return uint64(c[0]) | uint64(c[1])<<32
}

// Output starts SplitMix64 with the state `key`, and returns its output number `token` (0 is
// the first).
func Output(key uint64, token uint32) uint64 {
	z := key + (uint64(token)+1)*0x9E3779B97F4A7C15
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return z ^ z>>31
}

// Exponential turns an output into a number with the standard exponential distribution.
func Exponential(z uint64) float64 {
	return -math.Log((float64(z>>12) + 0.5) * 0x1p-52)
}

// Draw returns the token that the verifier draws from these probabilities. The lowest id wins a
// tie.
func Draw(probs []float32, seed, position uint64) (token uint32) {
	key, best := Key(seed, position), -1.0
	for id, p := range probs {
		if score := float64(p) / Exponential(Output(key, uint32(id))); score > best {
			best, token = score, uint32(id)
		}
	}
	return token
}
