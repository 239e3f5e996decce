"""One server's life: start, drain, kill, and what it leaves behind."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from wire import DEADLINE, SHARD, Wire, WireSession, key, raises

from kvdock.v1 import cache_pb2, types_pb2

SHM = Path("/dev/shm")


def segment_of(wire: Wire) -> Path:
    return SHM / wire.status().segments[0].shm_name[1:]


def run_server(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvdock_server", *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        env=os.environ | environment,
    )


def test_ready_at_once_however_large_the_pool(start_server: Callable[..., object]) -> None:
    seconds = []
    for memory in ("64MiB", "4GiB"):
        started = time.monotonic()
        server = start_server(memory=memory)
        seconds.append(time.monotonic() - started)
        server.stop()  # type: ignore[attr-defined]
    # The shared machine decides how long a start takes; the pool's size must not.
    assert seconds[1] < seconds[0] + 1.0


def test_the_pool_grows_to_its_limit(start_server: Callable[..., object]) -> None:
    server = start_server(memory="512MiB")
    wire = Wire(server.address)  # type: ignore[attr-defined]
    deadline = time.monotonic() + 20
    while wire.status().pool.ready_bytes < 512 << 20:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    # Nothing is sparse: every byte is backed by memory, also the page of the proof.
    assert segment_of(wire).stat().st_blocks * 512 == (512 << 20) + mmap.PAGESIZE
    wire.channel.close()


def test_the_socket_and_the_pool_are_the_owners_alone(server, wire: Wire) -> None:  # type: ignore[no-untyped-def]
    assert stat.S_IMODE(server.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(segment_of(wire).stat().st_mode) == 0o600


def test_sigterm_takes_everything_away(server, wire: Wire) -> None:  # type: ignore[no-untyped-def]
    segment = segment_of(wire)
    assert segment.exists()
    assert server.stop() == 0
    assert not segment.exists()
    assert not server.socket.exists()


def test_sigterm_lets_copies_finish_and_takes_nothing_new(server, wire: Wire) -> None:  # type: ignore[no-untyped-def]
    wire.put([key(9)], [bytes(SHARD)])
    session = WireSession(wire)
    reserve = cache_pb2.ReserveRequest(namespace="n", keys=[key(1)])
    reservation = session.ask(reserve=reserve).reserve.reservation_id
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert wire.status().draining
    with raises(grpc.StatusCode.UNAVAILABLE, "DRAINING"):
        wire.lookup([key(9)])
    assert session.error(reserve=reserve).reason == "DRAINING"
    assert server.process.poll() is None
    commit = cache_pb2.CommitRequest(reservation_id=reservation)
    sealed = session.ask(commit=commit).commit.chunks
    assert [chunk.status for chunk in sealed] == [types_pb2.CHUNK_STATUS_STORED]
    assert server.stop() == 0


def test_sigterm_does_not_wait_for_ever(start_server: Callable[..., object]) -> None:
    server = start_server("--drain-seconds", "0.5")
    wire = Wire(server.address)  # type: ignore[attr-defined]
    wire.register()
    session = WireSession(wire)
    session.ask(reserve=cache_pb2.ReserveRequest(namespace="n", keys=[key(1)]))
    started = time.monotonic()
    assert server.stop() == 0  # type: ignore[attr-defined]
    assert 0.4 < time.monotonic() - started < 5
    wire.channel.close()


def test_a_killed_servers_memory_is_reclaimed_and_a_live_ones_is_not(
    start_server: Callable[..., object],
) -> None:
    live, killed = start_server(), start_server()
    wires = [Wire(live.address), Wire(killed.address)]  # type: ignore[attr-defined]
    segments = [segment_of(wire) for wire in wires]
    epoch = wires[1].status().epoch
    killed.kill()  # type: ignore[attr-defined]
    assert segments[1].exists()
    killed.start()  # type: ignore[attr-defined]
    assert not segments[1].exists()
    assert segments[0].exists()
    wires[1].channel.close()
    again = Wire(killed.address)  # type: ignore[attr-defined]
    assert again.status().epoch != epoch
    assert wires[0].status().pool.ready_bytes


def test_health_and_reflection(wire: Wire) -> None:
    health = health_pb2_grpc.HealthStub(wire.channel)
    for service in ("", "kvdock.v1.CacheService", "kvdock.v1.SessionService"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=DEADLINE)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    for version in ("v1", "v1alpha"):
        listing = wire.channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        (answer,) = listing(iter([ask]), timeout=DEADLINE)
        names = {service.name for service in answer.list_services_response.service}
        assert {"kvdock.v1.CacheService", "kvdock.v1.AdminService"} <= names


def test_tcp_where_asked_for(start_server: Callable[..., object]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    server = start_server("--listen", address)
    wire = Wire(address)
    assert wire.status().epoch
    taken = run_server("--listen", address)
    assert taken.returncode == 2
    assert "cannot start" in taken.stderr
    wire.channel.close()
    assert server.stop() == 0  # type: ignore[attr-defined]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's folder")
def test_a_folder_that_somebody_else_owns_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "kvdock-0"
    folder.mkdir(mode=0o777)
    os.chown(folder, 12345, 12345)
    ended = run_server("--listen", f"unix://{folder}/kvdock.sock")
    assert ended.returncode == 2
    assert "belongs to user 12345" in ended.stderr


def test_the_default_address_is_in_the_users_runtime_folder(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "kvdock_server", "--memory", "16MiB"],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert process.stderr is not None
    assert any(f"unix://{tmp_path}/kvdock.sock" in line for line in process.stderr)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 0
