"""KV events: what the server has for this engine, through vLLM's own publisher.

Two halves that never meet. :class:`Teller` says of each chunk that is stored what vLLM's events say
of its blocks; it travels with the chunk to the server. :class:`Relay` follows the server's log and
turns it into vLLM's events again: for everything that this engine could load, whoever stored it,
and for everything that went. There is one relay an engine, in the scheduler, so the number of ranks
plays no part; and what is published is what the server has, so a lost connection, a restarted
server or a cleared cache are nothing special: the difference is published.

Consumers know a block by its hash. A hash is published as stored when the first part that has it
comes and as removed when the last one goes. Hashes that another engine made in another way are not
this engine's and are left out.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from kvdock.address import Address
from kvdock.errors import KVDockError, NoEventLog
from kvdock.events import Filter, Follower, Index, PartId, Removed, Stored
from kvdock.types import ChunkEventData
from kvdock_vllm import affinity
from kvdock_vllm.groups import GroupShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)

# A server that is away for longer has nothing for this engine, as far as consumers can tell.
_GONE_SECONDS = 5.0
_PROGRESS_SECONDS = 2.0
_JOIN_SECONDS = 3.0

# Parts that one step publishes at most, so that a large snapshot holds up no step.
_PARTS_A_STEP = 100


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


class Teller:
    """Says what events are to tell of a request's chunks."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

        self._vllm_config = vllm_config
        _, self._hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self._scheme: str | None = None

    def tell(
        self, request: Request, shape: GroupShape, first: int, end: int, chunk_tokens: int
    ) -> tuple[ChunkEventData, ...]:
        """Of one group's parts of chunks [first, end) of a request.

        Nothing at all if vLLM has not hashed them all, or not in a way that fits.
        """
        block_tokens = shape.block_tokens
        step = block_tokens // self._hash_tokens
        # A hash covers all tokens up to its end, so a larger block's is its last one's.
        hashes = request.block_hashes[step - 1 :: step] if step else []
        if len(hashes) < end * shape.chunk_blocks(chunk_tokens):
            return ()
        if self._scheme is None:
            self._scheme = hash_scheme(self._vllm_config)
        lora_name = request.lora_request.lora_name if request.lora_request is not None else ""
        told = []
        for chunk in range(first, end):
            part = shape.part(chunk, chunk_tokens)
            tokens = request.all_token_ids[part.start * block_tokens : part.stop * block_tokens]
            told.append(
                ChunkEventData(
                    block_hashes=tuple(map(bytes, hashes[part])),
                    parent_block_hash=bytes(hashes[part.start - 1]) if part.start else b"",
                    token_ids=_to_bytes(tokens),
                    block_size=block_tokens,
                    lora_name=lora_name,
                    hash_scheme=self._scheme,
                )
            )
        return tuple(told)


@dataclass(frozen=True, slots=True)
class GroupLabel:
    """How vLLM's own events name the kind of a group."""

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
            index: _label(group.kv_cache_spec) for index, group in enumerate(groups)
        }
        if len(groups) == 1:
            # Where there is only one group KVDock has none.
            labels[None] = labels[0]
        return cls(address, lambda: hash_scheme(vllm_config), labels)

    def follow(self, namespace: str, *, has_log: bool) -> None:
        """There is a server, and this engine's namespace there. Returns at once.

        Called again and again, whenever there is a new session, always on one thread.
        """
        running = self._thread is not None and self._thread.is_alive()
        if running and namespace == self._namespace:
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
        self._thread = threading.Thread(
            target=self._run, args=(self._follower,), name="kvdock-events", daemon=True
        )
        self._thread.start()

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
                self._published.note(update.changes)
                if update.lost is None:
                    lost_since = None
                    continue
                now = time.monotonic()
                lost_since = lost_since or now
                if now - lost_since > _GONE_SECONDS and len(follower.index):
                    _log.info("no KVDock server for %g s: publishing that", _GONE_SECONDS)
                    self._published.note(follower.index.forget())
        except NoEventLog as error:
            _log.warning("KV events tell nothing more of KVDock's cache: %s", error.message)
        except KVDockError as error:
            _log.error("KV events tell nothing more of KVDock's cache: %s", error.message)
        finally:
            # Another namespace, or nothing at all, takes its place.
            self._published.note(follower.index.forget())


