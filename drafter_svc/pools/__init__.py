"""Pools of n-grams and of texts: in this process, or in Redis."""
