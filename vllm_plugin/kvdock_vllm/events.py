"""KV events: what the server has for this engine, through vLLM's own publisher.

Two halves that never meet. :class:`Teller` says of each chunk that is stored what vLLM's events say
of its blocks; it travels with the chunk to the server. :class:`Relay` follows the server's log and
turns it into vLLM's events again: for everything that this engine could load, whoever stored it,
and for everything that went. There is one relay an engine, in the scheduler, so the number of ranks
plays no part; and what is published is what the server has, so a lost connection, a restarted
server or a cleared cache are nothing special: the difference is published.

Consumers know a block by its hash. A hash is published as stored when the first part that has it
comes and as removed when the last one goes. Hashes that another engine made in another way are not
this engine's and are left out, and so is what cannot be told exactly as vLLM tells it: a consumer
would take a block for another prompt's.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from kvdock.address import Address
from kvdock.errors import KVDockError, NoEventLog
from kvdock.events import Filter, Follower, Index, Medium, PartId, Removed, Stored
from kvdock.keys import LoRA
from kvdock.types import ChunkEventData
from kvdock_vllm import affinity
from kvdock_vllm.groups import GroupShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)

# A server that is away for longer has nothing for this engine, as far as consumers can tell.
_GONE_SECONDS = 5.0
_PROGRESS_SECONDS = 2.0
_JOIN_SECONDS = 3.0

# Parts that one step publishes at most, so that a large snapshot holds up no step.
_PARTS_A_STEP = 100

# What vLLM calls the media from which the server gives. Others are not the engine's to tell of.
_MEDIA = {Medium.CPU: "CPU", Medium.STORAGE: "STORAGE"}

# What may be told of one chunk, by the protocol's limit, and of all chunks of one store, so that
# its message stays below 4 MiB. No store may fail for what it tells.
_MOST_CHUNK_BYTES = 1 << 20
_MOST_STORE_BYTES = 3 << 20


def publishes_events(vllm_config: VllmConfig) -> bool:
    """Whether this engine was told to publish KV events."""
    config: Any = getattr(vllm_config, "kv_events_config", None)
    return bool(config and config.enable_kv_cache_events)


def hash_scheme(vllm_config: VllmConfig) -> str:
    """Names how this engine's block hashes are made. Call it once the engine is up."""
    import vllm
    from vllm.v1.core import kv_cache_utils

    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    # What hashes commit to beside the tokens differs between versions.
    version = ".".join(vllm.__version__.split(".")[:2])
    return f"vllm-{version}/{algorithm}/{bytes(kv_cache_utils.NONE_HASH).hex()[:16]}"


def adapter_scheme(scheme: str, request: Request, adapter: LoRA) -> str:
    """Of the hashes of a request with an adapter.

    vLLM hashes an adapter's name, in later versions its path as well, and not what stands there.
    So other weights are another way to make hashes: what has them this engine could not load.
    """
    from vllm.v1.core import kv_cache_utils

    keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, 0, 0, 0)
    hashed = keys[0] if keys else None
    content = hashlib.sha256(repr((hashed, adapter.source)).encode())
    return f"{scheme}/{content.hexdigest()[:16]}"


