"""Text: prompts to token ids, and token ids to text."""

from gateway.text.text_stream import TextStream
from gateway.text.token_table import TokenTable

__all__ = ["TextStream", "TokenTable"]
