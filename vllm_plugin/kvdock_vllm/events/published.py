"""What consumers were told of a server's cache, and what they are still to be told."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from kvdock.events import Follower, PartId, Removed, Stored
from kvdock.types import ChunkEventData
from kvdock_vllm.events.vllm_events import MEDIA, Adapter, GroupLabel, block_removed, block_stored

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool

_log = logging.getLogger(__name__)

# How many parts one step publishes at most, so that a large snapshot holds up no step.
_PARTS_A_STEP = 100


class Published:
    """The difference between what the server has and what consumers were told.

    It is no queue: a part that comes and goes between two steps costs nothing. ``_changed`` has
    parts in the order of their last change, so parents are stored before their children and removed
    after them.

    When the engine clears its own cache, vLLM tells consumers to drop all that the engine has, on
    every medium. Then everything is told again.

    A part that another engine stored with an adapter waits until this engine has the adapter:
    consumers may know it by its number, which each engine gives by itself.
    """

    def __init__(self, scheme: Callable[[], str], labels: Mapping[int | None, GroupLabel]) -> None:
        self._scheme = scheme
        self._labels = labels
        self._lock = threading.Lock()
        self._there: dict[PartId, Stored] = {}
        self._told: dict[PartId, ChunkEventData] = {}
        self._changed: dict[PartId, None] = {}
        # How many parts that consumers were told of have a hash, by medium, group and hash.
        self._holders: Counter[tuple[str, int, bytes]] = Counter()
        # The follower that tells what the server has.
        self._source: Follower | None = None
        # vLLM's pool of blocks, and the table by which it finds blocks by their hash.
        self._pool: BlockPool | None = None
        self._table: object = None
        # The engine's adapters by name, and the names of new ones.
        self._adapters: dict[str, Adapter | None] = {}
        self._new_adapters: set[str] = set()

    def is_told_by(self, source: Follower | None) -> bool:
        """Whether ``source`` tells what the server has."""
        return self._source is source

    def begin(self, source: Follower | None) -> None:
        """Forgets what the server has. From now on ``source`` tells it; None: nobody."""
        with self._lock:
            self._source = source
            for part_id in reversed(self._there):
                self._changed.pop(part_id, None)
                self._changed[part_id] = None
            self._there.clear()

    def note(self, changes: Sequence[Stored | Removed], source: Follower) -> None:
        """Takes changes of what the server has, unless ``source`` was replaced."""
        with self._lock:
            if self._source is not source:
                return
            for change in changes:
                if isinstance(change, Stored):
                    self._there[change.id] = change
                else:
                    self._there.pop(change.id, None)
                self._changed.pop(change.id, None)
                self._changed[change.id] = None

    def know_adapter(self, name: str, adapter: Adapter | None) -> None:
        """Notes that the engine has this adapter. Called on the thread of :meth:`take`."""
        if self._adapters.get(name) != adapter:
            self._adapters[name] = adapter
            self._new_adapters.add(name)

    def watch_pool(self, pool: BlockPool) -> None:
        """Takes the engine's own blocks, to notice when they are cleared."""
        self._pool = pool
        self._table = self._table_now()
        if self._table is None:
            _log.warning(
                "this version of vLLM does not show when it clears its cache: what KVDock has is "
                "then not told again to consumers of KV events"
            )

    def take(self) -> list[KVCacheEvent]:
        """The next events, which follow the engine's own. Empty while another thread is at it."""
        if not self._lock.acquire(blocking=False):
            return []
        try:
            table, self._table = self._table, self._table_now()
            if self._table is not table:
                self._told.clear()
                self._holders.clear()
                self._changed = dict.fromkeys(self._there)
            self._look_again_at_parts_of_new_adapters()
            events: list[KVCacheEvent] = []
            for part_id in list(islice(self._changed, _PARTS_A_STEP)):
                del self._changed[part_id]
                events += self._difference(part_id)
            return events
        finally:
            self._lock.release()

    def _table_now(self) -> object:
        """No hook tells that vLLM clears its cache, but it then makes a new table."""
        return getattr(self._pool, "cached_block_hash_to_block", None)

    def _look_again_at_parts_of_new_adapters(self) -> None:
        new, self._new_adapters = self._new_adapters, set()
        if not new:
            return
        parts = [
            part_id
            for part_id, part in self._there.items()
            if part.data is not None and part.data.lora_name in new
        ]
        told = [part_id for part_id in parts if part_id in self._told]
        for part_id in (*reversed(told), *parts):
            self._changed.setdefault(part_id)

    def _difference(self, part_id: PartId) -> list[KVCacheEvent]:
        events: list[KVCacheEvent] = []
        label, medium = self._labels.get(part_id.group_idx), MEDIA.get(part_id.medium)
        data = self._publishable(part_id)
        told = self._told.get(part_id)
        if told == data or label is None or medium is None:
            return events
        if told is not None:
            del self._told[part_id]
            gone = self._count(medium, label.index, told.block_hashes, -1)
            if gone:
                events.append(block_removed(gone, medium, label))
        if data is not None:
            self._told[part_id] = data
            if self._count(medium, label.index, data.block_hashes, 1):
                adapter = self._adapters.get(data.lora_name)
                events.append(block_stored(data, medium, label, adapter))
        return events

    def _publishable(self, part_id: PartId) -> ChunkEventData | None:
        """What is to be told of a part. None if it is not there, or not known as vLLM tells it."""
        part = self._there.get(part_id)
        data = part.data if part is not None else None
        if data is None or not data.block_hashes:
            return None
        scheme: str | None = self._scheme()
        if data.lora_name:
            adapter = self._adapters.get(data.lora_name)
            scheme = adapter.scheme if adapter else None
        return data if data.hash_scheme == scheme and _is_whole(data) else None

    def _count(self, medium: str, group_idx: int, hashes: Sequence[bytes], by: int) -> list[bytes]:
        """The hashes that had no part before, or have none any more."""
        turned = []
        for one in hashes:
            before = self._holders[medium, group_idx, one]
            self._holders[medium, group_idx, one] = before + by
            if not before + by:
                del self._holders[medium, group_idx, one]
            if not before or not before + by:
                turned.append(one)
        return turned


def _is_whole(data: ChunkEventData) -> bool:
    """False if something is missing, or a newer client told it in an unknown way."""
    blocks = len(data.block_hashes)
    if len(data.token_ids) != 4 * blocks * data.block_size:
        return False
    if len(data.extra_keys) not in (0, blocks):
        return False
    keys = (key for of_block in data.extra_keys for key in of_block)
    return not any(None in (key if isinstance(key, tuple) else (key,)) for key in keys)
