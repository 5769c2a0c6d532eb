"""Grammars: checked, compiled and followed by a backend."""
