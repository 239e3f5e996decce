"""Registers the mapped pool with CUDA behind the running engine, as the server faults it in.

Pinned memory is copied at the speed of the link. Other memory goes through the driver's own
buffers, at a fraction of it. Registering all of it in one call would take 0.054 s a GiB, during
which the engine's own calls into the driver may wait. So it is registered in pieces. No copy may
cross the border between two pieces, and each piece makes the driver slower at finding an address,
so there are few. Borders lie at multiples of one length, so :func:`cut` need not know the pieces.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvdock_server.transfer.devices.driver import CudaError, Driver
from kvdock_vllm.engine import affinity

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]
    U64 = npt.NDArray[np.uint64]

_log = logging.getLogger(__name__)

PIECE_BYTES = 2 << 30
_POLL_SECONDS = 0.2


def cut(address: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """The parts of a range that each lie in one piece: begin and end, counted from ``address``."""
    begin = 0
    while begin < nbytes:
        end = min(begin + PIECE_BYTES - (address + begin) % PIECE_BYTES, nbytes)
        yield begin, end
        begin = end


class PinnedMemory:
    """Pins memory until it is closed, on its own thread, and keeps the memory alive until then."""

    def __init__(self, memory: Sequence[Bytes], driver: Driver, context: int) -> None:
        """``memory`` is mapped in whole pages. ``context`` is the driver's that pins it."""
        self._memory = list(memory)
        self._driver = driver
        self._context = context
        pieces = sorted(
            (each.ctypes.data + begin, end - begin)
            for each in memory
            for begin, end in cut(each.ctypes.data, len(each))
        )
        self._starts: U64 = np.array([address for address, _ in pieces], dtype=np.uint64)
        self._is_pinned = np.zeros(len(pieces), dtype=np.bool_)
        self._registered: list[tuple[int, int]] = []
        self.refused: str | None = None
        """Why not all of the memory can be pinned; None if it can."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvdock-pin", daemon=True)
        self._thread.start()

    @property
    def pinned_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self._registered)

    @property
    def borders(self) -> U64:
        """Addresses that no copy may cross, ascending."""
        return self._starts[1:]

    def covers(self, host: U64) -> npt.NDArray[np.bool_] | None:
        """For each address in the memory, whether it is pinned. None: all of the memory is."""
        if self._is_pinned.all():
            return None
        return np.asarray(self._is_pinned[np.searchsorted(self.borders, host, side="right")])

    def close(self) -> None:
        """Unregisters everything in the background. No copy may be under way or follow."""
        self._closed.set()

    def _run(self) -> None:
        affinity.restore()
        try:
            self._driver.set_current(self._context)
            self._register()
            self._closed.wait()
            self._unregister()
        except CudaError as error:
            self._refuse(error)
        except Exception:
            _log.exception("pinning the pool failed")
        self._memory.clear()

    def _register(self) -> None:
        began = time.monotonic()
        for memory in self._memory:
            address = memory.ctypes.data
            for begin, end in cut(address, len(memory)):
                if not self._wait_until_backed(address + begin, end - begin):
                    return
                try:
                    self._driver.register_host(address + begin, end - begin)
                except CudaError as error:
                    self._refuse(error)
                    return
                self._registered.append((address + begin, end - begin))
                self._note(address + begin, is_pinned=True)
        seconds = time.monotonic() - began
        _log.info("pinned the pool's %.1f GiB in %.1f s", self.pinned_bytes / 2**30, seconds)

    def _unregister(self) -> None:
        while self._registered:
            address, _ = self._registered.pop()
            self._note(address, is_pinned=False)
            self._driver.unregister_host(address)

    def _note(self, address: int, *, is_pinned: bool) -> None:
        self._is_pinned[np.searchsorted(self._starts, address)] = is_pinned

    def _refuse(self, error: CudaError) -> None:
        nbytes = sum(len(memory) for memory in self._memory)
        self.refused = (
            f"CUDA pins no more than {self.pinned_bytes:,} of the pool's {nbytes:,} bytes in this "
            f"process ({error}). If that is a limit, raise it (ulimit -l; for containers --ulimit "
            f"memlock=-1)"
        )
        _log.warning("%s; the rest is copied unpinned, several times slower", self.refused)

    def _wait_until_backed(self, address: int, nbytes: int) -> bool:
        """Waits until the server has faulted the memory in. False if closed before.

        Pages that this process touched first would be charged to its container.
        """
        mincore = ctypes.CDLL(None).mincore
        mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        resident = ctypes.create_string_buffer(-(-nbytes // mmap.PAGESIZE))
        while not self._closed.is_set():
            failed = mincore(address, nbytes, resident) != 0
            if failed or b"\0" not in resident.raw:
                return True
            self._closed.wait(_POLL_SECONDS)
        return False
