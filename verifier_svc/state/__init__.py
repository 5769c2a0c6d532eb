"""What the verifier knows of each sequence and drafter. Knows no policy and no streams."""
