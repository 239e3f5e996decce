"""A real server and a worker that copies its GPU memory from and to the pool by itself."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdock import Client

sys.path.insert(0, str(Path(__file__).parent))
from worker_process import WorkerProcess

pytestmark = pytest.mark.gpu

SCRIPT = "shared_mode_worker.py"
BLOCKS = 64
PER_CHUNK = 4
LAYOUTS = [
    "kv_first",
    "block_first",
    "permuted",
    "layer_major",
    "block_major",
    "padded",
    "latent",
    "kernel_blocks",
]
StartServer = Callable[..., Any]


def keys(count: int) -> list[bytes]:
    return [secrets.token_bytes(32) for _ in range(count)]


@pytest.fixture(scope="module")
def worker() -> Iterator[Any]:
    """One for all tests that do it no harm: starting one takes seconds."""
    worker = WorkerProcess(script=SCRIPT)
    yield worker
    worker.stop()


@pytest.fixture
def start_own_worker() -> Iterator[Callable[..., Any]]:
    workers: list[WorkerProcess] = []

    def start(environment: dict[str, str] | None = None) -> WorkerProcess:
        workers.append(WorkerProcess(environment, SCRIPT))
        return workers[-1]

    yield start
    for worker in workers:
        worker.stop()


def round_trip(worker: Any, blocks: int = BLOCKS) -> None:
    """Blocks in random order and in a row, stored and loaded elsewhere, and nothing else changed.

    ``blocks`` is a multiple of 16.
    """
    everything = list(range(blocks))
    rng = np.random.default_rng(blocks)
    half = blocks // 2
    for source, target in [
        (everything[:half], everything[half:]),
        (rng.permutation(blocks)[:half].tolist(), rng.permutation(blocks)[:half].tolist()),
    ]:
        chunks = keys(half // PER_CHUNK)
        skip = PER_CHUNK - 1
        before = worker.blocks(everything)
        assert worker.store(chunks, source) == ["STORED"] * len(chunks)
        assert worker.store(chunks, source) == ["EXISTS"] * len(chunks)
        worker.fill(secrets.randbits(30))
        expected = worker.blocks(everything)
        assert worker.retrieve(chunks, target[skip:], skip) == [True] * len(chunks)
        expected[target[skip:]] = before[source[skip:]]
        np.testing.assert_array_equal(worker.blocks(everything), expected)


@pytest.mark.parametrize("dtype", ["bf16", "fp8", "uint8"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(start_server: StartServer, worker: Any, layout: str, dtype: str) -> None:
    worker.make(layout, dtype, 5, BLOCKS, 4096)
    server = start_server(memory="64MiB")
    mode, reason = worker.connect_as(server.address, "SHARED", PER_CHUNK)
    assert (mode, reason) == ("SHARED", "the client asked for it")
    round_trip(worker)
    assert worker.disconnect()


@pytest.mark.parametrize(
    ("layout", "layers", "page"),
    [
        ("block_major", 4, 512 << 10),  # blocks of 2 MiB, copied as they are
        ("padded", 4, 512 << 10),  # likewise, but for the room between layers
        ("latent", 1, 2 << 20),
        ("latent", 1, 48 << 20),  # more than a staging buffer
        ("layer_major", 3, 256 << 10),
        ("block_first", 3, 64),
    ],
)
def test_small_and_large_pages(
    start_server: StartServer, worker: Any, layout: str, layers: int, page: int
) -> None:
    worker.make(layout, "bf16", layers, 16, page)
    server = start_server(memory="2GiB")
    worker.connect_as(server.address, "SHARED", PER_CHUNK)
    round_trip(worker, 16)
    assert worker.disconnect()


def test_tensors_at_odd_offsets(start_server: StartServer, worker: Any) -> None:
    worker.make_inside("uint8", [1, 40_003, 90_006], BLOCKS, 515)
    server = start_server()
    worker.connect_as(server.address, "SHARED", PER_CHUNK)
    round_trip(worker)
    assert worker.disconnect()


@pytest.mark.parametrize("layout", ["block_first", "block_major"])
def test_a_store_gets_what_a_long_kernel_is_still_to_write(
    start_server: StartServer, worker: Any, layout: str
) -> None:
    worker.make(layout, "bf16", 4, BLOCKS, 512 << 10)
    worker.connect_as(start_server(memory="1GiB").address, "SHARED", PER_CHUNK)
    chunks, ids = keys(8), list(range(32))
    assert worker.store_late(500, 77, chunks, ids) == ["STORED"] * 8
    written = worker.blocks(ids)
    worker.fill(78)
    assert all(worker.retrieve(chunks, ids, 0))
    np.testing.assert_array_equal(worker.blocks(ids), written)
    assert worker.disconnect()


@pytest.mark.parametrize("layout", ["block_first", "block_major"])
def test_a_load_never_overtakes_who_still_reads(
    start_server: StartServer, worker: Any, layout: str
) -> None:
    worker.make(layout, "bf16", 4, BLOCKS, 512 << 10)
    worker.connect_as(start_server(memory="1GiB").address, "SHARED", PER_CHUNK)
    chunks, ids = keys(8), list(range(32))
    assert worker.store(chunks, ids) == ["STORED"] * 8
    stored = worker.blocks(ids)
    worker.fill(79)
    before = worker.blocks(ids)
    assert all(worker.retrieve_late(500, chunks, ids))
    np.testing.assert_array_equal(worker.snapshot_blocks(ids), before)
    np.testing.assert_array_equal(worker.blocks(ids), stored)
    assert worker.disconnect()


def test_a_store_that_waits_for_a_long_kernel_can_be_stopped(
    start_server: StartServer, worker: Any
) -> None:
    worker.make("block_first", "bf16", 4, BLOCKS, 4096)
    server = start_server()
    worker.connect_as(server.address, "SHARED", PER_CHUNK)
    seconds, copied = worker.store_until_stopped(1000, keys(8), list(range(32)))
    assert not copied
    assert seconds < 0.5
    assert worker.disconnect()


@pytest.mark.parametrize("layout", ["block_first", "block_major"])
def test_a_pool_that_is_not_pinned_is_copied_all_the_same(
    start_server: StartServer, start_own_worker: Callable[..., Any], layout: str
) -> None:
    worker = start_own_worker()
    worker.make(layout, "bf16", 4, BLOCKS, 512 << 10)
    why, pinned = worker.connect_refused(start_server(memory="1GiB").address, PER_CHUNK)
    assert "CUDA pins no more than" in why
    assert "cuMemHostRegister_v2 failed" in why
    assert pinned < 1 << 30
    round_trip(worker)


@pytest.mark.parametrize("layers", [1, 8])
def test_expandable_segments_end_in_shared_mode(
    start_server: StartServer, start_own_worker: Callable[..., Any], layers: int
) -> None:
    worker = start_own_worker({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    worker.make("block_major", "bf16", layers, BLOCKS, 128 << 10)  # up to 64 MiB: several mappings
    server = start_server(memory="512MiB")
    mode, reason = worker.connect_as(server.address, "UNSPECIFIED", PER_CHUNK)
    assert (mode, reason) == ("SHARED", "the client has no device memory to export")
    round_trip(worker)
    assert worker.disconnect()


def test_a_server_that_can_open_the_memory_copies_by_itself(
    start_server: StartServer, worker: Any
) -> None:
    worker.make("block_major", "bf16", 4, BLOCKS, 4096)
    mode, _ = worker.connect_as(start_server().address, "UNSPECIFIED", PER_CHUNK)
    assert mode == "SERVER"
    round_trip(worker)


def test_a_server_without_gpus_has_the_worker_copy(
    start_server: StartServer, worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as environment:
        environment.setenv("CUDA_VISIBLE_DEVICES", "")
        server = start_server()
    worker.make("block_major", "bf16", 4, BLOCKS, 4096)
    mode, reason = worker.connect_as(server.address, "UNSPECIFIED", PER_CHUNK)
    assert mode == "SHARED"
    assert reason not in ("the client asked for it", "the client has no device memory to export")
    round_trip(worker)
    assert worker.disconnect()


def test_an_engine_killed_during_a_copy_costs_the_server_nothing(
    start_server: StartServer, start_own_worker: Callable[..., Any], worker: Any
) -> None:
    server = start_server(memory="1GiB")
    killed = start_own_worker()
    killed.make("layer_major", "bf16", 8, BLOCKS, 512 << 10)
    killed.connect_as(server.address, "SHARED", PER_CHUNK)
    killed.store_on_and_on(8)
    time.sleep(0.3)
    killed.kill()
    with Client(server.address) as client:
        deadline = time.monotonic() + 10
        while client.status().sessions:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert client.health() == "SERVING"
    worker.make("layer_major", "bf16", 8, BLOCKS, 512 << 10)
    worker.connect_as(server.address, "SHARED", PER_CHUNK)
    round_trip(worker)
    assert worker.disconnect()


@pytest.mark.parametrize("layout", ["block_major", "layer_major", "block_first"])
def test_rates(start_server: StartServer, worker: Any, layout: str) -> None:
    """512 MiB of Llama-3.1-8B's geometry at random blocks, through the whole path."""
    worker.make(layout, "bf16", 32, 512, 64 << 10)
    worker.connect_as(start_server(memory="4GiB").address, "SHARED", 16)
    worker.wait_until_pinned()
    rates = worker.rates(512 << 20)
    store, load = rates["store"] / rates["D2H"], rates["load"] / rates["H2D"]
    print(
        f"\nshared mode, {layout}: store {rates['store']:.1f} GB/s ({store:.2f} of a pinned copy), "
        f"load {rates['load']:.1f} GB/s ({load:.2f})"
    )
    assert store >= 0.5
    assert load >= 0.5
    assert worker.disconnect()
