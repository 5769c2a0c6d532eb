"""Where n-grams are kept: in this process, or in Redis."""
