"""A lane whose streams copy host memory: order, fairness, cancelling, failure."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvdock_server.transfer.devices.lane import Lane, TransferFailedError
from kvdock_server.transfer.plans.pieces import (
    SERVER_PACE,
    ForwardedBlocks,
    Piece,
    ScatteredBlocks,
    Segments,
)

PIECE = 4096
UNDER_WAY = 6


class HostStreams:
    """Copies when a piece is waited for; ``gate`` holds it back."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.waits = 0
        self.log: list[str] = []
        self.started: list[tuple[str, Segments]] = []
        self.failing: set[str] = set()

    def open(self) -> None:
        self.log.append("open")

    def wait(self, ticket: int, *, more_under_way: bool) -> None:
        self.gate.wait(10)
        name, segments = self.started[ticket]
        if name in self.failing:
            raise RuntimeError("the copy broke")
        for device, host, nbytes in zip(
            segments.device.tolist(), segments.host.tolist(), segments.nbytes.tolist(), strict=True
        ):
            ctypes.memmove(host, device, nbytes)
        self.log.append(name)

    def close(self) -> None:
        self.log.append("close")


class HostTransfer:
    """A transfer of ``count`` pieces from one array to another."""

    def __init__(self, streams: HostStreams, name: str, count: int) -> None:
        self.streams = streams
        self.name = name
        self.source = np.random.default_rng(count).integers(0, 256, count * PIECE, np.uint8)
        self.target = np.zeros_like(self.source)
        self.is_ready = True
        self.finished = 0

    @property
    def total_bytes(self) -> int:
        return len(self.source)

    def ready(self) -> bool:
        return self.is_ready

    def pieces(self) -> Iterator[Piece]:
        for start in range(0, len(self.source), PIECE):
            addresses = [
                np.array([array.ctypes.data + start], dtype=np.uint64)
                for array in (self.source, self.target)
            ]
            yield Segments(addresses[0], addresses[1], np.array([PIECE], dtype=np.uint64))

    def start(self, piece: Piece) -> int:
        assert isinstance(piece, Segments)
        self.streams.started.append((self.name, piece))
        return len(self.streams.started) - 1

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def streams() -> HostStreams:
    return HostStreams()


@pytest.fixture
def lane(streams: HostStreams) -> Iterator[Lane]:
    lane = Lane("test", streams, SERVER_PACE.under_way_bytes)
    yield lane
    streams.gate.set()
    lane.close()


def eventually(condition: object, seconds: float = 5.0) -> None:
    assert callable(condition)
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_every_byte_arrives_and_the_transfer_finishes_once(
    lane: Lane, streams: HostStreams
) -> None:
    transfer = HostTransfer(streams, "a", 20)
    lane.submit(transfer).settled.result(5)
    np.testing.assert_array_equal(transfer.target, transfer.source)
    assert transfer.finished == 1


def test_a_small_transfer_passes_a_large_one(lane: Lane, streams: HostStreams) -> None:
    streams.gate.clear()
    large = lane.submit(HostTransfer(streams, "large", 50))
    eventually(lambda: streams.started)
    small = lane.submit(HostTransfer(streams, "small", 2))
    streams.gate.set()
    small.settled.result(5)
    large.settled.result(5)
    last_of_small = len(streams.log) - streams.log[::-1].index("small")
    assert streams.log[:last_of_small].count("large") < 10


def test_a_large_transfer_goes_on_while_small_ones_pass(lane: Lane, streams: HostStreams) -> None:
    streams.gate.clear()
    large = lane.submit(HostTransfer(streams, "large", 20))
    eventually(lambda: streams.started)
    small = [lane.submit(HostTransfer(streams, "small", 2)) for _ in range(30)]
    streams.gate.set()
    for job in (large, *small):
        job.settled.result(5)
    last_of_large = len(streams.log) - streams.log[::-1].index("large")
    assert 5 < streams.log[:last_of_large].count("small") < 30


def test_equal_transfers_end_one_after_the_other(lane: Lane, streams: HostStreams) -> None:
    streams.gate.clear()
    jobs = [lane.submit(HostTransfer(streams, name, 20)) for name in "abc"]
    streams.gate.set()
    for job in jobs:
        job.settled.result(5)
    ends = sorted(len(streams.log) - streams.log[::-1].index(name) for name in "abc")
    assert ends[0] <= 24
    assert ends[1] <= 44


def test_what_is_not_ready_holds_nobody_up(lane: Lane, streams: HostStreams) -> None:
    waiting = HostTransfer(streams, "waiting", 1)
    waiting.is_ready = False
    job = lane.submit(waiting)
    lane.submit(HostTransfer(streams, "other", 3)).settled.result(5)
    assert not job.settled.done()
    waiting.is_ready = True
    job.settled.result(5)
    assert streams.log == ["open", "other", "other", "other", "waiting"]


def test_a_cancelled_transfer_settles_when_its_last_piece_is_done(
    lane: Lane, streams: HostStreams
) -> None:
    streams.gate.clear()
    transfer = HostTransfer(streams, "a", 50)
    job = lane.submit(transfer)
    eventually(lambda: len(streams.started) == UNDER_WAY)
    job.cancel()
    time.sleep(0.02)
    assert not job.settled.done()  # these pieces still write to the target
    streams.gate.set()
    with pytest.raises(TransferFailedError, match="was cancelled"):
        job.settled.result(5)
    assert streams.log == ["open", *["a"] * UNDER_WAY]
    assert transfer.finished == 1


