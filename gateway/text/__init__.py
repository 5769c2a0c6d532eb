"""Text: prompts to token ids, and token ids to text."""

from gateway.text.text_stream import TextStream, TokenTable

__all__ = ["TextStream", "TokenTable"]
