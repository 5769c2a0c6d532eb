"""Placement experiments measure and predict where a drafter should run."""
