"""Protobuf messages put together from encoded pieces, and looked at before they are decoded.

For messages with large fields. Protobuf copies such a field twice, into fresh memory each time,
which takes a hundred times as long as joining the pieces. A message is encoded as its fields one
after another, in any order. A field whose value has a length is a tag, the length and the value.
"""

from __future__ import annotations

from google.protobuf.message import Message

_VARINT = 0
_LENGTH_DELIMITED = 2
_FIXED_BYTES = {1: 8, 5: 4}
"""By the wire types whose values have one length."""

_MOST_VARINT_BYTES = 10


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


def read_varint(encoded: bytes, at: int) -> tuple[int, int] | None:
    """The number of 64 bits that is encoded from ``at`` on, and where it ends; None if none is."""
    value = 0
    for index, byte in enumerate(encoded[at : at + _MOST_VARINT_BYTES]):
        value |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return value & (1 << 64) - 1, at + index + 1
    return None


def first_message(encoded: bytes, most_fields: int) -> int | None:
    """The number of the first field that may hold a message: one whose value has a length.

    None if there is none among the first ``most_fields`` fields.
    """
    at = 0
    for _ in range(most_fields):
        found = read_varint(encoded, at)
        if found is None:
            return None
        (number, wire_type), at = (found[0] >> 3, found[0] & 7), found[1]
        if wire_type == _LENGTH_DELIMITED:
            return number
        if wire_type == _VARINT:
            skipped = read_varint(encoded, at)
            if skipped is None:
                return None
            at = skipped[1]
        elif wire_type in _FIXED_BYTES:
            at += _FIXED_BYTES[wire_type]
        else:
            return None
    return None
