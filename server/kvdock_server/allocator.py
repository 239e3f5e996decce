"""Settings of the C library's memory allocator that this process needs."""

from __future__ import annotations

import ctypes

# From <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 256 << 20
_LARGEST_FROM_HEAP = 32 << 20  # glibc takes no more


def keep_freed_memory() -> None:
    """Reuse what large messages are read into, instead of giving it back after each of them.

    By default glibc maps every block of more than 128 KiB anew, and returns a heap's end to the
    system at once: each message of a byte stream then costs hundreds of page faults, which took two
    thirds of the stream's rate. Does nothing where the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
