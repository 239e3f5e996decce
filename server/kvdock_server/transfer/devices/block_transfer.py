"""A transfer of blocks between one worker's memory and the pool, as a lane carries it out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from kvdock_server.transfer.devices.copy_streams import DeviceMover, Direction
from kvdock_server.transfer.devices.device import Device, MappedGroup
from kvdock_server.transfer.devices.driver import CudaError
from kvdock_server.transfer.devices.opened_events import ReadyEvents
from kvdock_server.transfer.plans.arrays import I64, U64
from kvdock_server.transfer.plans.pieces import CopyPiece, Piece, RelayedBlocks


class Start(Protocol):
    """When copying may start. Called on the thread of the transfer's lane only."""

    def has_come(self) -> bool:
        """True from then on. Raises if it will not come."""
        ...

    def close(self) -> None:
        """Called once, last."""
        ...


class ReadyEvent:
    """The start of a transfer when an event of the engine's is done; at once if there is none."""

    def __init__(self, events: ReadyEvents, ipc_handle: bytes) -> None:
        self._events = events
        self._handle = ipc_handle
        self._event = 0
        self.was_done = not ipc_handle
        """What ``has_come`` last said. Any thread."""

    def has_come(self) -> bool:
        if not self.was_done:
            if not self._event:
                self._event = self._events.open(self._handle)
            self.was_done = self._events.is_done(self._event)
        return self.was_done

    def close(self) -> None:
        if self._event:
            self._events.close(self._handle, self._event)


class StartOfAnother:
    """The start of a transfer that another one's event holds back as well."""

    def __init__(self, event: ReadyEvent) -> None:
        self._event = event

    def has_come(self) -> bool:
        return self._event.was_done

    def close(self) -> None:
        """The event is the other's."""


class BlockTransfer:
    """Blocks ``ids`` of one group, from or to host addresses ``hosts``."""

    _passed_on = False
    """Whether a load goes on to other devices."""

    def __init__(
        self,
        device: Device,
        direction: Direction,
        group: MappedGroup,
        ids: I64,
        hosts: U64,
        start: Start,
    ) -> None:
        self._mover: DeviceMover = device.mover(direction)
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
            self._mover.check()
            raise

    def pieces(self) -> Iterator[Piece]:
        return self._copies(self._ids, self._hosts, stage=self._may_stage())

    def start(self, piece: Piece) -> int:
        assert not isinstance(piece, RelayedBlocks)
        return self._mover.start(piece, self._group.table)

    def finish(self) -> None:
        self._start.close()

    def _may_stage(self) -> bool:
        return (
            self._group.table is not None
            and self._group.planner.may_stage(passed_on=self._passed_on)
            and self._mover.reserve_staging()
        )

    def _copies(self, ids: I64, hosts: U64, *, stage: bool) -> Iterator[CopyPiece]:
        return self._group.planner.plan(ids, hosts, stage=stage, passed_on=self._passed_on)
