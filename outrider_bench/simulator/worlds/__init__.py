"""Random worlds with faults: each is a pure function of its seed, and every invariant is checked.

As TigerBeetle and FoundationDB test: the production code runs in virtual time, beside everything
that may go wrong, and a seed that fails plays the same again.
"""
