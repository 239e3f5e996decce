"""Calls that one message cannot hold: against a real server, and piece by piece."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st

import kvdock
from kvdock import ChunkEventData, ChunkStatus, Group, Namespace, Reservation, aio
from kvdock._pieces import pieces
from kvdock._session_verbs import SessionVerbs
from kvdock._verbs import Call, Request, Response, Result
from kvdock.channel import MAX_MESSAGE_BYTES
from kvdock.errors import DeadlineExceeded, InvalidArgument, UnknownReservation
from kvdock.types import ChunkResult
from kvdock.v1 import cache_pb2, types_pb2

MANY = 16_384
KEYS = [hashlib.sha256(n.to_bytes(4)).digest() for n in range(MANY)]
DATA = [ChunkEventData(token_ids=bytes(1 << 10))] * MANY
SHARD = 64
NAMESPACE = Namespace("n", 16, 1, (Group(shard_bytes=(SHARD,)),))

SECONDS = 60.0
MORE_SECONDS = {"timeout": SECONDS}


@pytest.fixture
def address(start_server: Callable[..., Any]) -> str:
    server = start_server("--event-log", "64MiB")
    with kvdock.Client(server.address) as client:
        client.register_namespace(NAMESPACE)
    return str(server.address)


def stored(client: kvdock.Client) -> int:
    return client.lookup("n", KEYS, probe=True, timeout=SECONDS).chunks


def test_put(address: str) -> None:
    moved: list[int] = []
    with kvdock.Client(address, timeout=SECONDS) as client:
        shards = [n.to_bytes(SHARD) for n in range(MANY)]
        statuses = client.put("n", KEYS, shards, event_data=DATA, progress=moved.append)
        assert statuses == [ChunkStatus.STORED] * MANY
        assert sum(moved) == MANY * SHARD
        assert stored(client) == MANY
        assert client.get("n", KEYS[-2:]) == shards[-2:]
        part = next(iter(client.chunks("n")))
        assert part.key == KEYS[0]


async def test_put_with_asyncio(address: str) -> None:
    async with aio.Client(address, timeout=SECONDS) as client:
        shards = [bytes(SHARD)] * MANY
        assert await client.put("n", KEYS, shards, event_data=DATA) == [ChunkStatus.STORED] * MANY
        assert (await client.lookup("n", KEYS, probe=True)).chunks == MANY


def check_reserved(reservation: Reservation) -> None:
    assert len(reservation.pieces) > 4
    assert len(set(reservation.ids)) == len(reservation.pieces)
    assert [chunk.status for chunk in reservation.chunks] == [ChunkStatus.RESERVED] * MANY
    offsets = {chunk.location.offset for chunk in reservation.chunks if chunk.location}
    assert len(offsets) == MANY


# Of different pieces, and not in order.
SOME = [9_000, 0, 16_383, 1]


def test_reserve_and_commit(address: str) -> None:
    with (
        kvdock.Client(address, timeout=SECONDS) as client,
        client.session(role="worker") as session,
    ):
        reservation = session.reserve("n", KEYS, event_data=DATA, **MORE_SECONDS)
        check_reserved(reservation)
        assert session.commit(reservation, SOME, **MORE_SECONDS) == [ChunkStatus.STORED] * 4
        assert stored(client) == 2
        with pytest.raises(InvalidArgument, match="are not open"):
            session.commit(reservation, SOME, **MORE_SECONDS)
        with pytest.raises(InvalidArgument, match="was not reserved"):
            session.commit(reservation, [MANY], **MORE_SECONDS)
        rest = session.commit(reservation, **MORE_SECONDS)
        assert rest == [ChunkStatus.STORED] * (MANY - 4)
        assert stored(client) == MANY
        assert session.abort(reservation) == 0


def test_commit_of_what_is_still_open_after_a_whole_piece_was_committed(address: str) -> None:
    with (
        kvdock.Client(address, timeout=SECONDS) as client,
        client.session(role="worker") as session,
    ):
        reservation = session.reserve("n", KEYS, event_data=DATA, **MORE_SECONDS)
        first = reservation.pieces[0][1]
        session.commit(reservation, range(first), **MORE_SECONDS)
        assert stored(client) == first
        rest = session.commit(reservation, **MORE_SECONDS)
        assert rest == [ChunkStatus.STORED] * (MANY - first)
        assert stored(client) == MANY
        with pytest.raises(UnknownReservation):
            session.commit(reservation, **MORE_SECONDS)


@pytest.mark.parametrize("chunks", [None, range(MANY)])
def test_commit_without_time_is_carried_out(address: str, chunks: range | None) -> None:
    with (
        kvdock.Client(address, timeout=SECONDS) as client,
        client.session(role="worker") as session,
    ):
        reservation = session.reserve("n", KEYS, event_data=DATA, **MORE_SECONDS)
        with pytest.raises(DeadlineExceeded):
            session.commit(reservation, chunks, timeout=0)
        # The server answers a session in order.
        session.register_namespace(NAMESPACE, **MORE_SECONDS)
        assert stored(client) == MANY


def test_abort_without_time_gives_all_back(address: str) -> None:
    with (
        kvdock.Client(address, timeout=SECONDS) as client,
        client.session(role="worker") as session,
    ):
        reservation = session.reserve("n", KEYS, event_data=DATA, **MORE_SECONDS)
        assert client.status().pool.reserved_bytes > 0
        with pytest.raises(DeadlineExceeded):
            session.abort(reservation, timeout=0)
        # The server answers a session in order.
        session.register_namespace(NAMESPACE, **MORE_SECONDS)
        assert client.status().pool.reserved_bytes == 0


async def test_reserve_commit_and_abort_with_asyncio(address: str) -> None:
    async with (
        aio.Client(address, timeout=SECONDS) as client,
        await client.session(role="worker") as session,
    ):
        reservation = await session.reserve("n", KEYS, event_data=DATA, **MORE_SECONDS)
        check_reserved(reservation)
        assert await session.commit(reservation, SOME, **MORE_SECONDS) == [ChunkStatus.STORED] * 4
        assert await session.abort(reservation, **MORE_SECONDS) == MANY - 4
        status = await client.status()
        assert (status.pool.reserved_bytes, status.index.parts) == (0, 4)


class Recorder(SessionVerbs):
    """Answers each request by itself, until it has had as many as it answers."""

    def __init__(self, answers: int = 100) -> None:
        self.requests: list[Any] = []
        self.given_back: list[Message] = []
        self._answers = answers

    def submit(self, request: Message) -> Future[Any]:
        self.given_back.append(request)
        return Future()

    def _seconds(self, timeout: float | None) -> float:
        return 10.0 if timeout is None else timeout

    def _call(self, call: Call[Request, Response, Result], timeout: float | None) -> Result:
        request: Any = call.request
        assert request.ByteSize() <= MAX_MESSAGE_BYTES
        if len(self.requests) == self._answers:
            raise DeadlineExceeded("no answer")
        self.requests.append(request)
        if isinstance(request, cache_pb2.ReserveRequest):
            chunks = (ChunkResult(ChunkStatus.RESERVED, None),) * len(request.keys)
            return Reservation(len(self.requests), 1, chunks)  # type: ignore[return-value]
        return [ChunkStatus.STORED] * len(request.keys)  # type: ignore[return-value]


def joined(requests: Sequence[Any], field: str) -> list[Any]:
    return [entry for request in requests for entry in getattr(request, field)]


@pytest.mark.parametrize("data", [DATA, None])
def test_store(data: list[ChunkEventData] | None) -> None:
    verbs = Recorder()
    # With large ids, the blocks alone are too much for one message.
    blocks = [2**31 + block for block in range(MANY * 64)]
    statuses = verbs.store("n", KEYS, blocks, parent=b"p" * 32, event_data=data, ready_event=b"e")
    assert statuses == [ChunkStatus.STORED] * MANY
    requests = verbs.requests
    assert len(requests) > 1
    assert joined(requests, "keys") == KEYS
    assert joined(requests, "block_ids") == blocks
    assert joined(requests, "event_data") == [one.to_proto() for one in data or ()]
    parents = [b"p" * 32, *(request.keys[-1] for request in requests)]
    assert [request.parent_key for request in requests] == parents[:-1]
    assert {request.ready_event for request in requests} == {b"e"}
    # All within the time of the call.
    times = [request.timeout_ms for request in requests]
    assert times == sorted(times, reverse=True)
    assert times[0] == 10_000


def test_what_is_reserved_is_given_back_if_a_later_piece_fails() -> None:
    verbs = Recorder(answers=2)
    with pytest.raises(DeadlineExceeded):
        verbs.reserve("n", KEYS, event_data=DATA)
    assert verbs.given_back == [cache_pb2.AbortRequest(reservation_id=n) for n in (1, 2)]


def test_block_ids_of_numpy() -> None:
    verbs = Recorder()
    verbs.store("n", KEYS[:2], list(np.arange(4)))
    assert joined(verbs.requests, "block_ids") == [0, 1, 2, 3]


def test_what_fits_is_one_request() -> None:
    verbs = Recorder()
    assert verbs.reserve("n", KEYS).pieces == ()
    verbs.store("n", KEYS, range(MANY))
    assert len(verbs.requests) == 2


@given(
    st.lists(st.integers(0, 1 << 20), min_size=1, max_size=40),
    st.integers(0, 3),
    st.integers(0, 2**32 - 1),
)
def test_pieces_follow_one_another_and_fit(sizes: list[int], blocks: int, most: int) -> None:
    keys = KEYS[: len(sizes)]
    data = [types_pb2.ChunkEventData(token_ids=bytes(size)) for size in sizes]
    ids = [most] * (blocks * len(keys))
    found = pieces(keys, b"first", data, ids)
    assert [piece.first for piece in found] == [0, *(piece.end for piece in found[:-1])]
    assert found[-1].end == len(keys)
    for piece in found:
        request = cache_pb2.StoreRequest(
            namespace="n" * 256,
            parent_key=piece.parent,
            keys=keys[piece.first : piece.end],
            event_data=data[piece.first : piece.end],
            block_ids=ids[piece.first * blocks : piece.end * blocks],
            ready_event=bytes(64),
        )
        assert request.ByteSize() <= MAX_MESSAGE_BYTES
        assert piece.parent == (keys[piece.first - 1] if piece.first else b"first")
