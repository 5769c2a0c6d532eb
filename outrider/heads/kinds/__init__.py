"""The arithmetic of each kind of head, one file a kind.

The kinds that draft step by step share `autoregressive` and `dynamic_tree`.
"""
