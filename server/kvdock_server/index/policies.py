"""The eviction policies that a server can be started with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from kvdock_server.index.eviction import LeastRecentlyUsed, MakePolicy
from kvdock_server.index.remembered import lru_with_memory

POLICIES: Final[Mapping[str, Callable[[int], MakePolicy]]] = {
    "lru-with-memory": lru_with_memory,
    "lru": lambda pool_bytes: partial(LeastRecentlyUsed, pool_bytes),
}
"""By name, for a pool of some bytes."""
