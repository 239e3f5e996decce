"""The metrics endpoint of a real server: off by default, and what it tells."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvdock import Client, Group, Namespace

SHARD = 4096


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def scrape(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def listening(pid: int) -> set[str]:
    """Inodes of the TCP sockets of a process that listen."""
    mine = {
        str(link.readlink())[8:-1]
        for link in Path(f"/proc/{pid}/fd").iterdir()
        if str(link.readlink()).startswith("socket:")
    }
    listed = [
        line.split()
        for file in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{file}").read_text().splitlines()[1:]
    ]
    return {fields[9] for fields in listed if fields[3] == "0A" and fields[9] in mine}


def put(client: Client, *names: int) -> None:
    keys = [name.to_bytes(32, "big") for name in names]
    client.put("n", keys, [bytes(SHARD)] * len(keys))


def test_off_by_default(server: Any) -> None:
    assert not listening(server.process.pid)


def test_a_stream_that_is_dropped_unread_ends(
    start_server: Callable[..., Any],
) -> None:
    port = free_port()
    server = start_server("--metrics-listen", f"127.0.0.1:{port}", "--event-log", "1MiB")
    with Client(server.address) as client:
        streams = [client.events() for _ in range(3)]
        assert scrape(port)["kvdock_event_subscribers"] == 3
        streams.pop().close()
        streams.clear()
        deadline = time.monotonic() + 5
        while scrape(port)["kvdock_event_subscribers"]:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_what_it_tells(start_server: Callable[..., Any]) -> None:
    port = free_port()
    server = start_server(
        "--metrics-listen",
        f"127.0.0.1:{port}",
        "--event-log",
        "1MiB",
        "--event-log-count",
        "4",
    )
    with Client(server.address) as client:
        client.register_namespace(Namespace("n", 16, 1, (Group(shard_bytes=(SHARD,)),)))
        stream = client.events()
        first = next(stream).cursor

        def read_to(sequence: int) -> None:
            """The log is short: a reader whom the server is slow to serve would be compacted."""
            while next(stream).cursor.sequence < sequence:
                pass

        put(client, 1, 2, 3)
        read_to(3)
        put(client, 4, 5, 6)
        read_to(6)
        client.evict(SHARD)
        client.lookup("n", [(1).to_bytes(32, "big")], probe=True)
        behind = next(client.events(first))
        assert type(behind).__name__ == "Compacted"
        found = scrape(port)
        assert found["kvdock_events_published_total"] == 7
        assert found["kvdock_events_dropped_total"] == 3
        assert found["kvdock_event_log_events"] == 4
        assert found["kvdock_events_compacted_total"] == 1
        assert found["kvdock_event_subscribers"] == 1
        assert found["kvdock_event_lag"] <= 7
        assert 0 < found["kvdock_event_log_bytes"] <= 1 << 20

        status = client.status()
        assert found["kvdock_stored_shards_total"] == status.counters.stored_shards == 6
        assert found["kvdock_evicted_parts_total"] == status.counters.evicted_parts == 1
        assert found["kvdock_lookups_total"] == status.counters.lookups == 1
        assert found["kvdock_parts"] == status.index.parts == 5
        assert found["kvdock_pool_used_bytes"] == status.pool.used_bytes
        assert found["kvdock_pool_bytes"] == status.pool.total_bytes
        assert found["process_resident_memory_bytes"] > 0
        stream.close()
    assert server.stop() == 0


def test_without_a_log_there_is_nothing_about_events(start_server: Callable[..., Any]) -> None:
    port = free_port()
    start_server("--metrics-listen", f"127.0.0.1:{port}")
    assert not [name for name in scrape(port) if name.startswith("kvdock_event")]


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        where = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = subprocess.run(
            [
                sys.executable,
                "-m",
                "kvdock_server",
                "--memory",
                "16MiB",
                "--listen",
                f"unix://{tmp_path}/s",
                "--metrics-listen",
                where,
            ],
            capture_output=True,
            text=True,
            timeout=30,
        )
    assert ended.returncode == 2
    assert f"metrics_listen {where}" in ended.stderr
