"""Protobuf messages put together from encoded pieces.

For messages with large fields. Protobuf copies such a field twice, into fresh memory each time,
which takes a hundred times as long as joining the pieces. A message is encoded as its fields one
after another, in any order. A field whose value has a length is a tag, the length and the value.
"""

from __future__ import annotations

from google.protobuf.message import Message

_LENGTH_DELIMITED = 2


def tag(message: type[Message], field: str) -> bytes:
    """The tag of a field whose value has a length; for field numbers up to 15."""
    return bytes([message.DESCRIPTOR.fields_by_name[field].number << 3 | _LENGTH_DELIMITED])


def varint(value: int) -> bytes:
    """The encoding of a length."""
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
