"""What consumers of vLLM's events make of them, by vLLM's own types."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch

Block = dict[str, Any]
"""All that an event says of one block, by the names of vLLM's fields."""


def decode(payload: bytes) -> list[Any]:
    """The events of a message."""
    return list(msgspec.msgpack.decode(payload, type=KVEventBatch).events)


class Consumer:
    """Knows which blocks an engine has on which medium, by group and hash."""

    def __init__(self) -> None:
        self._there: dict[str, set[tuple[int | None, Any]]] = {}

    def take(self, event: object) -> None:
        """What happened next."""
        match event:
            case BlockStored():
                self._on(event.medium).update(_names(event))
            case BlockRemoved():
                self._on(event.medium).difference_update(_names(event))
            case AllBlocksCleared():
                self._there.clear()

    def on(self, medium: str) -> set[tuple[int | None, Any]]:
        """What is there now."""
        return set(self._on(medium))

    def _on(self, medium: str | None) -> set[tuple[int | None, Any]]:
        assert medium is not None
        return self._there.setdefault(medium, set())


def _names(event: BlockStored | BlockRemoved) -> set[tuple[int | None, Any]]:
    return {(event.group_idx, name) for name in event.block_hashes}


def stored_blocks(events: Iterable[object], medium: str) -> dict[Any, Block]:
    """The blocks that were told as stored there, by hash, as they were told last."""
    found: dict[Any, Block] = {}
    for event in events:
        if isinstance(event, BlockStored) and event.medium == medium:
            found |= _of_one_block_each(event)
    return found


def _of_one_block_each(event: BlockStored) -> dict[Any, Block]:
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    hashes, tokens = fields.pop("block_hashes"), fields.pop("token_ids")
    parents = [fields.pop("parent_block_hash"), *hashes[:-1]]
    extra_keys = fields.pop("extra_keys")
    size = event.block_size
    assert len(tokens) == size * len(hashes)
    assert len(extra_keys) == len(hashes)
    return {
        name: fields
        | {
            "parent_block_hash": parents[index],
            "token_ids": tokens[index * size : (index + 1) * size],
            "extra_keys": extra_keys[index],
        }
        for index, name in enumerate(hashes)
    }


def assert_differ_in_place_only(ours: dict[Any, Block], theirs: dict[Any, Block]) -> None:
    """The same is told of each block of ours as of theirs, but for where it is."""
    assert ours
    for name, block in ours.items():
        differing = {field for field, value in block.items() if value != theirs[name][field]}
        assert "medium" in differing
        assert differing <= {"medium", "locality"}, (block, theirs[name])
