"""Acceptance rules: pure functions of probabilities and noise.

They know no sequences, streams or settings. The rules for greedy and for coupled drafts are a
comparison of tokens, which is in `verification/acceptance.py`.
"""
