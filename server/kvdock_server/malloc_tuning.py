"""Settings of the C library's malloc that this process needs."""

from __future__ import annotations

import ctypes

# From <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 256 << 20
_LARGEST_FROM_HEAP = 32 << 20  # glibc takes no more


def keep_freed_memory() -> None:
    """Reuse the memory that large messages are read into, instead of giving it back each time.

    By default glibc maps every block of more than 128 KiB anew, and returns the end of the heap to
    the system at once. Each message of a byte stream then costs hundreds of page faults, which took
    two thirds of the stream's rate. Does nothing if the C library has no such settings.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
