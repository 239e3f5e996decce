"""Where the blocks of a group lie, as byte regions.

The piece of block b in a region begins at ``address + b * block_stride``. The host keeps a block as
its regions one after the other. That order depends on the order of dimensions *inside* a page,
which goes into the namespace, and not on how layers and blocks lie around it: engines that differ
only in the latter share.
"""

from __future__ import annotations

from dataclasses import dataclass


class UnsupportedLayoutError(ValueError):
    """The model's KV cache has a form that is not supported; the message names it."""


@dataclass(frozen=True, slots=True)
class Region:
    """One contiguous piece of every block, in bytes."""

    address: int
    """Where the piece of block 0 begins."""
    block_stride: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Where the blocks of one group lie in this process, and in which order the host keeps them."""

    num_blocks: int
    regions: tuple[Region, ...]
    pages: tuple[str, ...]
    """For each layer its name, bytes a page, element type and order of dimensions."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all of its regions."""
        return sum(region.page_bytes for region in self.regions)
