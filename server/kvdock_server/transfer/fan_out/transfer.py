"""The transfer of a load that goes on to other devices.

Such a load comes from host memory once, to the leader's device. From there the blocks are forwarded
to the other devices in portions. While one portion is forwarded, the next comes from the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

from kvdock_server.transfer.devices.block_transfer import BlockTransfer, StartCondition
from kvdock_server.transfer.devices.copy_streams import Direction
from kvdock_server.transfer.devices.device import Device, MappedGroup
from kvdock_server.transfer.devices.driver import CudaError
from kvdock_server.transfer.fan_out.peer_path import PeerBranch
from kvdock_server.transfer.plans.arrays import I64, U64
from kvdock_server.transfer.plans.pieces import ForwardedBlocks, Piece

PORTION_BYTES = 128 << 20
"""To queue copies between devices takes the lane's thread 0.12 to 0.25 ms for every portion and
receiver, however few copies there are. With portions of 32 MiB and three receivers this took all of
the thread's time, and the link waited for the thread. With 16 MiB loads took twice as long."""
LAST_PORTION_BYTES = 32 << 20
"""Portions grow shorter towards the end of a load, since forwarding the last portion adds to the
time of the load: 0.25 to 0.5 ms for three receivers at 376 GB/s, beside 19.7 ms for 1 GiB from the
host."""


class FanOutTransfer(BlockTransfer):
    """A load into one worker's memory that goes on along ``branches``."""

    _forwarded = True

    def __init__(
        self,
        device: Device,
        group: MappedGroup,
        ids: I64,
        hosts: U64,
        start: StartCondition,
        branches: Sequence[PeerBranch],
    ) -> None:
        """Block ``ids[i]`` is loaded from host address ``hosts[i]``."""
        super().__init__(device, Direction.LOAD, group, ids, hosts, start)
        self._driver = device.driver
        self._branches = branches
        self._block_bytes = group.planner.block_bytes
        self._events: list[int] = []

    @property
    def total_bytes(self) -> int:
        return 2 * super().total_bytes  # forwarded blocks count as much as loaded ones

    def pieces(self) -> Iterator[Piece]:
        stage = self._may_stage()
        # Events of the streams are used again for other transfers, so this transfer makes its own.
        for _ in range(4):
            self._events.append(self._driver.create_event())
        first, second, third, fourth = self._events
        events = cycle([(first, second), (third, fourth)])
        waiting: ForwardedBlocks | None = None
        for portion in _portions(len(self._ids), self._block_bytes):
            ids = self._ids[portion]
            yield from self._copies(ids, self._hosts[portion], stage=stage)
            after = next(events)
            self._streams.mark(*after)
            # A portion is forwarded after the next portion's copies are queued, so that the link is
            # never idle.
            if waiting is not None:
                yield waiting
            waiting = ForwardedBlocks(ids, self._block_bytes, len(self._branches), after)
        assert waiting is not None
        yield waiting

    def start(self, piece: Piece) -> int:
        if not isinstance(piece, ForwardedBlocks):
            return super().start(piece)
        try:
            ends = [branch.forward(piece) for branch in self._branches]
            return self._streams.join([end for end in ends if end is not None])
        except CudaError:
            for branch in self._branches:
                branch.end_all()
            self._streams.end_all()
            raise

    def finish(self) -> None:
        for event in self._events:
            self._driver.destroy_event(event)
        super().finish()


def _portions(count: int, block_bytes: int) -> Iterator[slice]:
    """Slices of ``count`` blocks: each half of what is left, within the bounds of a portion."""
    most, least = (max(1, nbytes // block_bytes) for nbytes in (PORTION_BYTES, LAST_PORTION_BYTES))
    start = 0
    while start < count:
        end = start + min(most, max(least, (count - start) // 2))
        # A rest shorter than the least portion joins this one.
        end = end if count - end >= least else count
        yield slice(start, end)
        start = end
