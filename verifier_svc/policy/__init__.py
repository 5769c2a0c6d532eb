"""Decides how many draft tokens to verify, which drafters to ask, and how long to wait for them."""
