"""Random worlds with faults: each is a pure function of its seed, and every invariant is checked.

As in the tests of TigerBeetle and FoundationDB, the production code runs in virtual time, with
everything that may go wrong, and a failing seed plays identically again.
"""
