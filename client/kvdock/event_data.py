"""What the event of a chunk tells about the chunk, and how it is written on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvdock.v1 import types_pb2

ExtraValue: TypeAlias = str | int | bytes | None
"""None stands for a kind of value that this client does not know. It is read, never written."""

ExtraKey: TypeAlias = ExtraValue | tuple[ExtraValue, ...]
"""One thing that a block's hash commits to beside its tokens."""


@dataclass(frozen=True, slots=True)
class ChunkEventData:
    """What an event tells about a chunk beyond its key."""

    block_hashes: Sequence[bytes] = ()
    """The engine's own hashes of the chunk's blocks, in order."""
    parent_block_hash: bytes = b""
    """The engine's hash of the block before the chunk; empty for the first chunk."""
    token_ids: bytes = b""
    """Token ids of the chunk, little-endian uint32."""
    block_size: int = 0
    """Tokens a block hash covers."""
    lora_name: str = ""
    """Adapter's name; empty for the base model."""
    hash_scheme: str = ""
    """How block_hashes were made. Only hashes of one scheme are comparable. Empty: not known."""
    extra_keys: Sequence[tuple[ExtraKey, ...]] = ()
    """For each of block_hashes what it commits to beside the tokens. Empty if no block has any."""

    def to_proto(self) -> types_pb2.ChunkEventData:
        """Raises ValueError for an extra key that the message cannot hold."""
        return types_pb2.ChunkEventData(
            block_hashes=self.block_hashes,
            parent_block_hash=self.parent_block_hash,
            token_ids=self.token_ids,
            block_size=self.block_size,
            lora_name=self.lora_name,
            hash_scheme=self.hash_scheme,
            extra_keys=map(_extra_keys_to_proto, self.extra_keys),
        )

    @classmethod
    def from_proto(cls, message: types_pb2.ChunkEventData) -> ChunkEventData:
        return cls(
            tuple(message.block_hashes),
            message.parent_block_hash,
            message.token_ids,
            message.block_size,
            message.lora_name,
            message.hash_scheme,
            tuple(map(_extra_keys_from_proto, message.extra_keys)),
        )


def _extra_keys_to_proto(keys: Sequence[ExtraKey]) -> types_pb2.ExtraKeys:
    message = types_pb2.ExtraKeys()
    for key in keys:
        if isinstance(key, tuple):
            values = types_pb2.ExtraTuple(values=map(_extra_value_to_proto, key))
            message.keys.add(tuple=values)
        else:
            message.keys.add(value=_extra_value_to_proto(key))
    return message


def _extra_value_to_proto(value: ExtraValue) -> types_pb2.ExtraValue:
    match value:
        case str():
            return types_pb2.ExtraValue(text=value)
        case int() if not isinstance(value, bool):
            return types_pb2.ExtraValue(number=value)
        case bytes():
            return types_pb2.ExtraValue(raw=value)
        case _:
            raise ValueError(f"extra key {value!r}: give str, int, bytes or a tuple of these")


def _extra_keys_from_proto(message: types_pb2.ExtraKeys) -> tuple[ExtraKey, ...]:
    return tuple(
        tuple(map(_extra_value_from_proto, key.tuple.values))
        if key.HasField("tuple")
        else _extra_value_from_proto(key.value)
        for key in message.keys
    )


def _extra_value_from_proto(message: types_pb2.ExtraValue) -> ExtraValue:
    match message.WhichOneof("value"):
        case "text":
            return message.text
        case "number":
            return message.number
        case "raw":
            return message.raw
        case _:
            return None
