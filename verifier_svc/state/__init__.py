"""State of sequences and drafters: assignments, tries, measurements. No policy, no streams."""
