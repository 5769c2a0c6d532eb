"""Readers of published heads' files, which say what a head computes: a module for each group."""
