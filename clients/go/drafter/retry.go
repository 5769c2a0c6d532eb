package drafter

import (
	"math/rand"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"
)

const (
	firstPause = 100 * time.Millisecond
	longPause  = 2 * time.Second
	longRetry  = time.Minute // the longest RetryInfo that is followed
	goodStream = time.Minute
)

// The reasons that a drafter can get and that errors.proto marks "Retry: never". They count where a
// verifier's error has no `retry`.
var final = map[string]bool{
	"CERTIFICATE_NOT_ALLOWED": true, "INVALID_VALUE": true, "MALFORMED_REQUEST": true,
	"TOKENIZER_MISMATCH": true, "UNSUPPORTED_PARAMETER": true,
}

// refusal is an error for which the drafter itself ends a stream, and which a retry cannot cure.
type refusal string

func (r refusal) Error() string { return "drafter: " + string(r) }

// explain returns the time to wait after an error, and whether a retry cannot cure it.
func explain(err error, pause time.Duration) (time.Duration, bool) {
	if _, ok := err.(refusal); ok {
		return 0, true
	}
	wait := time.Duration(float64(pause) * (0.5 + rand.Float64()/2))
	for _, detail := range status.Convert(err).Details() {
		switch found := detail.(type) {
		case *errdetails.ErrorInfo:
			if found.Domain == "outrider.dev" && isFinal(found) {
				return 0, true
			}
		case *errdetails.RetryInfo:
			wait = found.RetryDelay.AsDuration()
		}
	}
	if wait > longRetry {
		wait = longRetry
	}
	return wait, false
}

// isFinal returns whether a retry cannot cure the error, even if its reason is unknown.
func isFinal(info *errdetails.ErrorInfo) bool {
	if rule := info.Metadata["retry"]; rule != "" {
		return rule == "never"
	}
	return final[info.Reason]
}

// next returns the pause after the next error: twice the last pause, or the first pause after a
// good stream.
func next(pause, lasted time.Duration) time.Duration {
	if pause *= 2; lasted > goodStream {
		return firstPause
	} else if pause > longPause {
		return longPause
	}
	return pause
}
