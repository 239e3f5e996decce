"""The server's host memory, mapped into this process.

A mapping outlives the server and the session: the kernel keeps the memory for as long as somebody
maps it. The bytes of a view mean something only while their lock or reservation is held.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvdock.errors import InvalidArgument, PoolUnmappable
from kvdock.trust import open_segment
from kvdock.types import Location, Segment

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_log = logging.getLogger(__name__)

# struct flock: type, whence, start, length, process.
_FLOCK = struct.Struct("@hhqqi4x")

_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23

# A call of madvise cannot be stopped, so each call gets only some milliseconds of work.
_PREFAULT_BYTES = 64 << 20
_PREFAULT_POLL_SECONDS = 0.2


class Pool:
    """Maps segments when they are first needed. Thread-safe."""

    def __init__(
        self,
        segments: Sequence[Segment],
        *,
        server: str,
        is_local: bool,
        guard: int | None = None,
    ) -> None:
        """``server`` is the address, for error messages; ``is_local``: the server is on this host.

        ``guard`` is the session's byte of each segment's file. It stays locked for as long as the
        mapping lives. So the server gives nobody the memory that is being written here, even if the
        session is lost meanwhile.
        """
        self._segments = {segment.segment_id: segment for segment in segments}
        self._server = server
        self._is_local = is_local
        self._guard = guard
        self._lock = threading.Lock()
        self._maps: dict[int, mmap.mmap] = {}
        self._views: dict[int, memoryview] = {}
        self._prefault: threading.Thread | None = None
        self._closed = threading.Event()

    @property
    def segments(self) -> list[Segment]:
        """The segments that the server offers."""
        return list(self._segments.values())

    def view(self, location: Location) -> memoryview:
        """Writable view of the bytes at ``location``, of format B. Stays valid after close().

        Raises PoolUnmappable if this process cannot map the pool, InvalidArgument if the pool has
        no such location.
        """
        segment = self._views.get(location.segment_id)
        if segment is None:
            segment = self._map(location.segment_id)
        end = location.offset + location.length
        if not 0 <= location.offset <= end <= segment.nbytes:
            raise InvalidArgument(
                f"{location} is not within segment {location.segment_id} of {segment.nbytes:,} "
                f"bytes"
            )
        return segment[location.offset : end]

    def array(self, location: Location) -> npt.NDArray[np.uint8]:
        """As :meth:`view`, as a writable one-dimensional NumPy array of uint8. Needs NumPy."""
        import numpy as np

        return np.frombuffer(self.view(location), dtype=np.uint8)

    def prefault(self) -> None:
        """Starts a thread that enters the whole pool into this process's page tables.

        Then even the first copies run at the speed of memory. Returns at once; a second call does
        nothing. Raises PoolUnmappable as :meth:`view` does.
        """
        for segment_id in self._segments:
            self._map(segment_id)
        with self._lock:
            if self._prefault is None and not self._closed.is_set():
                self._prefault = threading.Thread(
                    target=_prefault,
                    args=(list(self._maps.values()), self._closed),
                    name="kvdock-prefault",
                    daemon=True,
                )
                self._prefault.start()

    def close(self) -> None:
        """Drops the mappings. Each ends when its last view is gone."""
        self._closed.set()
        with self._lock:
            self._views.clear()
            self._maps.clear()

    def _map(self, segment_id: int) -> memoryview:
        with self._lock:
            if segment_id in self._views:
                return self._views[segment_id]
            if self._closed.is_set():
                raise InvalidArgument("the pool was closed; open another session")
            segment = self._segments.get(segment_id)
            if segment is None:
                raise InvalidArgument(
                    f"the server named no segment {segment_id}; it named {list(self._segments)}"
                )
            mapping = self._open(segment)
            self._maps[segment_id] = mapping
            self._views[segment_id] = memoryview(mapping)
            return self._views[segment_id]

    def _open(self, segment: Segment) -> mmap.mmap:
        if not self._is_local:
            raise PoolUnmappable(
                f"the server at {self._server} is on another host: its memory cannot be mapped; "
                f"use put and get, or a server of this host"
            )
        try:
            with _opened(segment) as fd:
                if self._guard is not None:
                    # mmap duplicates the descriptor, and the duplicate keeps the lock.
                    lock = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, self._guard, 1, 0)
                    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, lock)
                return mmap.mmap(fd, segment.nbytes)
        except OSError as error:
            raise PoolUnmappable(
                f"cannot map {segment.shm_name}, the pool of the server at {self._server}: "
                f"{error.strerror}. Client and server must run as one user and share /dev/shm (in "
                f"containers: one IPC namespace, or the same /dev/shm volume)"
            ) from error


@contextlib.contextmanager
def _opened(segment: Segment) -> Iterator[int]:
    fd = open_segment(segment, os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)


def _prefault(maps: list[mmap.mmap], closed: threading.Event) -> None:
    """Enters pages into the page tables once the server has faulted them in.

    A page that was first touched here would be charged to this process's container.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for function in (libc.madvise, libc.mincore):
        function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    pieces: list[tuple[int, int]] = []
    for mapping in maps:
        base = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        # A kernel without huge pages for shared memory refuses this, which does no harm.
        libc.madvise(base, len(mapping), _MADV_HUGEPAGE)
        pieces += [
            (base + start, min(_PREFAULT_BYTES, len(mapping) - start))
            for start in range(0, len(mapping), _PREFAULT_BYTES)
        ]
    resident = ctypes.create_string_buffer(_PREFAULT_BYTES // mmap.PAGESIZE)
    while pieces:
        missing = []
        for address, length in pieces:
            if closed.is_set():
                return
            num_pages = -(-length // mmap.PAGESIZE)
            # ctypes releases the interpreter lock during each call.
            if libc.mincore(address, length, resident) == 0 and b"\0" in resident.raw[:num_pages]:
                missing.append((address, length))
            elif libc.madvise(address, length, _MADV_POPULATE_WRITE) != 0:
                code = ctypes.get_errno()
                _log.info(
                    "the pool is not faulted in ahead of time (madvise: %s): first copies are slow",
                    "needs Linux 5.14" if code == errno.EINVAL else os.strerror(code),
                )
                return
        pieces = missing
        if pieces and closed.wait(_PREFAULT_POLL_SECONDS):
            return
