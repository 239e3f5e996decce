"""Resets of the cache: how often the namespace is to be cleared on the server, and was.

While stores from before a reset are under way, nothing of the server is used. When the last of them
has ended, the namespace is cleared once more.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvdock import Client


class Resets:
    """The scheduler's thread asks for clears, the link's thread carries them out."""

    def __init__(self) -> None:
        # Two counters and not a flag, since each thread writes one.
        self._wanted = 0
        self._done = 0
        self._stale_jobs: set[int] = set()

    @property
    def await_stores(self) -> bool:
        """Whether stores from before a reset are under way."""
        return bool(self._stale_jobs)

    def begin(self, under_way: Iterable[int]) -> None:
        """Asks for a clear now, and for another one when these stores have ended."""
        self._stale_jobs = set(under_way)
        self._wanted += 1

    def note_end(self, job_id: int) -> bool:
        """Notes the end of a store. True for the last one from before a reset: a clear is due."""
        if job_id not in self._stale_jobs:
            return False
        self._stale_jobs.discard(job_id)
        if self._stale_jobs:
            return False
        self._wanted += 1
        return True

    def clear(self, client: Client, namespace: str) -> None:
        """Clears the namespace if a clear is due. Raises KVDockError."""
        if (wanted := self._wanted) != self._done:
            client.clear(namespace)
            self._done = wanted
