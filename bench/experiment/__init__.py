"""Placement experiments: where should a drafter sit, measured on real processes and predicted by simulation."""
