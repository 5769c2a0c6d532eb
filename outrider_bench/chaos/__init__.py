"""A campaign of faults against a real stack under traffic, and the check of its history."""
