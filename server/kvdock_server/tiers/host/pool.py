"""The host pool: one segment and the slots in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvdock_server.numa import Topology
from kvdock_server.tiers.host.placement import Placement
from kvdock_server.tiers.host.segment import Segment
from kvdock_server.tiers.host.slots import SlotAllocator

_MIN_SLAB_BYTES = 1 << 20
_MAX_SLAB_BYTES = 64 << 20
_SLABS = 64


def slab_bytes(pool_bytes: int) -> int:
    """Bytes of a slab: about a 64th of the pool, a power of two from 1 to 64 MiB."""
    wanted = max(pool_bytes // _SLABS, _MIN_SLAB_BYTES)
    return min(1 << (wanted.bit_length() - 1), _MAX_SLAB_BYTES)


class Pool:
    """Host memory of a fixed size. It becomes usable piece by piece, as it is faulted in."""

    def __init__(self, nbytes: int, topology: Topology | None = None) -> None:
        """Make a pool of ``nbytes``, rounded down to slabs. PoolError beyond a memory limit.

        It is placed on the sockets of ``topology``, if there are any.
        """
        topology = topology or Topology()
        slab = slab_bytes(nbytes)
        self.slots = SlotAllocator(nbytes, slab, max(len(topology.sockets), 1))
        self.segment = Segment(self.slots.limit_bytes)
        self.placement = Placement(topology, self.segment.address, self.segment.nbytes, slab)

    def start(self, loop: asyncio.AbstractEventLoop, faulted: Callable[[int, int], None]) -> None:
        """Begin to fault memory in, in the background. Only ``loop`` touches the slots.

        ``faulted(offset, nbytes)`` is called for each piece, on any thread. PoolError if there is
        no memory for the first piece.
        """

        def ready(offset: int, nbytes: int) -> None:
            faulted(offset, nbytes)
            socket = self.placement.found(offset, nbytes)
            loop.call_soon_threadsafe(self._add, offset, nbytes, socket)

        self.segment.fault_in(self.slots.slab_bytes, ready, self.placement.shares)

    def _add(self, offset: int, nbytes: int, socket: int) -> None:
        self.slots.add(offset, nbytes, socket)
        if self.slots.ready_bytes == self.slots.limit_bytes:
            self.placement.check([ready for ready, _ in self.slots.ready_and_free()])

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The bytes of a slot."""
        return self.segment.view[offset : offset + nbytes]

    def stop(self) -> None:
        """Stop faulting in, and remove the segment's name."""
        self.segment.stop()
