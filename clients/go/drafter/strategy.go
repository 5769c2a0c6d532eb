package drafter

import pb "outrider.dev/go/outrider/v1"

// Strategy guesses how the text of one sequence goes on.
type Strategy interface {
	// Guess returns at most count tokens that may follow the text, one after the other. The text
	// ends with the guesses so far.
	Guess(text []uint32, count int) Guesses
}

// Guesses are tokens, one after the other.
type Guesses struct {
	Tokens []uint32
	// Confidences is empty, or has for each token the estimated probability that the token is
	// committed if the token before it is.
	Confidences []float32
	// Distributions is empty, or has for each token the distribution that it was drawn from. They
	// are sent where Opened.distribution is SPARSE.
	Distributions []*pb.SparseDistribution
}

// Branch guesses that Tokens follow the first At guesses, instead of the later guesses.
type Branch struct {
	At          int
	Tokens      []uint32
	Confidences []float32 // as in Guesses
}

// Brancher is a strategy that also offers branches beside the chain of guesses. Chain and branches
// form a tree.
type Brancher interface {
	// Branch returns branches with at most room tokens together.
	Branch(committed, guesses []uint32, room int) []Branch
}

// FeatureReader is a strategy that reads the target's hidden states.
type FeatureReader interface {
	// Read gets the features of consecutive tokens from position first on, in the type that
	// Config.Features names. The last committed token has no feature yet. Where first is higher than
	// the end of the earlier features, the features in between never come.
	Read(first int, rows []byte)
}

// GuessFunc is a function that is a strategy.
type GuessFunc func(text []uint32, count int) []uint32

// Guess calls the function.
func (f GuessFunc) Guess(text []uint32, count int) Guesses {
	return Guesses{Tokens: f(text, count)}
}

// Each returns an Open for a strategy that keeps no state for a sequence.
func Each(strategy Strategy) func(*pb.Opened) Strategy {
	return func(*pb.Opened) Strategy { return strategy }
}
