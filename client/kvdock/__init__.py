"""Client library of KVDock, a KV-cache server for LLM inference.

    with kvdock.Client() as client:
        hit = client.lookup("my-namespace", kvdock.keys.chunk_keys(token_ids, 256))

:class:`Client` asks call by call, :class:`Session` over one held stream; ``kvdock.aio`` has both as
coroutines. ``kvdock.keys`` makes chunk keys, ``kvdock.events`` follows what is stored and removed,
``kvdock.errors`` has the exceptions.
"""

from kvdock import aio, errors, events, keys
from kvdock._version import __version__
from kvdock.client import Client
from kvdock.errors import KVDockError
from kvdock.pool import Pool
from kvdock.session import Session
from kvdock.types import (
    ChunkEventData,
    ChunkResult,
    ChunkStatus,
    EvictionPriority,
    Group,
    GroupHit,
    GroupKind,
    Hit,
    Keep,
    Lease,
    Location,
    Namespace,
    Reservation,
    SessionRole,
    TransferMode,
)

__all__ = [
    "ChunkEventData",
    "ChunkResult",
    "ChunkStatus",
    "Client",
    "EvictionPriority",
    "Group",
    "GroupHit",
    "GroupKind",
    "Hit",
    "KVDockError",
    "Keep",
    "Lease",
    "Location",
    "Namespace",
    "Pool",
    "Reservation",
    "Session",
    "SessionRole",
    "TransferMode",
    "__version__",
    "aio",
    "errors",
    "events",
    "keys",
]
