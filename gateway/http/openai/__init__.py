"""OpenAI's completions and chats: bodies, their checks, and the shapes of answers."""
