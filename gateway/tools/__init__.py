"""Tools and thinking: the grammar for the request, and the reader of the answer."""
