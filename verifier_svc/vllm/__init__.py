"""vLLM as the verifier's engine: its scheduler takes our drafts, its runner our noise."""
