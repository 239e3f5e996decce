"""Where the blocks of a group are, as byte regions.

Block b's piece in a region begins at ``address + b * block_stride``. The host keeps a block as its
regions one after the other. So the host's order depends on the order of dimensions *inside* a page,
which the namespace commits to. It does not depend on the order of layers and blocks around a page:
engines that differ only there share.
"""

from __future__ import annotations

from dataclasses import dataclass


class UnsupportedLayoutError(ValueError):
    """The layout of the model's KV cache is not supported. The message names it."""


@dataclass(frozen=True, slots=True)
class Region:
    """One contiguous piece of every block, in bytes."""

    address: int
    """Where the piece of block 0 begins."""
    block_stride: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Where the blocks of one group are in this process, and in which order the host keeps them."""

    num_blocks: int
    regions: tuple[Region, ...]
    pages: tuple[str, ...]
    """For each layer: its name, bytes a page, element type and order of dimensions."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all its regions."""
        return sum(region.page_bytes for region in self.regions)
