"""The server's state: sessions, leases, reservations, over index, pool and event log.

Each call happens as a whole, or in steps. Nothing here waits or knows gRPC. ``service`` and ``rpc``
import from here only, and nothing of ``index``.
"""

from kvdock_server.core.core import MAX_LOCK_RANGES, MAX_READERS, Core, check_session
from kvdock_server.core.listing import ListedPart, list_parts
from kvdock_server.core.pins import pin_name
from kvdock_server.core.ranges import LeaseRange, LockRange
from kvdock_server.core.reading import MAX_KEYS, LocatedShard, LockedShards
from kvdock_server.core.sessions import Mode, Role, Session
from kvdock_server.core.writing import Writing
from kvdock_server.index.chunk import Pin
from kvdock_server.index.index import ReserveStatus, Slot
from kvdock_server.index.keeping import Keep
from kvdock_server.index.namespace import (
    MAX_CHUNK_TOKENS,
    MAX_GROUPS,
    MAX_KV_WORLD_SIZE,
    MAX_LABELS,
    Group,
    GroupKind,
    Namespace,
)
from kvdock_server.index.terms import Priority

__all__ = [
    "MAX_CHUNK_TOKENS",
    "MAX_GROUPS",
    "MAX_KEYS",
    "MAX_KV_WORLD_SIZE",
    "MAX_LABELS",
    "MAX_LOCK_RANGES",
    "MAX_READERS",
    "Core",
    "Group",
    "GroupKind",
    "Keep",
    "LeaseRange",
    "ListedPart",
    "LocatedShard",
    "LockRange",
    "LockedShards",
    "Mode",
    "Namespace",
    "Pin",
    "Priority",
    "ReserveStatus",
    "Role",
    "Session",
    "Slot",
    "Writing",
    "check_session",
    "list_parts",
    "pin_name",
]
