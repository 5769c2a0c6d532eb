"""The acceptance rules that compute with probabilities: pure functions of probabilities and noise.

The rules use no sequences, streams or settings. TOKEN_WISE and BLOCK are in `sampled_drafts.py`;
TYPICAL and RELAXED are in `lossy.py`. GREEDY and COUPLED compare tokens, and SYNTHETIC compares
noise with given rates: they are in `verification/acceptance.py`, which applies all rules.
"""
