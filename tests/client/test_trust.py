"""A client gives nothing to a server of another user, and writes into no file that one names."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from servers import ServerProcess
from tests.users import ANOTHER, OTHER, as_user, needs_other_users

import kvdock
import kvdock.aio
from kvdock import errors, trust
from kvdock.types import Location
from kvdock.v1 import session_pb2, session_pb2_grpc, types_pb2

CALLS: dict[str, Callable[[Any], Any]] = {
    "status": lambda client: client.status(),
    "health": lambda client: client.health(),
    "lookup": lambda client: client.lookup("n", [bytes(32)]),
    "put": lambda client: client.put("n", [bytes(32)], [b"secret"]),
    "get": lambda client: client.get("n", [bytes(32)]),
    "namespaces": lambda client: client.namespaces(),
    "chunks": lambda client: client.chunks("n"),
    "events": lambda client: client.events(),
    "session": lambda client: client.session(),
}

# Prints what each connection brings first.
LISTENER = """
import socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("listening", flush=True)
while True:
    print(listener.accept()[0].recv(65536), flush=True)
"""


class Listener:
    """A process of another user that listens where a server should."""

    def __init__(self, path: Path, user: int = OTHER) -> None:
        self._path = path
        self._process = subprocess.Popen(
            [*as_user(user), sys.executable, "-c", LISTENER, str(path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "listening\n"

    def end(self) -> list[str]:
        """What it got; one entry for each connection."""
        # It takes connections one by one, so it has told of all others when it tells of this one.
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(str(self._path))
            last.sendall(b"the last")
            assert self._process.stdout is not None
            got = [line.rstrip() for line in iter(self._process.stdout.readline, "b'the last'\n")]
        self._process.kill()
        self._process.communicate()
        return got


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder like /tmp: all may put something there, and only take away what is theirs."""
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as folder:
        Path(folder).chmod(0o1777)
        yield Path(folder)


def folder_of(user: int, path: Path) -> Path:
    path.mkdir(mode=0o700)
    os.chown(path, user, user)
    return path


def server_of(user: int, socket_path: Path) -> ServerProcess:
    return ServerProcess(socket_path, "--memory", "16MiB", prefix=as_user(user))


def command(address: str, *arguments: str, user: int = 0, **environment: str) -> Any:
    return subprocess.run(
        [*as_user(user), sys.executable, "-m", "kvdock", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"KVDOCK_ADDRESS": address} | environment,
    )


async def refused_everything(client: kvdock.aio.Client) -> None:
    for call in CALLS.values():
        with pytest.raises(errors.UntrustedServer):
            asked = call(client)
            await (anext(asked) if hasattr(asked, "__anext__") else asked)
    await client.close()


