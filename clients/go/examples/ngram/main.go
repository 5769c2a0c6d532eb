// Command ngram is a whole drafter. It looks up an earlier occurrence of the text's last tokens,
// and guesses the tokens that followed there.
// Usage: ngram HOST:PORT [CERT KEY CA]
// The PEM files are for a verifier with TLS.
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
	config := drafter.Config{Verifier: os.Args[1], Family: "go-ngram", Open: drafter.Each(guess)}
	var err error
	if len(os.Args) > 4 {
		config.TLS, err = drafter.Files(os.Args[2], os.Args[3], os.Args[4])
	}
	if err == nil {
		err = config.Serve()
	}
	if err != nil {
		log.Fatal(err)
	}
}
