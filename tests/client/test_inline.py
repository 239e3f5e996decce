import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock._inline import MESSAGE_BYTES, GetTransfer, PutTransfer, put_data
from kvdock.errors import InvalidArgument, WrongLength
from kvdock.types import ChunkStatus
from kvdock.v1 import cache_pb2, types_pb2

KEYS = [bytes([n + 1]) * 32 for n in range(3)]
SIZE = MESSAGE_BYTES * 2 + 5
SHARDS = [bytes([n]) * SIZE for n in range(3)]


def put(shards: list[bytes] = SHARDS) -> PutTransfer:
    return PutTransfer("n", KEYS, shards, parent=b"", group_idx=None, kv_worker_id=0, event_data=())


def admission(*statuses: ChunkStatus) -> cache_pb2.PutResponse:
    return cache_pb2.PutResponse(
        admission=cache_pb2.PutAdmission(
            chunks=[
                cache_pb2.ChunkResult(status=types_pb2.ChunkStatus.ValueType(status))
                for status in statuses
            ],
            shard_bytes=SIZE,
        )
    )


def test_put_sends_what_the_server_lacks_in_order_and_in_pieces() -> None:
    transfer = put()
    transfer.feed(admission(ChunkStatus.EXISTS, ChunkStatus.RESERVED, ChunkStatus.RESERVED))

    sent = [cache_pb2.PutRequest.FromString(message).data for message, _ in transfer.data()]

    assert [piece.chunk for piece in sent] == [1, 1, 1, 2, 2, 2]
    assert max(len(piece.data) for piece in sent) == MESSAGE_BYTES
    assert b"".join(piece.data for piece in sent) == SHARDS[1] + SHARDS[2]


@given(st.integers(0, 2**32 - 1), st.binary(max_size=300))
def test_put_data_is_what_protobuf_makes(chunk: int, data: bytes) -> None:
    made = cache_pb2.PutRequest.FromString(put_data(chunk, memoryview(data)))

    assert made == cache_pb2.PutRequest(data=cache_pb2.PutData(chunk=chunk, data=data))


def test_put_reports_chunk_by_chunk_and_what_was_not_settled_as_failed() -> None:
    transfer = put()
    transfer.feed(admission(ChunkStatus.NO_SPACE, ChunkStatus.RESERVED, ChunkStatus.RESERVED))
    transfer.feed(
        cache_pb2.PutResponse(
            result=cache_pb2.PutResult(chunk=1, status=types_pb2.CHUNK_STATUS_STORED)
        )
    )

    assert transfer.result() == [ChunkStatus.NO_SPACE, ChunkStatus.STORED, ChunkStatus.FAILED]


def test_put_of_a_wrong_length_sends_nothing() -> None:
    transfer = put([SHARDS[0], SHARDS[1][:-1], SHARDS[2]])

    with pytest.raises(WrongLength, match=f"shard 1 has {2 * MESSAGE_BYTES + 4:,} bytes"):
        transfer.feed(admission(*[ChunkStatus.RESERVED] * 3))
    assert list(transfer.data()) == []


def test_put_and_get_need_as_many_buffers_as_keys() -> None:
    with pytest.raises(InvalidArgument, match="3 keys and 2 shards"):
        put(SHARDS[:2])
    with pytest.raises(InvalidArgument, match="3 keys and 1 buffers"):
        GetTransfer("n", KEYS, group_idx=None, kv_worker_id=0, buffers=[bytearray(1)])


def piece(chunk: int, data: bytes) -> cache_pb2.GetResponse:
    return cache_pb2.GetResponse(
        chunk=chunk, status=types_pb2.CHUNK_STATUS_RETRIEVED, data=data, shard_bytes=SIZE
    )


def test_get_joins_pieces_and_drops_what_is_not_whole() -> None:
    transfer = GetTransfer("n", KEYS, group_idx=None, kv_worker_id=0)
    for start in range(0, SIZE, MESSAGE_BYTES):
        transfer.feed(piece(0, SHARDS[0][start : start + MESSAGE_BYTES]))
    transfer.feed(piece(1, SHARDS[1][:10]))

    assert transfer.result() == [SHARDS[0], None, None]
    assert transfer.num_complete == 1


def test_get_fills_buffers_in_place() -> None:
    buffers = [bytearray(SIZE) for _ in KEYS]
    transfer = GetTransfer("n", KEYS, group_idx=None, kv_worker_id=0, buffers=buffers)
    transfer.feed(piece(0, SHARDS[1][:7]))
    transfer.feed(piece(0, SHARDS[1][7:]))
    transfer.feed(cache_pb2.GetResponse(chunk=1, status=types_pb2.CHUNK_STATUS_NOT_FOUND))

    assert buffers[0] == SHARDS[1]
    assert transfer.num_complete == 1


def test_get_into_a_buffer_of_a_wrong_length_is_refused() -> None:
    transfer = GetTransfer(
        "n", KEYS, group_idx=None, kv_worker_id=0, buffers=[bytearray(SIZE + 1)] * 3
    )

    with pytest.raises(WrongLength, match="buffer 0"):
        transfer.feed(piece(0, b"x"))
