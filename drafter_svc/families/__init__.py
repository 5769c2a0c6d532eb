"""Ways of drafting. Adding one takes a file here and a line in registry.py, or an entry point of another package."""
