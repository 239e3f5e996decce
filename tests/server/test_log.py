"""What the server's log shows of what its users named and did."""

from __future__ import annotations

from typing import Any

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
