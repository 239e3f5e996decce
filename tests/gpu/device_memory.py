"""Memory of a device, asked in the test's own process."""

from __future__ import annotations


def free_bytes(ordinal: int = 0) -> int:
    import torch

    return int(torch.cuda.mem_get_info(ordinal)[0])
