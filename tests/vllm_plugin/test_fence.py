"""When a server that did not answer may write to the worker's blocks no more."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvdock import liveness, trust
from kvdock.errors import DeadlineExceeded, DeviceMemory, SessionLost
from kvdock.types import ChunkStatus, EvictionPriority, Keep, Segment
from kvdock.v1 import cache_pb2, types_pb2
from kvdock_vllm.engine.parallel import ParallelStrategy
from kvdock_vllm.engine.specs import GroupStore, Target
from kvdock_vllm.engine.transfers import fence as fence_module
from kvdock_vllm.engine.transfers import server as server_module
from kvdock_vllm.engine.transfers.base import CopyRequest, Mark
from kvdock_vllm.engine.transfers.fence import Fence
from kvdock_vllm.engine.transfers.server import ServerChunkTransfers

TARGET = Target(1, "model", 16)


class Server:
    """A process, as far as its pool's file tells of it."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self.epoch = epoch
        self._path = folder / f"kvdock-0-{epoch:016x}"
        self._proof = os.urandom(32)
        self._lock = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
        os.write(self._lock, self._proof)
        fcntl.flock(self._lock, fcntl.LOCK_EX)

    def session(self) -> Any:
        segments = (Segment(0, f"/{self._path.name}", 0, self._proof),)
        return _Session(self.epoch, SimpleNamespace(segments=segments))

    def end(self) -> None:
        self._path.unlink(missing_ok=True)
        os.close(self._lock)


class _Session:
    def __init__(self, epoch: int, info: Any) -> None:
        self.epoch = epoch
        self.info = info


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setattr(trust, "_SHM_FOLDER", tmp_path)
    monkeypatch.setattr(liveness, "_AFTERMATH_SECONDS", 0.0)
    return Server(tmp_path, 1)


def lost() -> Future[Any]:
    """A request whose session was lost."""
    future: Future[Any] = Future()
    future.set_exception(SessionLost("silent for 20 s"))
    return future


def test_a_store_whose_session_is_lost_ends_with_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server may not know of the loss, and until then seals what it copies."""
    monkeypatch.setattr(server_module, "_STORE_SECONDS", 0.2)
    sent: list[Any] = []
    session: Any = SimpleNamespace(submit=lambda request: sent.append(request) or lost())
    group = GroupStore(0, None, 0, b"", (bytes(32),), (0,))
    transfers = ServerChunkTransfers(ParallelStrategy(False, 1, 1, 0), Fence())
    with pytest.raises(SessionLost):
        transfers.store(CopyRequest(session, TARGET, group, Mark(), lambda: False))
    assert time.monotonic_ns() >= sent[0].deadline_ns > 0


def test_a_store_carries_what_its_request_says() -> None:
    sent: list[Any] = []
    response: Future[Any] = Future()
    response.set_result(cache_pb2.StoreResponse(chunks=[cache_pb2.ChunkResult(status=1)]))
    session: Any = SimpleNamespace(submit=lambda request: sent.append(request) or response)
    keep, high = Keep("mine", 5.0), EvictionPriority.HIGH
    group = GroupStore(0, None, 0, b"", (bytes(32),), (0,), (), keep, high)
    transfers = ServerChunkTransfers(ParallelStrategy(False, 1, 1, 0), Fence())
    stored = transfers.store(CopyRequest(session, TARGET, group, Mark(), lambda: False))
    assert stored == [ChunkStatus.STORED]
    assert (sent[0].keep.pin, sent[0].keep.ttl_ms) == ("mine", 5_000)
    assert sent[0].priority == types_pb2.EVICTION_PRIORITY_HIGH


def test_a_store_that_is_not_answered_reads_until_its_deadline_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "_STORE_SECONDS", 0.1)
    monkeypatch.setattr(server_module, "_PIECE_SECONDS", 0.4)
    sent: list[Any] = []
    session: Any = SimpleNamespace(submit=lambda request: sent.append(request) or Future())
    group = GroupStore(0, None, 0, b"", (bytes(32),), (0,))
    transfers = ServerChunkTransfers(ParallelStrategy(False, 1, 1, 0), Fence())
    ended: list[int] = []

    @contextmanager
    def reading() -> Iterator[None]:
        assert not sent
        yield
        ended.append(time.monotonic_ns())

    with pytest.raises(DeadlineExceeded):
        transfers.store(CopyRequest(session, TARGET, group, Mark(), lambda: False, reading))
    late = time.monotonic_ns() - sent[0].deadline_ns
    assert 0 <= ended[0] - sent[0].deadline_ns < late / 2


def test_an_answer_ends_it_whatever_it_says(server: Server) -> None:
    fence, session = Fence(), server.session()
    fence.registered(session)
    answered: Future[Any] = Future()
    refused: Future[Any] = Future()
    over = [fence.passed(session, request) for request in (answered, refused, lost())]
    assert [is_over() for is_over in over] == [False] * 3
    answered.set_result("late")
    refused.set_exception(DeviceMemory("no such memory"))
    assert [is_over() for is_over in over] == [True, True, False]


def test_the_end_of_the_process_ends_it_and_that_of_the_session_does_not(server: Server) -> None:
    fence, session = Fence(), server.session()
    fence.registered(session)
    is_over = fence.passed(session, lost())
    assert not is_over()
    server.end()
    assert is_over()


def test_the_next_session_at_the_same_server_ends_it(server: Server) -> None:
    fence, session = Fence(), server.session()
    fence.registered(session)
    is_over = fence.passed(session, lost())
    fence.registered(session)
    assert not is_over(), "the same session says nothing"
    fence.registered(server.session())
    assert is_over()


def test_another_server_says_nothing_as_long_as_the_first_one_lives(
    server: Server, tmp_path: Path
) -> None:
    fence, session = Fence(), server.session()
    fence.registered(session)
    is_over = fence.passed(session, lost())
    fence.registered(Server(tmp_path, 2).session())
    assert not is_over()
    server.end()
    assert is_over()


def test_where_the_end_of_a_server_cannot_be_seen(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.end()  # no file, as in another container's /dev/shm
    fence, session = Fence(), server.session()
    fence.registered(session)
    is_over = fence.passed(session, lost())
    assert not is_over()
    fence.registered(Server(tmp_path, 2).session())
    assert is_over()
    fence.registered(session)
    is_over = fence.passed(session, lost())
    assert not is_over()
    monkeypatch.setattr(fence_module, "_UNSEEN_SECONDS", 0.0)
    assert is_over()
