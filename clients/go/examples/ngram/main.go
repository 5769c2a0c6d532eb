// Command ngram is a whole drafter. It looks up earlier occurrences of the text's last tokens, and
// guesses the tokens that followed there; where other tokens followed at other places, it guesses
// them as branches.
// Usage: ngram HOST:PORT [CERT KEY CA]
// The PEM files are for a verifier with TLS.
package main

import (
	"context"
	"log"
	"os"
	"os/signal"
	"syscall"

	"outrider.dev/go/drafter"
)

const longestMatch = 3

type ngram struct{}

// Guess finds the longest match of the text's end, and returns the tokens that followed it.
func (ngram) Guess(text []uint32, count int) drafter.Guesses {
	for size := longestMatch; size > 0; size-- {
		var best []uint32
		each(text, size, count, func(run []uint32) bool {
			if len(run) > len(best) {
				best = run
			}
			return len(best) < count
		})
		if len(best) > 0 {
			return drafter.Guesses{Tokens: best}
		}
	}
	return drafter.Guesses{}
}

// Branch offers the other continuations of the committed tokens, the newest first.
func (ngram) Branch(committed, guesses []uint32, room int) (branches []drafter.Branch) {
	known := map[uint32]bool{guesses[0]: true}
	each(committed, longestMatch, len(guesses), func(run []uint32) bool {
		if !known[run[0]] && len(run) <= room {
			known[run[0]] = true
			room -= len(run)
			branches = append(branches, drafter.Branch{Tokens: run})
		}
		return room > 0
	})
	return branches
}

// each finds the earlier occurrences of the text's last `size` tokens, the newest first. It calls
// visit with the tokens after each occurrence, at most `count` tokens, until visit returns false.
func each(text []uint32, size, count int, visit func(run []uint32) bool) {
	for start := len(text) - size - 1; start >= 0; start-- {
		same := 0
		for same < size && text[start+same] == text[len(text)-size+same] {
			same++
		}
		run := text[start+size:]
		if len(run) > count {
			run = run[:count]
		}
		if same == size && !visit(run) {
			return
		}
	}
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	config := drafter.Config{
		Verifiers: os.Args[1:2], Family: "go-ngram", Open: drafter.Each(ngram{}), Logf: log.Printf,
	}
	var err error
	if len(os.Args) > 4 {
		config.TLS, err = drafter.Files(os.Args[2], os.Args[3], os.Args[4])
	}
	if err == nil {
		err = drafter.Serve(ctx, config)
	}
	if err != nil {
		log.Fatal(err)
	}
}
