"""The drafter service. A drafter dials verifiers and streams guesses of their next tokens.

The stream and the state of each sequence are in `outrider.drafter`. A verdict moves a sequence on
or rewinds it (`DraftSequence.advance_or_rewind`); then the family rewinds its caches
(`Family.committed`).
"""
