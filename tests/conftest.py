"""Fixtures shared by all tests."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
sys.path.insert(0, str(Path(__file__).parent))

from hold_ups import HOLD_UPS
from loop_watchdog import LIMIT_SECONDS, slowness
from servers import ServerProcess


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for begin, (seconds, reason) in HOLD_UPS.items():
            if item.nodeid.startswith(begin):
                item.add_marker(pytest.mark.hold_up(seconds, reason=reason))


@pytest.fixture
def hold_up_limit(request: pytest.FixtureRequest) -> float:
    """For how many seconds one callback may hold up a server's event loop in this test."""
    marker = request.node.get_closest_marker("hold_up")
    seconds = marker.args[0] if marker else LIMIT_SECONDS
    return float(seconds * slowness())


@pytest.fixture
def start_server(hold_up_limit: float) -> Iterator[Callable[..., ServerProcess]]:
    """A function that starts a server with the given arguments, on a socket of its own.

    The test fails if something holds up the event loop of one of them.
    """
    # Not tmp_path: a socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as folder:
        servers: list[ServerProcess] = []
        held_up = Path(folder) / "held-up"

        def start(*arguments: str, memory: str = "64MiB", **options: Any) -> ServerProcess:
            socket = Path(folder) / f"{len(servers)}.sock"
            options = {"held_up": held_up, "limit": hold_up_limit} | options
            servers.append(ServerProcess(socket, "--memory", memory, *arguments, **options))
            return servers[-1]

        yield start
        for server in servers:
            server.stop()
        if held_up.exists():
            pytest.fail(held_up.read_text(), pytrace=False)


@pytest.fixture
def server(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    """A server with 64 MiB."""
    return start_server()
