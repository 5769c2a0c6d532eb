package drafter

import pb "outrider.dev/go/outrider/v1"

const maxProposalTokens = 1024

// sequence is the drafter's state of one sequence: the committed tokens, and a chain of guesses
// after them.
type sequence struct {
	strategy      Strategy
	sampled       bool // the verifier asked for sampled guesses with their distributions
	id            uint64
	committed     []uint32
	guesses       []uint32
	confidences   []float32                // of the guesses; 0 where none was given
	distributions []*pb.SparseDistribution // of the unsent guesses, if they were sampled
	sent          int                      // number of guesses that were sent
	wanted        int                      // guesses that the verifier can use in its next step
	tree          int                      // guesses of a tree, chain included, that are worth sending
	window        *pb.Window
	givenUp       bool // the chain is not extended before the next verdict
	branched      bool
	skipped       bool
}

func open(opened *pb.Opened, strategy Strategy) *sequence {
	sparse := pb.DraftDistribution_DRAFT_DISTRIBUTION_SPARSE
	return &sequence{
		strategy: strategy, sampled: opened.Distribution == sparse, id: opened.SequenceId,
		committed: opened.TokenIds, wanted: int(opened.DraftTokens), tree: int(opened.TreeTokens),
		window: opened.Window,
	}
}

// follow applies a verdict, and returns false if the verdict leaves a gap. A verdict without new
// tokens changes nothing.
func (s *sequence) follow(verdict *pb.Verdict) bool {
	fresh := int(verdict.CommittedLength) - len(s.committed)
	if fresh > len(verdict.NewTokenIds) {
		return false
	}
	if fresh <= 0 {
		return true
	}
	added := verdict.NewTokenIds[len(verdict.NewTokenIds)-fresh:]
	matched := 0
	for matched < len(added) && matched < len(s.guesses) && added[matched] == s.guesses[matched] {
		matched++
	}
	s.committed = append(s.committed, added...)
	if matched == len(added) {
		s.guesses, s.confidences = s.guesses[matched:], s.confidences[matched:]
		s.sent = max(0, s.sent-matched)
	} else {
		s.guesses, s.confidences, s.sent = nil, nil, 0
	}
	s.distributions = nil
	s.givenUp, s.branched, s.skipped = false, false, false
	s.wanted, s.tree = int(verdict.DraftTokens), int(verdict.TreeTokens)
	if verdict.Window != nil {
		s.window = verdict.Window
	}
	return true
}

// room returns how many more guesses the chain may have.
func (s *sequence) room() int {
	if s.givenUp {
		return 0
	}
	most := min(int(s.window.GetDepth()), int(s.window.GetTokenCount()), maxProposalTokens)
	return max(0, most-len(s.guesses))
}

// branchRoom returns how many tokens branches may have together: as many as the next step can
// verify in a tree beside the chain, or, where the drafter runs ahead, as many as the window has
// room for.
func (s *sequence) branchRoom() int {
	most := min(int(s.window.GetTokenCount()), maxProposalTokens)
	if s.tree > s.wanted {
		most = min(most, s.tree)
	} else if int(s.window.GetDepth()) <= s.wanted {
		return 0
	}
	return max(0, most-len(s.guesses))
}

// urgent returns whether the verifier may be waiting for guesses.
func (s *sequence) urgent() bool {
	return len(s.guesses) < s.wanted && s.room() > 0
}

// extend asks the strategy for the guesses that the verifier's next step lacks. If the step lacks
// none, extend asks for the guesses of one more step.
func (s *sequence) extend() {
	count := s.wanted
	if s.urgent() {
		count -= len(s.guesses)
	}
	count = min(count, s.room())
	if count <= 0 {
		s.givenUp = true
		return
	}
	text := make([]uint32, 0, len(s.committed)+len(s.guesses))
	text = append(append(text, s.committed...), s.guesses...)
	found := s.strategy.Guess(text, count)
	count = min(count, len(found.Tokens))
	s.guesses = append(s.guesses, found.Tokens[:count]...)
	s.confidences = append(s.confidences, sized(found.Confidences, count)...)
	if s.sampled && len(found.Distributions) >= count {
		s.distributions = append(s.distributions, found.Distributions[:count]...)
	}
	s.givenUp = count == 0
}

// skip returns the message that no more guesses come, or nil. It returns the message once for each
// committed length, and only if the verifier may be waiting for more.
func (s *sequence) skip() *pb.Skip {
	if s.skipped || s.room() > 0 || len(s.guesses) >= s.wanted {
		return nil
	}
	s.skipped = true
	return &pb.Skip{SequenceId: s.id, BaseLength: int32(len(s.committed))}
}

func min(first int, others ...int) int {
	for _, other := range others {
		if other < first {
			first = other
		}
	}
	return first
}

func max(one, other int) int {
	if one > other {
		return one
	}
	return other
}