def test_cancelling_what_never_becomes_ready(lane: Lane, streams: HostStreams) -> None:
    transfer = HostTransfer(streams, "a", 1)
    transfer.is_ready = False
    job = lane.submit(transfer)
    time.sleep(0.005)
    job.cancel()
    with pytest.raises(TransferFailedError, match="was cancelled"):
        job.settled.result(5)
    assert not transfer.target.any()


def test_no_piece_is_started_after_the_deadline(lane: Lane, streams: HostStreams) -> None:
    streams.gate.clear()
    transfer = HostTransfer(streams, "a", 50)
    job = lane.submit(transfer, time.monotonic() + 0.05)
    eventually(lambda: len(streams.started) == UNDER_WAY)
    time.sleep(0.1)  # as if the process had been stopped
    streams.gate.set()
    with pytest.raises(TransferFailedError, match="in time"):
        job.settled.result(5)
    assert streams.log == ["open", *["a"] * UNDER_WAY]


def test_the_deadline_also_ends_what_never_becomes_ready(lane: Lane, streams: HostStreams) -> None:
    transfer = HostTransfer(streams, "a", 1)
    transfer.is_ready = False
    with pytest.raises(TransferFailedError, match="in time"):
        lane.submit(transfer, time.monotonic() + 0.02).settled.result(5)
    assert not transfer.target.any()


def test_a_waiter_that_gives_up_does_not_end_the_job(lane: Lane, streams: HostStreams) -> None:
    streams.gate.clear()
    transfer = HostTransfer(streams, "a", 3)
    job = lane.submit(transfer)
    assert not job.settled.cancel()
    streams.gate.set()
    job.settled.result(5)


def test_a_copy_that_breaks_fails_its_own_transfer_only(lane: Lane, streams: HostStreams) -> None:
    streams.failing = {"bad"}
    bad_transfer = HostTransfer(streams, "bad", 10)
    bad = lane.submit(bad_transfer)
    good = lane.submit(HostTransfer(streams, "good", 10))
    with pytest.raises(TransferFailedError, match="the copy broke"):
        bad.settled.result(5)
    good.settled.result(5)
    assert bad_transfer.finished == 1


def test_a_transfer_whose_event_cannot_be_asked_fails(lane: Lane, streams: HostStreams) -> None:
    class Broken(HostTransfer):
        def ready(self) -> bool:
            raise RuntimeError("no such event")

    with pytest.raises(TransferFailedError, match="no such event"):
        lane.submit(Broken(streams, "a", 1)).settled.result(5)


def test_closing_cancels_what_is_there_and_refuses_what_comes(streams: HostStreams) -> None:
    lane = Lane("test", streams, SERVER_PACE.under_way_bytes)
    streams.gate.clear()
    transfers = [HostTransfer(streams, "a", 50), HostTransfer(streams, "b", 1)]
    transfers[1].is_ready = False
    jobs = [lane.submit(transfer) for transfer in transfers]
    eventually(lambda: len(streams.started) == UNDER_WAY)
    threading.Timer(0.02, streams.gate.set).start()
    lane.close()
    jobs.append(lane.submit(HostTransfer(streams, "late", 1)))
    for job in jobs:
        with pytest.raises(TransferFailedError, match="closes this device"):
            job.settled.result(0)
    assert [transfer.finished for transfer in transfers] == [1, 1]
    assert streams.log[-1] == "close"


def test_a_thread_that_cannot_start_fails_transfers_with_the_reason() -> None:
    class Broken(HostStreams):
        def open(self) -> None:
            raise RuntimeError("no context")

    streams = Broken()
    lane = Lane("test", streams, SERVER_PACE.under_way_bytes)
    with pytest.raises(TransferFailedError, match="no context"):
        lane.submit(HostTransfer(streams, "a", 1)).settled.result(5)
    lane.close()


def test_what_is_passed_on_takes_nothing_of_the_link(lane: Lane, streams: HostStreams) -> None:
    """Large windows under way between devices leave room for the link's next pieces."""

    class PassedOn(HostTransfer):
        def pieces(self) -> Iterator[Piece]:
            copies = list(super().pieces())
            window = ForwardedBlocks(np.arange(1), 1 << 30, 3, (0, 0))
            yield from (copies[0], window, copies[1], window, *copies[2:])

        def start(self, piece: Piece) -> int:
            if isinstance(piece, ForwardedBlocks):
                nothing = np.zeros(0, dtype=np.uint64)
                piece = Segments(nothing, nothing, nothing)
            return super().start(piece)

    streams.gate.clear()
    transfer = PassedOn(streams, "a", 8)
    job = lane.submit(transfer)
    eventually(lambda: len(streams.started) == 6)
    streams.gate.set()
    job.settled.result(5)
    np.testing.assert_array_equal(transfer.target, transfer.source)


def test_no_more_staged_pieces_are_started_than_there_are_buffers(
    lane: Lane, streams: HostStreams
) -> None:
    class Staged(HostTransfer):
        def pieces(self) -> Iterator[Piece]:
            for piece in super().pieces():
                assert isinstance(piece, Segments)
                yield ScatteredBlocks(np.zeros(1, dtype=np.int64), PIECE, piece)

        def start(self, piece: Piece) -> int:
            assert isinstance(piece, ScatteredBlocks)
            return super().start(piece.host)

    streams.gate.clear()
    transfer = Staged(streams, "a", 8)
    job = lane.submit(transfer)
    eventually(lambda: len(streams.started) == 2)
    time.sleep(0.05)
    assert len(streams.started) == 2
    streams.gate.set()
    job.settled.result(5)
    np.testing.assert_array_equal(transfer.target, transfer.source)
