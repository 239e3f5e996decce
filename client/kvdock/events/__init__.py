"""The event stream of a server, and a mirror of the parts that the server has.

An :class:`Index` holds the parts. A :class:`Follower` keeps the index up to date, also after a lost
connection, a restart of the server, or having fallen behind::

    index = Index()
    for update in Follower(index, "unix:///run/kvdock/kvdock.sock"):
        ...  # index.prefix(namespace, keys), update.changes

:class:`AsyncFollower` does the same in an event loop. ``Client.events`` is the stream by itself.

An Index does no I/O. Feed it the messages of a stream that began at its ``start``: then it equals
exactly what the server had announced at its ``cursor``. A follower may be stopped between any two
messages, and another follower may go on with the same Index.
"""

from kvdock.events.follower import AsyncFollower, Follower, Update
from kvdock.events.index import Index, OutOfStepError
from kvdock.events.messages import (
    Batch,
    Cleared,
    Compacted,
    Cursor,
    Event,
    Filter,
    Medium,
    Message,
    PartId,
    Progress,
    Removed,
    SnapshotPiece,
    Stored,
    Unknown,
)

__all__ = [
    "AsyncFollower",
    "Batch",
    "Cleared",
    "Compacted",
    "Cursor",
    "Event",
    "Filter",
    "Follower",
    "Index",
    "Medium",
    "Message",
    "OutOfStepError",
    "PartId",
    "Progress",
    "Removed",
    "SnapshotPiece",
    "Stored",
    "Unknown",
    "Update",
]
