"""HTTP: the schemas and answers of OpenAI's and Anthropic's APIs, connections, and the page."""
