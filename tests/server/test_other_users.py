"""What another user of the host can do to a server whose socket is open to all.

Functions named ``stranger_...`` are carried out as that user, in a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from servers import ServerProcess
from test_long_calls import send_lists_that_are_too_long
from test_session_tokens import as_token
from test_wire_limits import peak_bytes
from tests.users import OTHER, as_user, needs_other_users
from wire import DEADLINE, SHARD, Wire, WireSession, key, raises

from kvdock.v1 import cache_pb2, session_pb2, types_pb2

pytestmark = needs_other_users

Code = grpc.StatusCode
FORGED = "kvdock: ERROR: forged"
NAME = f"e\n{FORGED}\r\x1b[2J\u202e"


@pytest.fixture
def server(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    """A server of this user, which is root, that everybody may connect to."""
    server = start_server("--event-log", "16MiB")
    server.socket.parent.chmod(0o755)
    server.socket.chmod(0o666)
    return server


def begin(stranger: Callable[..., None], *arguments: object) -> subprocess.Popen[str]:
    code = f"import sys, {__name__} as tests; tests.{stranger.__name__}(*sys.argv[1:])"
    return subprocess.Popen(
        [*as_user(OTHER), sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def end(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


def command(server: ServerProcess, *arguments: str) -> str:
    """What the operator is shown."""
    done = subprocess.run(
        [sys.executable, "-m", "kvdock", *arguments],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"KVDOCK_ADDRESS": server.address, "COLUMNS": "500"},
    )
    return done.stdout


def stranger_names_large_numbers(address: str) -> None:
    assert os.getuid() == OTHER
    wire = Wire(address)
    group = types_pb2.Group(kind=types_pb2.GROUP_KIND_FULL_ATTENTION, shard_bytes=[1])
    for world in (257, 10**8, 2**32 - 1):
        namespace = types_pb2.Namespace(
            name="x", chunk_tokens=1, kv_world_size=world, groups=[group] * 3
        )
        request = cache_pb2.RegisterNamespaceRequest(namespace=namespace)
        with raises(Code.INVALID_ARGUMENT, "INVALID_ARGUMENT_VALUE") as caught:
            wire.cache.RegisterNamespace(request, timeout=DEADLINE)
        assert caught.message == f"kv_world_size {world}: from 1 to 256"


def test_another_users_large_numbers_take_no_memory(server: ServerProcess) -> None:
    def call() -> None:
        end(begin(stranger_names_large_numbers, server.address))

    assert peak_bytes(server.process.pid, call) < 32 << 20


def stranger_sends_long_lists(address: str) -> None:
    assert os.getuid() == OTHER
    send_lists_that_are_too_long(Wire(address))


def test_another_users_long_lists_hold_up_nobody(server: ServerProcess) -> None:
    """As the watchdog of ``start_server`` sees."""
    end(begin(stranger_sends_long_lists, server.address))


def stranger_has_an_ill_name(address: str) -> None:
    assert os.getuid() == OTHER
    wire = Wire(address)
    group = types_pb2.Group(kind=types_pb2.GROUP_KIND_FULL_ATTENTION, shard_bytes=[SHARD])
    namespace = types_pb2.Namespace(
        name="n", labels={"model": NAME}, chunk_tokens=16, kv_world_size=1, groups=[group]
    )
    wire.cache.RegisterNamespace(
        cache_pb2.RegisterNamespaceRequest(namespace=namespace), timeout=DEADLINE
    )
    session = WireSession(wire, engine=NAME, client=NAME)
    session.ask(register_memory=session_pb2.RegisterMemoryRequest(namespace="n"))
    print("there", flush=True)
    sys.stdin.read()
    session.close()


def test_another_users_name_is_one_harmless_line(server: ServerProcess) -> None:
    stranger = begin(stranger_has_an_ill_name, server.address)
    assert stranger.stdout is not None
    assert stranger.stdout.readline() == "there\n"
    shown = [command(server, "status"), command(server, "ls")]
    end(stranger)
    server.stop()
    for text in (*shown, server.log):
        assert rf"e\n{FORGED}\r\x1b[2J" in text
        assert all(line.isprintable() and line != FORGED for line in text.split("\n"))


def stranger_acts_for_another_session(address: str, reservation: str) -> None:
    """Which it sees in Status. It also knows the reservation's number, which it could not."""
    assert os.getuid() == OTHER
    wire = Wire(address)
    (victim,) = wire.status().sessions
    mine = WireSession(wire)
    for verb, request in (
        ("Abort", cache_pb2.AbortRequest(reservation_id=int(reservation))),
        ("Commit", cache_pb2.CommitRequest(reservation_id=int(reservation))),
    ):
        for request.session_token in as_token(victim.session_id):
            with raises(Code.NOT_FOUND, "UNKNOWN_SESSION"):
                getattr(wire.cache, verb)(request, timeout=DEADLINE)
        request.session_token = mine.opened.session_token
        with raises(Code.PERMISSION_DENIED):
            getattr(wire.cache, verb)(request, timeout=DEADLINE)
        on_my_stream: dict[str, Any] = {verb.lower(): request}
        assert mine.error(**on_my_stream).code == Code.PERMISSION_DENIED.value[0]
    mine.close()


def test_another_user_aborts_no_session_that_it_sees(server: ServerProcess) -> None:
    wire = Wire(server.address)
    wire.register()
    with contextlib.closing(WireSession(wire)) as session:
        reserve = cache_pb2.ReserveRequest(namespace="n", keys=[key(1)])
        reservation = session.ask(reserve=reserve).reserve.reservation_id
        end(begin(stranger_acts_for_another_session, server.address, reservation))
        assert wire.status().pool.reserved_bytes == SHARD
        commit = cache_pb2.CommitRequest(reservation_id=reservation)
        sealed = session.ask(commit=commit).commit.chunks
        assert [chunk.status for chunk in sealed] == [types_pb2.CHUNK_STATUS_STORED]
    wire.channel.close()
