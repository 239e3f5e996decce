"""One load for several workers: bytes, order, and every end, on devices made of host memory."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdock_server.transfer import (
    CopiedBytes,
    DeviceAllocation,
    DeviceMemoryError,
    LoadFollower,
    TransferFailedError,
)
from kvdock_server.transfer.devices import kernels as device_kernels
from kvdock_server.transfer.devices.lane import Job, Lane, Transfer
from kvdock_server.transfer.fan_out import transfer
from kvdock_server.transfer.plans import planner
from kvdock_server.transfer.plans.cost_model import COST_MODEL

sys.path.insert(0, str(Path(__file__).parent))
import kv_layouts
from host_driver import COPY_TO_PEER, MOVE_BLOCKS, HostDriver, uuid
from several_devices import BLOCKS, LOADED_BLOCKS, PER_CHUNK, POOL_BYTES, Setting, Worker

EVENT = b"e" * 64


async def pinned(setting: Setting) -> None:
    for _ in range(1000):
        if setting.transfers.stats().pinned_bytes == POOL_BYTES:
            break
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("name", sorted(kv_layouts.CASES))
async def test_every_layout_is_copied_once_and_passed_on(setting: Setting, name: str) -> None:
    workers = await setting.workers(name)
    await pinned(setting)
    moved: Counter[str] = Counter()

    def count(target: int, source: int, nbytes: int) -> None:
        from_pool = setting.driver.device_of(source) is None
        moved["from the pool" if from_pool else "between devices"] += nbytes

    setting.driver.before_copy = count
    copied, followers = await setting.load(workers[0], workers[1:])
    nbytes = LOADED_BLOCKS * workers[0].case.layout.block_bytes
    assert copied == CopiedBytes(nbytes, 3 * nbytes)
    assert [follower.failure for follower in followers] == [None] * 3
    assert all(setting.is_filled(worker) for worker in workers)
    assert moved == {"from the pool": nbytes, "between devices": 3 * nbytes}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("few_ids", [2, 960])
@pytest.mark.parametrize("name", sorted(kv_layouts.CASES))
async def test_kernels_pass_on_what_would_be_many_copies(
    setting: Setting, name: str, few_ids: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_kernels, "FEW_IDS", few_ids)
    workers = await setting.workers(name)
    await setting.load(workers[0], workers[1:])
    assert all(setting.is_filled(worker) for worker in workers)
    # A block in one piece is one copy.
    assert (COPY_TO_PEER in setting.driver.launched) == (name != "block-major")
    for worker in workers:
        await worker.registration.close()


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize("name", sorted(kv_layouts.CASES))
async def test_what_came_staged_is_passed_on(setting: Setting, name: str) -> None:
    workers = await setting.workers(name)
    await setting.load(workers[0], workers[1:])
    assert all(setting.is_filled(worker) for worker in workers)
    if name == "block first, layers apart":
        assert MOVE_BLOCKS in setting.driver.launched
    for worker in workers:
        await worker.registration.close()


async def test_workers_whose_layouts_differ(setting: Setting) -> None:
    names = ["block-major", "layer-major, one allocation", "block first, layers apart"]
    workers = [await setting.worker(device, name, 3) for device, name in enumerate(names)]
    for leader in workers:
        await setting.load(leader, [worker for worker in workers if worker is not leader])
        assert all(setting.is_filled(worker) for worker in workers)
        for array in (array for worker in workers for array in worker.arrays):
            array[:] = 0xA5


async def test_without_a_way_between_the_devices_each_gets_its_own_copy(setting: Setting) -> None:
    workers = await setting.workers()
    same_device = await setting.worker(0)
    setting.driver.peers.discard((0, 1))
    setting.driver.refused.add((1, list(setting.driver.exported)[2]))  # device 2's, from device 0
    copied, followers = await setting.load(workers[0], [*workers[1:], same_device])
    nbytes = LOADED_BLOCKS * workers[0].case.layout.block_bytes
    assert copied == CopiedBytes(4 * nbytes, nbytes)
    assert [follower.failure for follower in followers] == [None] * 4
    assert all(setting.is_filled(worker) for worker in (*workers, same_device))


async def test_handles_are_opened_once_more_and_closed_with_either_worker(
    setting: Setting,
) -> None:
    leader, gone, stays = (await setting.workers())[:3]
    for _ in range(2):
        await setting.load(leader, [gone, stays])
    opened = lambda: sorted(o.context for o in setting.driver.opened.values())  # noqa: E731
    assert opened() == [1, 1, 1, 2, 3, 4]
    await gone.registration.close()
    assert opened() == [1, 1, 3, 4]
    await leader.registration.close()
    assert opened() == [3, 4]
    assert setting.driver.log.count("open") == 6


@pytest.mark.parametrize("name", sorted(kv_layouts.CASES))
async def test_a_lane_knows_how_much_of_a_load_is_left(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    jobs: list[Job] = []
    submit = Lane.submit

    def recorded(lane: Lane, transfer: Transfer, *deadline: float) -> Job:
        jobs.append(submit(lane, transfer, *deadline))
        return jobs[-1]

    workers = await setting.workers(name)
    monkeypatch.setattr(Lane, "submit", recorded)
    await setting.load(workers[0], workers[1:])
    await setting.load(workers[0], [])
    assert [job.bytes_left for job in jobs] == [0, 0]


async def test_two_loads_at_once_share_the_way(setting: Setting) -> None:
    workers = await setting.workers()
    await asyncio.gather(*(setting.load(workers[0], workers[1:]) for _ in range(3)))
    assert all(setting.is_filled(worker) for worker in workers)
    assert setting.driver.log.count("open") == 7


@pytest.mark.parametrize("peers", [True, False])
async def test_the_leaders_event_holds_everybody_back(setting: Setting, peers: bool) -> None:
    workers = await setting.workers()
    if not peers:
        setting.driver.peers.clear()
    task = asyncio.create_task(setting.load(workers[0], workers[1:], EVENT))
    await asyncio.sleep(0.05)
    assert list(setting.driver.events.values()) == [EVENT]
    assert not any(setting.is_filled(worker) for worker in workers)
    setting.driver.ready_events.add(EVENT)
    await task
    assert all(setting.is_filled(worker) for worker in workers)


@pytest.mark.parametrize("peers", [True, False])
async def test_nothing_is_copied_after_the_deadline(setting: Setting, peers: bool) -> None:
    workers = await setting.workers()
    if not peers:
        setting.driver.peers.clear()
    followers = [worker.registration.follower() for worker in workers[1:]]
    with pytest.raises(TransferFailedError, match="in time"):
        await setting.load_for(workers[0], followers, EVENT, 0.02)
    setting.driver.ready_events.add(EVENT)
    await asyncio.sleep(0.02)
    assert not any(setting.is_filled(worker) for worker in workers)


@pytest.mark.parametrize("peers", [True, False])
async def test_a_cancelled_load_is_over_for_all(setting: Setting, peers: bool) -> None:
    workers = await setting.workers()
    if not peers:
        setting.driver.peers.clear()
    task = asyncio.create_task(setting.load(workers[0], workers[1:], EVENT))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    setting.driver.ready_events.add(EVENT)
    for worker in workers:
        await worker.registration.close()
    assert not any(setting.is_filled(worker) for worker in workers)


@pytest.mark.parametrize("peers", [True, False])
async def test_one_who_gives_up_costs_the_others_nothing(setting: Setting, peers: bool) -> None:
    workers = await setting.workers()
    if not peers:
        setting.driver.peers.clear()
    followers = [worker.registration.follower() for worker in workers[1:]]
    await followers[0].give_up()
    task = asyncio.create_task(setting.load_for(workers[0], followers, EVENT))
    await asyncio.sleep(0.02)
    await followers[1].give_up()
    setting.driver.ready_events.add(EVENT)
    copied = await task
    nbytes = LOADED_BLOCKS * workers[0].case.layout.block_bytes
    assert copied == (CopiedBytes(nbytes, nbytes) if peers else CopiedBytes(2 * nbytes, 0))
    assert [setting.is_filled(worker) for worker in workers] == [True, False, False, True]
    assert [follower.failure is None for follower in followers] == [False, False, True]
    await followers[2].give_up()  # too late to matter


class Gate:
    """Stops the copy that would be the ``number``-th between devices, before it happens."""

    def __init__(self, driver: HostDriver, number: int) -> None:
        self.reached = threading.Event()
        self.open = threading.Event()
        self._left = number
        self._driver = driver
        driver.before_copy = self._before

    def _before(self, target: int, source: int, nbytes: int) -> None:
        if None in (self._driver.device_of(target), self._driver.device_of(source)):
            return
        self._left -= 1
        if self._left == 0:
            self.reached.set()
            assert self.open.wait(10)


async def reached(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.reached.wait, 10)


async def stopped_in_the_middle(
    setting: Setting, workers: list[Worker]
) -> tuple[list[LoadFollower], Gate, asyncio.Task[CopiedBytes]]:
    """A load for all that waits in a copy between devices until the gate is open."""
    setting.driver.others_first = False
    gate = Gate(setting.driver, 5)
    followers = [worker.registration.follower() for worker in workers[1:]]
    load = asyncio.create_task(setting.load_for(workers[0], followers))
    await reached(gate)
    return followers, gate, load


async def test_a_worker_that_goes_away_in_the_middle(setting: Setting) -> None:
    workers = await setting.workers()
    followers, gate, load = await stopped_in_the_middle(setting, workers)
    closing = asyncio.create_task(workers[1].registration.close())
    await asyncio.sleep(0.02)
    assert not closing.done()  # a copy into its memory is under way
    gate.open.set()
    await closing  # the driver checks that nothing is queued to what is closed
    await load
    assert followers[0].failure is not None
    assert [follower.failure for follower in followers[1:]] == [None, None]
    for worker in (workers[0], *workers[2:]):
        assert setting.is_filled(worker)
    with pytest.raises(DeviceMemoryError):
        workers[1].registration.follower()


async def test_who_gives_up_in_the_middle_is_not_interrupted(setting: Setting) -> None:
    workers = await setting.workers()
    followers, gate, load = await stopped_in_the_middle(setting, workers)
    giving_up = asyncio.create_task(followers[0].give_up())
    for _ in range(3):
        await asyncio.sleep(0.01)
        giving_up.cancel()
    await asyncio.sleep(0.01)
    assert not giving_up.done()  # a copy into its memory is under way
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await giving_up
    before = [array.copy() for array in workers[1].arrays]
    await load
    assert all((one == two).all() for one, two in zip(before, workers[1].arrays, strict=True))


async def test_a_leader_that_goes_away_in_the_middle(setting: Setting) -> None:
    workers = await setting.workers()
    gate = Gate(setting.driver, 1)
    load = asyncio.create_task(setting.load(workers[0], workers[1:]))
    await reached(gate)
    closing = asyncio.create_task(workers[0].registration.close())
    await asyncio.sleep(0.02)
    gate.open.set()
    await closing
    with pytest.raises(TransferFailedError, match="cancelled"):
        await load


async def test_a_copy_that_cannot_be_queued_fails_its_own_reader_only(setting: Setting) -> None:
    workers = await setting.workers()
    setting.driver.refuse_copies_to.add(list(setting.driver.exported)[1])
    followers = [worker.registration.follower() for worker in workers[1:]]
    await setting.load_for(workers[0], followers)
    assert "a copy to where none can be" in (followers[0].failure or "")
    assert [follower.failure for follower in followers[1:]] == [None, None]
    assert setting.is_filled(workers[0])
    assert setting.is_filled(workers[3])


async def test_a_way_that_nobody_waits_for_is_closed_with_its_worker(setting: Setting) -> None:
    leader, other = (await setting.workers())[:2]
    for _ in range(20):
        load = asyncio.create_task(setting.load(leader, [other]))
        await asyncio.sleep(0)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
    await other.registration.close()
    await leader.registration.close()
    assert sorted(o.context for o in setting.driver.opened.values()) == [3, 4]


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: kv_layouts.CASES["block-major"](13, BLOCKS // 2, 96, PER_CHUNK, 0), "id 39"),
        (lambda: kv_layouts.CASES["block-major"](12, BLOCKS, 96, PER_CHUNK, 0), "1152 bytes"),
    ],
)
async def test_a_follower_that_does_not_fit_is_refused(
    setting: Setting, make: Callable[[], kv_layouts.Case], complaint: str
) -> None:
    leader = await setting.worker(0)
    case = make()
    handle, _ = setting.driver.export(case.allocation_bytes[0], 1)
    allocations = [DeviceAllocation(handle, case.allocation_bytes[0], uuid(1))]
    other = await setting.transfers.register(allocations, {None: case.layout})
    with pytest.raises(ValueError, match=complaint):
        await setting.load_for(leader, [other.follower()])
    assert not setting.is_filled(leader)
    with pytest.raises(ValueError, match="group None of a follower"):
        second = await setting.transfers.register(allocations, {7: case.layout})
        await setting.load_for(leader, [second.follower()])


async def test_nothing_to_copy_is_no_error(setting: Setting) -> None:
    workers = await setting.workers()
    followers = [worker.registration.follower() for worker in workers[1:]]
    assert (
        await workers[0].registration.retrieve(None, [], [], followers=followers) == CopiedBytes()
    )
    assert [follower.failure for follower in followers] == [None] * 3


@pytest.mark.parametrize("count", [1, 2, 5, 31, 32, 33, 64, 100, 1024, 5000])
def test_portions_are_bounded_and_grow_shorter_towards_the_end(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PORTION_BYTES", 128 * 7)
    monkeypatch.setattr(transfer, "LAST_PORTION_BYTES", 32 * 7)
    portions = list(transfer._portions(count, 7))
    assert [block for portion in portions for block in range(count)[portion]] == list(range(count))
    sizes = [portion.stop - portion.start for portion in portions]
    assert max(sizes) <= 128
    assert sizes == sorted(sizes, reverse=True)
    assert min(count, 32) <= sizes[-1] < 64
    assert portions[-1].stop == count
    assert len(sizes) <= -(-count // 128) + 3


@pytest.mark.usefixtures("kernels")
async def test_only_who_passes_on_stages_what_is_not_worth_it_otherwise(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = COST_MODEL._replace(stage_segments_below=0.0, stage_forwarded_below=1.0)
    monkeypatch.setattr(planner, "COST_MODEL", model)
    workers = await setting.workers("block first, layers apart")
    memories = [worker.registration._memory for worker in workers]
    assert not any(group.kernel for memory in memories for group in memory.groups.values())
    await setting.load(workers[0], workers[1:])
    assert all(setting.is_filled(worker) for worker in workers)
    has_kernel = [
        group.kernel is not None for memory in memories for group in memory.groups.values()
    ]
    assert has_kernel == [True] + [False] * (len(has_kernel) - 1)
    assert MOVE_BLOCKS in setting.driver.launched
    for worker in workers:
        await worker.registration.close()
