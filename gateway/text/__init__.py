"""Text: prompts to token ids, and token ids to text."""
