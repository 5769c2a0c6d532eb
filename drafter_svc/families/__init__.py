"""The families of drafters.

To add one, see docs/contribute.md, or register an entry point in another package.
"""
