"""A GPU as the server uses it: the CUDA driver, mapped memory, and a lane for each direction."""