class Teller:
    """Says what events are to tell of a request's chunks."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        self._vllm_config = vllm_config
        _, self._hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self._scheme: str | None = None
        self._said_left_out = False

    def tell(
        self,
        request: Request,
        adapter: LoRA | None,
        shape: GroupShape,
        first: int,
        end: int,
        chunk_tokens: int,
    ) -> tuple[ChunkEventData, ...]:
        """Of one group's parts of chunks [first, end) of a request with that adapter.

        Nothing at all if vLLM has not hashed them all, or not in a way that fits. Of a chunk that
        cannot be told as vLLM tells it an empty description, which nobody publishes.
        """
        block_tokens = shape.block_tokens
        step = block_tokens // self._hash_tokens
        # A hash covers all tokens up to its end, so a larger block's is its last one's.
        hashes = request.block_hashes[step - 1 :: step] if step else []
        if len(hashes) < end * shape.chunk_blocks(chunk_tokens):
            return ()
        if self._scheme is None:
            self._scheme = hash_scheme(self._vllm_config)
        scheme, lora_name = self._scheme, ""
        if adapter is not None:
            scheme, lora_name = adapter_scheme(scheme, request, adapter), adapter.name
        told = []
        room = _MOST_STORE_BYTES
        for chunk in range(first, end):
            part = shape.part(chunk, chunk_tokens)
            tokens = request.all_token_ids[part.start * block_tokens : part.stop * block_tokens]
            data = ChunkEventData(
                block_hashes=tuple(map(bytes, hashes[part])),
                parent_block_hash=bytes(hashes[part.start - 1]) if part.start else b"",
                token_ids=_to_bytes(tokens),
                block_size=block_tokens,
                lora_name=lora_name,
                hash_scheme=scheme,
                extra_keys=_extra_keys(request, part, block_tokens),
            )
            nbytes = self._message_bytes(data, min(room, _MOST_CHUNK_BYTES))
            room -= nbytes
            told.append(data if nbytes else ChunkEventData())
        return tuple(told)

    def _message_bytes(self, data: ChunkEventData, most: int) -> int:
        """The size of the message; 0 if the protocol has none for it, or it is larger than that."""
        try:
            nbytes = data.to_proto().ByteSize()
            if nbytes <= most:
                return nbytes
            why = f"what is to be told of one takes {nbytes:,} bytes, and {most:,} are left"
        except ValueError as error:
            why = str(error)
        if not self._said_left_out:
            self._said_left_out = True
            _log.warning("KV events leave out chunks of which not all can be told: %s", why)
        return 0


def _extra_keys(request: Request, blocks: slice, block_tokens: int) -> tuple[tuple[Any, ...], ...]:
    """What vLLM's own events tell of each of these blocks beside its tokens: adapter, pictures,
    salt, prompt embeddings. Empty if no block has any.
    """
    from vllm.v1.core import kv_cache_utils

    hashed: list[tuple[Any, ...] | None] = []
    picture = 0
    for block in range(blocks.start, blocks.stop):
        begin = block * block_tokens
        keys, picture = kv_cache_utils.generate_block_hash_extra_keys(
            request, begin, begin + block_tokens, picture
        )
        hashed.append(keys)
    if not any(hashed):
        return ()
    # From 0.32 on vLLM hashes more than it publishes: what each key is, and the adapter's path.
    published: Any = getattr(kv_cache_utils, "to_event_extra_keys", list)
    return tuple(keys or () for keys in published(hashed))


class Adapter(NamedTuple):
    """An adapter as the engine has it."""

    lora_id: int
    """The engine's number for it."""
    scheme: str
    """How the hashes of its blocks are made."""


@dataclass(frozen=True, slots=True)
class GroupLabel:
    """How vLLM's own events name a group."""

    index: int
    kind: str | None
    sliding_window: int | None


