"""Where bytes are kept: so far host memory."""
