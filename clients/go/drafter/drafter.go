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
	"os"
	"runtime"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/keepalive"

	"outrider.dev/go/internal/dial"
	pb "outrider.dev/go/outrider/v1"
)

// Config has the settings of a drafter. Verifiers, Family and Open must be given.
type Config struct {
	Verifiers      []string // host:port of each
	ID             string   // unique; made of family, host and process id unless given
	Family         string
	MaxDraftTokens int // most guesses for one step; 16 unless given
	Distributions  []pb.DraftDistribution
	// Features are the target's hidden states that strategies read, if any: see FeatureReader. Serve
	// ends with an error if a verifier's features have another width than FeatureWidth.
	Features     *pb.FeatureRequest
	FeatureWidth int
	// Open makes the strategy of a sequence. With several verifiers it must be safe for
	// concurrent use.
	Open        func(*pb.Opened) Strategy
	TLS         *tls.Config                              // mutual TLS, as Files makes it; none unless given
	DialOptions []grpc.DialOption                        // they come after the package's own options
	Logf        func(format string, args ...interface{}) // such as log.Printf; silent unless given
}

const (
	messageSize  = 16 << 20
	pollInterval = 250 * time.Millisecond
	pollTimeout  = 10 * time.Second
)

// Serve drafts for every verifier until ctx is done; then it says goodbye and returns nil. It
// reconnects when a verifier restarts, and returns early with an error that a retry cannot cure.
func Serve(ctx context.Context, config Config) error {
	if err := config.complete(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error)
	for _, address := range config.Verifiers {
		go func(address string) { ended <- config.serve(ctx, address) }(address)
	}
	var first error
	for range config.Verifiers {
		if err := <-ended; err != nil && first == nil {
			first = err
			cancel()
		}
	}
	return first
}

// complete checks the settings and fills in those that were not given.
func (c *Config) complete() error {
	if len(c.Verifiers) == 0 || c.Family == "" || c.Open == nil {
		return fmt.Errorf("drafter: Verifiers, Family and Open must be given")
	}
	host, _ := os.Hostname()
	if c.ID == "" {
		c.ID = fmt.Sprintf("%s-%s-%d", c.Family, host, os.Getpid())
	}
	if c.MaxDraftTokens == 0 {
		c.MaxDraftTokens = 16
	}
	if c.Logf == nil {
		c.Logf = func(string, ...interface{}) {}
	}
	id, err := c.ownID()
	c.ID = id
	return err
}

// serve drafts at one verifier.
func (c Config) serve(ctx context.Context, address string) error {
	reconnect := backoff.Config{BaseDelay: firstPause, Multiplier: 2, MaxDelay: longPause}
	options := append([]grpc.DialOption{
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(messageSize)),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: reconnect}),
		// Go's gRPC pings no sooner than after 10 s.
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 8 * time.Second}),
	}, c.DialOptions...)
	connection, err := dial.New(address, c.TLS, options...)
	if err != nil {
		return err
	}
	defer connection.Close()
	verifier, pause := pb.NewVerifierServiceClient(connection), firstPause
	for {
		began := time.Now()
		err := c.once(ctx, verifier)
		if ctx.Err() != nil {
			return nil
		}
		wait, forever := explain(err, pause)
		if forever {
			return err
		}
		c.Logf("the stream to %s ended: %v", address, err)
		sleep(ctx, wait)
		pause = next(pause, time.Since(began))
	}
}

// once waits until the verifier serves its model, and then drafts on one stream.
func (c Config) once(ctx context.Context, verifier pb.VerifierServiceClient) error {
	model, err := ready(ctx, verifier)
	if err != nil {
		return err
	}
	host, _ := os.Hostname()
	var capabilities []pb.Capability
	if c.Features != nil {
		capabilities = append(capabilities, pb.Capability_CAPABILITY_FEATURES)
	}
	return c.stream(ctx, verifier, &pb.Hello{
		DrafterId: c.ID, Family: c.Family, TokenizerFingerprint: model.TokenizerFingerprint,
		MaxDraftTokens: int32(c.MaxDraftTokens), Distributions: c.Distributions,
		Capabilities: capabilities, FeatureRequest: c.Features,
		Placement: &pb.Placement{Kind: "local", Host: host, Device: "cpu", Architecture: runtime.GOARCH},
	})
}

// ready waits until the verifier serves its model, and returns the model. It waits at any other
// stage, even at FAILED: the verifier may be started again.
func ready(ctx context.Context, verifier pb.VerifierServiceClient) (*pb.GetModelResponse, error) {
	for {
		asking, cancel := context.WithTimeout(ctx, pollTimeout)
		model, err := verifier.GetModel(asking, &pb.GetModelRequest{})
		cancel()
		if err != nil || model.Stage == pb.ModelStage_MODEL_STAGE_READY {
			return model, err
		}
		if sleep(ctx, pollInterval); ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
}

func sleep(ctx context.Context, duration time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(duration):
	}
}
