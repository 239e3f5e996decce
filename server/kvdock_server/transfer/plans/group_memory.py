"""How a worker's KV cache lies in device memory, as the worker describes it.

The memory of a group is a list of regions. A region is one contiguous range of bytes in every
block, usually one layer's page. In block ``b`` this range begins at ``offset + b * block_stride``
of one allocation. Regions describe every cache that engines make: K and V apart or together, layers
apart or in one allocation, blocks or layers outermost, padded and permuted strides. What the bytes
mean does not matter here.

In host memory a block is its regions one behind the other, in the order in which they are listed,
and a chunk is its blocks one behind the other. The order in host memory does not depend on the
order in device memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvdock_server.transfer.plans.arrays import I64

UUID_BYTES = 16
IPC_HANDLE_BYTES = 64  # of a memory handle and of an event handle


class LayoutError(ValueError):
    """A described layout is wrong: it leaves its allocation, or a number is out of its limits."""


@dataclass(frozen=True, slots=True)
class DeviceAllocation:
    """One allocation of device memory of another process, as a whole.

    ``ipc_handle`` is its CUDA IPC memory handle (64 bytes), ``nbytes`` its size, and
    ``device_uuid`` names its device (16 bytes). LayoutError if one has another length.
    """

    ipc_handle: bytes
    nbytes: int
    device_uuid: bytes

    def __post_init__(self) -> None:
        if len(self.ipc_handle) != IPC_HANDLE_BYTES:
            raise LayoutError(f"an IPC handle has 64 bytes, this one has {len(self.ipc_handle)}")
        if len(self.device_uuid) != UUID_BYTES:
            raise LayoutError(f"a device UUID has 16 bytes, this one has {len(self.device_uuid)}")


@dataclass(frozen=True, slots=True)
class BlockRegion:
    """One contiguous range of every block: ``page_bytes`` at ``offset + b * block_stride``.

    ``allocation`` is an index into the worker's allocations, ``offset`` bytes from its beginning.
    """

    allocation: int
    offset: int
    block_stride: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """The blocks of one KV-cache group, with ids from 0 to ``num_blocks - 1``.

    ``regions`` are in the order in which host memory keeps them.
    """

    num_blocks: int
    blocks_per_chunk: int
    regions: tuple[BlockRegion, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in host memory."""
        return sum(region.page_bytes for region in self.regions)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one chunk in host memory: one slot of the pool."""
        return self.block_bytes * self.blocks_per_chunk

    def check(self, allocation_bytes: Sequence[int]) -> None:
        """LayoutError unless every byte of every block lies inside its allocation.

        ``allocation_bytes`` must not exceed the driver's sizes, whatever the worker says: a copy
        outside of mapped memory breaks the server's context for every engine.
        """
        if self.num_blocks < 1 or self.blocks_per_chunk < 1 or not self.regions:
            raise LayoutError(
                f"a layout needs blocks, blocks a chunk and regions, this one has "
                f"{self.num_blocks}, {self.blocks_per_chunk} and {len(self.regions)}"
            )
        for number, region in enumerate(self.regions):
            if not 0 <= region.allocation < len(allocation_bytes):
                raise LayoutError(
                    f"region {number} names allocation {region.allocation}, "
                    f"{len(allocation_bytes)} are described"
                )
            if region.page_bytes < 1 or region.offset < 0:
                raise LayoutError(
                    f"region {number} has {region.page_bytes} bytes a page at offset "
                    f"{region.offset}: a page has at least one byte, an offset is not negative"
                )
            if self.num_blocks > 1 and region.block_stride < region.page_bytes:
                raise LayoutError(
                    f"region {number} has pages of {region.page_bytes} bytes at a stride of "
                    f"{region.block_stride}: blocks would overlap"
                )
            end = region.offset + (self.num_blocks - 1) * region.block_stride + region.page_bytes
            size = allocation_bytes[region.allocation]
            if end > size:
                raise LayoutError(
                    f"region {number} ends at byte {end} of allocation {region.allocation}, "
                    f"which has {size}: check offset, stride and number of blocks"
                )

    def block_ids(
        self, named: Sequence[int] | npt.NDArray[np.integer], chunks: int, skip_blocks: int
    ) -> I64:
        """The block ids of ``chunks`` chunks without the first ``skip_blocks`` blocks, as an array.

        ValueError unless ``named`` has an id for each block, and the group has all these blocks.
        The count is checked before any id is looked at.
        """
        if not 0 <= skip_blocks < self.blocks_per_chunk:
            raise ValueError(
                f"skip_blocks {skip_blocks}: a chunk has {self.blocks_per_chunk} blocks"
            )
        needed = chunks * self.blocks_per_chunk - skip_blocks
        if len(named) != needed:
            raise ValueError(
                f"{len(named)} block_ids: {chunks} chunks of {self.blocks_per_chunk} blocks less "
                f"{skip_blocks} make {needed}"
            )
        ids = np.asarray(named, dtype=np.int64)
        low, high = int(ids.min(initial=0)), int(ids.max(initial=0))
        if low < 0 or high >= self.num_blocks:
            wrong = low if low < 0 else high
            raise ValueError(f"block id {wrong}: {self.num_blocks} blocks are registered")
        return ids
