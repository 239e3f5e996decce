"""The ways for a worker's bytes to move, behind one face (``base``).

In *server* mode the server copies between its pool and the GPU memory that the worker exported. In
*shared* mode the worker copies between its memory and the pool that it maps.
"""