class Relay:
    """Follows the server's log and hands vLLM's events to the scheduler."""

    def __init__(
        self,
        address: Address,
        scheme: Callable[[], str],
        labels: Mapping[int | None, GroupLabel],
    ) -> None:
        self._address = address
        self._scheme = scheme
        self._published = _Published(scheme, labels)
        self._follower: Follower | None = None
        self._thread: threading.Thread | None = None
        self._namespace = ""
        self._said_no_log = False

    @classmethod
    def of_engine(
        cls, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, address: Address
    ) -> Relay:
        """The relay of one engine. Connects to nothing yet."""
        groups = kv_cache_config.kv_cache_groups
        labels: dict[int | None, GroupLabel] = {
            index: _label(index, group.kv_cache_spec) for index, group in enumerate(groups)
        }
        if len(groups) == 1:
            # Where there is only one group KVDock has none, and vLLM calls it 0.
            labels[None] = labels[0]
        return cls(address, lambda: hash_scheme(vllm_config), labels)

    def watch_pool(self, pool: BlockPool) -> None:
        """The engine's own blocks, whose clearing is to be noticed."""
        self._published.watch_pool(pool)

    def forget(self) -> None:
        """Nothing is known of the server until :meth:`follow`: its namespace is being cleared."""
        self._published.begin(None)

    def follow(self, namespace: str, *, has_log: bool) -> None:
        """There is a server, and this engine's namespace there. Returns at once.

        Called again and again, whenever there is a new session, always on one thread.
        """
        running = self._thread is not None and self._thread.is_alive()
        if running and namespace == self._namespace and self._published.is_told_by(self._follower):
            return
        if not has_log:
            if not self._said_no_log:
                self._said_no_log = True
                _log.warning(
                    "KV events tell nothing of KVDock's cache: the server at %s keeps no event log "
                    "(start it with --event-log 256MiB)",
                    self._address,
                )
            return
        self._stop()
        self._namespace = namespace
        index = Index(Filter(namespaces=(namespace,)))
        self._follower = Follower(index, str(self._address), progress_interval=_PROGRESS_SECONDS)
        self._published.begin(self._follower)
        self._thread = threading.Thread(
            target=self._run, args=(self._follower,), name="kvdock-events", daemon=True
        )
        self._thread.start()

    def know_adapter(self, request: Request, adapter: LoRA | None) -> None:
        """The engine has the adapter of this request; None: it is not cached."""
        lora = request.lora_request
        if lora is None:
            return
        known = None
        if adapter is not None:
            known = Adapter(lora.adapter_id, adapter_scheme(self._scheme(), request, adapter))
        self._published.know_adapter(lora.lora_name, known)

    def take(self) -> list[KVCacheEvent]:
        """What is to be published next; the rest comes with later steps. Never waits."""
        return self._published.take()

    def close(self) -> None:
        """Ends the following."""
        self._stop()

    def _stop(self) -> None:
        follower, self._follower = self._follower, None
        if follower is not None and self._thread is not None:
            follower.close()
            self._thread.join(_JOIN_SECONDS)

    def _run(self, follower: Follower) -> None:
        affinity.restore()
        lost_since: float | None = None
        try:
            for update in follower:
                self._published.note(update.changes, follower)
                if update.lost is None:
                    lost_since = None
                    continue
                now = time.monotonic()
                lost_since = lost_since or now
                if now - lost_since > _GONE_SECONDS and len(follower.index):
                    _log.info("no KVDock server for %g s: publishing that", _GONE_SECONDS)
                    self._published.note(follower.index.forget(), follower)
        except NoEventLog as error:
            _log.warning("KV events tell nothing more of KVDock's cache: %s", error.message)
        except KVDockError as error:
            _log.error("KV events tell nothing more of KVDock's cache: %s", error.message)
        finally:
            self._published.note(follower.index.forget(), follower)


class _Published:
    """What consumers were told, and what they are to be told.

    Kept as the difference of two states, not as a queue: a part that comes and goes while the
    engine takes no step costs nothing. Parts in ``_changed`` stand in the order of their last
    change, so parents are stored before their children and removed after them.

    When the engine clears its own cache, vLLM tells consumers to drop all that the engine has, on
    every medium. Then nothing of what was told counts any more, and it is told again.

    What other engines stored with an adapter waits until this engine has that adapter: consumers
    may know it by the number that each engine gives it.
    """

    def __init__(self, scheme: Callable[[], str], labels: Mapping[int | None, GroupLabel]) -> None:
        self._scheme = scheme
        self._labels = labels
        self._lock = threading.Lock()
        self._there: dict[PartId, Stored] = {}
        self._told: dict[PartId, ChunkEventData] = {}
        self._changed: dict[PartId, None] = {}
        # How many of the parts that were told of have a hash, by medium, group and hash.
        self._holders: Counter[tuple[str, int, bytes]] = Counter()
        # Who tells what the server has.
        self._source: Follower | None = None
        self._engine_cache = _EngineCache()
        # The engine's adapters, by name, and the names of those that are new.
        self._adapters: dict[str, Adapter | None] = {}
        self._new_adapters: set[str] = set()

    def is_told_by(self, source: Follower | None) -> bool:
        """Whether that is who tells what the server has."""
        return self._source is source

    def begin(self, source: Follower | None) -> None:
        """From now on that is who tells what the server has, or nobody. What it had is gone."""
        with self._lock:
            self._source = source
            for part_id in reversed(self._there):
                self._changed.pop(part_id, None)
                self._changed[part_id] = None
            self._there.clear()

    def note(self, changes: Sequence[Stored | Removed], source: Follower) -> None:
        """What the server has has changed. Nothing if another one tells that by now."""
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
        """The engine has this adapter. Called on the thread that takes."""
        if self._adapters.get(name) != adapter:
            self._adapters[name] = adapter
            self._new_adapters.add(name)

    def watch_pool(self, pool: BlockPool) -> None:
        """The engine's own blocks, whose clearing is to be noticed."""
        self._engine_cache = _EngineCache(pool)

    def take(self) -> list[KVCacheEvent]:
        """The next events, which follow the engine's own. Empty while somebody else is at it,
        rather than waiting.
        """
        if not self._lock.acquire(blocking=False):
            return []
        try:
            if self._engine_cache.was_cleared():
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
        label, medium = self._labels.get(part_id.group_idx), _MEDIA.get(part_id.medium)
        data = self._publishable(part_id)
        told = self._told.get(part_id)
        if told == data or label is None or medium is None:
            return events
        if told is not None:
            del self._told[part_id]
            gone = self._count(medium, label.index, told.block_hashes, -1)
            if gone:
                events.append(_removed(gone, medium, label))
        if data is not None:
            self._told[part_id] = data
            if self._count(medium, label.index, data.block_hashes, 1):
                adapter = self._adapters.get(data.lora_name)
                events.append(_stored(data, medium, label, adapter))
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
        """The hashes that the first part has there now, or none any more."""
        turned = []
        for one in hashes:
            before = self._holders[medium, group_idx, one]
            self._holders[medium, group_idx, one] = before + by
            if not before + by:
                del self._holders[medium, group_idx, one]
            if not before or not before + by:
                turned.append(one)
        return turned


