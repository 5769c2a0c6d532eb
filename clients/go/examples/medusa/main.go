// Command medusa is a drafter with a head. It reads the target's final states, as the verifier sends
// them, and guesses the next tokens with Medusa's heads (arXiv 2401.10774).
// Usage: medusa HEAD.safetensors HOST:PORT [CERT KEY CA]
// The PEM files are for a verifier with TLS.
package main

import (
	"context"
	"log"
	"os"
	"os/signal"
	"syscall"

	"google.golang.org/protobuf/proto"
	"outrider.dev/go/drafter"
	pb "outrider.dev/go/outrider/v1"
)

// medusa drafts for one sequence. Only the state of the last token but one matters, so a gap in the
// features costs nothing once the next features have come.
type medusa struct {
	heads []head
	state []float32 // the last state that came
	known int       // the position after that state's token
}

// Read keeps the last of the states.
func (m *medusa) Read(first int, rows []byte) {
	states := floats(rows)
	width := m.heads[0].out.width
	m.state, m.known = states[len(states)-width:], first+len(states)/width
}

// Guess returns a token of each head. The heads read only the state of the last token but one. So
// once the text ends with guesses, Guess returns nothing.
func (m *medusa) Guess(text []uint32, count int) (found drafter.Guesses) {
	if m.state == nil || m.known != len(text)-1 {
		return
	}
	for i := 0; i < len(m.heads) && i < count; i++ {
		found.Tokens = append(found.Tokens, m.heads[i].guess(m.state))
	}
	return
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	heads, err := loadHeads(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	config := drafter.Config{
		Verifiers: os.Args[2:3], Family: "go-medusa", Logf: log.Printf,
		Open: func(*pb.Opened) drafter.Strategy { return &medusa{heads: heads} },
		Features: &pb.FeatureRequest{
			FinalState: true, Dtype: pb.FeatureDtype_FEATURE_DTYPE_FLOAT32,
			LastPromptTokenCount: proto.Int32(1),
		},
		FeatureWidth: heads[0].out.width,
	}
	if len(os.Args) > 5 {
		config.TLS, err = drafter.Files(os.Args[3], os.Args[4], os.Args[5])
	}
	if err == nil {
		err = drafter.Serve(ctx, config)
	}
	if err != nil {
		log.Fatal(err)
	}
}
