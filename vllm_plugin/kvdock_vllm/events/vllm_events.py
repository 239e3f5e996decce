"""vLLM's own event objects, made of what a server tells of a part."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kvdock.events import Medium
from kvdock.types import ChunkEventData

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent

MEDIA = {Medium.CPU: "CPU", Medium.STORAGE: "STORAGE"}
"""vLLM's names of the media from which a server gives. Others are not the engine's to tell of."""


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


def label_of(index: int, spec: Any) -> GroupLabel:
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


def block_stored(
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


def block_removed(hashes: Sequence[bytes], medium: str, label: GroupLabel) -> KVCacheEvent:
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


def _from_bytes(token_ids: bytes) -> list[int]:
    values = array("I", token_ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
