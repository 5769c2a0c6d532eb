package drafter

import (
	"context"
	"io"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "outrider.dev/go/outrider/v1"
)

// refusing is a verifier that opens a sequence, sends more steps than a stream keeps, and then has
// ended the stream.
type refusing struct {
	pb.VerifierServiceClient
	pb.VerifierService_StreamDraftsClient
	life    context.Context
	arrived int
}

func (r *refusing) StreamDrafts(life context.Context, _ ...grpc.CallOption) (pb.VerifierService_StreamDraftsClient, error) {
	r.life = life
	return r, nil
}

func (r *refusing) Context() context.Context { return r.life }

func (r *refusing) Send(request *pb.StreamDraftsRequest) error {
	if request.GetHello() != nil {
		return nil
	}
	time.Sleep(100 * time.Millisecond) // the steps arrive while the drafter writes
	return io.EOF
}

func (r *refusing) Recv() (*pb.StreamDraftsResponse, error) {
	step := &pb.StepBatch{}
	if r.arrived++; r.arrived == 1 {
		step.Opened = []*pb.Opened{{
			SequenceId: 1, TokenIds: []uint32{5}, DraftTokens: 2,
			Window: &pb.Window{TokenCount: 32, Depth: 3},
		}}
	} else if r.arrived > 600 {
		return nil, status.Error(codes.PermissionDenied, "refused")
	}
	return &pb.StreamDraftsResponse{Message: &pb.StreamDraftsResponse_Step{Step: step}}, nil
}

func TestARefusalBehindManyStepsIsRead(t *testing.T) {
	config := Config{Open: func(*pb.Opened) Strategy { return forked{} }}
	ended := make(chan error, 1)
	go func() { ended <- config.stream(context.Background(), &refusing{}, &pb.Hello{}) }()
	select {
	case err := <-ended:
		if status.Code(err) != codes.PermissionDenied {
			t.Error(err)
		}
	case <-time.After(10 * time.Second):
		t.Error("the drafter hangs")
	}
}
