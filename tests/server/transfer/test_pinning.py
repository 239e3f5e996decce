"""Which pieces of the pool become pinned, and what happens when CUDA refuses."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvdock_server.transfer.devices.driver import CudaError
from kvdock_server.transfer.devices.pinning import SECTION_BYTES, PinnedPool

BASE = 1 << 44
SIZE = 2 * SECTION_BYTES + SECTION_BYTES // 2


class RecordingDriver:
    """Stands in for the CUDA driver, which is not on every machine that runs the tests."""

    def __init__(self, refuse_after: int = 100) -> None:
        self.registered: dict[int, int] = {}
        self.refuse_after = refuse_after

    def set_current(self, context: int) -> None:
        pass

    def register_host(self, address: int, nbytes: int) -> None:
        if len(self.registered) == self.refuse_after:
            raise CudaError("cuMemHostRegister_v2", 2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory")
        self.registered[address] = nbytes

    def unregister_host(self, address: int) -> None:
        del self.registered[address]


@pytest.fixture
def pool() -> Iterator[PinnedPool]:
    pool = PinnedPool(BASE, SIZE)
    yield pool
    pool.stop()


def settle(pool: PinnedPool, nbytes: int) -> None:
    end = time.monotonic() + 5
    while pool.pinned_bytes != nbytes and pool.refused is None:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_piece_is_pinned_when_all_of_it_is_there(pool: PinnedPool) -> None:
    driver = RecordingDriver()
    half = SECTION_BYTES // 2
    pool.faulted(half, SECTION_BYTES)  # the second half of one piece, the first of the next
    pool.start(driver, 0)  # type: ignore[arg-type]
    pool.faulted(2 * SECTION_BYTES, half)  # the last piece, which is short
    settle(pool, half)
    hosts = np.array([BASE, BASE + SECTION_BYTES, BASE + 2 * SECTION_BYTES], dtype=np.uint64)
    covered = pool.covers(hosts)
    assert covered is not None
    assert covered.tolist() == [False, False, True]
    pool.faulted(0, half)
    settle(pool, SECTION_BYTES + half)
    pool.faulted(SECTION_BYTES + half, half)
    settle(pool, SIZE)
    assert pool.covers(hosts) is None
    assert driver.registered == {
        BASE: SECTION_BYTES,
        BASE + SECTION_BYTES: SECTION_BYTES,
        BASE + 2 * SECTION_BYTES: half,
    }
    pool.stop()
    assert driver.registered == {}


def test_a_refused_limit_is_reported_and_the_rest_stays_unpinned(
    pool: PinnedPool, caplog: pytest.LogCaptureFixture
) -> None:
    pool.start(RecordingDriver(refuse_after=1), 0)  # type: ignore[arg-type]
    pool.faulted(0, SIZE)
    settle(pool, SIZE)
    assert pool.refused is not None
    assert f"refused to pin more than {SECTION_BYTES} of the pool's {SIZE} bytes" in pool.refused
    covered = pool.covers(np.array([BASE, BASE + SECTION_BYTES], dtype=np.uint64))
    assert covered is not None
    assert covered.tolist() == [True, False]
    pool.stop()
    assert "memlock" in caplog.text
