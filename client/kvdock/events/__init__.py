"""The event stream of a server, and a mirror of what it has.

What every router must write is here: :class:`Index` holds the parts that a server has, and a
:class:`Follower` keeps it so, through lost connections, restarts of the server, and having fallen
behind::

    index = Index()
    for update in Follower(index, "unix:///run/kvdock/kvdock.sock"):
        ...  # index.prefix(namespace, keys), update.changes

:class:`AsyncFollower` does the same in an event loop. ``Client.events`` is the stream by itself.

An Index is pure: feed it the messages of streams that began at its ``start``, and it equals what
the server had announced at its ``cursor``, exactly. A follower may be stopped between any two
messages and another one go on with the same Index.
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
