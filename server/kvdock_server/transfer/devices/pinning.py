"""Registers the pool with CUDA, section by section, while the server already runs.

Registered memory is pinned: it is copied at the speed of the link. Other memory goes through the
driver's own buffers at a fraction of this speed. The pool is not registered in one call: for a
large pool this takes seconds, fails beyond 512 GiB on some drivers, and would have to wait until
the whole pool is faulted in. But no copy may cross the border between two sections. And each
further section makes the driver slower at finding an address: a batch of 512 segments took 0.25 ms
with one section, 0.5 ms with four. So sections are large, and the first copies of a server's life
may go unpinned.

If CUDA refuses (memlock, a container's quota), this is logged once with the numbers, and the rest
is copied unpinned.
"""

from __future__ import annotations

import bisect
import logging
import threading
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvdock_server.transfer.devices.driver import CudaError, Driver
from kvdock_server.transfer.plans.arrays import U64

logger = logging.getLogger(__name__)

SECTION_BYTES = 16 << 30
"""To fault a section in takes some seconds, to register it 0.054 s a GiB."""


class Pinned(Protocol):
    """Host memory that is pinned by and by. Any thread may ask."""

    @property
    def borders(self) -> U64:
        """Host addresses that no copy may cross, ascending."""

    def covers(self, host: U64) -> npt.NDArray[np.bool_] | None:
        """For each host address, whether it is pinned. None: all of the memory is."""


class PinnedPool:
    """Which sections of the pool are pinned. A thread of its own pins them; any thread may ask."""

    def __init__(self, address: int, nbytes: int) -> None:
        """``address`` is where the pool is mapped in this process."""
        self._nbytes = nbytes
        self._starts: list[int] = [*range(0, nbytes, SECTION_BYTES), nbytes]
        self._addresses: U64 = np.array(self._starts, dtype=np.uint64) + np.uint64(address)
        self.borders: U64 = self._addresses[1:-1]
        """Host addresses that no copy may cross, ascending."""
        self._sizes = np.diff(self._starts)
        self._missing = self._sizes.tolist()
        self._is_pinned = np.zeros(len(self._missing), dtype=np.bool_)
        self._all_pinned = False
        self._ready: list[int] = []
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.refused: str | None = None
        """Why the rest of the pool stays unpinned; None if CUDA did not refuse."""

    @property
    def pinned_bytes(self) -> int:
        return int(self._sizes[self._is_pinned].sum())

    def faulted(self, offset: int, nbytes: int) -> None:
        """A range of the pool is backed by memory now. Each byte is reported once. Any thread."""
        with self._wake:
            while nbytes > 0:
                section = bisect.bisect(self._starts, offset) - 1
                inside = min(nbytes, self._starts[section + 1] - offset)
                self._missing[section] -= inside
                if self._missing[section] == 0:
                    self._ready.append(section)
                offset += inside
                nbytes -= inside
            self._wake.notify()

    def start(self, driver: Driver, context: int) -> None:
        """Begin to pin what is faulted in. Further calls do nothing. Any thread."""
        with self._wake:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(
                    target=self._run, args=(driver, context), name="pin-pool", daemon=True
                )
                self._thread.start()

    def stop(self) -> None:
        """Unpin everything. No copy may be under way."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def covers(self, host: U64) -> npt.NDArray[np.bool_] | None:
        """For each host address, whether its section is pinned. None: all sections are."""
        if self._all_pinned:
            return None
        return np.asarray(self._is_pinned[np.searchsorted(self.borders, host, side="right")])

    def _run(self, driver: Driver, context: int) -> None:
        try:
            driver.set_current(context)
            while (section := self._next()) is not None:
                driver.register_host(int(self._addresses[section]), int(self._sizes[section]))
                self._is_pinned[section] = True
                self._all_pinned = bool(self._is_pinned.all())
        except CudaError as error:
            self.refused = (
                f"CUDA refused to pin more than {self.pinned_bytes} of the pool's {self._nbytes} "
                f"bytes ({error}): if that is a limit, raise it (ulimit -l, --ulimit memlock=-1) "
                "or start with less --memory"
            )
            logger.error("%s; the rest is copied unpinned, several times slower", self.refused)
        with self._wake:
            while not self._stopping:
                self._wake.wait()
        pinned = self._addresses[:-1][self._is_pinned].tolist()
        self._is_pinned[:] = False
        for address in pinned:
            driver.unregister_host(address)

    def _next(self) -> int | None:
        with self._wake:
            while not self._ready and not self._stopping:
                self._wake.wait()
            return None if self._stopping else self._ready.pop(0)
