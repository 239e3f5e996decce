"""One Retrieve that fills all ranks, on several GPUs: exact, counted once, safe in every end."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from device_memory import free_bytes
from worker_process import WorkerProcess

from kvdock import Client
from kvdock_server.transfer import CopiedBytes, GpuTransfers, gpu
from kvdock_server.transfer.devices.driver import (
    CudaError,
    CudaUnavailableError,
    Driver,
    load_driver,
)
from kvdock_server.transfer.devices.libcuda import CUDA_ERROR_INVALID_VALUE

pytestmark = pytest.mark.gpu

BLOCKS = 64
PER_CHUNK = 4
CHUNKS = 6
SKIP = 3


def device_count() -> int:
    try:
        return len(load_driver().device_uuids())
    except CudaUnavailableError:
        return 0


several_gpus = pytest.mark.skipif(device_count() < 2, reason="needs at least two GPUs")


class Ranks:
    """Worker processes of one engine, a device each."""

    def __init__(self, devices: list[int], visible: str) -> None:
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = given.split(",") if given else [str(n) for n in range(device_count())]
        self.engine = secrets.token_hex(4)
        self.workers = [
            WorkerProcess(
                {"CUDA_VISIBLE_DEVICES": names[device]}
                if visible == "its own"
                else {"TEST_DEVICE": str(device)},
                "rank_worker.py",
            )
            for device in devices
        ]
        self._threads = ThreadPoolExecutor(len(devices))

    def __len__(self) -> int:
        return len(self.workers)

    def make(self, *arguments: object) -> None:
        """The same cache for each, all poison but rank 0's."""
        self._each(lambda rank, worker: worker.make(*arguments))
        self._each(lambda rank, worker: worker.poison() if rank else None)

    def join(self, address: str) -> None:
        modes = self._each(lambda rank, worker: worker.join(address, self.engine, rank, PER_CHUNK))
        assert modes == ["SERVER"] * len(self)

    def retrieve(self, lease: int, ids: list[int], chunks: int, skip: int) -> list[list[str]]:
        """Rank 0 leads and the others ask, all at once; each rank's statuses."""
        others = list(range(1, len(self)))
        return self._each(
            lambda rank, worker: (
                worker.ask(lease, chunks) if rank else worker.lead(lease, ids, skip, others)
            )
        )

    def blocks(self, ids: list[int]) -> list[np.ndarray[Any, Any]]:
        return self._each(lambda rank, worker: worker.blocks(ids))

    def in_background(self, work: Callable[[], Any]) -> Any:
        return self._threads.submit(work)

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()
        self._threads.shutdown()

    def _each(self, order: Callable[[int, WorkerProcess], Any]) -> list[Any]:
        return list(self._threads.map(order, range(len(self)), self.workers))


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """As many as there are devices, up to four. Starting them takes seconds."""
    ranks = Ranks(list(range(min(4, device_count()))), request.param)
    yield ranks
    ranks.stop()


@pytest.fixture
def server(start_server: Callable[..., Any]) -> Any:
    return start_server(memory="1GiB")


def copied(address: str) -> tuple[int, int]:
    """What the server has copied from host to device, and from device to device."""
    with Client(address) as client:
        counters = client.status().counters
    return counters.host_to_device_bytes, counters.device_to_device_bytes


def keys(count: int) -> list[bytes]:
    return [secrets.token_bytes(32) for _ in range(count)]


