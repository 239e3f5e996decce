"""Bytes that travel in the stream: the state of one Put and of one Get, without I/O.

The messages with a Put's bytes are serialized here. protobuf would build each message in an arena,
encode it into a second buffer that it enlarges step by step, and copy that buffer, each time into
memory fresh from the kernel. That takes longer than sending the message.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from kvdock._verbs import check_size, event_data_messages, within_limits
from kvdock.errors import InvalidArgument, WrongLength
from kvdock.pin import Keep
from kvdock.types import NORMAL_PRIORITY, ChunkEventData, ChunkStatus, EvictionPriority
from kvdock.v1 import cache_pb2, types_pb2

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

MESSAGE_BYTES = 128 << 10

# protobuf's wire types, and the fields that carry a Put's bytes.
_VARINT = 0
_LENGTH_DELIMITED = 2
_REQUEST_DATA = cache_pb2.PutRequest.DATA_FIELD_NUMBER
_DATA_CHUNK = cache_pb2.PutData.CHUNK_FIELD_NUMBER
_DATA_DATA = cache_pb2.PutData.DATA_FIELD_NUMBER

PUT_METHOD = "/kvdock.v1.CacheService/Put"

Progress = Callable[[int], None]
"""Called with the number of bytes that moved since the last call."""


def put_data(chunk: int, data: memoryview) -> bytes:
    """A serialized PutRequest with a PutData of these fields."""
    chunk_field = _tag(_DATA_CHUNK, _VARINT) + _varint(chunk)
    data_head = _tag(_DATA_DATA, _LENGTH_DELIMITED) + _varint(data.nbytes)
    inner_bytes = len(chunk_field) + len(data_head) + data.nbytes
    head = _tag(_REQUEST_DATA, _LENGTH_DELIMITED) + _varint(inner_bytes)
    return b"".join((head, chunk_field, data_head, data))


def _tag(field_number: int, wire_type: int) -> bytes:
    return _varint(field_number << 3 | wire_type)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


@within_limits("put")
def put_event_data(
    keys: Sequence[bytes],
    shards: Sequence[ReadableBuffer],
    event_data: Sequence[ChunkEventData] | None,
) -> list[types_pb2.ChunkEventData]:
    """The event data of a Put as messages. Raises InvalidArgument unless each key has its shard."""
    _check_shards(keys, shards)
    return event_data_messages(event_data)


def _check_shards(keys: Sequence[bytes], shards: Sequence[ReadableBuffer]) -> None:
    if len(keys) != len(shards):
        raise InvalidArgument(f"put got {len(keys)} keys and {len(shards)} shards")


class PutTransfer:
    """One Put: what to send and what became of each chunk."""

    def __init__(
        self,
        namespace: str,
        keys: Sequence[bytes],
        shards: Sequence[ReadableBuffer],
        *,
        parent: bytes,
        group_idx: int | None,
        kv_worker_id: int,
        event_data: Sequence[types_pb2.ChunkEventData],
        keep: Keep | None = None,
        priority: EvictionPriority = NORMAL_PRIORITY,
        progress: Progress | None = None,
    ) -> None:
        _check_shards(keys, shards)
        self._shards = [memoryview(shard).cast("B") for shard in shards]
        self._progress = progress
        self._fault: Exception | None = None
        self._admitted: list[int] = []
        self._statuses = [ChunkStatus.FAILED] * len(keys)
        with within_limits("put"):
            opening = cache_pb2.PutRequest(
                open=cache_pb2.PutOpen(
                    namespace=namespace,
                    group_idx=group_idx,
                    kv_worker_id=kv_worker_id,
                    parent_key=parent,
                    keys=keys,
                    event_data=event_data,
                    keep=keep.to_proto() if keep else None,
                    priority=priority.to_proto(),
                )
            )
        check_size(opening)
        self.open: bytes = opening.SerializeToString()
        """The first message to send, serialized."""

    def feed(self, response: cache_pb2.PutResponse) -> None:
        """Takes an answer of the server. The first one says what to send.

        Raises WrongLength if a shard has another length than the namespace's shards.
        """
        if response.WhichOneof("message") == "admission":
            self._admit(response.admission)
        else:
            result = response.result
            self._statuses[result.chunk] = ChunkStatus(result.status)

    def _admit(self, admission: cache_pb2.PutAdmission) -> None:
        admitted = []
        for index, chunk in enumerate(admission.chunks):
            if chunk.status != types_pb2.CHUNK_STATUS_RESERVED:
                self._statuses[index] = ChunkStatus(chunk.status)
                continue
            nbytes = self._shards[index].nbytes
            if nbytes != admission.shard_bytes:
                raise WrongLength(
                    f"shard {index} has {nbytes:,} bytes; a shard of this namespace has "
                    f"{admission.shard_bytes:,}"
                )
            admitted.append(index)
        self._admitted = admitted

    def data(self) -> Iterator[tuple[bytes, int]]:
        """The serialized messages that carry the admitted shards, in order.

        With each comes the number of the shards' bytes in it.
        """
        for index in self._admitted:
            shard = self._shards[index]
            for start in range(0, shard.nbytes, MESSAGE_BYTES):
                piece = shard[start : start + MESSAGE_BYTES]
                yield put_data(index, piece), piece.nbytes

    def sent(self, nbytes: int) -> bool:
        """Tells ``progress`` that ``nbytes`` were sent. False if ``progress`` raised.

        :meth:`result` raises the error for the caller of put. gRPC, which takes the messages, would
        only cancel the call.
        """
        if self._progress is not None:
            try:
                self._progress(nbytes)
            except Exception as fault:
                self._fault = fault
        return self._fault is None

    def result(self) -> list[ChunkStatus]:
        """STORED, EXISTS, NO_SPACE, PARENT_MISSING or FAILED for each chunk."""
        if self._fault is not None:
            raise self._fault
        return self._statuses


class GetTransfer:
    """One Get: collects the bytes of each chunk, in the caller's buffers if there are any."""

    def __init__(
        self,
        namespace: str,
        keys: Sequence[bytes],
        *,
        group_idx: int | None,
        kv_worker_id: int,
        progress: Progress | None = None,
        buffers: Sequence[WriteableBuffer] | None = None,
    ) -> None:
        if buffers is not None and len(keys) != len(buffers):
            raise InvalidArgument(f"get got {len(keys)} keys and {len(buffers)} buffers")
        self._buffers = (
            None if buffers is None else [memoryview(buffer).cast("B") for buffer in buffers]
        )
        self._progress = progress
        self._chunks = [io.BytesIO() for _ in keys] if buffers is None else []
        self._received = [0] * len(keys)
        self._complete = [False] * len(keys)
        with within_limits("get"):
            self.request = cache_pb2.GetRequest(
                namespace=namespace,
                group_idx=group_idx,
                kv_worker_id=kv_worker_id,
                keys=keys,
                message_bytes=MESSAGE_BYTES,
            )
        """The message to send."""
        check_size(self.request)

    @property
    def num_complete(self) -> int:
        """How many chunks came whole: the first ones, since a Get ends at the first miss."""
        return sum(self._complete)

    def feed(self, response: cache_pb2.GetResponse) -> None:
        """Takes an answer of the server, and tells ``progress`` how many bytes it brought.

        Raises WrongLength if the caller's buffer has another length than the shard.
        """
        if response.status != types_pb2.CHUNK_STATUS_RETRIEVED:
            return
        index, data = response.chunk, response.data
        start = self._received[index]
        if self._buffers is None:
            self._chunks[index].write(data)
        else:
            buffer = self._buffers[index]
            if buffer.nbytes != response.shard_bytes:
                raise WrongLength(
                    f"buffer {index} has {buffer.nbytes:,} bytes; a shard of this namespace has "
                    f"{response.shard_bytes:,}"
                )
            buffer[start : start + len(data)] = data
        self._received[index] = start + len(data)
        self._complete[index] = self._received[index] == response.shard_bytes
        if self._progress is not None:
            self._progress(len(data))

    def result(self) -> list[bytes | None]:
        """The bytes of each chunk; None for each that did not come whole."""
        return [
            chunk.getvalue() if complete else None
            for chunk, complete in zip(self._chunks, self._complete, strict=True)
        ]
