"""Ways of drafting, one file each."""
