"""Settings of a process: command line, environment, files, and their checks."""
