"""Lets the scheduler's half ask for ended loads itself, where its worker is in the same process.

vLLM tells it too late there. With async scheduling it acts on a step's outcome only after the next
step was begun, and in one process that next step is begun after the first has come back. So the
request would wait for a whole step more.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakValueDictionary


class EndedLoads:
    """The ended loads of one worker. Both halves use it on the engine's thread."""

    def __init__(self, take: Callable[[], set[str]]) -> None:
        self.take = take
        """Requests whose load has filled all blocks, each once."""
        self.has_reader = False
        """The scheduler's half takes them."""


_offered: WeakValueDictionary[str, EndedLoads] = WeakValueDictionary()
"""By engine_id. vLLM makes an engine's worker before its scheduler. If the engine's start fails
between the two, nothing here keeps the worker and its KV cache.
"""


def offer(engine_id: str, loads: EndedLoads) -> None:
    """The only worker of an engine offers its loads."""
    _offered[engine_id] = loads


def find(engine_id: str) -> EndedLoads | None:
    """What the engine's only worker offered in this process. Whoever finds it must take it."""
    loads = _offered.pop(engine_id, None)
    if loads is not None:
        loads.has_reader = True
    return loads
