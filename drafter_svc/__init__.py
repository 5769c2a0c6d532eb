"""A drafter: dials a verifier, is handed sequences, and streams guesses of their next tokens."""
