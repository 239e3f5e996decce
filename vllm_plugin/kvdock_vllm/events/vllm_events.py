"""Makes vLLM's own event objects of what a server tells of a part."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kvdock.events import Medium
from kvdock.types import ChunkEventData

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent

MEDIA = {Medium.CPU: "CPU", Medium.STORAGE: "STORAGE"}
"""vLLM's names of the media of a server. Events of other media are not published."""


class Adapter(NamedTuple):
    """An adapter as the engine has it."""

    lora_id: int
    """The engine's number for the adapter."""
    scheme: str
    """How the hashes of blocks with the adapter are made."""


@dataclass(frozen=True, slots=True)
class GroupLabel:
    """How vLLM's own events name a group."""

    index: int
    kind: str | None
    sliding_window: int | None


def label_of(index: int, spec: Any) -> GroupLabel:
    """The label of vLLM's own events, in versions that have one."""
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
    parent = data.parent_block_hash
    return _event(
        "BlockStored",
        medium,
        label,
        block_hashes=_external(data.block_hashes),
        parent_block_hash=_external([parent])[0] if parent else None,
        token_ids=_from_bytes(data.token_ids),
        block_size=data.block_size,
        lora_id=adapter.lora_id if adapter else None,
        lora_name=data.lora_name or None,
        extra_keys=[keys or None for keys in data.extra_keys or [()] * len(data.block_hashes)],
        kv_cache_spec_kind=label.kind,
        kv_cache_spec_sliding_window=label.sliding_window,
    )


def block_removed(hashes: Sequence[bytes], medium: str, label: GroupLabel) -> KVCacheEvent:
    return _event("BlockRemoved", medium, label, block_hashes=_external(hashes))


def _external(hashes: Sequence[bytes]) -> list[Any]:
    """The hashes as vLLM publishes them."""
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    convert: Any = maybe_convert_block_hash
    return [convert(one) for one in hashes]


def _event(kind: str, medium: str, label: GroupLabel, **fields: object) -> KVCacheEvent:
    """An event of a kind, with the fields that this version of vLLM knows."""
    from vllm.distributed import kv_events

    make: Any = getattr(kv_events, kind)
    fields |= {"medium": medium, "group_idx": label.index, "locality": "LOCAL"}
    known = {name: value for name, value in fields.items() if name in make.__struct_fields__}
    event: KVCacheEvent = make(**known)
    return event


def _from_bytes(token_ids: bytes) -> list[int]:
    values = array("I", token_ids)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
