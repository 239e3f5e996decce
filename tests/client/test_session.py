"""The session against a real server."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

import kvdock
import kvdock.aio
from kvdock import errors
from kvdock._outbox import LOOKUPS_UNDER_WAY
from kvdock.types import ChunkStatus
from kvdock.v1 import cache_pb2, session_pb2


@pytest.fixture
def client(server: Any, namespace: kvdock.Namespace) -> Iterator[kvdock.Client]:
    with kvdock.Client(server.address) as client:
        client.register_namespace(namespace)
        yield client


@pytest.fixture
def session(client: kvdock.Client) -> Iterator[kvdock.Session]:
    with client.session("engine") as session:
        yield session


def wait_until(condition: Callable[[], object], seconds: float = 5) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def store(session: kvdock.Session, prompt: Any) -> None:
    """Stores the prompt in shared mode."""
    reservation = session.reserve(prompt.namespace, prompt.keys)
    for chunk, shard in zip(reservation.chunks, prompt.shards, strict=True):
        assert chunk.location is not None
        session.pool.view(chunk.location)[:] = shard
    assert session.commit(reservation) == [ChunkStatus.STORED] * len(prompt.keys)


def test_shared_mode_from_reserve_to_the_copy_back(session: kvdock.Session, prompt: Any) -> None:
    store(session, prompt)
    assert session.reserve("test", prompt.keys).id == 0

    hit = session.lookup("test", prompt.keys)
    assert hit.lease is not None
    chunks = session.retrieve(hit.lease)
    copies = [bytes(session.pool.view(chunk.location)) for chunk in chunks if chunk.location]
    assert session.free_locks(hit.lease) == 4
    assert copies == prompt.shards
    with pytest.raises(errors.UnknownLease):
        session.retrieve(999)
    with pytest.raises(errors.WrongMode):
        session.await_fill(hit.lease, 0, 4, filled_by=1)


def test_an_abort_gives_memory_back(
    client: kvdock.Client, session: kvdock.Session, prompt: Any
) -> None:
    reservation = session.reserve("test", prompt.keys)
    assert session.commit(reservation, [0]) == [ChunkStatus.STORED]

    assert session.abort(reservation) == 3
    assert session.abort(reservation) == 0
    with pytest.raises(errors.UnknownReservation):
        session.commit(reservation)
    assert client.status().pool.reserved_bytes == 0


def test_what_the_server_said_at_the_start(client: kvdock.Client, session: kvdock.Session) -> None:
    status = client.status()

    assert session.epoch == status.epoch
    assert session.server_version == status.version
    assert session.chunk_tokens == status.chunk_tokens
    assert [entry.session_id for entry in status.sessions] == [session.id]
    assert (session.alive, session.lost) == (True, None)


def test_submit_does_not_block_and_brings_the_message(session: kvdock.Session) -> None:
    futures = [
        session.submit(cache_pb2.LookupRequest(namespace="test", keys=[os.urandom(32)]))
        for _ in range(200)
    ]

    assert {future.result(5).hit_chunks for future in futures} == {0}
    with pytest.raises(errors.UnknownNamespace):
        session.submit(cache_pb2.LookupRequest(namespace="other", keys=[bytes(32)])).result(5)
    with pytest.raises(TypeError):
        session.submit(cache_pb2.PutOpen())
    # The stream goes on after each of them.
    assert session.submit(session_pb2.HeartbeatRequest()).result(5).epoch == session.epoch


def test_many_threads_share_a_session(session: kvdock.Session, prompt: Any) -> None:
    store(session, prompt)
    wrong: list[kvdock.Hit] = []

    def look_up() -> None:
        for length in (1, 2, 3, 4) * 10:
            hit = session.lookup("test", prompt.keys[:length], probe=True)
            wrong.extend([] if hit.chunks == length else [hit])

    threads = [threading.Thread(target=look_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_death_of_the_server_fails_what_is_pending(
    server: Any, client: kvdock.Client, prompt: Any
) -> None:
    lost: list[tuple[str, str]] = []
    session = client.session(
        on_lost=lambda why: lost.append((why, threading.current_thread().name))
    )
    view = session.pool.view(kvdock.Location(0, 0, 8))
    os.kill(server.process.pid, signal.SIGSTOP)
    pending = session.submit(cache_pb2.LookupRequest(namespace="test", keys=prompt.keys))
    server.kill()

    with pytest.raises(errors.SessionLost):
        pending.result(5)
    wait_until(lambda: lost)
    assert not session.alive
    assert [(session.lost, "kvdock-session")] == lost
    with pytest.raises(errors.SessionLost):
        session.lookup("test", prompt.keys)
    view[:] = b"no fault"
    session.close()
    assert len(lost) == 1


def test_another_session_after_a_restart(server: Any, client: kvdock.Client) -> None:
    with client.session() as session:
        server.restart()
        wait_until(lambda: not session.alive)
        with client.session() as another:
            assert another.epoch != session.epoch


def test_draining_is_told_as_the_reason(server: Any, client: kvdock.Client) -> None:
    lost: list[str] = []
    with client.session(on_lost=lost.append) as session:
        server.stop()
        wait_until(lambda: lost)
        assert not session.alive


def test_close_releases_everything_and_fails_what_is_pending(
    server: Any, client: kvdock.Client, prompt: Any
) -> None:
    lost: list[str] = []
    session = client.session(on_lost=lost.append)
    client.put("test", prompt.keys, prompt.shards)
    assert session.lookup("test", prompt.keys).lease is not None
    session.reserve("test", [os.urandom(32)])
    os.kill(server.process.pid, signal.SIGSTOP)
    pending = session.submit(session_pb2.HeartbeatRequest())
    try:
        began = time.monotonic()
        session.close()
        session.close()
        assert time.monotonic() - began < 2
    finally:
        os.kill(server.process.pid, signal.SIGCONT)

    with pytest.raises(errors.SessionLost, match="closed"):
        pending.result(0)
    with pytest.raises(errors.SessionLost, match="closed"):
        session.lookup("test", prompt.keys)
    status = client.status
    wait_until(lambda: not status().sessions)
    assert status().index.locks == 0
    assert status().pool.reserved_bytes == 0
    assert lost == []


def test_a_dropped_session_ends(client: kvdock.Client) -> None:
    lost: list[str] = []
    session = client.session(on_lost=lost.append)
    future = session.submit(session_pb2.HeartbeatRequest())
    future.result(5)

    del session
    gc.collect()

    wait_until(lambda: not client.status().sessions)
    wait_until(lambda: not [thread for thread in threading.enumerate() if "kvdock" in thread.name])
    assert lost == []


@contextlib.contextmanager
def stopped(server: Any) -> Iterator[None]:
    """The server stands still meanwhile."""
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


def submit_and_send(session: kvdock.Session, request: Message) -> Future[Any]:
    """Submits a request and waits until it is on its way."""
    future = session.submit(request)
    wait_until(lambda: not session._stream._protocol.has_next)
    return future


def test_a_late_answer_is_undone(server: Any, client: kvdock.Client, prompt: Any) -> None:
    client.put("test", prompt.keys, prompt.shards)
    with client.session() as session:
        lookup = cache_pb2.LookupRequest(namespace="test", keys=prompt.keys)
        reserve = cache_pb2.ReserveRequest(namespace="test", keys=[os.urandom(32)])
        with stopped(server):
            assert submit_and_send(session, lookup).cancel()
            assert submit_and_send(session, reserve).cancel()

        session.submit(session_pb2.HeartbeatRequest()).result(5)
        wait_until(lambda: client.status().index.locks == 0)
        wait_until(lambda: client.status().pool.reserved_bytes == 0)
        assert client.status().counters.lookups == 1


def test_what_is_read_too_late_is_not_carried_out(
    server: Any, client: kvdock.Client, prompt: Any
) -> None:
    client.put("test", prompt.keys, prompt.shards)
    with client.session(role="worker") as session:
        with stopped(server):
            with pytest.raises(errors.DeadlineExceeded, match="LookupRequest"):
                session.lookup("test", prompt.keys, timeout=0.1)
            lookup = cache_pb2.LookupRequest(namespace="test", keys=prompt.keys, timeout_ms=100)
            reserve = cache_pb2.ReserveRequest(
                namespace="test", keys=[os.urandom(32)], timeout_ms=100
            )
            late = [session.submit(lookup), session.submit(reserve)]
            time.sleep(0.5)  # on their way

        for future in late:
            with pytest.raises(errors.TooLate, match="100 ms that its client waits"):
                future.result(5)
        status = client.status()
        assert (status.counters.lookups, status.index.leases) == (0, 0)
        assert status.pool.reserved_bytes == 0
        # The others are not late.
        assert session.lookup("test", prompt.keys, timeout=5).chunks == len(prompt.keys)


def test_what_is_given_up_before_it_was_sent_is_forgotten(
    server: Any, client: kvdock.Client, prompt: Any
) -> None:
    """A server that stands still, or does not keep up, is not asked again for what is over."""
    with client.session() as session:
        protocol = session._stream._protocol
        lookup = cache_pb2.LookupRequest(namespace="test", keys=prompt.keys)
        with stopped(server):
            futures = [session.submit(lookup) for _ in range(2_000)]
            sent = LOOKUPS_UNDER_WAY
            wait_until(lambda: len(protocol._outbox) == len(futures) - sent)
            assert sum(future.cancel() for future in futures) == len(futures)
            assert len(protocol._outbox) == 0
            assert len(protocol._pending) == sent

        session.submit(session_pb2.HeartbeatRequest()).result(5)
        assert client.status().counters.lookups == sent


def test_the_outbox_is_bounded_but_not_for_what_gives_back(
    server: Any, client: kvdock.Client
) -> None:
    with client.session() as session, stopped(server):
        lookup = cache_pb2.LookupRequest(namespace="test", keys=[bytes(32)] * 16_000)
        futures = [session.submit(lookup) for _ in range(100)]
        refused = [future for future in futures if future.done()]
        assert 60 < len(refused) < 80  # 16 MiB of 0.5 each are not
        with pytest.raises(errors.Overloaded, match="requests wait to be sent already"):
            refused[0].result(0)
        giving_back = cache_pb2.FreeLocksRequest(locks=[cache_pb2.LockRange(lease_id=1)])
        freed = session.submit(giving_back)
        assert not freed.done()
        assert futures[-1].done()
        for future in futures:
            future.cancel()
        assert not session.submit(lookup).done()
    assert freed.done()


def test_what_gives_back_is_sent_although_nobody_awaits_the_answer(
    server: Any, client: kvdock.Client, prompt: Any
) -> None:
    client.put("test", prompt.keys, prompt.shards)
    with client.session() as session:
        hit = session.lookup("test", prompt.keys)
        assert hit.lease is not None
        locks = [cache_pb2.LockRange(lease_id=hit.lease.id)]
        with stopped(server):
            long = cache_pb2.LookupRequest(namespace="test", keys=[bytes(32)] * 16_000, probe=True)
            blocking = [session.submit(long) for _ in range(2)]  # more than the connection takes
            freed = session.submit(cache_pb2.FreeLocksRequest(locks=locks))
            assert freed.cancel()
            assert len(session._stream._protocol._outbox) > 0
        wait_until(lambda: client.status().index.locks == 0)
        assert {future.result(5).hit_chunks for future in blocking} == {0}


def test_heartbeats_keep_a_silent_session_alive(client: kvdock.Client, prompt: Any) -> None:
    client.put("test", prompt.keys, prompt.shards)
    with client.session(ttl=1) as session:
        assert session.lookup("test", prompt.keys).lease is not None
        time.sleep(2.5)
        assert session.alive
        assert client.status().index.locks == 4


def test_a_server_that_stops_answering_is_given_up(server: Any, client: kvdock.Client) -> None:
    lost: list[str] = []
    with client.session(ttl=1, on_lost=lost.append) as session:
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            pending = session.submit(session_pb2.HeartbeatRequest())
            with pytest.raises(errors.SessionLost, match="did not answer for 1 s"):
                pending.result(5)
            wait_until(lambda: lost)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)


def test_a_process_that_was_stopped_too_long_learns_it(
    server: Any, client: kvdock.Client, prompt: Any
) -> None:
    parent_end, child_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            lost: list[str] = []
            child = kvdock.Client(server.address)
            session = child.session(ttl=1, on_lost=lost.append)
            os.write(child_end, b"x")
            wait_until(lambda: lost, 15)
            try:
                session.lookup("test", prompt.keys)
            except errors.SessionExpired:
                # The stream stays for as long as copies into reserved memory may run.
                time.sleep(2)
                status = 0 if child.status().sessions and not session.alive else 2
        finally:
            os._exit(status)
    os.read(parent_end, 1)
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: any(entry.expired for entry in client.status().sessions))
    os.kill(pid, signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_fork_is_told_to_open_its_own(session: kvdock.Session, prompt: Any) -> None:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            session.lookup("test", prompt.keys)
        except errors.SessionLost as error:
            status = 0 if "fork" in error.message else 2
        finally:
            os._exit(status)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert session.lookup("test", prompt.keys).chunks == 0


def test_an_open_that_is_refused_says_why(client: kvdock.Client) -> None:
    with pytest.raises(errors.InvalidArgument):
        client.session("x" * 300)
    with pytest.raises(errors.InvalidArgument):
        client.session(ttl=0.01)


def test_closing_the_client_closes_its_sessions(server: Any) -> None:
    client = kvdock.Client(server.address)
    session = client.session()
    client.close()

    assert session.lost == "the session was closed"


def test_a_callback_that_raises_or_closes_harms_nothing(
    server: Any, client: kvdock.Client, caplog: pytest.LogCaptureFixture
) -> None:
    def on_lost(why: str) -> None:
        session.close()
        raise RuntimeError("of the caller")

    session = client.session(on_lost=on_lost)
    server.kill()

    wait_until(lambda: "of the caller" in caplog.text)
    wait_until(lambda: not [thread for thread in threading.enumerate() if "kvdock" in thread.name])


def test_an_answer_that_comes_as_its_caller_is_interrupted_is_undone(
    client: kvdock.Client, prompt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.session(role="worker") as session:
        store(session, prompt)

        def interrupted(future: Future[Any], timeout: float | None = None) -> Any:
            monkeypatch.undo()
            concurrent.futures.wait([future])
            raise KeyboardInterrupt

        monkeypatch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.lookup("test", prompt.keys)

        session.lookup("test", prompt.keys, probe=True)  # answered after what was before
        assert client.status().index.leases == 0


def left() -> int:
    """Sessions that nobody has dropped, or that something holds."""
    gc.collect()
    return sum(type(each) in (kvdock.Session, kvdock.aio.Session) for each in gc.get_objects())


def test_a_session_that_could_not_be_opened_leaves_nothing(
    client: kvdock.Client, tmp_path: Path
) -> None:
    before = left()
    for _ in range(3):
        with pytest.raises(errors.InvalidArgument):
            client.session("x" * 300)
        with (
            kvdock.Client(f"unix://{tmp_path}/nobody.sock", timeout=1) as other,
            pytest.raises(errors.Unavailable),
        ):
            other.session()
    assert left() == before


def test_a_session_that_was_lost_and_dropped_leaves_nothing(
    server: Any, client: kvdock.Client
) -> None:
    before = left()

    def lose_one() -> None:
        session = client.session()
        server.process.send_signal(signal.SIGSTOP)
        with concurrent.futures.ThreadPoolExecutor() as threads:
            pending = [threads.submit(session.lookup, "test", [b"k" * 32]) for _ in range(3)]
            time.sleep(0.1)
            server.kill()
            for each in pending:
                with pytest.raises(errors.SessionLost):
                    each.result(5)

    lose_one()
    assert left() == before