def load_and_compare(
    ranks: Ranks, server: Any, blocks: int, chunks: int, skip: int
) -> tuple[int, int]:
    """Rank 0 stores, one Retrieve fills random blocks of all, and every cache is compared in full.

    Returns how often the load's bytes went from host to device, and from device to device.
    """
    ranks.join(server.address)
    leader = ranks.workers[0]
    rng = np.random.default_rng(4)
    order = [int(block) for block in rng.permutation(blocks)]
    source = order[: chunks * PER_CHUNK]
    target = order[len(source) :][: len(source) - skip]
    assert len(target) == len(source) - skip
    chunk_keys = keys(chunks)
    assert leader.store(chunk_keys, source) == ["STORED"] * chunks
    everything = list(range(blocks))
    before = ranks.blocks(everything)
    lease = leader.lookup(chunk_keys, len(ranks))
    was = copied(server.address)
    assert ranks.retrieve(lease, target, chunks, skip) == [["RETRIEVED"] * chunks] * len(ranks)
    now = copied(server.address)
    loaded = before[0][source[skip:]]
    for rank, after in enumerate(ranks.blocks(everything)):
        expected = before[rank].copy()
        expected[target] = loaded
        np.testing.assert_array_equal(after, expected)
    size = loaded.nbytes
    assert (now[0] - was[0]) % size == (now[1] - was[1]) % size == 0
    return (now[0] - was[0]) // size, (now[1] - was[1]) // size


@several_gpus
@pytest.mark.parametrize("ranks", ["all", "its own"], indirect=True)
@pytest.mark.parametrize(
    "layout", ["block_major", "latent", "layer_major", "kv_first", "padded", "kernel_blocks"]
)
def test_one_retrieve_fills_all_ranks(ranks: Ranks, server: Any, layout: str) -> None:
    ranks.make(layout, "bf16", 5, BLOCKS, 4096)
    loads = load_and_compare(ranks, server, BLOCKS, CHUNKS, SKIP)
    assert loads == (1, len(ranks) - 1)


@several_gpus
@pytest.mark.parametrize("ranks", ["all"], indirect=True)
@pytest.mark.parametrize("layout", ["latent", "layer_major", "block_major"])
def test_a_load_of_many_portions(ranks: Ranks, server: Any, layout: str) -> None:
    """120 MiB; with layers apart in segments of 32 KiB, which a kernel passes on."""
    ranks.make(layout, "bf16", 20, 400, 32768)
    loads = load_and_compare(ranks, server, 400, 48, 0)
    assert loads == (1, len(ranks) - 1)


@pytest.mark.skipif(device_count() < 1, reason="needs a GPU")
def test_ranks_that_share_a_device_get_a_copy_each(server: Any) -> None:
    ranks = Ranks([0, 0], "all")
    try:
        ranks.make("block_major", "bf16", 5, BLOCKS, 4096)
        assert load_and_compare(ranks, server, BLOCKS, CHUNKS, SKIP) == (2, 0)
    finally:
        ranks.stop()


@several_gpus
@pytest.mark.parametrize("ranks", ["all"], indirect=True)
def test_no_rank_is_filled_before_the_leaders_event(ranks: Ranks, server: Any) -> None:
    ranks.make("block_major", "bf16", 5, BLOCKS, 4096)
    ranks.join(server.address)
    leader, follower = ranks.workers[:2]
    chunk_keys = keys(2)
    leader.store(chunk_keys, list(range(8)))
    target = list(range(20, 28))
    lease = leader.lookup(chunk_keys, len(ranks))
    event = leader.read_late(700)
    others = list(range(1, len(ranks)))
    leading = ranks.in_background(lambda: leader.lead(lease, target, 0, others, event))
    time.sleep(0.3)
    assert (follower.blocks(target) == 0xA5).all()
    assert not leading.done()
    assert leading.result(10) == ["RETRIEVED"] * 2
    np.testing.assert_array_equal(follower.blocks(target), leader.blocks(list(range(8))))


