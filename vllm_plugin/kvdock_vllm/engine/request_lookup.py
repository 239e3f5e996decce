"""The lookup of one request, and the lease that answers it.

A :class:`Lookup` alone owns its lease. :meth:`Lookup.close` frees the remaining locks. It may be
called at any time and repeatedly. Closing before the answer leaves nothing behind either: the
client frees the locks of a late answer.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future, wait

from kvdock.errors import DeadlineExceeded, KVDockError
from kvdock.v1 import cache_pb2
from kvdock_vllm.engine.link import Live
from kvdock_vllm.engine.specs import GroupLoad, Target

_log = logging.getLogger(__name__)


class State(enum.Enum):
    """The state of a lookup."""

    ASKED = enum.auto()
    ANSWERED = enum.auto()
    TIMED_OUT = enum.auto()
    FAILED = enum.auto()


class Lookup:
    """Used by one thread. Only :meth:`poll` may block, and only for the time that it is given."""

    def __init__(
        self, live: Live[Target], keys: Sequence[bytes], *, readers: int, timeout: float
    ) -> None:
        """Sends the keys of a prompt to the server. ``timeout`` is in seconds."""
        self.live = live
        self.keys = keys
        self.state = State.ASKED
        self.error: KVDockError | None = None
        self.most_tokens = len(keys) * self.target.chunk_tokens
        """No hit can be longer than this."""
        self.hit_chunks = 0
        """Length of the hit in chunks; 0 until ANSWERED."""
        self.locked: dict[int | None, range] = {}
        """The chunks of each group that are locked for the hit, by group_idx."""
        self.lease_id = 0
        self.num_computed_tokens = 0
        """Tokens that the engine had computed when it was last told the hit."""
        self.asked_at = time.monotonic()
        self._answered_at = 0.0
        self._deadline = self.asked_at + timeout
        self._future: Future[cache_pb2.LookupResponse] = live.session.submit(
            cache_pb2.LookupRequest(
                namespace=self.target.namespace,
                keys=keys,
                readers=readers,
                timeout_ms=round(timeout * 1000),
            )
        )
        self._future.add_done_callback(self._note_time)

    @property
    def target(self) -> Target:
        """The target that the server was asked for."""
        return self.live.prepared

    @property
    def answer_seconds(self) -> float:
        """How long the answer took, whenever it was looked for. Only once it is there."""
        return (self._answered_at or time.monotonic()) - self.asked_at

    def _note_time(self, _: Future[cache_pb2.LookupResponse]) -> None:
        """Runs on the session's thread."""
        self._answered_at = time.monotonic()

    def poll(self, seconds: float = 0.0) -> bool:
        """Waits at most ``seconds`` for the answer. True if this call settled the lookup."""
        if self.state is not State.ASKED:
            return False
        if seconds > 0:
            wait([self._future], seconds)
        if not self._future.done():
            if time.monotonic() < self._deadline:
                return False
            if self._future.cancel():
                self.state = State.TIMED_OUT
                return True
        try:
            response = self._future.result()
        except DeadlineExceeded:  # the server was the first to say so
            self.state = State.TIMED_OUT
            return True
        except (KVDockError, CancelledError) as error:
            self.state = State.FAILED
            self.error = error if isinstance(error, KVDockError) else None
            return True
        self.state = State.ANSWERED
        self.hit_chunks = response.hit_chunks
        self.lease_id = response.lease_id
        self.locked = {
            group.group_idx if group.HasField("group_idx") else None: range(
                group.first_chunk, group.end_chunk
            )
            for group in response.groups
        }
        return True

    def keep(self, loads: Sequence[GroupLoad]) -> None:
        """Frees the locks that none of the ``loads`` needs."""
        kept = {load.group_idx: (load.first_chunk, load.end_chunk) for load in loads}
        unused = []
        for group_idx, locked in self.locked.items():
            first, end = kept.get(group_idx, (locked.stop, locked.stop))
            unused += [(group_idx, locked.start, first), (group_idx, end, locked.stop)]
        self._free(
            cache_pb2.LockRange(
                lease_id=self.lease_id, first_chunk=first, end_chunk=end, group_idx=group_idx
            )
            for group_idx, first, end in unused
            if first < end
        )

    def close(self) -> None:
        """Frees every lock that is still held."""
        if self.state is State.ASKED and not self._future.cancel():
            self.poll()
        if self.lease_id:
            self._free([cache_pb2.LockRange(lease_id=self.lease_id)])
        self.lease_id = 0

    def _free(self, locks: Iterable[cache_pb2.LockRange]) -> None:
        request = cache_pb2.FreeLocksRequest(locks=locks)
        if request.locks and self.live.session.alive:
            self.live.session.submit(request).add_done_callback(_log_failure)


def _log_failure(future: Future[cache_pb2.FreeLocksResponse]) -> None:
    # The locks end with the session at the latest, so a failure needs no action.
    error = None if future.cancelled() else future.exception()
    if error is not None:
        _log.debug("freeing locks failed: %s", error)
