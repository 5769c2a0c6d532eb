"""Acceptance rules: pure functions of probabilities and noise.

They know no sequences, streams or settings.
"""
