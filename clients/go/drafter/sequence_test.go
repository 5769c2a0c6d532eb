package drafter

import (
	"context"
	"reflect"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "outrider.dev/go/outrider/v1"
)

// forked guesses 6 and 7, each with a confidence. In a branch it guesses that 8 and 9 follow the
// first guess.
type forked struct{ confidences []float32 }

func (f forked) Guess(text []uint32, count int) Guesses {
	return Guesses{Tokens: []uint32{6, 7}, Confidences: f.confidences}
}

func (f forked) Branch(committed, guesses []uint32, room int) []Branch {
	return []Branch{
		{At: 1, Tokens: []uint32{8, 9}, Confidences: []float32{0.25, 2}},
		{At: 3, Tokens: []uint32{1}},
		{At: 0, Tokens: make([]uint32, room+1)},
	}
}

func proposed(strategy Strategy, treeTokens int32) *pb.Proposal {
	s := open(&pb.Opened{
		TokenIds: []uint32{5}, DraftTokens: 2, TreeTokens: treeTokens,
		Window: &pb.Window{TokenCount: 32, Depth: 3},
	}, strategy)
	s.extend()
	return s.proposal()
}

func TestABranchNamesItsParentsAndOneWithoutRoomIsLeftOut(t *testing.T) {
	found := proposed(forked{[]float32{0.5, 1}}, 8)
	if !reflect.DeepEqual(found.TokenIds, []uint32{6, 7, 8, 9}) ||
		!reflect.DeepEqual(found.Parents, []uint32{0, 1, 1, 3}) ||
		!reflect.DeepEqual(found.Confidences, []float32{0.5, 1, 0.25, 1}) {
		t.Error(found)
	}
}

func TestConfidencesAreSentForAllTokensOrNone(t *testing.T) {
	if found := proposed(forked{}, 8); len(found.Confidences) > 0 || len(found.TokenIds) != 4 {
		t.Error(found)
	}
}

func TestARefusalIsFinalByItsRuleAndElseByItsReason(t *testing.T) {
	for _, one := range []struct {
		reason, rule string
		forever      bool
	}{
		{"LATER_REASON", "never", true},
		{"LATER_REASON", "", false},
		{"CERTIFICATE_NOT_ALLOWED", "", true},
		{"CERTIFICATE_NOT_ALLOWED", "backoff", false},
	} {
		info := &errdetails.ErrorInfo{Domain: "outrider.dev", Reason: one.reason}
		if one.rule != "" {
			info.Metadata = map[string]string{"retry": one.rule}
		}
		refused, err := status.New(codes.PermissionDenied, "refused").WithDetails(info)
		if err != nil {
			t.Fatal(err)
		}
		if _, forever := explain(refused.Err(), firstPause); forever != one.forever {
			t.Error(one)
		}
	}
}

func TestServeEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	strategy := Each(GuessFunc(func([]uint32, int) []uint32 { return nil }))
	// Nothing listens there.
	config := Config{Verifiers: []string{"127.0.0.1:1", "127.0.0.1:2"}, Family: "none", Open: strategy}
	if err := Serve(ctx, config); err != nil {
		t.Error(err)
	}
	if Serve(context.Background(), Config{Family: "none", Open: strategy}) == nil {
		t.Error("no error without verifiers")
	}
}
