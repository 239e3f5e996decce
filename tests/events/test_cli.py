"""``kvdock events`` as a process, against a real server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvdock import ChunkEventData, Client, Group, Namespace
from kvdock.cli import events
from kvdock.events import Batch, Cursor, Unknown

SHARD = 4096
KEYS = [bytes([number]) * 32 for number in range(1, 5)]


@pytest.fixture
def server_with_log(start_server: Callable[..., Any]) -> Any:
    return start_server("--event-log", "4MiB", "--event-log-count", "4")


@pytest.fixture
def client(server_with_log: Any) -> Iterator[Client]:
    with Client(server_with_log.address) as client:
        client.register_namespace(Namespace("n", 16, 1, (Group(shard_bytes=(SHARD,)),)))
        yield client


def put(client: Client, *keys: bytes) -> None:
    extra_keys = (("adapter", ("a picture", -2), b"\xff"),)
    told = [
        ChunkEventData((key[:8],), b"", bytes(64), 16, "adapter", "scheme", extra_keys)
        for key in keys
    ]
    client.put("n", keys, [bytes(SHARD)] * len(keys), event_data=told)


def command(server: Any, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvdock", "events", "--address", server.address, *arguments]


def lines(server: Any, count: int, *arguments: str) -> list[str]:
    """The first lines that the command prints; then it is interrupted, as by Ctrl-C."""
    process = subprocess.Popen(
        command(server, *arguments),
        stdout=subprocess.PIPE,
        text=True,
        # A shell's background job, which these tests may be, ignores it, and so would the command.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    watchdog = threading.Timer(30, process.kill)
    watchdog.start()
    assert process.stdout is not None
    found = [process.stdout.readline() for _ in range(count)]
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    watchdog.cancel()
    return found


def test_json_lines_from_a_snapshot_and_resumed_at_any_of_them(
    server_with_log: Any, client: Client
) -> None:
    put(client, *KEYS[:3])
    first = [json.loads(line) for line in lines(server_with_log, 3, "--json", "--from", "snapshot")]
    assert [line["key"] for line in first] == [key.hex() for key in KEYS[:3]]
    assert first[1] == {
        "cursor": None,
        "event": "stored",
        "namespace": "n",
        "snapshot": True,
        "key": KEYS[1].hex(),
        "group_idx": None,
        "medium": "cpu",
        "parent_key": KEYS[0].hex(),
        "kind": "full_attention",
        "window_tokens": 0,
        "block_hashes": [KEYS[1][:8].hex()],
        "parent_block_hash": "",
        "tokens": 16,
        "block_size": 16,
        "lora_name": "adapter",
        "hash_scheme": "scheme",
        "extra_keys": [["adapter", ["a picture", -2], {"hex": "ff"}]],
    }
    assert first[0]["cursor"] is None
    client.evict(SHARD)
    client.clear(all=True)
    where = first[-1]["cursor"]
    gone, cleared = (
        json.loads(line) for line in lines(server_with_log, 2, "--json", "--from", where)
    )
    assert (gone["event"], gone["block_hashes"]) == ("removed", [KEYS[2][:8].hex()])
    assert (cleared["event"], cleared["namespace"]) == ("cleared", "n")
    (again,) = lines(server_with_log, 1, "--json", "--from", gone["cursor"])
    assert json.loads(again) == cleared


def test_a_snapshot_has_no_place_to_resume_before_its_end(
    server_with_log: Any, client: Client
) -> None:
    keys = [number.to_bytes(32) for number in range(1, 1_101)]  # more than two messages
    put(client, *keys)
    told = [
        json.loads(line) for line in lines(server_with_log, 1_100, "--json", "--from", "snapshot")
    ]
    assert [line["key"] for line in told] == [key.hex() for key in keys]
    assert [line["cursor"] is None for line in told] == [True] * 1_099 + [False]


def test_what_only_a_newer_server_tells_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    event = Unknown(7, "n")
    batch = Batch(Cursor(1, 9), 0, (event,))
    events._print_json(batch, event)
    assert json.loads(capsys.readouterr().out) == {
        "cursor": "1:7",
        "event": "unknown",
        "namespace": "n",
    }
    events._print_line(batch, event)
    assert capsys.readouterr().out.split()[1:] == ["7", "unknown", "n"]


def test_a_line_each_for_people(server_with_log: Any, client: Client) -> None:
    put(client, KEYS[0])
    (line,) = lines(server_with_log, 1, "--from", "snapshot", "--namespace", "n")
    assert line.split() == ["1", "stored", "cpu", KEYS[0].hex(), "n"]


def run(server: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(server, *arguments), capture_output=True, text=True, timeout=30, env=os.environ
    )


def test_a_place_that_is_gone(server_with_log: Any, client: Client) -> None:
    start = next(client.events()).cursor
    put(client, *KEYS)
    put(client, (2_000).to_bytes(32))
    ended = run(server_with_log, "--from", str(start))
    assert ended.returncode == 1
    assert "--from snapshot" in ended.stderr


def test_what_is_no_place(server_with_log: Any) -> None:
    ended = run(server_with_log, "--from", "yesterday")
    assert ended.returncode == 2
    assert "'yesterday' is no cursor" in ended.stderr
    ended = run(server_with_log, "--from", f"1:{1 << 64}")
    assert ended.returncode == 2
    assert "cannot be sent" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_server_without_log(server: Any) -> None:
    ended = run(server)
    assert ended.returncode == 1
    assert "--event-log" in ended.stderr
