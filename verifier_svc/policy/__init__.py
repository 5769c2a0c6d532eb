"""How many draft tokens to verify, whom to ask and how long to wait. Writes no state."""
