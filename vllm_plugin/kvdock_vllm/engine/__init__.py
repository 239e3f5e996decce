"""What a connector of any engine can use: nothing here knows vLLM.

The scheduler's side: the link to the server, lookups, and which loads and stores are under way. The
worker's side: jobs on background threads, and the ways for their bytes to move. What needs torch,
because the blocks are torch's tensors, is in ``tensor_regions`` and in ``device``.
"""
