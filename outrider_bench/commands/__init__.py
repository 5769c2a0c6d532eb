"""The commands of `outrider lab`: their flags and help.

Before a command runs, it imports only what its flags need, so that `--help` answers at once.
"""
