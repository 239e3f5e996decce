"""A real server and engines on the GPU: server mode over sessions."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from device_memory import free_bytes

from kvdock import Client

pytestmark = pytest.mark.gpu

BLOCKS = 64
PER_CHUNK = 4


def keys(count: int) -> list[bytes]:
    return [secrets.token_bytes(32) for _ in range(count)]


@pytest.fixture
def gpu_server(start_server: Callable[..., Any]) -> Any:
    return start_server(memory="512MiB")


def test_one_engine_stores_and_another_retrieves(gpu_server: Any, start_worker: Any) -> None:
    one, two = start_worker(), start_worker()
    one.make("layer_major", "bf16", 5, BLOCKS, 4096)
    two.make("block_major", "bf16", 5, BLOCKS, 4096)  # another order of layers and blocks
    for name, worker in (("one", one), ("two", two)):
        assert worker.connect(gpu_server.address, name, "model", PER_CHUNK) == "SERVER"
    chunks = keys(6)
    source = list(range(40, 16, -1))
    assert one.store(chunks, source) == ["STORED"] * 6
    assert one.store(chunks, source) == ["EXISTS"] * 6
    target = list(range(3, 24))
    before = two.blocks(list(range(BLOCKS)))
    assert two.retrieve(chunks, target, 3) == ["RETRIEVED"] * 6
    expected = before.copy()
    expected[target] = one.blocks(source)[3:]
    np.testing.assert_array_equal(two.blocks(list(range(BLOCKS))), expected)


def test_a_restarted_server_takes_the_memory_again(gpu_server: Any, start_worker: Any) -> None:
    worker = start_worker()
    worker.make("layer_major", "bf16", 5, BLOCKS, 4096)
    for _ in range(2):
        assert worker.connect(gpu_server.address, "engine", "model", PER_CHUNK) == "SERVER"
        chunks = keys(2)
        assert worker.store(chunks, list(range(8))) == ["STORED"] * 2
        assert worker.retrieve(chunks, list(range(8, 16)), 0) == ["RETRIEVED"] * 2
        blocks = worker.blocks(list(range(16)))
        np.testing.assert_array_equal(blocks[:8], blocks[8:])
        gpu_server.restart()


def test_a_killed_worker_costs_the_server_nothing(gpu_server: Any, start_worker: Any) -> None:
    neighbour = start_worker()
    neighbour.make("layer_major", "bf16", 5, BLOCKS, 4096)
    neighbour.connect(gpu_server.address, "neighbour", "model", PER_CHUNK)
    free = free_bytes()
    worker = start_worker()
    worker.make("block_major", "bf16", 32, 4096, 16384)  # 2 GiB
    worker.connect(gpu_server.address, "engine", "large", 16)
    worker.store(keys(4), list(range(64)))
    assert free_bytes() < free - (2 << 30)
    worker.kill()
    end = time.monotonic() + 10
    while free_bytes() < free - (64 << 20):
        assert time.monotonic() < end
        time.sleep(0.05)
    with Client(gpu_server.address) as client:
        assert client.health() == "SERVING"
    assert neighbour.store(keys(2), list(range(8))) == ["STORED"] * 2
