"""Tells the scheduler's half of a load's end at once, where its worker is in the same process.

vLLM tells it too late there. With async scheduling it acts on a step's outcome only after the next
step was begun, and in one process that next step is begun after the first has come back. So the
request would wait for a whole step more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from weakref import WeakValueDictionary


class EndedLoads:
    """Requests whose load has filled all blocks. Both halves use it on the engine's thread."""

    def __init__(self) -> None:
        self.has_reader = False
        """The scheduler's half is in this process."""
        self._request_ids: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._request_ids)

    def put(self, request_ids: Iterable[str]) -> None:
        self._request_ids.update(request_ids)

    def take(self, under_way: Collection[str]) -> set[str]:
        """Those of the loads ``under_way`` that have ended, each once."""
        taken = self._request_ids.intersection(under_way)
        self._request_ids -= taken
        return taken


_of_engines: WeakValueDictionary[str, EndedLoads] = WeakValueDictionary()


def of_engine(engine_id: str) -> EndedLoads:
    """The same object for both halves of an engine, if they are in one process."""
    return _of_engines.setdefault(engine_id, EndedLoads())
