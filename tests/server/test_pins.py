"""Pins: what they keep, what they may keep, and when they end."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from one_engine import KEYS, PER_CHUNK, Engine
from servers import ServerProcess

import kvdock
from kvdock.errors import InvalidArgument, PinLimit, UnknownNamespace
from kvdock.types import ChunkStatus
from kvdock.v1 import cache_pb2, types_pb2
from kvdock_server.core import Core, Group, GroupKind, Namespace, ReserveStatus, Slot
from kvdock_server.errors import Reason, RequestError
from kvdock_server.index import keeping
from kvdock_server.rpc import verbs
from kvdock_server.steps import at_once
from kvdock_server.tiers.host.slots import PAGE_BYTES, SlotAllocator

SLAB = 16 * PAGE_BYTES
PARTS = 64
"""So many parts of one page fill the pool; pins may keep a quarter."""
QUOTA = PARTS // 4


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def core(clock: Clock) -> Core:
    slots = SlotAllocator(PARTS * PAGE_BYTES, SLAB)
    for slab in range(slots.slabs):
        slots.add(slab * SLAB, SLAB)
    core = Core(slots, clock=clock)
    core.index.register(namespace("n"))
    return core


def namespace(name: str, size: int = PAGE_BYTES) -> Namespace:
    return Namespace(name, 16, 1, (Group(None, GroupKind.FULL_ATTENTION, 0, (size,)),))


def key(*path: int) -> bytes:
    return bytes(path).ljust(32, b"k")


def prompt(first: int, length: int) -> list[bytes]:
    return [key(first, *[1] * (depth + 1)) for depth in range(length)]


def store(
    core: Core,
    keys: Sequence[bytes],
    pin: str | None = None,
    ttl_ms: int = 0,
    *,
    parent: bytes = b"",
    space: str = "n",
) -> int:
    """Stores a whole prompt; how many of its chunks are kept."""
    wish = core.pins.wish(pin, ttl_ms) if pin is not None else None
    outcomes = at_once(core.reserve_in_steps(None, space, None, 0, parent, keys, (), wish))
    for outcome in outcomes:
        assert isinstance(outcome, Slot) or outcome is ReserveStatus.EXISTS, outcome
        if isinstance(outcome, Slot):
            core.seal(outcome)
    return wish.kept if wish else 0


def fill(core: Core, *, rounds: int = 3, space: str = "n") -> None:
    """Others store so much that all goes that may."""
    for number in range(100, 100 + rounds * PARTS // 4):
        store(core, prompt(number, 4), space=space)


def hit(core: Core, keys: Sequence[bytes]) -> int:
    return core.lookup(None, "n", keys, probe=True).chunks


def kept(core: Core) -> tuple[int, int]:
    """How many parts are kept, which is exact however it is counted."""
    found = core.index.keeping
    parts = {part for pin in core.pins.named() for part in pin.until}
    assert found.parts == len(parts)
    assert found.nbytes == len(parts) * PAGE_BYTES == sum(s.kept_bytes for s in core.index.spaces)
    assert all(pin.nbytes == len(pin.until) * PAGE_BYTES for pin in core.pins.named())
    return len(core.pins.named()), len(parts)


def sweep(core: Core) -> None:
    core.sweep()
    at_once(core.backlog.all_steps())


def test_what_is_kept_is_not_evicted_and_what_is_not_goes(core: Core) -> None:
    store(core, prompt(1, 4))
    assert store(core, prompt(2, 4), "a") == 4
    fill(core)
    assert (hit(core, prompt(1, 4)), hit(core, prompt(2, 4))) == (0, 4)
    parts, _ = at_once(core.evict_all_in_steps())
    assert parts
    assert hit(core, prompt(2, 4)) == 4
    assert kept(core) == (1, 4)


def test_a_kept_chunk_keeps_the_chunks_before_it(core: Core) -> None:
    keys = prompt(1, 6)
    store(core, keys[:4])
    assert store(core, keys[4:5], "a", parent=keys[3]) == 1
    assert kept(core) == (1, 5)
    store(core, keys[5:], parent=keys[4])
    fill(core)
    assert hit(core, keys) == 5


def test_a_pin_ends_with_its_time_and_not_before(core: Core, clock: Clock) -> None:
    store(core, prompt(1, 4), "a", 10_000)
    clock.now += 9.9
    sweep(core)
    fill(core)
    assert hit(core, prompt(1, 4)) == 4
    clock.now += 2
    sweep(core)
    assert kept(core) == (0, 0)
    fill(core)
    assert hit(core, prompt(1, 4)) == 0


def test_the_later_end_counts_and_the_prefix_ends_last(core: Core, clock: Clock) -> None:
    keys = prompt(1, 4)
    store(core, keys, "a", 10_000)
    store(core, keys[:3], "a", 1_000)
    clock.now += 5
    store(core, keys[2:3], "a", 10_000, parent=keys[1])
    clock.now += 7
    sweep(core)
    assert kept(core) == (1, 3)
    assert core.pins.named()[0].due.keys() == {keeping.keep_until(105.0, 10.0)}
    clock.now += 10
    sweep(core)
    assert kept(core) == (0, 0)


def test_two_pins_keep_a_part_until_both_are_gone(core: Core) -> None:
    store(core, prompt(1, 4), "a")
    store(core, prompt(1, 4), "b")
    assert kept(core) == (2, 4)
    assert at_once(core.pins.unpin_in_steps(core.pins.named(None, "a"))) == (0, 0)
    fill(core)
    assert hit(core, prompt(1, 4)) == 4
    assert at_once(core.pins.unpin_in_steps(core.pins.named("n", "b"))) == (4, 4 * PAGE_BYTES)
    assert at_once(core.pins.unpin_in_steps(core.pins.named("n", "b"))) == (0, 0)
    fill(core)
    assert hit(core, prompt(1, 4)) == 0


def test_beyond_the_quota_chunks_are_stored_and_not_kept(core: Core) -> None:
    assert store(core, prompt(1, QUOTA - 1), "a") == QUOTA - 1
    assert store(core, prompt(2, 4), "a") == 1
    assert hit(core, prompt(2, 4)) == 4
    assert kept(core) == (1, QUOTA)
    assert core.index.totals.refused_keeps == 3
    # What is there already costs nothing.
    assert store(core, prompt(1, QUOTA - 1), "b") == QUOTA - 1
    assert core.index.totals.refused_keeps == 3
    at_once(core.pins.unpin_in_steps(core.pins.named(None, "a")))
    assert store(core, prompt(2, 4), "a") == 1


def test_a_pin_by_hand_is_for_all_or_nothing(core: Core) -> None:
    store(core, prompt(1, QUOTA + 1))
    with pytest.raises(RequestError, match="pin_share") as refused:
        at_once(core.pins.pin_in_steps("n", prompt(1, QUOTA + 1), core.pins.wish("a", 0)))
    assert refused.value.reason is Reason.PIN_LIMIT
    assert kept(core) == (0, 0)
    wish = core.pins.wish("a", 0)
    at_once(core.pins.pin_in_steps("n", prompt(1, QUOTA), wish))
    assert (wish.kept, kept(core)) == (QUOTA, (1, QUOTA))
    assert core.index.pinned_parts == 0, "no lock is left"


def test_a_pin_by_its_last_chunk_keeps_the_whole_prompt(core: Core) -> None:
    store(core, prompt(1, 5))
    wish = core.pins.wish("", 0)
    at_once(core.pins.pin_in_steps("n", prompt(1, 5)[3:4], wish))
    assert (wish.pin, wish.kept, kept(core)) == ("default", 1, (1, 4))


def test_a_miss_pins_nothing(core: Core) -> None:
    wish = core.pins.wish("a", 0)
    at_once(core.pins.pin_in_steps("n", prompt(1, 4), wish))
    assert (wish.kept, kept(core)) == (0, (0, 0))


def test_clear_ends_the_pins_of_its_namespace_only(core: Core) -> None:
    core.index.register(namespace("other"))
    store(core, prompt(1, 4), "a")
    store(core, prompt(1, 3), "a", space="other")
    core.clear("n")
    assert kept(core) == (1, 3)
    at_once(core.backlog.all_steps())
    assert kept(core) == (1, 3)
    assert store(core, prompt(1, 4), "a") == 4
    core.clear_all()
    at_once(core.backlog.all_steps())
    assert kept(core) == (0, 0)
    assert not core.index.sealed_bytes


def test_what_is_evicted_while_it_is_pinned_is_not_kept(core: Core) -> None:
    store(core, prompt(1, 8))
    wish = core.pins.wish("a", 0)
    steps = core.pins.pin_in_steps("n", prompt(1, 8), wish)
    for _ in itertools.islice(steps, 3):
        pass
    assert at_once(core.evict_in_steps(4 * PAGE_BYTES)) == (4, 4 * PAGE_BYTES)
    at_once(steps)
    assert (wish.kept, kept(core)) == (4, (1, 4))
    steps = core.pins.pin_in_steps("n", prompt(1, 8), wish := core.pins.wish("b", 0))
    next(steps)
    core.clear("n")
    at_once(steps)
    assert (wish.kept, kept(core)) == (0, (0, 0))


def test_a_clear_between_the_steps_of_a_store(core: Core) -> None:
    wish = core.pins.wish("a", 0)
    steps = core.reserve_in_steps(None, "n", None, 0, b"", prompt(1, 8), (), wish)
    for _ in itertools.islice(steps, 4):
        pass
    core.clear("n")
    assert store(core, prompt(2, 2), "a") == 2
    steps.close()
    at_once(core.backlog.all_steps())
    assert kept(core) == (1, 2)


def test_the_window_of_a_kept_prompt_is_not_evicted(core: Core) -> None:
    window = Group(1, GroupKind.SLIDING_WINDOW, 17, (PAGE_BYTES,))
    core.index.register(
        Namespace("h", 16, 1, (Group(0, GroupKind.FULL_ATTENTION, 0, (PAGE_BYTES,)), window))
    )
    keys = prompt(1, 4)
    for group_idx in (0, 1):
        for slot in at_once(core.reserve_in_steps(None, "h", group_idx, 0, b"", keys)):
            assert isinstance(slot, Slot)
            core.seal(slot)
    at_once(core.pins.pin_in_steps("h", keys, core.pins.wish("a", 0)))
    assert core.index.keeping.parts == 4 + 1, "a hit needs the window's last part"
    assert at_once(core.evict_all_in_steps()) == (3, 3 * PAGE_BYTES)
    assert core.lookup(None, "h", keys, probe=True).chunks == 4


def test_a_store_that_fails_keeps_nothing(core: Core) -> None:
    wish = core.pins.wish("a", 0)
    (slot,) = at_once(core.reserve_in_steps(None, "n", None, 0, b"", [key(1)], (), wish))
    assert isinstance(slot, Slot)
    assert kept(core) == (1, 1)
    core.index.abort(slot)
    assert kept(core) == (0, 0)


def test_windows_for_another_size_leave_what_is_kept(core: Core) -> None:
    """Chunks of another size evict whole slabs, but none in which something is kept."""
    core.index.register(namespace("big", SLAB))
    store(core, prompt(1, 4), "a")
    for number in range(2, 17):
        store(core, prompt(number, 4))
    for number in range(PARTS):
        at_once(core.reserve_in_steps(None, "big", None, 0, b"", [key(number)]))
    assert hit(core, prompt(1, 4)) == 4
    assert kept(core) == (1, 4)


def test_kept_chunks_are_locked_and_freed_like_others(core: Core) -> None:
    store(core, prompt(1, 4), "a")
    found = core.lookup(None, "n", prompt(1, 4))
    assert core.index.pinned_parts == 4
    assert found.lease is not None
    at_once(core.leases.release_in_steps(found.lease))
    assert core.index.pinned_parts == 0
    at_once(core.pins.unpin_in_steps(core.pins.named()))
    fill(core)
    assert hit(core, prompt(1, 4)) == 0


def test_there_are_only_so_many_pins(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeping, "MAX_PINS", 2)
    monkeypatch.setattr(keeping, "MAX_ENTRIES", 10)
    assert store(core, prompt(1, 4), "a") == 4
    assert store(core, prompt(1, 4), "b") == 4
    assert store(core, prompt(1, 4), "c") == 0
    with pytest.raises(RequestError) as refused:
        at_once(core.pins.pin_in_steps("n", prompt(1, 4), core.pins.wish("c", 0)))
    assert refused.value.reason is Reason.PIN_LIMIT
    assert store(core, prompt(2, 4), "b") == 2
    assert kept(core) == (2, 6)


def test_an_unpin_between_the_steps_of_a_store_counts(core: Core) -> None:
    wish = core.pins.wish("a", 0)
    steps = core.reserve_in_steps(None, "n", None, 0, b"", prompt(1, 8), (), wish)
    for _ in itertools.islice(steps, 4):
        pass
    at_once(core.pins.unpin_in_steps(core.pins.named()))
    with pytest.raises(StopIteration):
        while True:
            next(steps)
    assert wish.kept < 8
    assert kept(core) == (0, 0)


@pytest.mark.parametrize(
    ("pin", "ttl_ms", "field"),
    [
        ("two words", 0, "pin"),
        ("x" * 129, 0, "pin"),
        ("ä", 0, "pin"),
        ("a", 2_592_000_001, "ttl_ms"),
    ],
)
def test_names_and_times_out_of_their_limits_are_refused(
    core: Core, pin: str, ttl_ms: int, field: str
) -> None:
    with pytest.raises(RequestError) as refused:
        core.pins.wish(pin, ttl_ms)
    assert refused.value.metadata["field"] == field


async def test_a_store_in_server_mode_keeps(engine: Engine) -> None:
    request = cache_pb2.StoreRequest(
        namespace="model",
        keys=KEYS,
        block_ids=range(len(KEYS) * PER_CHUNK),
        keep=types_pb2.Keep(pin="mine", ttl_ms=1_000),
        priority=types_pb2.EVICTION_PRIORITY_HIGH,
    )
    stored = await verbs.store(engine.service, engine.workers[0].session, request)
    assert stored.kept_chunks == len(KEYS)
    assert engine.core.index.keeping.parts == len(KEYS)
    (space,) = engine.core.index.spaces
    assert set(space.priorities.values()) == {1}


# Over the wire


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as folder:
        process = ServerProcess(Path(folder) / "s.sock", "--memory", "16MiB", "--pin-share", "0.5")
        try:
            yield process
        finally:
            process.stop()


SHARD = 1 << 20


@pytest.fixture
def client(server: Any) -> Any:
    with kvdock.Client(server.address) as client:
        client.register_namespace(kvdock.Namespace("w", 16, 1, (kvdock.Group((SHARD,)),)))
        yield client
        client.clear("w")


def put(client: kvdock.Client, keys: list[bytes], keep: kvdock.Keep | None = None) -> None:
    statuses = client.put("w", keys, [bytes(SHARD)] * len(keys), keep=keep)
    assert set(statuses) <= {ChunkStatus.STORED, ChunkStatus.EXISTS}


def test_a_put_that_keeps(client: kvdock.Client) -> None:
    put(client, prompt(1, 3), kvdock.Keep("mine", 600))
    put(client, prompt(2, 3))
    totals = client.status().pins
    assert (totals.pins, totals.parts, totals.bytes) == (1, 3, 3 * SHARD)
    assert totals.limit_bytes == 8 * SHARD
    (pin,) = client.pins()
    assert (pin.namespace, pin.pin, pin.parts, pin.nbytes) == ("w", "mine", 3, 3 * SHARD)
    assert pin.first_end is not None
    assert pin.last_end is not None
    assert 595 < pin.first_end <= pin.last_end < 640
    assert [part.pins for part in client.chunks("w")].count(1) == 3
    assert client.evict(all=True).parts == 3
    assert client.lookup("w", prompt(1, 3), probe=True).chunks == 3
    ended = client.unpin("mine")
    assert (ended.pins, ended.parts, ended.nbytes) == (1, 3, 3 * SHARD)
    assert client.evict(all=True).parts == 3


def test_a_pin_outlives_the_session_that_stored(client: kvdock.Client) -> None:
    with client.session("engine", role="worker") as session:
        session.register_memory("w", mode=kvdock.TransferMode.SHARED)
        reservation = session.reserve("w", prompt(1, 2), keep=kvdock.Keep("held"))
        assert reservation.kept_chunks == 2
        session.commit(reservation)
    assert client.evict(all=True).parts == 0
    (pin,) = client.pins("w")
    assert (pin.pin, pin.parts, pin.first_end, pin.last_end) == ("held", 2, None, None)


def test_pins_by_hand(client: kvdock.Client) -> None:
    put(client, prompt(1, 9))
    with pytest.raises(PinLimit, match="8388608"):
        client.pin("w", prompt(1, 9))
    assert client.pin("w", prompt(1, 8)) == 8
    assert client.pin("w", prompt(3, 2)) == 0
    assert [pin.pin for pin in client.pins()] == ["default"]
    assert client.unpin(all=True).parts == 8
    with pytest.raises(UnknownNamespace):
        client.pin("nowhere", prompt(1, 1))


def test_what_says_nothing_or_too_much_is_refused(client: kvdock.Client) -> None:
    put(client, prompt(1, 1), kvdock.Keep())
    with pytest.raises(InvalidArgument):
        client.unpin()
    with pytest.raises(InvalidArgument, match="pin ''"):
        client.unpin("")
    with pytest.raises(InvalidArgument, match="ttl_ms"):
        client.pin("w", prompt(1, 1), kvdock.Keep("a", 86_400 * 31))
    with pytest.raises(InvalidArgument, match="-1 seconds"):
        client.pin("w", prompt(1, 1), kvdock.Keep("a", -1))
    with pytest.raises(InvalidArgument, match="two words"):
        client.put("w", prompt(2, 1), [bytes(SHARD)], keep=kvdock.Keep("two words"))
    assert client.lookup("w", prompt(2, 1), probe=True).chunks == 0
    assert [pin.pin for pin in client.pins()] == ["default"]


async def test_the_same_in_asyncio(server: Any, client: kvdock.Client) -> None:
    async with kvdock.aio.Client(server.address) as other:
        await other.put("w", prompt(1, 1), [bytes(SHARD)], keep=kvdock.Keep("a"))
        assert await other.pin("w", prompt(1, 1), kvdock.Keep("b", 5)) == 1
        assert [pin.pin for pin in await other.pins()] == ["a", "b"]
        assert (await other.unpin("a", namespace="w")).pins == 1
        assert (await other.unpin(all=True)).parts == 1
