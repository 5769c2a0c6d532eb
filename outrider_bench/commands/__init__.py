"""The commands of `outrider lab`: their flags and help.

Before it runs, a command imports only what its flags need, so that `--help` answers at once.
"""
