"""Verification of drafts: acceptance rules, grammar masks, log probabilities."""