class _Published:
    """What consumers were told, and what they are to be told.

    Kept as the difference of two states, not as a queue: a part that comes and goes while the
    engine takes no step costs nothing. Parts in ``_changed`` stand in the order of their last
    change, so parents are stored before their children and removed after them.
    """

    def __init__(self, scheme: Callable[[], str], labels: Mapping[int | None, GroupLabel]) -> None:
        self._scheme = scheme
        self._labels = labels
        self._lock = threading.Lock()
        self._there: dict[PartId, Stored] = {}
        self._told: dict[PartId, ChunkEventData] = {}
        self._changed: dict[PartId, None] = {}
        # How many of the parts that were told of have a hash, by group and hash.
        self._holders: Counter[tuple[int | None, bytes]] = Counter()

    def note(self, changes: Sequence[Stored | Removed]) -> None:
        """What the server has has changed."""
        with self._lock:
            for change in changes:
                if isinstance(change, Stored):
                    self._there[change.id] = change
                else:
                    self._there.pop(change.id, None)
                self._changed.pop(change.id, None)
                self._changed[change.id] = None

    def take(self) -> list[KVCacheEvent]:
        """The next events. Empty while somebody else is at it, rather than waiting."""
        if not self._changed or not self._lock.acquire(blocking=False):
            return []
        try:
            events: list[KVCacheEvent] = []
            for part_id in list(islice(self._changed, _PARTS_A_STEP)):
                del self._changed[part_id]
                events += self._difference(part_id)
            return events
        finally:
            self._lock.release()

    def _difference(self, part_id: PartId) -> list[KVCacheEvent]:
        events: list[KVCacheEvent] = []
        part = self._there.get(part_id)
        data = part.data if part is not None else None
        if data is not None and (not data.block_hashes or data.hash_scheme != self._scheme()):
            data = None
        told = self._told.get(part_id)
        if told == data:
            return events
        group_idx = part_id.group_idx
        if told is not None:
            del self._told[part_id]
            gone = self._count(group_idx, told.block_hashes, -1)
            if gone:
                events.append(_removed(gone, group_idx))
        if data is not None:
            self._told[part_id] = data
            if self._count(group_idx, data.block_hashes, 1):
                events.append(_stored(data, group_idx, self._labels.get(group_idx)))
        return events

    def _count(self, group_idx: int | None, hashes: Sequence[bytes], by: int) -> list[bytes]:
        """The hashes that the first part has now, or none any more."""
        turned = []
        for one in hashes:
            before = self._holders[group_idx, one]
            self._holders[group_idx, one] = before + by
            if not before + by:
                del self._holders[group_idx, one]
            if not before or not before + by:
                turned.append(one)
        return turned


def _stored(data: ChunkEventData, group_idx: int | None, label: GroupLabel | None) -> KVCacheEvent:
    from vllm.distributed import kv_events
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    convert: Any = maybe_convert_block_hash
    parent = data.parent_block_hash
    fields = {
        "block_hashes": [convert(one) for one in data.block_hashes],
        "parent_block_hash": convert(parent) if parent else None,
        "token_ids": _from_bytes(data.token_ids),
        "block_size": data.block_size,
        "lora_id": None,
        "medium": _medium(),
        "lora_name": data.lora_name or None,
        "group_idx": group_idx,
        "kv_cache_spec_kind": label.kind if label else None,
        "kv_cache_spec_sliding_window": label.sliding_window if label else None,
        "locality": "LOCAL",
    }
    return _make(kv_events.BlockStored, fields)


def _removed(hashes: Sequence[bytes], group_idx: int | None) -> KVCacheEvent:
    from vllm.distributed import kv_events
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    convert: Any = maybe_convert_block_hash
    fields = {
        "block_hashes": [convert(one) for one in hashes],
        "medium": _medium(),
        "group_idx": group_idx,
        "locality": "LOCAL",
    }
    return _make(kv_events.BlockRemoved, fields)


def _make(kind: Any, fields: Mapping[str, object]) -> KVCacheEvent:
    """With the fields that this version of vLLM knows."""
    known = {name: value for name, value in fields.items() if name in kind.__struct_fields__}
    event: KVCacheEvent = kind(**known)
    return event


def _medium() -> str:
    from vllm.distributed import kv_events

    return str(getattr(kv_events, "MEDIUM_CPU", "CPU"))


def _label(spec: Any) -> GroupLabel:
    """As vLLM labels its own events, in versions that do."""
    try:
        from vllm.v1.kv_cache_interface import (
            get_kv_cache_spec_kind,
            get_kv_cache_spec_sliding_window,
        )
    except ImportError:
        return GroupLabel(None, None)
    return GroupLabel(
        str(get_kv_cache_spec_kind(spec).value), get_kv_cache_spec_sliding_window(spec)
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
