"""Turns logits into tokens: penalties, truncation and counter-based noise."""
