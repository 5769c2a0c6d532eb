"""The prompts of an experiment by kind: those of the demo, and chats."""

from __future__ import annotations

from outrider.launch.prompts import CODE, EXTRACTION, REWRITING

_CHATS = (
    "What is a list in Python, and how does it differ from a tuple?",
    "Explain in a few sentences what a virtual environment is for.",
    "How do I read a file line by line?",
    "Write a short note that thanks a colleague for a review.",
)
CHAT = tuple(("chat", f"<|user|>{ask}<|end|><|assistant|>") for ask in _CHATS)
KINDS = {"code": CODE, "rewriting": REWRITING, "json": EXTRACTION, "chat": CHAT}
"""Pairs (kind, prompt); chats are rendered in the bundled pair's template."""
