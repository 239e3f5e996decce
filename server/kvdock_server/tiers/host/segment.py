"""The pool's shared-memory segment: made at start, faulted in while the server already runs.

The segment is a file under /dev/shm. The server holds a lock (flock) on the file for as long as it
lives. The lock tells the segment of a live server from one that a killed server left behind. A
process id in the name would not do, since process ids are used again.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import secrets
import struct
import threading
from collections.abc import Callable, Sequence

from kvdock_server.numa import run_on
from kvdock_server.tiers.host.memory_limits import SHM, PoolError, check_memory_limits
from kvdock_server.tiers.host.placement import Share

logger = logging.getLogger(__name__)

_PREFIX = "kvdock-"
_PROOF_BYTES = 32
_STEP_BYTES = 64 << 20
_FAULT_THREADS = 4

# From <linux/mman.h>. The mmap module has no MADV_POPULATE_WRITE.
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23

# struct flock: type, whence, start, length, process.
_FLOCK = struct.Struct("@hhqqi4x")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Segment:
    """One named piece of shared memory, mapped into this process.

    ``address`` is where it is mapped, and ``view`` are its bytes. No page is backed by memory until
    ``fault_in``. To touch a page earlier could kill the process if /dev/shm is full. ``proof`` are
    the last bytes of the file, behind those that are mapped. Clients know the file by them.
    """

    def __init__(self, nbytes: int) -> None:
        """Make and map a segment of ``nbytes``. PoolError beyond a memory limit."""
        check_memory_limits(nbytes)
        self.nbytes = nbytes
        self.proof = secrets.token_bytes(_PROOF_BYTES)
        self.shm_name = f"/{_PREFIX}{os.getuid()}-{secrets.token_hex(8)}"
        self._path = SHM / self.shm_name[1:]
        # The file gets its final name only when it is locked. Otherwise another server could take
        # it for one that a killed server left behind.
        new = self._path.with_name(f".{self._path.name}")
        self._fd = os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(self._path)
            try:
                os.pwrite(self._fd, self.proof, nbytes)
            except OSError as error:
                raise PoolError(f"no memory for the end of the pool's file: {error}") from None
            self._map = mmap.mmap(self._fd, nbytes)
        except BaseException:
            new.unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)
            raise
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        # Large pages make copies faster. If the kernel has none, the pages stay small.
        _libc.madvise(self.address, nbytes, _MADV_HUGEPAGE)

    def fault_in(
        self,
        step_bytes: int,
        ready: Callable[[int, int], None],
        shares: Sequence[Share] = (),
    ) -> None:
        """Back the segment with memory: the first piece at once, the rest on several threads.

        ``ready(offset, nbytes)`` is called for each piece, on the thread that backed it. A piece is
        a multiple of ``step_bytes`` long. If memory runs out, this is logged, and the rest never
        becomes ready. PoolError if there is no memory for the first piece. Each of the ``shares``,
        multiples of ``step_bytes``, is backed by threads of its own, on its processors.
        """
        piece = max(_STEP_BYTES // step_bytes, 1) * step_bytes
        shares = shares or [Share(0, self.nbytes)]
        first = min(piece, shares[0].nbytes)
        try:
            self._populate(0, first)
        except OSError as error:
            raise PoolError(f"no memory for the first {first} bytes of the pool: {error}") from None
        ready(0, first)
        for number, share in enumerate(shares):
            done = 0 if number else first
            rest = share._replace(offset=share.offset + done, nbytes=share.nbytes - done)
            self._fault_in_share(rest, piece, ready, f"fault-in-{number}")

    def _fault_in_share(
        self, share: Share, piece: int, ready: Callable[[int, int], None], name: str
    ) -> None:
        end = share.offset + share.nbytes
        offsets = iter(range(share.offset, end, piece))
        lock = threading.Lock()

        def work() -> None:
            run_on(share.cpus)
            while not self._stop.is_set():
                with lock:
                    offset = next(offsets, None)
                if offset is None:
                    return
                nbytes = min(piece, end - offset)
                try:
                    self._populate(offset, nbytes)
                except OSError as error:
                    self._stop.set()
                    logger.error(
                        "no memory for all of the pool's %d bytes (%s): "
                        "start with less --memory or enlarge %s",
                        self.nbytes,
                        error,
                        SHM,
                    )
                    return
                ready(offset, nbytes)

        count = min(_FAULT_THREADS, len(share.cpus) or os.cpu_count() or 1)
        for number in range(count):
            thread = threading.Thread(target=work, name=f"{name}-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def is_guarded(self, byte: int) -> bool:
        """True if another process holds a lock (fcntl F_OFD_SETLK) on this byte of the file."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def stop(self) -> None:
        """Stop faulting in, and remove the segment's name.

        The clients' mappings stay valid. This process's mapping lives until the process ends.
        """
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._path.unlink(missing_ok=True)

    def _populate(self, offset: int, nbytes: int) -> None:
        """Back a range with memory. OSError if there is not enough memory; never SIGBUS."""
        if _libc.madvise(self.address + offset, nbytes, _MADV_POPULATE_WRITE) == 0:
            return
        # Kernels before 5.14 have no MADV_POPULATE_WRITE. Reserved pages are safe to touch.
        os.posix_fallocate(self._fd, offset, nbytes)
        for page in range(offset, offset + nbytes, mmap.PAGESIZE):
            self._map[page] = 0


def remove_stale_segments() -> list[str]:
    """Remove this user's segments whose server is gone. Returns their names.

    Files of other users are left alone, whatever their names.
    """
    removed = []
    for path in SHM.glob(f"{_PREFIX}{os.getuid()}-*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # removed meanwhile, or another user's
        try:
            if os.fstat(fd).st_uid != os.getuid():
                continue
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # its server is alive
        else:
            path.unlink(missing_ok=True)
            removed.append(path.name)
        finally:
            os.close(fd)
    return removed
