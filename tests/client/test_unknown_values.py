"""What a newer server answers and this client does not know: a status like that is a failure."""

from __future__ import annotations

from typing import Any

import pytest

from kvdock import ChunkStatus
from kvdock._inline import GetTransfer, PutTransfer
from kvdock._session_verbs import SessionVerbs
from kvdock._verbs import Call
from kvdock.types import ChunkResult, MemoryRegistration, TransferMode
from kvdock.v1 import cache_pb2, session_pb2

NEWER: Any = 99
KEY = bytes(32)


class Answering(SessionVerbs):
    """A session whose server gives one answer."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def _call(self, call: Call[Any, Any, Any], timeout: float | None) -> Any:
        # The way over the wire: a value that the stubs do not know, too, arrives as a number.
        return call.read(type(self.answer).FromString(self.answer.SerializeToString()))

    def _seconds(self, timeout: float | None) -> float:
        return 1.0


def newer_result() -> cache_pb2.ChunkResult:
    result = cache_pb2.ChunkResult(status=NEWER)
    result.location.length = 1
    return result


@pytest.mark.parametrize("status", [s for s in ChunkStatus if s is not ChunkStatus.UNSPECIFIED])
def test_an_unknown_status_is_no_known_one(status: ChunkStatus) -> None:
    found = ChunkResult.from_proto(newer_result()).status
    assert found is ChunkStatus.UNSPECIFIED
    assert found is not status


def test_of_a_sessions_verbs() -> None:
    chunks = [newer_result(), cache_pb2.ChunkResult(status=1)]  # type: ignore[arg-type]
    expected = [ChunkStatus.UNSPECIFIED, ChunkStatus.STORED]
    committed = Answering(cache_pb2.CommitResponse(chunks=chunks)).commit(5)
    assert committed == expected
    stored = Answering(cache_pb2.StoreResponse(chunks=chunks)).store("n", [KEY, KEY], [])
    assert stored == expected
    awaited = Answering(cache_pb2.AwaitFillResponse(chunks=chunks)).await_fill(5, 0, 2, filled_by=1)
    assert awaited == expected
    retrieved = Answering(cache_pb2.RetrieveResponse(chunks=chunks)).retrieve(5)
    assert [chunk.status for chunk in retrieved] == expected
    reservation = Answering(cache_pb2.ReserveResponse(chunks=chunks)).reserve("n", [KEY, KEY])
    assert [chunk.status for chunk in reservation.chunks] == expected


def test_of_a_put() -> None:
    put = PutTransfer(
        "n", [KEY] * 2, [b"12345678"] * 2, parent=b"", group_idx=None, kv_worker_id=0,
        event_data=None,
    )  # fmt: skip
    admission = cache_pb2.PutAdmission(shard_bytes=8, chunks=[newer_result()])
    admission.chunks.add(status=2)  # type: ignore[arg-type]
    put.feed(cache_pb2.PutResponse(admission=admission))
    assert len(list(put.data())) == 1  # what is not RESERVED is not sent
    put.feed(cache_pb2.PutResponse(result=cache_pb2.PutResult(chunk=1, status=NEWER)))
    assert put.result() == [ChunkStatus.UNSPECIFIED] * 2


def test_of_a_get() -> None:
    get = GetTransfer("n", [KEY], group_idx=None, kv_worker_id=0)
    get.feed(cache_pb2.GetResponse(chunk=0, status=NEWER, data=b"12345678", shard_bytes=8))
    assert get.result() == [None]


def test_an_unknown_mode_is_none_that_this_client_has() -> None:
    answer = session_pb2.RegisterMemoryResponse(mode=NEWER)
    assert MemoryRegistration.from_proto(answer).mode is TransferMode.UNSPECIFIED
