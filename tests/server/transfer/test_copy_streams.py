"""How a device's streams hand pieces to the driver."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from kvdock_server.transfer.devices import copy_streams
from kvdock_server.transfer.devices.copy_streams import CopyStreams, Direction
from kvdock_server.transfer.devices.driver import CudaError, Driver, Side
from kvdock_server.transfer.devices.pinning import PinnedPool
from kvdock_server.transfer.plans.arrays import U64
from kvdock_server.transfer.plans.pieces import SERVER_PACE, Rectangles, Segments


class CountingDriver:
    """Copies nothing, and notes how many copies come in each call."""

    has_batch_copy = True

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.synchronized: list[int] = []
        self.fails_at_call = -1
        self._next = 0

    def copy_batch(self, targets: U64, sources: U64, sizes: U64, stream: int) -> None:
        self._count(len(sizes))

    def copy_rectangles(
        self, targets: Side, sources: Side, width: U64, height: U64, stream: int
    ) -> None:
        self._count(len(width))

    def _count(self, copies: int) -> None:
        if len(self.calls) == self.fails_at_call:
            raise CudaError("a copy", 700, "CUDA_ERROR_ILLEGAL_ADDRESS", "it broke")
        self.calls.append(copies)

    def create_stream(self) -> int:
        self._next += 1
        return self._next

    create_event = create_stream

    def synchronize_stream(self, stream: int) -> None:
        self.synchronized.append(stream)

    def set_current(self, context: int) -> None: ...

    def record_event(self, event: int, stream: int) -> None: ...

    def synchronize_event(self, event: int) -> None: ...

    def query_event(self, event: int) -> bool:
        return True


class Pinned:
    def covers(self, host: U64) -> None:
        """All is."""


@pytest.fixture
def driver() -> CountingDriver:
    return CountingDriver()


@pytest.fixture
def streams(driver: CountingDriver) -> CopyStreams:
    pool = cast(PinnedPool, Pinned())
    streams = CopyStreams(cast(Driver, driver), 1, Direction.LOAD, pool, SERVER_PACE)
    streams.open()
    return streams


def columns(count: int, number: int) -> list[Any]:
    return [np.arange(count, dtype=np.uint64)] * number


def test_calls_are_short_where_the_link_is_idle(
    driver: CountingDriver, streams: CopyStreams
) -> None:
    tickets = [streams.start(Segments(*columns(700, 3)), None) for _ in range(2)]
    assert driver.calls == [32, 64, 128, 256, 220, 512, 188]
    driver.calls.clear()
    for ticket in tickets:
        streams.wait(ticket, more_under_way=False)
    streams.start(Rectangles(*columns(30, 6)), None)
    streams.start(Rectangles(*columns(30, 6)), None)
    assert driver.calls == [4, 8, 16, 2, 30]


def test_nothing_of_a_piece_that_could_not_be_queued_is_under_way(
    driver: CountingDriver, streams: CopyStreams
) -> None:
    driver.fails_at_call = 2
    with pytest.raises(CudaError, match="it broke"):
        streams.start(Segments(*columns(700, 3)), None)
    assert sorted(driver.synchronized) == sorted(streams._streams)
    assert streams.failure is None
    driver.calls.clear()
    streams.start(Segments(*columns(33, 3)), None)
    assert driver.calls == [copy_streams._FIRST_SEGMENTS, 1]
