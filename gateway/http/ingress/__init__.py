"""Bounds connections, admits requests and parses bodies, before a handler sees them."""
