// Command ngram is a whole drafter. It guesses the tokens that followed the text's last tokens
// before.
// Usage: ngram HOST:PORT
package main

import (
	"log"
	"os"
	"reflect"

	"outrider.dev/go/drafter"
)

const longestMatch = 3

func guess(text []uint32, count int) (best []uint32) {
	for size := longestMatch; size > 0 && len(best) == 0; size-- {
		for start := len(text) - size - 1; start >= 0 && len(best) < count; start-- {
			if !reflect.DeepEqual(text[start:start+size], text[len(text)-size:]) {
				continue
			}
			found := text[start+size:]
			if len(found) > count {
				found = found[:count]
			}
			if len(found) > len(best) {
				best = found
			}
		}
	}
	return best
}

func main() {
	if err := (drafter.Config{Verifier: os.Args[1], Family: "go-ngram", Open: drafter.Each(guess)}).Serve(); err != nil {
		log.Fatal(err)
	}
}
