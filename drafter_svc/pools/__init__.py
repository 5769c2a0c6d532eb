"""Pools of n-grams: in this process, or in Redis."""
