"""Registers the pool with CUDA behind the running server, piece by piece as it is faulted in.

Pinned memory is copied at the speed of the link, other memory through the driver's own buffers at a
fraction of it. One call for all of a large pool would take seconds, fails beyond 512 GiB on some
drivers, and would wait until all of the pool is there. But no copy may cross the border between two
pieces, and each more of them makes the driver slower at finding an address, for as long as the
server lives (batches of 512 segments took 0.25 ms with one piece, 0.5 ms with four); so pieces are
large, and the first copies of a server's life may go unpinned.

A limit that is refused (memlock, a container's quota) is logged once with the numbers; what is not
registered is copied unpinned.
"""

from __future__ import annotations

import bisect
import logging
import threading

import numpy as np
import numpy.typing as npt

from kvdock_server.transfer.devices.driver import CudaError, Driver
from kvdock_server.transfer.plans.arrays import U64

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 << 30
"""Faulting so much in takes some seconds, registering it 0.054 s a GiB."""


class PinnedPool:
    """Which parts of the pool are registered. One thread registers; any may ask."""

    def __init__(self, address: int, nbytes: int) -> None:
        self._nbytes = nbytes
        self._starts: list[int] = [*range(0, nbytes, PIECE_BYTES), nbytes]
        self._addresses: U64 = np.array(self._starts, dtype=np.uint64) + np.uint64(address)
        self.borders: U64 = self._addresses[1:-1]
        """Addresses that no copy may cross."""
        self._missing = np.diff(self._starts).tolist()
        self._is_pinned = np.zeros(len(self._missing), dtype=np.bool_)
        self._all_pinned = False
        self._ready: list[int] = []
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False
        self.refused: str | None = None

    @property
    def pinned_bytes(self) -> int:
        pinned = np.flatnonzero(self._is_pinned).tolist()
        return sum(self._piece_bytes(piece) for piece in pinned)

    def faulted(self, offset: int, nbytes: int) -> None:
        """A range of the pool is backed by memory now. Each byte is reported once. Any thread."""
        with self._wake:
            while nbytes > 0:
                piece = bisect.bisect(self._starts, offset) - 1
                part = min(nbytes, self._starts[piece + 1] - offset)
                self._missing[piece] -= part
                if self._missing[piece] == 0:
                    self._ready.append(piece)
                offset += part
                nbytes -= part
            self._wake.notify()

    def start(self, driver: Driver, context: int) -> None:
        """Begin to register, on a thread of its own. Further calls do nothing."""
        with self._wake:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(
                    target=self._run, args=(driver, context), name="pin-pool", daemon=True
                )
                self._thread.start()

    def stop(self) -> None:
        """Unregister everything. No copy may be under way."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def covers(self, host: U64) -> npt.NDArray[np.bool_] | None:
        """For copies at addresses ``host`` whether they are pinned. None: all of the pool is."""
        if self._all_pinned:
            return None
        return np.asarray(self._is_pinned[np.searchsorted(self.borders, host, side="right")])

    def _run(self, driver: Driver, context: int) -> None:
        try:
            driver.set_current(context)
            while (piece := self._next()) is not None:
                driver.register_host(self._address(piece), self._piece_bytes(piece))
                self._is_pinned[piece] = True
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
        for piece in np.flatnonzero(self._is_pinned).tolist():
            self._is_pinned[piece] = False
            driver.unregister_host(self._address(piece))

    def _next(self) -> int | None:
        with self._wake:
            while not self._ready and not self._stopping:
                self._wake.wait()
            return None if self._stopping else self._ready.pop(0)

    def _address(self, piece: int) -> int:
        return int(self._addresses[piece])

    def _piece_bytes(self, piece: int) -> int:
        return self._starts[piece + 1] - self._starts[piece]
