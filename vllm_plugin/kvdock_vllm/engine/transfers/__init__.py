"""The ways for a worker's bytes to move, behind one face.

In *server* mode the server copies between its pool and the GPU memory that the worker exported. In
*shared* mode the worker copies between its memory and the pool that it maps.
"""

from kvdock_vllm.engine.transfers.base import (
    CopyRequest,
    CountWorkers,
    Mark,
    Transfers,
    UnansweredError,
    split_blocks,
)
from kvdock_vllm.engine.transfers.shared import HostMover, SharedTransfers

__all__ = [
    "CopyRequest",
    "CountWorkers",
    "HostMover",
    "Mark",
    "SharedTransfers",
    "Transfers",
    "UnansweredError",
    "split_blocks",
]
