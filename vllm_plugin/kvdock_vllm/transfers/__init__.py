"""The ways for a worker's bytes to move, behind one face.

``HostTransfers``: the worker copies between its memory and the pool, both mapped into its process.
``DeviceTransfers``: the server copies between its pool and the GPU memory that the worker exported.
"""

from kvdock_vllm.transfers.base import Transfers, split_blocks
from kvdock_vllm.transfers.server import DeviceTransfers
from kvdock_vllm.transfers.shared import HostTransfers

__all__ = ["DeviceTransfers", "HostTransfers", "Transfers", "split_blocks"]
