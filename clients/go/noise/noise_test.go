package noise

import (
	"encoding/json"
	"math"
	"os"
	"strconv"
	"testing"
)

type row struct {
	Seed, Position, Key, Z string
	Token                  uint32
	Exponential            float64
	Probs                  []float32
}

func number(t *testing.T, text string) uint64 {
	value, err := strconv.ParseUint(text, 0, 64)
	if err != nil {
		t.Fatal(err)
	}
	return value
}

func TestNoiseAgreesWithTheVectors(t *testing.T) {
	text, err := os.ReadFile("../../../protos/coupled_noise.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors struct{ Noise, Edges, Draws []row }
	if err := json.Unmarshal(text, &vectors); err != nil {
		t.Fatal(err)
	}
	for _, r := range vectors.Noise {
		if Key(number(t, r.Seed), number(t, r.Position)) != number(t, r.Key) {
			t.Error(r)
		}
	}
	for _, r := range append(vectors.Noise, vectors.Edges...) {
		z := Output(number(t, r.Key), r.Token)
		// Allow two units in the last place.
		if z != number(t, r.Z) || math.Abs(Exponential(z)-r.Exponential) > r.Exponential*0x1p-51 {
			t.Error(r)
		}
	}
	for _, r := range vectors.Draws {
		if Draw(r.Probs, number(t, r.Seed), number(t, r.Position)) != r.Token {
			t.Error(r)
		}
	}
}
