"""Where bytes are kept. So far the only tier is host memory."""
