"""The commands of `outrider lab`: their flags and help.

None imports more than its flags need until it runs, so that `--help` answers at once.
"""
