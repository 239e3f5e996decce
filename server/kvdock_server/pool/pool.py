"""The host pool: one segment and the slots in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvdock_server.pool.segment import Segment
from kvdock_server.pool.slots import SlotAllocator

_MIN_SLAB_BYTES = 1 << 20
_MAX_SLAB_BYTES = 64 << 20
_SLABS = 64


def slab_bytes(pool_bytes: int) -> int:
    """Slab size for a pool: about a 64th, a power of two from 1 to 64 MiB."""
    wanted = max(pool_bytes // _SLABS, _MIN_SLAB_BYTES)
    return min(1 << (wanted.bit_length() - 1), _MAX_SLAB_BYTES)


class Pool:
    """Memory of a fixed size that becomes usable as it is faulted in."""

    def __init__(self, nbytes: int) -> None:
        """Make a pool of ``nbytes``, rounded down to whole slabs; PoolError if it cannot be had."""
        self.slots = SlotAllocator(nbytes, slab_bytes(nbytes))
        self.segment = Segment(self.slots.limit_bytes)

    def start(self, loop: asyncio.AbstractEventLoop, faulted: Callable[[int, int], None]) -> None:
        """Fault memory in behind the running loop, which alone touches the slots.

        ``faulted(offset, nbytes)`` is told of each piece, on other threads.
        """

        def ready(offset: int, nbytes: int) -> None:
            faulted(offset, nbytes)
            loop.call_soon_threadsafe(self.slots.add, offset, nbytes)

        self.segment.fault_in(self.slots.slab_bytes, ready)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The bytes of a slot."""
        return self.segment.view[offset : offset + nbytes]

    def stop(self) -> None:
        """Remove the segment's name."""
        self.segment.stop()
