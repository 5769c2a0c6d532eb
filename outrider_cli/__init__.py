"""The command line, and a whole stack on one host."""
