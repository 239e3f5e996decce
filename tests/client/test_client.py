"""The blocking client against a real server."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

import kvdock
from kvdock import errors
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