class _EngineCache:
    """The engine's own cache, of which it matters when it is cleared.

    No hook tells a connector that. But vLLM's pool of blocks then begins anew with the table in
    which it finds blocks by their hash.
    """

    def __init__(self, pool: BlockPool | None = None) -> None:
        self._pool = pool
        self._table = self._table_now()
        if pool is not None and self._table is None:
            _log.warning(
                "this version of vLLM does not show when it clears its cache: what KVDock has is "
                "then not told again to consumers of KV events"
            )

    def was_cleared(self) -> bool:
        """Since the last call."""
        before, self._table = self._table, self._table_now()
        return self._table is not before

    def _table_now(self) -> object:
        return getattr(self._pool, "cached_block_hash_to_block", None)


def _is_whole(data: ChunkEventData) -> bool:
    """False if something is missing, or a newer client told it in a way that is not known here."""
    blocks = len(data.block_hashes)
    if len(data.token_ids) != 4 * blocks * data.block_size:
        return False
    if len(data.extra_keys) not in (0, blocks):
        return False
    keys = (key for of_block in data.extra_keys for key in of_block)
    return not any(None in (key if isinstance(key, tuple) else (key,)) for key in keys)


def _stored(
    data: ChunkEventData, medium: str, label: GroupLabel, adapter: Adapter | None
) -> KVCacheEvent:
    from vllm.distributed import kv_events
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    convert: Any = maybe_convert_block_hash
    parent = data.parent_block_hash
    fields = {
        "block_hashes": [convert(one) for one in data.block_hashes],
        "parent_block_hash": convert(parent) if parent else None,
        "token_ids": _from_bytes(data.token_ids),
        "block_size": data.block_size,
        "lora_id": adapter.lora_id if adapter else None,
        "medium": medium,
        "lora_name": data.lora_name or None,
        "extra_keys": [keys or None for keys in data.extra_keys or [()] * len(data.block_hashes)],
        "group_idx": label.index,
        "kv_cache_spec_kind": label.kind,
        "kv_cache_spec_sliding_window": label.sliding_window,
        "locality": "LOCAL",
    }
    return _make(kv_events.BlockStored, fields)


def _removed(hashes: Sequence[bytes], medium: str, label: GroupLabel) -> KVCacheEvent:
    from vllm.distributed import kv_events
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    convert: Any = maybe_convert_block_hash
    fields = {
        "block_hashes": [convert(one) for one in hashes],
        "medium": medium,
        "group_idx": label.index,
        "locality": "LOCAL",
    }
    return _make(kv_events.BlockRemoved, fields)


def _make(kind: Any, fields: Mapping[str, object]) -> KVCacheEvent:
    """With the fields that this version of vLLM knows."""
    known = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
    event: KVCacheEvent = kind(**known)
    return event


def _label(index: int, spec: Any) -> GroupLabel:
    """As vLLM labels its own events, in versions that do."""
    try:
        from vllm.v1.kv_cache_interface import (
            get_kv_cache_spec_kind,
            get_kv_cache_spec_sliding_window,
        )
    except ImportError:
        return GroupLabel(index, None, None)
    return GroupLabel(
        index, str(get_kv_cache_spec_kind(spec).value), get_kv_cache_spec_sliding_window(spec)
    )


def _to_bytes(token_ids: Sequence[int]) -> bytes:
    """Little-endian uint32."""
    values = array("I", token_ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _from_bytes(token_ids: bytes) -> list[int]:
    values = array("I", token_ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
