"""The drafter service. It dials verifiers and streams guesses of their sequences' next tokens.

The stream and the state of each sequence are in `outrider.drafter`. A verdict moves a sequence on
or rewinds it (`DraftSequence.advance_or_rewind`); then the family rewinds its caches
(`Family.committed`).
"""