@several_gpus
def test_a_killed_rank_costs_the_others_nothing(server: Any) -> None:
    ranks = Ranks(list(range(min(4, device_count()))), "all")
    try:
        ranks.make("block_major", "bf16", 16, 2048, 65536)
        nbytes = 2 << 30
        ranks.join(server.address)
        free = free_bytes(len(ranks) - 1)
        leader, victim = ranks.workers[0], ranks.workers[-1]
        chunk_keys = keys(64)
        source, target = list(range(256)), list(range(511, 255, -1))
        assert leader.store(chunk_keys, source) == ["STORED"] * 64
        others = list(range(1, len(ranks)))
        stop = threading.Event()

        def load_on() -> list[list[str]]:
            outcomes = []
            while not stop.is_set():
                lease = leader.lookup(chunk_keys, len(ranks))
                outcomes.append(leader.lead(lease, target, 0, others))
            return outcomes

        loading = ranks.in_background(load_on)
        time.sleep(0.5)
        victim.kill()
        killed = time.monotonic()
        time.sleep(0.5)
        stop.set()
        outcomes = loading.result(15)
        assert len(outcomes) > 3
        assert {status for outcome in outcomes for status in outcome} == {"RETRIEVED"}
        # The driver gives its memory back with the last mapping, of two.
        while free_bytes(len(ranks) - 1) < free + nbytes:
            assert time.monotonic() - killed < 10
            time.sleep(0.05)
        for worker in ranks.workers[:-1]:
            worker.poison_blocks(target)
        lease = leader.lookup(chunk_keys, len(ranks))
        assert leader.lead(lease, target, 0, others) == ["RETRIEVED"] * 64
        expected = leader.blocks(source)
        for worker in ranks.workers[:-1]:
            np.testing.assert_array_equal(worker.blocks(target), expected)
    finally:
        ranks.stop()


class Unpeered:
    """The driver, on a host whose devices do not reach each other."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._driver, name)


class Unmappable(Unpeered):
    """The driver, on a host where no memory can be opened for another device."""

    def __init__(self, driver: Driver) -> None:
        super().__init__(driver)
        self._opened: set[bytes] = set()

    def can_access_peer(self, ordinal: int, peer: int) -> bool:
        return True

    def ipc_open_memory(self, handle: bytes) -> int:
        if handle in self._opened:
            code = CUDA_ERROR_INVALID_VALUE
            raise CudaError("cuIpcOpenMemHandle_v2", code, "INVALID_VALUE", "as if refused")
        self._opened.add(handle)
        return self._driver.ipc_open_memory(handle)


@several_gpus
@pytest.mark.parametrize("ranks", ["its own"], indirect=True)
@pytest.mark.parametrize("without", [None, Unpeered, Unmappable])
async def test_without_a_way_between_devices_each_rank_gets_a_copy(
    ranks: Ranks,
    pool: Any,
    as_server_types: Any,
    monkeypatch: pytest.MonkeyPatch,
    without: type[Unpeered] | None,
) -> None:
    if without is not None:
        driver = without(load_driver())
        monkeypatch.setattr(gpu, "load_driver", lambda: driver)
    ranks.make("layer_major", "bf16", 5, BLOCKS, 4096)
    transfers = GpuTransfers(pool.address, len(pool.bytes))
    transfers.faulted(0, len(pool.bytes))
    registrations = []
    for worker in ranks.workers:
        allocations, groups = as_server_types(worker.export(PER_CHUNK))
        registrations.append(await transfers.register(allocations, groups))
    await registrations[0].store(None, range(8), [0, groups[None].chunk_bytes])
    followers = [registration.follower() for registration in registrations[1:]]
    target = [40, 17, 18, 19, 33, 8, 63, 50]
    amounts = await registrations[0].retrieve(
        None, target, [0, groups[None].chunk_bytes], followers=followers
    )
    expected = ranks.workers[0].blocks(list(range(8)))
    nbytes, more = expected.nbytes, len(ranks) - 1
    assert [follower.failure for follower in followers] == [None] * more
    once, apart = CopiedBytes(nbytes, nbytes * more), CopiedBytes(nbytes * (1 + more))
    assert amounts == (once if without is None else apart)
    for worker in ranks.workers:
        np.testing.assert_array_equal(worker.blocks(target), expected)
    await transfers.close()