@needs_other_users
def test_another_users_server_hears_nothing(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That user was there first: made the folder, and serves in it."""
    server = server_of(OTHER, folder_of(OTHER, shared / "kvdock-0") / "kvdock.sock")
    try:
        with kvdock.Client(server.address) as client:
            for call in CALLS.values():
                with pytest.raises(errors.UntrustedServer, match=f"belongs to user {OTHER}"):
                    list(call(client))
        asyncio.run(_refused(server.address))
        shown = command(server.address, "status")
        assert shown.returncode == 1
        assert "KVDOCK_SERVER_USER" in shown.stderr
        doctor = command(server.address, "doctor")
        assert doctor.returncode == 1
        assert f"belongs to user {OTHER}: another user may be the server" in doctor.stdout

        monkeypatch.setenv("KVDOCK_SERVER_USER", str(OTHER))
        with kvdock.Client(server.address) as client, client.session() as session:
            assert session.pool.view(Location(0, 0, 4)) == bytes(4)
            assert len(client.status().sessions) == 1
            assert not client.namespaces()
    finally:
        server.stop()


async def _refused(address: str) -> None:
    await refused_everything(kvdock.aio.Client(address))


@needs_other_users
def test_nothing_is_sent_to_who_listens_in_a_folder_of_all(shared: Path) -> None:
    listener = Listener(shared / "k.sock")
    refused = pytest.raises(errors.UntrustedServer, match=f"k.sock belongs to user {OTHER}")
    with kvdock.Client(f"unix://{shared}/k.sock") as client, refused:
        client.put("n", [bytes(32)], [b"secret"])
    assert listener.end() == []


@needs_other_users
def test_who_listens_counts_and_not_only_whose_file_it_is(shared: Path) -> None:
    listener = Listener(shared / "k.sock")
    os.chown(shared / "k.sock", 0, 0)
    refused = pytest.raises(errors.UntrustedServer, match=f"user {OTHER} listens")
    with kvdock.Client(f"unix://{shared}/k.sock") as client, refused:
        client.put("n", [bytes(32)], [b"secret"])
    assert listener.end() == ["b''"]


@needs_other_users
def test_a_link_of_another_user_leads_nowhere(
    shared: Path, start_server: Callable[..., Any]
) -> None:
    link = shared / "kvdock-0"
    link.symlink_to(start_server().socket.parent)
    with kvdock.Client(f"unix://{link}/0.sock") as client:
        assert client.status()
        os.chown(link, OTHER, OTHER, follow_symlinks=False)
    refused = pytest.raises(errors.UntrustedServer, match=f"{link} belongs to user {OTHER}")
    with kvdock.Client(f"unix://{link}/0.sock") as client, refused:
        client.status()


@needs_other_users
def test_who_takes_the_place_of_a_server_that_went_is_looked_at(shared: Path) -> None:
    server = ServerProcess(shared / "k.sock", "--memory", "16MiB")
    with kvdock.Client(server.address) as client:
        assert client.status()
        server.stop()
        with pytest.raises(errors.Unavailable, match="No such file"):
            client.status()
        listener = Listener(server.socket)
        with pytest.raises(errors.UntrustedServer):
            client.status()
        assert listener.end() == []
        server.socket.unlink()
        server.start()
        assert client.status().pid == server.process.pid
    server.stop()


@needs_other_users
def test_the_default_folder_that_another_user_made_is_refused_by_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    folder = Path(f"/tmp/kvdock-{OTHER}")
    try:
        listener = Listener(folder_of(ANOTHER, folder) / "kvdock.sock", ANOTHER)
        for arguments in (["status"], ["serve", "--memory", "1MiB"], ["doctor"]):
            done = command("", *arguments, user=OTHER)
            assert done.returncode in (1, 2)
            assert f"{folder} belongs to user {ANOTHER}" in done.stdout + done.stderr
        assert listener.end() == []
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@needs_other_users
def test_roots_server_is_everybodys(shared: Path) -> None:
    """As in containers where the server runs as root, with a socket that the operator opened."""
    server = ServerProcess(shared / "run" / "k.sock", "--memory", "16MiB")
    try:
        assert command(server.address, "status", user=OTHER).returncode == 1  # it is closed
        server.socket.parent.chmod(0o755)
        server.socket.chmod(0o666)
        shown = command(server.address, "status", user=OTHER)
        assert shown.returncode == 0, shown.stderr
    finally:
        server.stop()


def test_a_folder_that_all_may_write_in_is_refused() -> None:
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as folder:
        path = Path(folder) / "k.sock"
        with socket.socket(socket.AF_UNIX) as listener, kvdock.Client(f"unix://{path}") as client:
            listener.bind(str(path))
            listener.listen()
            Path(folder).chmod(0o777)
            with pytest.raises(errors.UntrustedServer, match=f"{folder} has mode 0777"):
                client.status()


def test_a_server_that_takes_no_connection_is_not_waited_for() -> None:
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as folder:
        path = f"{folder}/k.sock"
        waiting = []
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(0)
            with pytest.raises(BlockingIOError):
                while True:
                    waiting.append(socket.socket(socket.AF_UNIX))
                    waiting[-1].setblocking(False)
                    waiting[-1].connect(path)
            with kvdock.Client(f"unix://{path}") as client, pytest.raises(errors.Unavailable):
                client.status()
        for one in waiting:
            one.close()


def test_a_socket_is_looked_at_once(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Path] = []
    real = trust.socket_fault
    monkeypatch.setattr(trust, "socket_fault", lambda path: looked.append(path) or real(path))
    with kvdock.Client(server.address) as client:
        for _ in range(20):
            client.status()
        assert len(looked) == 1
        server.restart()
        for _ in range(20):
            client.status()
    assert len(looked) == 2


def test_a_user_that_is_named_must_exist(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVDOCK_SERVER_USER", "nobody-of-this-name")
    with kvdock.Client(server.address) as client:
        with pytest.raises(errors.InvalidArgument, match="KVDOCK_SERVER_USER=nobody-of-this-name"):
            client.status()
        monkeypatch.setenv("KVDOCK_SERVER_USER", "daemon")
        assert client.status()


class FalseServer(session_pb2_grpc.SessionServiceServicer):
    """Opens every session, and names any file as its pool."""

    def __init__(self) -> None:
        self.segment = types_pb2.Segment()

    def Session(self, requests: Any, context: Any) -> Iterator[Any]:  # noqa: N802
        for request in requests:
            opened = session_pb2.OpenResponse(
                session_id=1, epoch=1, ttl_ms=30_000, segments=[self.segment]
            )
            yield session_pb2.SessionResponse(id=request.id, open=opened)


def test_a_false_server_at_a_port_gets_nothing_written(
    start_server: Callable[..., Any], tmp_path: Path
) -> None:
    """It may name the true server's file, but does not know what that holds."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious" * 1024)
    false = FalseServer()
    grpc_server = grpc.server(ThreadPoolExecutor(2))
    session_pb2_grpc.add_SessionServiceServicer_to_server(false, grpc_server)
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    grpc_server.start()
    with kvdock.Client(start_server().address) as client:
        (true,) = client.status().segments
    assert not true.proof
    try:
        with kvdock.Client(f"127.0.0.1:{port}") as client:
            for name, nbytes, proof in (
                (f"/{victim}", 4096, b"precious" * 4),
                (f"/../..{victim}", 4096, b"precious" * 4),
                (true.shm_name, true.bytes, b"precious" * 4),
                (true.shm_name, true.bytes, b""),
                # What lies within the pool, zeros for example, is known to others.
                (true.shm_name, 4096, bytes(32)),
            ):
                false.segment = types_pb2.Segment(shm_name=name, bytes=nbytes, proof=proof)
                with client.session() as session, pytest.raises(errors.PoolUnmappable):
                    session.pool.view(Location(0, 0, 8))[:] = b"scribble"
    finally:
        grpc_server.stop(None)
    assert victim.read_bytes() == b"precious" * 1024


def test_the_true_server_at_a_port_can_be_written_to(start_server: Callable[..., Any]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    start_server("--listen", address)
    with kvdock.Client(address) as client, client.session() as session:
        assert session.pool.view(Location(0, 0, 4)) == bytes(4)
