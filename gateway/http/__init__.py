"""HTTP: OpenAI's API, its schema and answers, connections, and the page."""
