"""The eviction policies that a server can be started with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from kvdock_server.index.eviction import EvictionPolicy, LeastRecentlyUsed
from kvdock_server.index.remembered import LruWithMemory

POLICIES: Final[Mapping[str, Callable[[int], EvictionPolicy]]] = {
    "lru-with-memory": LruWithMemory,
    "lru": LeastRecentlyUsed,
}
"""By name, for a pool of some bytes."""
