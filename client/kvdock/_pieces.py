"""How a call about many chunks is parted into messages that the protocol allows.

A message has at most 4 MiB, and what events are to tell of a chunk may be 1 MiB. Each piece names
the last chunk before it as parent, so the server sees one prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, TypeVar

from kvdock.channel import MAX_MESSAGE_BYTES
from kvdock.errors import KVDockError
from kvdock.v1 import types_pb2

T = TypeVar("T")

Steps = Generator[Callable[[], Any], Any, T]
"""A call that takes several requests. It yields what sends each. The answer is sent to it, or the
error is thrown into it."""

# For what a message has beside its chunks: a namespace's name, handles, tokens, tags and lengths.
_ROOM_BYTES = 16 << 10
# Tag and length of a key, and at most so many of the event data of a chunk.
_KEY_FRAME_BYTES = 2
_DATA_FRAME_BYTES = 5


class Piece(NamedTuple):
    """The chunks [first, end) of a call, and the key of the chunk before them."""

    first: int
    end: int
    parent: bytes


def pieces(
    keys: Sequence[bytes],
    parent: bytes,
    event_data: Sequence[types_pb2.ChunkEventData],
    block_ids: Sequence[int] = (),
) -> list[Piece]:
    """The pieces of a call with these chunks: one if all fit, or if their numbers do not match."""
    whole = [Piece(0, len(keys), parent)]
    blocks, rest = divmod(len(block_ids), len(keys) or 1)
    if rest or len(event_data) not in (0, len(keys)):
        return whole
    each = blocks * _varint_bytes(int(max(block_ids, default=0)))
    sizes = [len(key) + _KEY_FRAME_BYTES + each for key in keys]
    if event_data:
        told = [data.ByteSize() + _DATA_FRAME_BYTES for data in event_data]
        sizes = list(map(int.__add__, sizes, told))
    most = MAX_MESSAGE_BYTES - _ROOM_BYTES
    if sum(sizes) <= most:
        return whole
    found, first, nbytes = [], 0, 0
    for index, size in enumerate(sizes):
        if nbytes + size > most and index > first:
            found.append(Piece(first, index, keys[first - 1] if first else parent))
            first, nbytes = index, 0
        nbytes += size
    found.append(Piece(first, len(keys), keys[first - 1] if first else parent))
    return found


def in_turn(steps: Steps[T]) -> T:
    """The result of the steps, for the blocking face. The steps are closed however they end."""
    try:
        send = next(steps)
        while True:
            try:
                answer = send()
            except KVDockError as error:
                send = steps.throw(error)
            else:
                send = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


async def in_turn_async(steps: Steps[T]) -> T:
    """The same for the asyncio face."""
    try:
        send = next(steps)
        while True:
            try:
                answer = await send()
            except KVDockError as error:
                send = steps.throw(error)
            else:
                send = steps.send(answer)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


def _varint_bytes(number: int) -> int:
    """At most 10: where a number cannot be sent, protobuf says so later."""
    return max(1, (number.bit_length() + 6) // 7)
