"""A filter of thousands of namespaces costs a reader's server what one of a few costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from servers import ServerProcess

from kvdock import Client, Group, Namespace
from kvdock.events import Filter, SnapshotPiece

NAMESPACES = 600
CHUNKS = 400
"""Of one more namespace."""
FEW, MANY = 40, 4_000


def key(number: int) -> bytes:
    return (number + 1).to_bytes(32, "little")


@pytest.fixture
def filled(start_server: Callable[..., ServerProcess]) -> Iterator[tuple[ServerProcess, Client]]:
    """A server that knows a chunk of each of many namespaces, and many of one."""
    server = start_server("--event-log", "16MiB")
    with Client(server.address) as client:
        for number in range(NAMESPACES):
            name = f"namespace-{number}"
            client.register_namespace(Namespace(name, 16, 1, (Group(shard_bytes=(4096,)),)))
            client.put(name, [key(number)], [bytes(4096)])
        client.register_namespace(Namespace("large", 16, 1, (Group(shard_bytes=(4096,)),)))
        client.put("large", [key(number) for number in range(CHUNKS)], [bytes(4096)] * CHUNKS)
        yield server, client


def loop_seconds(server: ServerProcess) -> float:
    """How long the thread of the server's loop has used a processor so far."""
    thread = server.process.pid
    return int(Path(f"/proc/{thread}/task/{thread}/schedstat").read_text().split()[0]) / 1e9


def snapshot_seconds(server: ServerProcess, client: Client, names: list[str], events: int) -> float:
    """What a snapshot with that filter costs the loop, the cheapest of several."""
    costs = []
    for _ in range(5):
        before = loop_seconds(server)
        found = 0
        for message in client.events("snapshot", only=Filter(tuple(names))):
            assert isinstance(message, SnapshotPiece)
            found += len(message.stored)
            if message.last:
                break
        costs.append(loop_seconds(server) - before)
        assert found == events
        time.sleep(0.01)
    return min(costs)


def test_a_snapshot_costs_no_more_with_4000_names_than_with_40(
    filled: tuple[ServerProcess, Client],
) -> None:
    others = [f"no-namespace-{number}" for number in range(MANY)]
    for wanted, events in (([], 0), (["large"], CHUNKS)):
        few = snapshot_seconds(*filled, others[:FEW] + wanted, events)
        many = snapshot_seconds(*filled, others[len(wanted) :] + wanted, events)
        assert many < 4 * few
