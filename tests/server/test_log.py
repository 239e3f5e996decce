"""What the server's log shows of what its users named and did."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable
from pathlib import Path
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


def in_a_network_of_its_own() -> list[str]:
    """The beginning of a command line: what listens there, nobody else can reach."""
    for prefix in (["unshare", "--net"], ["unshare", "--user", "--map-root-user", "--net"]):
        with contextlib.suppress(FileNotFoundError):
            if not subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode:
                return prefix
    pytest.skip("this user may make no network namespace (unshare)")


@pytest.mark.parametrize(("host", "others_reach_it"),
                         [("0.0.0.0", True), ("[::]", True), ("127.0.0.1", False)])  # fmt: skip
def test_each_address_that_others_reach_is_warned_of_once(
    start_server: Callable[..., Any], host: str, others_reach_it: bool
) -> None:
    if ":" in host and not Path("/proc/net/if_inet6").exists():
        pytest.skip("no IPv6 here")
    listen, metrics = f"{host}:7000", f"{host}:9464"
    server = start_server(
        "--listen", listen, "--metrics-listen", metrics, prefix=in_a_network_of_its_own()
    )
    server.stop()

    warnings = [line for line in server.log.splitlines() if "WARNING" in line]
    assert len(warnings) == 2 * others_reach_it
    for line, address, consequence in zip(
        warnings,
        (listen, metrics),
        ("can read, clear and evict every namespace", "can read the metrics"),
        strict=False,
    ):
        assert f"whoever reaches {address} {consequence}" in line
