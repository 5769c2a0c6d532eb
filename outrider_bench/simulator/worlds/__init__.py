"""Random simulated worlds with faults: a seed determines each world; every invariant is checked.

As in the tests of TigerBeetle and FoundationDB, the production code runs in virtual time, with
everything that may go wrong. A failing seed fails identically when it runs again.
"""
