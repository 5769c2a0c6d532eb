"""Checks and compiles grammars, and computes token masks."""
