"""Tools and thinking: the grammar on the way in, and the reader of the answer on the way out."""
