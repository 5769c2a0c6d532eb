"""OpenAI's Responses API, translated to a chat and back."""
