"""The arithmetic of each kind of head, one file a kind."""
