"""Blocks in GPU memory. With torch: it owns the memory, and has the streams, events and kernels."""
