"""HTTP: OpenAI's and Anthropic's APIs, with schemas and answers, connections, and the page."""
