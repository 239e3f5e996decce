"""The server's state: sessions, leases, reservations, over index, pool and event log.

Each call happens as a whole, and nothing here waits. It knows no gRPC. ``rpc`` and ``service``
import from here only what stands below, and nothing of ``index``.
"""

from kvdock_server.core.core import (
    MAX_KEYS,
    MAX_LOCK_RANGES,
    MAX_READERS,
    Core,
    Hit,
    LocatedShard,
    check_keys,
    check_session,
)

__all__ = [
    "MAX_KEYS",
    "MAX_LOCK_RANGES",
    "MAX_READERS",
    "Core",
    "Hit",
    "LocatedShard",
    "check_keys",
    "check_session",
]
