"""``kvdock replay`` in processes of its own, also against real servers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from workloads import chats, write

import kvdock


def replay(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "kvdock", "replay", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        timeout=120,
        check=False,
        env=os.environ | {"COLUMNS": "200"},
    )


def as_json(*arguments: str | Path) -> Any:
    done = replay(*arguments, "--json")
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return write(chats(3, 300), tmp_path / "trace.jsonl")


def test_it_says_how_much_memory_and_which_policy(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plot.svg"
    done = replay(trace, "--bytes-per-token", "128KiB", "--plot", picture)
    assert done.returncode == 0, done.stderr.decode()
    shown = done.stdout.decode()
    rows = [line for line in shown.splitlines() if line.startswith("│")]
    assert [row.split()[1] for row in rows] == [
        "lru",
        "lru-with-memory",
        "s3-fifo",
        "arc",
        "optimum",
    ]
    assert all(len(row.split("│")) == 1 + 7 + 1 for row in rows)
    assert "Memory: give it " in shown
    assert "GiB). Then lru finds 0." in shown
    assert "Policy: " in shown
    drawn = ElementTree.parse(picture)
    assert {"lru", "optimum"} <= {element.text for element in drawn.iter()}


def test_json_has_the_figures(trace: Path) -> None:
    found = as_json(
        trace, "--sizes", "100,1GiB", "--bytes-per-token", "8KiB", "--policies", "lru,arc"
    )
    outcomes = found["outcomes"]
    assert [(each["policy"], each["size"]) for each in outcomes] == [
        *(("lru", 100), ("lru", 256)),
        *(("arc", 100), ("arc", 256)),
    ]
    assert outcomes[1]["bytes"] == 1 << 30
    assert found["trace"]["prompts"] == 300
    assert found["advice"]["bytes"] == found["advice"]["size"] * 512 * 8192
    cut = as_json(trace, "--sizes", "100", "--policies", "lru", "--most-blocks", "1000")
    assert cut["trace"]["is_cut"]
    assert 900 < cut["trace"]["blocks"] <= 1000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["-"], "stdin, line 2 has no hash_ids"),
        (["/no/such/file"], "cannot read /no/such/file: No such file"),
        (["-", "--sizes", "8GiB"], "give --bytes-per-token, too"),
        (["-", "--sizes", "0"], "'0' is less than one block"),
        (["-", "--sizes", "9" * 5000], "is no number of blocks"),
        (["-", "--sizes", "many", "--bytes-per-token", "1KiB"], "'many' is not a size"),
        (["-", "--policies", "lru,fifo"], "'fifo' is none of lru, lru-with-memory"),
        (["-", "--bytes-per-token", "much"], "'much' is not a size"),
    ],
)
def test_what_cannot_be_used_is_named(arguments: list[str], said: str) -> None:
    bad = b'{"hash_ids": [1]}\n{}\n' if arguments == ["-"] else b'{"hash_ids": [1]}\n'
    done = replay(*arguments, stdin=bad)
    assert done.returncode == 2
    assert said in done.stderr.decode()
    assert b"Traceback" not in done.stderr


def test_a_policy_that_is_named_twice_is_played_once() -> None:
    done = replay("-", "--policies", "lru,arc,lru", stdin=b'{"hash_ids": [1, 2]}\n')
    rows = [line for line in done.stdout.decode().splitlines() if line.startswith("│")]
    assert [row.split() for row in rows] == [
        ["│", "lru", "│", "0.0000", "│"],
        ["│", "arc", "│", "0.0000", "│"],
    ]


def test_a_plot_that_cannot_be_written_does_not_cost_the_figures(tmp_path: Path) -> None:
    done = replay("-", "--plot", tmp_path, stdin=b'{"hash_ids": [1, 2]}\n{"hash_ids": [1, 2]}\n')
    assert done.returncode == 2
    assert f"cannot write {tmp_path}" in done.stderr.decode()
    assert "Memory: give it " in done.stdout.decode()
    # No advice against a policy that is as good as any other here.
    assert "Policy: --eviction lru-with-memory finds no more than lru" in done.stdout.decode()


@pytest.mark.parametrize(
    ("policy", "sizes"),
    # With memory a server remembers what it evicted while it played the size before.
    [("lru", "256,1024"), ("lru-with-memory", "256"), ("lru-with-memory", "1024")],
)
def test_a_real_server_finds_what_its_policy_finds_simulated(
    trace: Path, start_server: Callable[..., Any], policy: str, sizes: str
) -> None:
    server = start_server("--eviction", policy, memory="4MiB")
    found = as_json(trace, "--server", server.address, "--sizes", sizes, "--policies", policy)
    hits = {(each["policy"], each["size"]): each["hits"] for each in found["outcomes"]}
    for size in map(int, sizes.split(",")):
        simulated, measured = hits[policy, size], hits["server", size]
        tolerance = 0 if policy == "lru" else 0.02
        assert measured == pytest.approx(simulated, rel=tolerance, abs=0)
    with kvdock.Client(server.address) as client:
        assert client.status().index.chunks == 0


def test_a_server_that_is_used_or_too_small_is_left_alone(
    trace: Path, start_server: Callable[..., Any]
) -> None:
    server = start_server(memory="1MiB")
    done = replay(trace, "--server", server.address, "--sizes", "257")
    assert done.returncode == 2
    assert b"holds at most 256 chunks: start the server with --memory 2MiB" in done.stderr
    with kvdock.Client(server.address) as client:
        client.register_namespace(kvdock.Namespace("n", 16, 1, (kvdock.Group((1,)),)))
        client.put("n", [b"k" * 32], [b"x"])
        done = replay(trace, "--server", server.address, "--sizes", "100")
        assert done.returncode == 2
        assert b"holds 1 chunks, which a replay would evict" in done.stderr
        assert client.status().index.chunks == 1
