"""Pinning in order and by pieces, with a driver that writes down what it is told."""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

from kvdock_server.transfer.devices.driver import CudaError, Driver
from kvdock_vllm.engine.device import pinning
from kvdock_vllm.engine.device.pinning import PinnedMemory

PIECE = 1 << 20


class RecordingDriver:
    """Pins up to a limit, in one context."""

    def __init__(self, limit: int = 1 << 40) -> None:
        self.limit = limit
        self.registered: dict[int, int] = {}
        self.context: int | None = None

    def set_current(self, context: int) -> None:
        self.context = context

    def register_host(self, address: int, nbytes: int) -> None:
        assert self.context is not None
        if sum(self.registered.values()) + nbytes > self.limit:
            raise CudaError("cuMemHostRegister_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
        self.registered[address] = nbytes

    def unregister_host(self, address: int) -> None:
        assert self.context is not None
        del self.registered[address]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[RecordingDriver], RecordingDriver]:
    def use(driver: RecordingDriver) -> RecordingDriver:
        monkeypatch.setattr(pinning, "PIECE_BYTES", PIECE)
        monkeypatch.setattr(pinning, "_POLL_SECONDS", 0.001)
        return driver

    return use


def shared_memory(nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Of which nothing is there yet."""
    fd = os.memfd_create("pool")
    os.ftruncate(fd, nbytes)
    memory = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
    os.close(fd)
    return memory


def pinned_by(driver: RecordingDriver, memory: Any, context: int) -> PinnedMemory:
    return PinnedMemory([memory], cast(Driver, driver), context)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def ended(pinned: PinnedMemory) -> bool:
    """Whether everything was unregistered in time."""
    pinned._thread.join(5)
    return not pinned._thread.is_alive()


def test_each_piece_is_pinned_when_it_is_there_and_unpinned_at_the_end(
    use: Callable[[RecordingDriver], RecordingDriver],
) -> None:
    driver = use(RecordingDriver())
    memory = shared_memory(3 * PIECE)
    address = memory.ctypes.data
    border = -address % PIECE or PIECE
    pinned = pinned_by(driver, memory, 3)
    memory[: border - 1] = 1
    until(lambda: pinned.pinned_bytes == border)
    assert driver.registered == {address: border}
    assert driver.context == 3
    assert pinned.borders[0] == address + border
    some = np.array([address, address + border - 1, address + border], np.uint64)
    covered = pinned.covers(some)
    assert covered is not None
    assert covered.tolist() == [True, True, False]
    memory[:] = 1
    until(lambda: pinned.pinned_bytes == 3 * PIECE)
    until(lambda: pinned.covers(some) is None)
    assert all(
        (start + nbytes) % PIECE == 0 for start, nbytes in list(driver.registered.items())[:-1]
    )
    pinned.close()
    assert ended(pinned)
    assert driver.registered == {}
    assert pinned.refused is None


def test_a_limit_is_told_and_what_is_pinned_stays_so(
    use: Callable[[RecordingDriver], RecordingDriver], caplog: pytest.LogCaptureFixture
) -> None:
    driver = use(RecordingDriver(limit=2 * PIECE))
    memory = shared_memory(4 * PIECE)
    memory[:] = 1
    pinned = pinned_by(driver, memory, 0)
    until(lambda: pinned.refused is not None)
    assert pinned.pinned_bytes == sum(driver.registered.values()) > 0
    # It is told right after it is noted, by another thread.
    until(lambda: any(r.levelno == logging.WARNING for r in caplog.records))
    (warning,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert f"CUDA pins no more than {pinned.pinned_bytes:,} of the pool's 4,194,304 bytes" in (
        warning.getMessage()
    )
    assert "CUDA_ERROR_OUT_OF_MEMORY" in warning.getMessage()
    assert "memlock" in warning.getMessage()
    pinned.close()
    assert ended(pinned)
    assert driver.registered == {}


def test_it_ends_while_it_waits_for_memory(
    use: Callable[[RecordingDriver], RecordingDriver],
) -> None:
    driver = use(RecordingDriver())
    pinned = pinned_by(driver, shared_memory(PIECE), 0)
    pinned.close()
    assert ended(pinned)
    assert driver.registered == {}
