// Package drafter makes an Outrider drafter of a strategy: a function from a text to tokens that
// may follow it.
//
// The package keeps the texts, runs ahead of the verifier, sends skips, measures drafting time,
// reconnects, and says goodbye before it stops. Outrider's docs/protocol.md has the contract.
package drafter

import (
	"context"
	"crypto/tls"
	"fmt"
	"log"
	"math/rand"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	pb "outrider.dev/go/outrider/v1"
)

// Guesser is a strategy. Guess returns at most count tokens that may follow the text. The text ends
// with the guesses so far.
type Guesser interface {
	Guess(text []uint32, count int) []uint32
}

// GuessFunc is a function that is a strategy.
type GuessFunc func(text []uint32, count int) []uint32

// Guess calls the function.
func (f GuessFunc) Guess(text []uint32, count int) []uint32 { return f(text, count) }

// Sampler is a strategy that draws its guesses and returns the distributions that it drew from. It
// is called where Opened.distribution is SPARSE.
type Sampler interface {
	Sample(text []uint32, count int) ([]uint32, []*pb.SparseDistribution)
}

// Branch guesses that Tokens follow the first At guesses, instead of the other guesses.
type Branch struct {
	At     int
	Tokens []uint32
}

// Brancher is a strategy that also offers branches beside the chain of guesses.
type Brancher interface {
	Branch(committed, guesses []uint32) []Branch
}

// Config has the settings of a drafter.
type Config struct {
	Verifier       string // host:port
	ID             string // unique; made of family, host and process id unless given
	Family         string
	MaxDraftTokens int // most guesses for one step; 16 unless given
	Distributions  []pb.DraftDistribution
	Open           func(*pb.Opened) Guesser // makes the strategy of a sequence
	TLS            *tls.Config              // mutual TLS, as Files makes it; none unless given
}

// Each returns an Open for a strategy that keeps no state for a sequence.
func Each(guess GuessFunc) func(*pb.Opened) Guesser {
	return func(*pb.Opened) Guesser { return guess }
}

const (
	firstPause  = 100 * time.Millisecond
	longPause   = 2 * time.Second
	goodStream  = time.Minute
	messageSize = 16 << 20
)

// Reasons that errors.proto marks "Retry: never" and that a drafter can get.
var final = map[string]bool{"TOKENIZER_MISMATCH": true, "INVALID_VALUE": true, "MALFORMED_REQUEST": true, "UNSUPPORTED_PARAMETER": true}

// Serve drafts until SIGTERM or SIGINT, and reconnects when the verifier restarts. It returns an
// error that a retry cannot cure.
func (c Config) Serve() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	host, _ := os.Hostname()
	if c.ID == "" {
		c.ID = fmt.Sprintf("%s-%s-%d", c.Family, host, os.Getpid())
	}
	if c.MaxDraftTokens == 0 {
		c.MaxDraftTokens = 16
	}
	id, err := c.ownID()
	if err != nil {
		return err
	}
	c.ID = id
	security := grpc.WithInsecure()
	if c.TLS != nil {
		security = grpc.WithTransportCredentials(credentials.NewTLS(c.TLS))
	}
	connection, err := grpc.Dial(c.Verifier, security,
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(messageSize)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: firstPause, Multiplier: 2, MaxDelay: longPause}}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 8 * time.Second}))
	if err != nil {
		return err
	}
	defer connection.Close()
	verifier, pause := pb.NewVerifierServiceClient(connection), firstPause
	for ctx.Err() == nil {
		began := time.Now()
		err := c.once(ctx, verifier, host)
		if ctx.Err() != nil {
			break
		}
		wait, forever := explain(err, pause)
		if forever {
			return err
		}
		log.Printf("the stream to %s ended: %v", c.Verifier, err)
		sleep(ctx, wait)
		if pause *= 2; pause > longPause {
			pause = longPause
		}
		if time.Since(began) > goodStream {
			pause = firstPause
		}
	}
	return nil
}

// once waits until the verifier serves its model, and serves one stream.
func (c Config) once(ctx context.Context, verifier pb.VerifierServiceClient, host string) error {
	var model *pb.GetModelResponse
	for model.GetStage() != pb.ModelStage_MODEL_STAGE_READY {
		answer, err := verifier.GetModel(ctx, &pb.GetModelRequest{})
		if err != nil {
			return err
		}
		if model = answer; model.Stage != pb.ModelStage_MODEL_STAGE_READY {
			sleep(ctx, 250*time.Millisecond)
		}
	}
	return c.stream(ctx, verifier, &pb.Hello{
		DrafterId: c.ID, Family: c.Family, TokenizerFingerprint: model.TokenizerFingerprint,
		MaxDraftTokens: int32(c.MaxDraftTokens), Distributions: c.Distributions,
		Placement: &pb.Placement{Kind: "local", Host: host, Device: "cpu", Architecture: runtime.GOARCH},
	})
}

// explain returns the time to wait after an error, and whether a retry cannot cure it.
func explain(err error, pause time.Duration) (time.Duration, bool) {
	wait := time.Duration(float64(pause) * (0.5 + rand.Float64()/2))
	for _, detail := range status.Convert(err).Details() {
		switch found := detail.(type) {
		case *errdetails.ErrorInfo:
			if found.Domain == "outrider.dev" && final[found.Reason] {
				return 0, true
			}
		case *errdetails.RetryInfo:
			wait = found.RetryDelay.AsDuration()
		}
	}
	return wait, false
}

func sleep(ctx context.Context, duration time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(duration):
	}
}
