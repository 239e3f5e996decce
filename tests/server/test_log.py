"""What the server's log shows of what its users named and did."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
from wire import Wire, WireSession

from kvdock.v1 import session_pb2

FORGED = "kvdock: ERROR: forged"


def test_a_name_begins_no_line_and_sends_no_control_characters(server: Any, wire: Wire) -> None:
    session = WireSession(wire, engine=f"e\n{FORGED}\r\x1b[2J\u202e")
    session.ask(register_memory=session_pb2.RegisterMemoryRequest(namespace="n"))
    session.close()
    server.stop()

    lines = server.log.splitlines()
    [line] = [line for line in lines if "worker 0 of" in line]
    assert rf"e\n{FORGED}\r\x1b[2J\u202e:" in line
    assert FORGED not in lines


def free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((host.strip("[]"), 0))
            port: int = probe.getsockname()[1]
            return port
    except OSError as error:
        pytest.skip(f"{host}: {error}")


@pytest.mark.parametrize(("host", "warnings"), [("0.0.0.0", 1), ("[::]", 1), ("127.0.0.1", 0)])
def test_an_address_that_others_reach_is_warned_of_once(
    start_server: Callable[..., Any], host: str, warnings: int
) -> None:
    server = start_server("--listen", f"{host}:{free_port(host)}")
    server.stop()

    lines = [line for line in server.log.splitlines() if "WARNING" in line]
    assert len(lines) == warnings
    assert all("can read, clear and evict every namespace" in line for line in lines)
