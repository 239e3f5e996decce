"""The blocking client against a real server."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

import kvdock
from kvdock import errors
from kvdock.events import Cursor
from kvdock.keys import ROOT
from kvdock.types import ChunkStatus


@pytest.fixture
def client(server: Any, namespace: kvdock.Namespace) -> Iterator[kvdock.Client]:
    with kvdock.Client(server.address) as client:
        client.register_namespace(namespace)
        yield client


def test_what_is_put_is_found_and_got(client: kvdock.Client, prompt: Any) -> None:
    moved: list[int] = []
    assert (
        client.put("test", prompt.keys, prompt.shards, progress=moved.append)
        == [ChunkStatus.STORED] * 4
    )
    assert sum(moved) == sum(map(len, prompt.shards))
    assert client.put("test", prompt.keys, prompt.shards) == [ChunkStatus.EXISTS] * 4

    missing = bytes(32)
    assert client.get("test", [*prompt.keys, missing]) == [*prompt.shards, None]
    assert client.get("test", [missing, *prompt.keys]) == [None] * 5

    buffers = [bytearray(len(shard)) for shard in prompt.shards]
    assert client.get_into("test", prompt.keys, buffers) == 4
    assert buffers == prompt.shards


def test_the_root_as_parent_is_no_parent(client: kvdock.Client, prompt: Any) -> None:
    first, *rest = prompt.keys
    assert client.put("test", [first], prompt.shards[:1], parent=ROOT) == [ChunkStatus.STORED]
    assert client.put("test", [first], prompt.shards[:1]) == [ChunkStatus.EXISTS]
    with client.session(role="worker") as session:
        (chunk,) = session.reserve("test", rest[:1], parent=ROOT).chunks
    assert chunk.status is ChunkStatus.RESERVED
    assert client.lookup("test", [first], probe=True).chunks == 1
    assert {part.parent_key for part in client.chunks("test")} == {b""}


def test_a_lookup_locks_for_each_reader_and_a_probe_for_nobody(
    client: kvdock.Client, prompt: Any
) -> None:
    client.put("test", prompt.keys, prompt.shards)

    probed = client.lookup("test", prompt.keys, probe=True)
    assert (probed.chunks, probed.lease) == (4, None)

    hit = client.lookup("test", prompt.keys, readers=2)
    assert hit.lease is not None
    assert [(group.first_chunk, group.end_chunk) for group in hit.groups] == [(0, 4)]
    assert [part.locks for part in client.chunks("test")] == [1] * 4
    assert client.status().index.locks == 8
    assert client.free_locks(hit.lease, 0, 1, reader=1) == 1
    assert client.free_locks(hit.lease) == 7
    assert client.free_locks(hit.lease) == 0

    assert client.lookup("test", [bytes(32)]).lease is None


def test_a_lease_lives_for_its_ttl(client: kvdock.Client, prompt: Any) -> None:
    client.put("test", prompt.keys, prompt.shards)
    client.lookup("test", prompt.keys, ttl=0.2)
    assert client.status().index.locks == 4

    deadline = time.monotonic() + 5
    while client.status().index.locks:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_admin(client: kvdock.Client, namespace: kvdock.Namespace, prompt: Any) -> None:
    client.put("test", prompt.keys, prompt.shards)

    assert client.health() == "SERVING"
    status = client.status()
    assert status.index.chunks == 4
    assert status.version == kvdock.__version__
    assert [entry.namespace for entry in client.namespaces()] == [namespace]
    assert client.register_namespace(namespace) is False
    parts = list(client.chunks("test"))
    assert [part.key for part in parts] == prompt.keys
    assert [part.parent_key for part in parts] == [b"", *prompt.keys[:-1]]

    assert client.evict(1).parts == 1
    assert client.clear("test") == 3
    assert list(client.chunks("test")) == []


def test_errors_have_their_classes(client: kvdock.Client, prompt: Any) -> None:
    with pytest.raises(errors.UnknownNamespace) as unknown:
        client.lookup("other", prompt.keys)
    assert unknown.value.reason == "UNKNOWN_NAMESPACE"
    with pytest.raises(errors.UnknownNamespace):
        list(client.chunks("other"))
    with pytest.raises(errors.UnknownNamespace):
        client.get("other", prompt.keys)
    with pytest.raises(errors.UnknownNamespace):
        client.put("other", prompt.keys, prompt.shards)
    with pytest.raises(errors.InvalidArgument, match="32"):
        client.lookup("test", [b"short"])
    with pytest.raises(errors.WrongLength):
        client.put("test", prompt.keys, [b"short"] * 4)
    with pytest.raises(errors.NamespaceConflict):
        client.register_namespace(kvdock.Namespace("test", 128, 1, (kvdock.Group((9,)),)))
    with pytest.raises(errors.InvalidArgument, match="fewer chunks"):
        client.lookup("test", [bytes(32)] * 200_000)
    assert client.status().index.pending_parts == 0


def test_no_server_is_told_at_once(tmp_path: Any) -> None:
    began = time.monotonic()
    with kvdock.Client(f"unix://{tmp_path}/none.sock") as client:
        for call in (client.status, client.session, client.health):
            with pytest.raises(errors.Unavailable, match="kvdock serve"):
                call()
    assert time.monotonic() - began < 2


def test_a_stopped_server_costs_no_more_than_the_deadline(server: Any, prompt: Any) -> None:
    with kvdock.Client(server.address, timeout=0.3) as client:
        client.status()
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            for call in (
                client.status,
                client.session,
                lambda: client.get("test", prompt.keys),
                lambda: client.put("test", prompt.keys, prompt.shards),
            ):
                with pytest.raises(errors.DeadlineExceeded):
                    call()
            assert time.monotonic() - began < 4
        finally:
            os.kill(server.process.pid, signal.SIGCONT)


def test_a_closed_client_says_so(server: Any, prompt: Any) -> None:
    client = kvdock.Client(server.address)
    client.status()
    client.close()
    client.close()

    for call in (
        client.status,
        client.health,
        client.session,
        lambda: list(client.chunks("test")),
        lambda: client.get("test", prompt.keys),
        lambda: client.put("test", prompt.keys, prompt.shards),
    ):
        with pytest.raises(errors.Unavailable, match="closed"):
            call()


def test_a_restarted_server_is_found_again(server: Any) -> None:
    with kvdock.Client(server.address) as client:
        before = client.status().epoch
        server.kill()
        with pytest.raises(errors.Unavailable):
            client.status()
        server.start()

        deadline = time.monotonic() + 5
        while True:
            try:
                assert client.status().epoch != before
                break
            except errors.Unavailable:
                assert time.monotonic() < deadline
                time.sleep(0.05)


def test_a_proxy_is_passed_by_on_the_way_to_this_host(
    start_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:1")
    server = start_server("--listen", f"127.0.0.1:{port}")

    with kvdock.Client(f"127.0.0.1:{port}") as client:
        assert client.status().pid == server.process.pid


@pytest.mark.parametrize("timeout", [float("inf"), 1e18])
def test_a_timeout_may_be_longer_than_a_clock_can_count(
    client: kvdock.Client, timeout: float
) -> None:
    client.status(timeout=timeout)
    client.namespaces(timeout=timeout)
    with client.session(timeout=timeout) as session:
        session.lookup("test", [bytes(32)], timeout=timeout)


def test_values_that_cannot_be_sent_are_refused_like_any_others(
    client: kvdock.Client, prompt: Any
) -> None:
    nan = float("nan")
    with client.session() as session:
        for call in (
            lambda: client.lookup("test", prompt.keys, readers=-1),
            lambda: client.lookup("\udcff", prompt.keys),
            lambda: client.lookup("test", prompt.keys, ttl=nan),
            lambda: client.lookup("test", prompt.keys, ttl=-1),
            lambda: client.lookup("test", prompt.keys, ttl=1e9),
            lambda: client.put("test", prompt.keys, prompt.shards, group_idx=-1),
            lambda: client.get("test", prompt.keys, kv_worker_id=1 << 40),
            lambda: client.free_locks(1 << 64),
            lambda: client.evict(-1),
            lambda: client.evict(),
            lambda: client.evict(1, all=True),
            lambda: client.clear(),
            lambda: client.clear("n", all=True),
            lambda: client.session(worker_id=-1),
            lambda: client.register_namespace(kvdock.Namespace("n", -1, 1, ())),
            lambda: client.session(role="unspecified"),
            lambda: list(client.events(progress_interval=nan)),
            lambda: list(client.events(progress_interval=0)),
            lambda: list(client.events(progress_interval=0.0004)),
            lambda: list(client.events(Cursor(1 << 64, 0))),
            lambda: client.status(timeout=nan),
            lambda: client.health("x" * 200),
            lambda: client.health("no-such-service"),
            lambda: session.retrieve(-1),
            lambda: session.lookup("test", prompt.keys, timeout=nan),
        ):
            with pytest.raises(errors.InvalidArgument):
                call()
    assert not client.status().index.leases


def test_what_progress_raises_comes_to_the_caller(client: kvdock.Client, prompt: Any) -> None:
    def fail(nbytes: int) -> None:
        raise LookupError(nbytes)

    with pytest.raises(LookupError):
        client.put("test", prompt.keys, prompt.shards, progress=fail)
    client.put("test", prompt.keys, prompt.shards)
    with pytest.raises(LookupError):
        client.get("test", prompt.keys, progress=fail)


def test_a_reader_of_the_listing_may_take_its_time(client: kvdock.Client) -> None:
    tiny = kvdock.Namespace("tiny", 1, 1, (kvdock.Group((1,)),))
    client.register_namespace(tiny)
    keys = [number.to_bytes(32) for number in range(1, 12_001)]
    client.put("tiny", keys, [b"."] * len(keys))

    parts = client.chunks("tiny", timeout=0.2)
    next(parts)
    time.sleep(0.6)
    assert sum(1 for _ in parts) == len(keys) - 1


def test_a_call_under_way_learns_that_its_client_was_closed(server: Any, prompt: Any) -> None:
    client = kvdock.Client(server.address)
    client.status()
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        with concurrent.futures.ThreadPoolExecutor() as threads:
            calls = [
                threads.submit(client.status),
                threads.submit(client.namespaces),
                threads.submit(client.get, "test", prompt.keys),
            ]
            time.sleep(0.3)
            client.close()
            for call in calls:
                with pytest.raises(errors.Unavailable, match="closed"):
                    call.result()
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


def test_a_fork_is_told_to_make_its_own(client: kvdock.Client) -> None:
    client.status()

    child = os.fork()
    if child == 0:
        try:
            client.status()
        except errors.Unavailable as error:
            client.close()
            os._exit(0 if "fork" in error.message else 1)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    client.status()


def test_closing_waits_for_no_server_that_takes_nothing(
    server: Any, namespace: kvdock.Namespace
) -> None:
    client = kvdock.Client(server.address, timeout=0.3)
    client.register_namespace(namespace)

    def stop(nbytes: int) -> None:
        os.kill(server.process.pid, signal.SIGSTOP)

    keys = [number.to_bytes(32) for number in range(1, 31)]
    shards = [bytes(namespace.groups[0].shard_bytes[0])] * len(keys)
    try:
        with pytest.raises(errors.DeadlineExceeded):
            client.put("test", keys, shards, progress=stop)
        began = time.monotonic()
        client.close()
        assert time.monotonic() - began < 5
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
