"""Resets of the cache: how often the namespace is to be cleared on the server, and was.

While stores from before a reset are under way nothing of the server may be used, and the namespace
is cleared once more when the last of them has ended.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvdock import Client


class Resets:
    """The scheduler's thread asks for clears, the link's thread carries them out."""

    def __init__(self) -> None:
        # Two counters, not a flag, since two threads write here.
        self._wanted = 0
        self._done = 0
        self._stale_jobs: set[int] = set()

    @property
    def wanted(self) -> int:
        """Clears that were asked for so far."""
        return self._wanted

    @property
    def are_done(self) -> bool:
        """Nothing of before a reset is there any more, or comes."""
        return not self._stale_jobs and self._done == self._wanted

    @property
    def await_stores(self) -> bool:
        """Stores from before a reset are under way."""
        return bool(self._stale_jobs)

    def begin(self, under_way: Iterable[int]) -> None:
        """What was stored is to be cleared, and what these stores will have stored as well."""
        self._stale_jobs = set(under_way)
        self._wanted += 1

    def note_end(self, job_id: int) -> bool:
        """A store has ended. True if a clear is due now, because it was the last from before."""
        if job_id not in self._stale_jobs:
            return False
        self._stale_jobs.discard(job_id)
        if self._stale_jobs:
            return False
        self._wanted += 1
        return True

    def clear(self, client: Client, namespace: str) -> None:
        """Clears the namespace if that is due. Raises KVDockError."""
        if (wanted := self._wanted) != self._done:
            client.clear(namespace)
            self._done = wanted
