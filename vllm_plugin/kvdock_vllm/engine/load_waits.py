"""Waits of requests for the load of another request that fills blocks of the same prefix.

Several requests with one prefix may come at once, for instance after the engine's start. The first
one loads it. When the load has ended, the engine's prefix cache has the blocks, and the others take
them from there. So the prefix is loaded once and has its blocks once.

A wait must pay. At least half of what the load brings, and at least half of what the request would
load itself, must be common to both. A request that shares little with a long load has its own
sooner. One that needs much more than a short load brings should begin to load at once.

A wait ends. A request waits for one load. It waits for another only if that one failed, or if its
request was aborted: then one of those that wait loads, and the others wait for that load. All this
takes at most ``_MOST_SECONDS``. A load of a session that was lost is not waited for.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from kvdock_vllm.engine.groups import GroupShape, fitting_chunk_tokens
from kvdock_vllm.engine.loads import Loads, PendingLoad
from kvdock_vllm.engine.request_lookup import Lookup

_MOST_SECONDS = 2.0


@dataclass(slots=True)
class _Wait:
    """One request's."""

    load: PendingLoad
    began: float


class LoadWaits:
    """Used by the scheduler's thread."""

    def __init__(
        self, loads: Loads, shapes: Sequence[GroupShape], *, has_prefix_cache: bool
    ) -> None:
        """Without a prefix cache of the engine's own no request could take what another loaded."""
        self._loads = loads
        self._has_prefix_cache = has_prefix_cache
        self._block_tokens = fitting_chunk_tokens(1, shapes)
        self._brings_only_the_end = any(shape.leaves_blocks_behind for shape in shapes)
        self._waits: WeakKeyDictionary[Lookup, _Wait] = WeakKeyDictionary()

    def end(self, lookup: Lookup) -> bool:
        """Ends a request's wait. True if it has waited.

        Else a request that loads would keep the load it waited for, which may keep another one.
        """
        return self._waits.pop(lookup, None) is not None

    def must_wait(self, lookup: Lookup, num_tokens: int) -> bool:
        """Whether a request of ``num_tokens`` tokens waits before it loads its hit."""
        if not self._has_prefix_cache:
            return False
        wait = self._waits.get(lookup)
        if wait is not None and self._has_brought_something(wait.load):
            return False
        most_tokens = self._most_tokens(lookup, num_tokens)
        for load in self._loads.uncached:
            if self._pays(load, lookup, most_tokens):
                break
        else:
            return False
        if wait is None:
            wait = self._waits[lookup] = _Wait(load, time.monotonic())
        wait.load = load
        return time.monotonic() < wait.began + _MOST_SECONDS

    def _most_tokens(self, lookup: Lookup, num_tokens: int) -> int:
        """How much of the hit the engine's cache can give. It never gives the last token."""
        cacheable = (num_tokens - 1) // self._block_tokens * self._block_tokens
        return min(lookup.hit_chunks * lookup.target.chunk_tokens, cacheable)

    def _has_brought_something(self, load: PendingLoad) -> bool:
        """Whether a load has ended as it should."""
        return not (load.is_lost or load.has_failed) and load not in self._loads.uncached

    def _pays(self, load: PendingLoad, lookup: Lookup, most_tokens: int) -> bool:
        """Whether the load brings enough of the lookup's hit."""
        if load.is_lost or load.lookup is None or load.lookup.live is not lookup.live:
            return False
        if not load.is_shareable:
            return False
        common = _common_length(load.lookup.keys, lookup.keys) * lookup.target.chunk_tokens
        most_tokens = min(common, most_tokens)
        load_end = load.first_token + load.loaded_tokens
        if self._brings_only_the_end and load_end > most_tokens:
            # Of a window or state the load brings only what is needed at its end.
            return False
        begin = lookup.num_computed_tokens
        shared = min(most_tokens, load_end) - max(load.first_token, begin)
        wanted = lookup.hit_chunks * lookup.target.chunk_tokens - begin
        return shared > 0 and 2 * shared >= max(load.num_tokens, wanted)


def _common_length(ours: Sequence[bytes], theirs: Sequence[bytes]) -> int:
    """How many keys are equal. After the first two that differ all do: keys name prefixes."""
    if ours[0] != theirs[0]:
        return 0
    most = min(len(ours), len(theirs))
    return bisect_left(range(most), True, key=lambda index: ours[index] != theirs[index])
