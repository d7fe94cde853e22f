"""Inner loops: a torch twin of every operation, and its Triton kernel where one exists."""
