"""What a session has yet to send, and which request goes next. Pure: no I/O, no locks.

A server that is asked for more than it can do answers late, and a late answer is worth nothing: its
caller has gone on without it. A refusal costs the server as much as an answer, nearly all of it in
gRPC. So a lookup that nobody awaits any more must not be sent. Hence only a few lookups are on
their way at a time. The others wait here, where giving up costs nothing. The newest goes first,
since it has the most time left. If the oldest went first, each would go when its time is nearly
over.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvdock.errors import Overloaded
from kvdock.v1 import session_pb2

LOOKUPS_UNDER_WAY = 8
"""Enough to keep the server busy, and few enough for it to answer soon. If 25 sessions have so many
under way, the server needs 0.1 s for all of them."""

MOST_WAITING_BYTES = 16 << 20
_OBJECT_BYTES = 1 << 10
"""What a request costs beside its own bytes, roughly."""

# These give back what the server granted, or show that the session lives. So there are never too
# many, and they are sent even if nobody awaits the answer.
_ALWAYS_SENT = frozenset({"open", "heartbeat", "free_locks", "commit", "abort"})


class _Waiting(NamedTuple):
    request: session_pb2.SessionRequest
    kind: str | None
    nbytes: int


class Outbox:
    """The requests of one session that wait to be sent, by their ids."""

    def __init__(self) -> None:
        self._lookups: OrderedDict[int, _Waiting] = OrderedDict()
        self._others: OrderedDict[int, _Waiting] = OrderedDict()
        self._under_way: set[int] = set()
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._lookups) + len(self._others)

    def put(self, request: session_pb2.SessionRequest, nbytes: int) -> None:
        """Adds a request of ``nbytes`` bytes. Raises Overloaded if too much waits already."""
        waiting = _Waiting(request, request.WhichOneof("request"), nbytes + _OBJECT_BYTES)
        is_too_much = self._nbytes + waiting.nbytes > MOST_WAITING_BYTES
        if is_too_much and waiting.kind not in _ALWAYS_SENT:
            raise Overloaded(
                f"{len(self):,} requests wait to be sent already ({self._nbytes >> 20} MiB): the "
                "server does not keep up with this session; ask less, or go on without an answer"
            )
        self._nbytes += waiting.nbytes
        queue = self._lookups if waiting.kind == "lookup" else self._others
        queue[request.id] = waiting

    @property
    def is_ready(self) -> bool:
        """True if there is a request to send now, before another answer comes."""
        return bool(self._others) or self._lookup_may_go

    @property
    def _lookup_may_go(self) -> bool:
        return bool(self._lookups) and len(self._under_way) < LOOKUPS_UNDER_WAY

    def take(self) -> session_pb2.SessionRequest | None:
        """The request to send now, if there is one."""
        if self._others:
            _, waiting = self._others.popitem(last=False)
        elif self._lookup_may_go:
            request_id, waiting = self._lookups.popitem(last=True)
            self._under_way.add(request_id)
        else:
            return None
        self._nbytes -= waiting.nbytes
        return waiting.request

    def drop(self, request_id: int) -> bool:
        """Forgets a request. False if it was sent, or must be sent all the same."""
        queue = self._lookups if request_id in self._lookups else self._others
        waiting = queue.get(request_id)
        if waiting is None or waiting.kind in _ALWAYS_SENT:
            return False
        del queue[request_id]
        self._nbytes -= waiting.nbytes
        return True

    def answered(self, request_id: int) -> None:
        """Notes that the answer to a request came."""
        self._under_way.discard(request_id)

    def end(self) -> None:
        """Forgets all requests that may be forgotten."""
        for request_id in [*self._lookups, *self._others]:
            self.drop(request_id)
