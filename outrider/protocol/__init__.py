"""The messages between processes, with their limits and errors, and their forms on the wire."""
