"""Which copies move a worker's blocks. Pure: no I/O, no CUDA, no threads."""
