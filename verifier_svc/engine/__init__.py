"""The engine: scheduling, forwards, commits, and the thread that runs them."""
