package main

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"strings"
)

// matrix has rows of width numbers each.
type matrix struct {
	numbers []float32
	width   int
}

// times returns the product of the matrix and a vector.
func (m matrix) times(x []float32) []float32 {
	out := make([]float32, len(m.numbers)/m.width)
	for i := range out {
		for j, number := range m.numbers[i*m.width : (i+1)*m.width] {
			out[i] += number * x[j]
		}
	}
	return out
}

// block adds SiLU(weight · x + bias) to a state x.
type block struct {
	weight matrix
	bias   []float32
}

// head guesses the token of one place. It has blocks, and a matrix that turns the last block's
// state into scores.
type head struct {
	blocks []block
	out    matrix
}

// guess returns the likeliest token for the target's final state.
func (h head) guess(state []float32) uint32 {
	for _, block := range h.blocks {
		inner := block.weight.times(state)
		next := make([]float32, len(state))
		for i, number := range inner {
			number += block.bias[i]
			next[i] = state[i] + number/float32(1+math.Exp(-float64(number)))
		}
		state = next
	}
	best, scores := 0, h.out.times(state)
	for i, score := range scores {
		if score > scores[best] {
			best = i
		}
	}
	return uint32(best)
}

// loadHeads reads Medusa's safetensors file: {i}.{j}.linear.weight and .bias for each block j of
// head i, then {i}.{number of blocks}.weight for its scores.
func loadHeads(path string) ([]head, error) {
	tensors, err := readTensors(path)
	if err != nil {
		return nil, err
	}
	var heads []head
	for {
		one := head{}
		for {
			name := fmt.Sprintf("%d.%d.linear.", len(heads), len(one.blocks))
			weight, found := tensors[name+"weight"]
			if !found {
				break
			}
			one.blocks = append(one.blocks, block{weight, tensors[name+"bias"].numbers})
		}
		out, found := tensors[fmt.Sprintf("%d.%d.weight", len(heads), len(one.blocks))]
		if !found {
			break
		}
		one.out = out
		heads = append(heads, one)
	}
	if len(heads) == 0 {
		return nil, fmt.Errorf("%s has no Medusa head with a matrix of its own for the scores", path)
	}
	for i, one := range heads {
		if !one.fits(heads[0].out.width) {
			return nil, fmt.Errorf("head %d in %s has tensors of wrong sizes", i, path)
		}
	}
	return heads, nil
}

// fits returns whether all tensors of a head are for states of the given width.
func (h head) fits(width int) bool {
	fitting := h.out.width == width && width > 0 && len(h.out.numbers)%width == 0
	for _, block := range h.blocks {
		square := block.weight.width == width && len(block.weight.numbers) == width*width
		fitting = fitting && square && len(block.bias) == width
	}
	return fitting
}

// readTensors reads a safetensors file: the length of a JSON header, the header, the numbers.
func readTensors(path string) (map[string]matrix, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	broken := fmt.Errorf("%s is no safetensors file", path)
	if len(data) < 8 || binary.LittleEndian.Uint64(data) > uint64(len(data)-8) {
		return nil, broken
	}
	body := data[8+binary.LittleEndian.Uint64(data):]
	var header map[string]struct {
		Dtype   string
		Shape   []int
		Offsets []int `json:"data_offsets"`
	}
	if json.Unmarshal(data[8:len(data)-len(body)], &header) != nil {
		return nil, broken
	}
	delete(header, "__metadata__")
	tensors := map[string]matrix{}
	for name, entry := range header {
		if len(entry.Offsets) != 2 || len(entry.Shape) == 0 || entry.Offsets[0] < 0 ||
			entry.Offsets[0] > entry.Offsets[1] || entry.Offsets[1] > len(body) {
			return nil, broken
		}
		numbers, err := decode(body[entry.Offsets[0]:entry.Offsets[1]], entry.Dtype)
		if err != nil {
			return nil, fmt.Errorf("%s in %s: %w", name, path, err)
		}
		name = strings.TrimPrefix(name, "medusa_head.")
		tensors[name] = matrix{numbers, entry.Shape[len(entry.Shape)-1]}
	}
	return tensors, nil
}

// decode returns the numbers of a tensor.
func decode(raw []byte, dtype string) ([]float32, error) {
	switch dtype {
	case "F32":
		return floats(raw), nil
	case "BF16":
		numbers := make([]float32, len(raw)/2)
		for i := range numbers {
			high := uint32(binary.LittleEndian.Uint16(raw[2*i:]))
			numbers[i] = math.Float32frombits(high << 16)
		}
		return numbers, nil
	}
	return nil, fmt.Errorf("the type must be F32 or BF16, not %s", dtype)
}

// floats returns the numbers of little-endian float32.
func floats(raw []byte) []float32 {
	numbers := make([]float32, len(raw)/4)
	for i := range numbers {
		numbers[i] = math.Float32frombits(binary.LittleEndian.Uint32(raw[4*i:]))
	}
	return numbers
}
