package drafter

import (
	"context"
	"fmt"
	"io"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	pb "outrider.dev/go/outrider/v1"
)

const (
	goodbye     = time.Second
	mostEntries = 512 // most proposals and skips in a message; the verifier takes 4096
)

// session has the sequences of one stream.
type session struct {
	open      func(*pb.Opened) Strategy
	sequences map[uint64]*sequence
	order     []uint64
}

// stream sends the Hello and drafts until the stream or the context ends.
func (c Config) stream(
	ctx context.Context, verifier pb.VerifierServiceClient, hello *pb.Hello,
) error {
	// The call outlives ctx, so that the drafter can say goodbye.
	life, end := context.WithCancel(context.Background())
	defer end()
	call, err := verifier.StreamDrafts(life)
	if err != nil {
		return err
	}
	first := &pb.StreamDraftsRequest_Hello{Hello: hello}
	err = call.Send(&pb.StreamDraftsRequest{Message: first})
	if err != nil && err != io.EOF {
		return err
	}
	steps, ended := make(chan *pb.StepBatch, 256), make(chan error, 1)
	go c.receive(call, steps, ended)
	s := &session{open: c.Open, sequences: map[uint64]*sequence{}}
	for {
		select {
		case step := <-steps:
			if err := s.apply(step); err != nil {
				return err
			}
			continue
		case err := <-ended:
			return err
		case <-ctx.Done():
			return leave(call, ended, end)
		default:
		}
		batch := s.round()
		if batch == nil {
			select {
			case step := <-steps:
				if err := s.apply(step); err != nil {
					return err
				}
			case err := <-ended:
				return err
			case <-ctx.Done():
				return leave(call, ended, end)
			}
			continue
		}
		// The error of a failed send has no reason. The receiver gets the reason.
		drafts := &pb.StreamDraftsRequest_Drafts{Drafts: batch}
		if call.Send(&pb.StreamDraftsRequest{Message: drafts}) != nil {
			return reason(steps, ended)
		}
	}
}

// reason waits for the status of a stream that takes no more messages. The receiver reaches the
// status only if its steps are read meanwhile.
func reason(steps <-chan *pb.StepBatch, ended <-chan error) error {
	for {
		select {
		case <-steps:
		case err := <-ended:
			return err
		}
	}
}

// receive reads until the stream ends, in a goroutine of its own: so neither side blocks the other.
func (c Config) receive(
	call pb.VerifierService_StreamDraftsClient, steps chan<- *pb.StepBatch, ended chan<- error,
) {
	for {
		response, err := call.Recv()
		if err != nil {
			ended <- err
			return
		}
		switch message := response.Message.(type) {
		case *pb.StreamDraftsResponse_Welcome:
			if width := int(message.Welcome.FeatureWidth); c.Features != nil && width != c.FeatureWidth {
				ended <- refusal(fmt.Sprintf("the verifier's features have %d numbers, not %d", width, c.FeatureWidth))
				return
			}
			c.Logf("drafting for %s", message.Welcome.ModelId)
		case *pb.StreamDraftsResponse_Step:
			select {
			case steps <- message.Step:
			case <-call.Context().Done():
			}
		case *pb.StreamDraftsResponse_Draining:
			c.Logf("the verifier is draining: %s", message.Draining.Reason)
		}
	}
}

// leave sends Draining and reads to the end. If the process exited at once, the message could be
// lost.
func leave(call pb.VerifierService_StreamDraftsClient, ended <-chan error, end func()) error {
	draining := &pb.Draining{Reason: "the drafter is stopping"}
	message := &pb.StreamDraftsRequest_Draining{Draining: draining}
	if err := call.Send(&pb.StreamDraftsRequest{Message: message}); err != nil {
		return err
	}
	if err := call.CloseSend(); err != nil {
		return err
	}
	select {
	case err := <-ended:
		return err
	case <-time.After(goodbye):
		end()
		return nil
	}
}

func (s *session) apply(step *pb.StepBatch) error {
	for _, opened := range step.Opened {
		s.sequences[opened.SequenceId] = open(opened, s.open(opened))
		s.order = append(s.order, opened.SequenceId)
	}
	for _, features := range step.Features {
		if known := s.sequences[features.SequenceId]; known != nil {
			if reader, ok := known.strategy.(FeatureReader); ok {
				reader.Read(int(features.FirstPosition), features.Rows)
			}
		}
	}
	for _, verdict := range step.Verdicts {
		known := s.sequences[verdict.SequenceId]
		if known != nil && !known.follow(verdict) {
			return fmt.Errorf("a verdict of sequence %d leaves a gap", verdict.SequenceId)
		}
	}
	for _, closed := range step.Closed {
		delete(s.sequences, closed.SequenceId)
	}
	kept := s.order[:0]
	for _, id := range s.order {
		if s.sequences[id] != nil {
			kept = append(kept, id)
		}
	}
	s.order = kept
	return nil
}

// round makes one message; nil if there is nothing to send before the next step. Sequences that the
// verifier may be waiting for come first.
func (s *session) round() *pb.DraftBatch {
	for {
		began := time.Now()
		asked := s.asked()
		for _, one := range asked {
			one.extend()
		}
		batch := &pb.DraftBatch{}
		for _, id := range s.order {
			if len(batch.Proposals)+len(batch.Skips) >= mostEntries {
				break
			}
			one := s.sequences[id]
			if proposal := one.proposal(); proposal != nil {
				proposal.DraftDuration = durationpb.New(time.Since(began))
				batch.Proposals = append(batch.Proposals, proposal)
			}
			if skip := one.skip(); skip != nil {
				batch.Skips = append(batch.Skips, skip)
			}
		}
		if len(batch.Proposals)+len(batch.Skips) > 0 {
			return batch
		}
		if len(asked) == 0 {
			return nil
		}
	}
}

// asked returns the sequences that the verifier may be waiting for, or if there are none, all that
// may run ahead.
func (s *session) asked() (asked []*sequence) {
	for _, id := range s.order {
		if s.sequences[id].urgent() {
			asked = append(asked, s.sequences[id])
		}
	}
	if len(asked) > 0 {
		return asked
	}
	for _, id := range s.order {
		if s.sequences[id].room() > 0 {
			asked = append(asked, s.sequences[id])
		}
	}
	return asked
}
