"""A transfer of blocks between one worker's memory and the pool, as a lane carries it out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from kvdock_server.transfer.devices.copy_streams import Direction
from kvdock_server.transfer.devices.device import Device, MappedGroup
from kvdock_server.transfer.devices.driver import CudaError
from kvdock_server.transfer.devices.opened_events import OpenedEvents
from kvdock_server.transfer.plans.arrays import I64, U64
from kvdock_server.transfer.plans.pieces import CopyPiece, ForwardedBlocks, Piece


class StartCondition(Protocol):
    """When a transfer may start to copy. Called on the thread of its lane, ``close`` last."""

    def has_come(self) -> bool:
        """True once copying may start, and from then on. Raises if copying may never start."""

    def close(self) -> None: ...


class ReadyEvent:
    """Holds a transfer back until an event of the engine is done."""

    def __init__(self, events: OpenedEvents, ipc_handle: bytes) -> None:
        """``ipc_handle`` is the event's (64 bytes), or empty if the transfer may start at once."""
        self._events = events
        self._handle = ipc_handle
        self._event = 0
        self.was_done = not ipc_handle
        """The last answer of ``has_come``. Any thread may read it."""

    def has_come(self) -> bool:
        if not self.was_done:
            if not self._event:
                self._event = self._events.open(self._handle)
            self.was_done = self._events.is_done(self._event)
        return self.was_done

    def close(self) -> None:
        if self._event:
            self._events.close(self._handle, self._event)


class LeadersReadyEvent:
    """Holds a follower's transfer back until the leader's transfer has seen the event done."""

    def __init__(self, event: ReadyEvent) -> None:
        self._event = event

    def has_come(self) -> bool:
        return self._event.was_done

    def close(self) -> None:
        """The leader's transfer closes the event."""


class BlockTransfer:
    """Copies blocks of one group from or to the pool."""

    _forwarded = False
    """True for a load that goes on to other devices."""

    def __init__(
        self,
        device: Device,
        direction: Direction,
        group: MappedGroup,
        ids: I64,
        hosts: U64,
        start: StartCondition,
    ) -> None:
        """Block ``ids[i]`` is copied from or to host address ``hosts[i]``."""
        self._streams = device.streams[direction]
        self._group = group
        self._ids = ids
        self._hosts = hosts
        self._start = start

    @property
    def total_bytes(self) -> int:
        return len(self._ids) * self._group.planner.block_bytes

    def ready(self) -> bool:
        try:
            return self._start.has_come()
        except CudaError:
            self._streams.check()
            raise

    def pieces(self) -> Iterator[Piece]:
        return self._copies(self._ids, self._hosts, stage=self._may_stage())

    def start(self, piece: Piece) -> int:
        assert not isinstance(piece, ForwardedBlocks)
        return self._streams.start(piece, self._group.kernel)

    def finish(self) -> None:
        self._start.close()

    def _may_stage(self) -> bool:
        return (
            self._group.kernel is not None
            and self._group.planner.may_stage(forwarded=self._forwarded)
            and self._streams.reserve_staging()
        )

    def _copies(self, ids: I64, hosts: U64, *, stage: bool) -> Iterator[CopyPiece]:
        return self._group.planner.plan(ids, hosts, stage=stage, forwarded=self._forwarded)
