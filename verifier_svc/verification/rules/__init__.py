"""Acceptance rules: each a pure function of probabilities and noise. They know no sequences, streams or settings."""
