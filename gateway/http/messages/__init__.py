"""Anthropic's Messages API, translated to a chat and back."""
