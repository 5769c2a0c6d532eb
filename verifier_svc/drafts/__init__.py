"""Drafters as the engine sees them: the roster, and the exchange of verdicts and proposals."""
