"""Models on a CPU: attention and whole forwards in C."""
