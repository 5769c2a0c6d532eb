package drafter

import pb "outrider.dev/go/outrider/v1"

const maxProposalTokens = 1024

// sequence is the drafter's state of one sequence: the committed tokens, and a chain of guesses
// behind them.
type sequence struct {
	guesser       Guesser
	sampled       bool // the verifier asked for sampled guesses with their distributions
	id            uint64
	committed     []uint32
	guesses       []uint32
	distributions []*pb.SparseDistribution // of the unsent guesses, if they were sampled
	sent          int                      // number of guesses that were sent
	wanted        int                      // guesses that the verifier can use in its next step
	window        *pb.Window
	givenUp       bool // the chain is not extended before the next verdict
	branched      bool
	skipped       bool
}

func open(opened *pb.Opened, guesser Guesser) *sequence {
	sparse := pb.DraftDistribution_DRAFT_DISTRIBUTION_SPARSE
	return &sequence{
		guesser: guesser, sampled: opened.Distribution == sparse, id: opened.SequenceId,
		committed: opened.TokenIds, wanted: int(opened.DraftTokens), window: opened.Window,
	}
}

// follow applies a verdict. A verdict without new tokens changes nothing. It returns false for a
// verdict that leaves a gap.
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
		s.guesses, s.sent = s.guesses[matched:], max(0, s.sent-matched)
	} else {
		s.guesses, s.sent = nil, 0
	}
	s.distributions = nil
	s.givenUp, s.branched, s.skipped = false, false, false
	s.wanted = int(verdict.DraftTokens)
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

// urgent returns whether the verifier may be waiting for guesses.
func (s *sequence) urgent() bool {
	return len(s.guesses) < s.wanted && s.room() > 0
}

// extend asks the strategy for the guesses that the verifier's next step lacks. If it lacks none,
// it asks for the guesses of one more step.
func (s *sequence) extend() {
	count := s.wanted
	if s.urgent() {
		count -= len(s.guesses)
	}
	count = min(count, s.room())
	text := make([]uint32, 0, len(s.committed)+len(s.guesses))
	text = append(append(text, s.committed...), s.guesses...)
	var run []uint32
	if sampler, ok := s.guesser.(Sampler); ok && s.sampled && count > 0 {
		var given []*pb.SparseDistribution
		run, given = sampler.Sample(text, count)
		s.distributions = append(s.distributions, given...)
	} else if count > 0 {
		run = s.guesser.Guess(text, count)
	}
	if len(run) > count {
		run = run[:count]
	}
	s.guesses = append(s.guesses, run...)
	s.givenUp = len(run) == 0
}

// proposal returns the unsent guesses as a proposal that is complete in itself; nil if there are
// none.
func (s *sequence) proposal() *pb.Proposal {
	if s.sent == len(s.guesses) {
		return nil
	}
	tokens := append([]uint32(nil), s.guesses...)
	proposal := &pb.Proposal{SequenceId: s.id, BaseLength: int32(len(s.committed)), TokenIds: tokens}
	if len(s.distributions) > 0 {
		// A distribution without ids stands for the one that was sent with the same token before.
		before := len(s.guesses) - len(s.distributions)
		proposal.Distributions = make([]*pb.SparseDistribution, before, len(s.guesses))
		for i := range proposal.Distributions {
			proposal.Distributions[i] = &pb.SparseDistribution{}
		}
		proposal.Distributions = append(proposal.Distributions, s.distributions...)
		s.distributions = nil
	}
	s.sent = len(s.guesses)
	s.addBranches(proposal)
	return proposal
}

// addBranches adds the strategy's branches to the proposal, as far as the window has room.
func (s *sequence) addBranches(proposal *pb.Proposal) {
	brancher, ok := s.guesser.(Brancher)
	if !ok || s.branched || len(proposal.Distributions) > 0 {
		return
	}
	s.branched = true
	room := int(s.window.GetTokenCount()) - len(s.guesses)
	for i := range s.guesses {
		proposal.Parents = append(proposal.Parents, uint32(i))
	}
	for _, branch := range brancher.Branch(s.committed, s.guesses) {
		if branch.At > len(s.guesses) || len(branch.Tokens) > room {
			continue
		}
		room -= len(branch.Tokens)
		parent := uint32(branch.At)
		for _, token := range branch.Tokens {
			proposal.TokenIds = append(proposal.TokenIds, token)
			proposal.Parents = append(proposal.Parents, parent)
			parent = uint32(len(proposal.TokenIds))
		}
	}
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
