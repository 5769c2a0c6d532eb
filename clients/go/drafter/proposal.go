package drafter

import pb "outrider.dev/go/outrider/v1"

// The least confidence that is sent: the contract allows no confidence of 0.
const leastConfidence = 1e-6

// proposal returns a proposal of all guesses, sent and unsent, so it needs no earlier proposal.
// Unless the guesses were sampled, it also has the strategy's branches. If no guess is unsent,
// proposal returns nil.
func (s *sequence) proposal() *pb.Proposal {
	if s.sent == len(s.guesses) {
		return nil
	}
	tokens := append([]uint32(nil), s.guesses...)
	proposal := &pb.Proposal{SequenceId: s.id, BaseLength: int32(len(s.committed)), TokenIds: tokens}
	s.sent = len(s.guesses)
	if len(s.distributions) > 0 {
		// A distribution without ids stands for the distribution that came with the same token before.
		before := len(s.guesses) - len(s.distributions)
		proposal.Distributions = make([]*pb.SparseDistribution, before, len(s.guesses))
		for i := range proposal.Distributions {
			proposal.Distributions[i] = &pb.SparseDistribution{}
		}
		proposal.Distributions = append(proposal.Distributions, s.distributions...)
		s.distributions = nil
		return proposal
	}
	given := append([]float32(nil), s.confidences...)
	for _, branch := range s.branches() {
		given = append(given, addBranch(proposal, branch)...)
	}
	proposal.Confidences = complete(given)
	return proposal
}

// branches returns the strategy's branches that have room. It asks the strategy once per verdict.
func (s *sequence) branches() (fitting []Branch) {
	brancher, ok := s.strategy.(Brancher)
	room := s.branchRoom()
	if !ok || s.branched || room == 0 {
		return nil
	}
	s.branched = true
	for _, branch := range brancher.Branch(s.committed, s.guesses, room) {
		deepest := branch.At + len(branch.Tokens)
		isInChain := 0 <= branch.At && branch.At <= len(s.guesses)
		if !isInChain || len(branch.Tokens) > room || deepest > int(s.window.GetDepth()) {
			continue
		}
		room -= len(branch.Tokens)
		fitting = append(fitting, branch)
	}
	return fitting
}

// addBranch adds a branch after the first At guesses of a proposal, and returns its confidences.
// As a parent, 0 is the base and j is TokenIds[j-1].
func addBranch(proposal *pb.Proposal, branch Branch) []float32 {
	if proposal.Parents == nil {
		for i := range proposal.TokenIds {
			proposal.Parents = append(proposal.Parents, uint32(i))
		}
	}
	parent := uint32(branch.At)
	for _, token := range branch.Tokens {
		proposal.TokenIds = append(proposal.TokenIds, token)
		proposal.Parents = append(proposal.Parents, parent)
		parent = uint32(len(proposal.TokenIds))
	}
	return sized(branch.Confidences, len(branch.Tokens))
}

// sized returns count confidences, 0 for those that were not given.
func sized(given []float32, count int) []float32 {
	all := make([]float32, count)
	copy(all, given)
	return all
}

// complete returns confidences as the contract demands: one in (0, 1] for each token, or none.
func complete(given []float32) []float32 {
	for i, confidence := range given {
		switch {
		case confidence == 0 || confidence != confidence:
			return nil
		case confidence < leastConfidence:
			given[i] = leastConfidence
		case confidence > 1:
			given[i] = 1
		}
	}
	return given
}
