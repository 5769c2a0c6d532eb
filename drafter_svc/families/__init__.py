"""The families of drafters.

To add a family, see docs/contribute.md, or register an entry point in another package.
"""
