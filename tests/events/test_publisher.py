"""What is announced, when, and in which order: against a model, and the corners one by one."""

from __future__ import annotations

import hashlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from kvdock.v1 import events_pb2 as pb
from kvdock.v1 import types_pb2
from kvdock_server.core import Core
from kvdock_server.events import wire
from kvdock_server.events.event import Medium
from kvdock_server.events.log import Limits
from kvdock_server.index.chunk import Part
from kvdock_server.index.index import _MAX_NAMESPACES, Slot
from kvdock_server.index.namespace import Group, GroupKind, Namespace
from kvdock_server.rpc.events import _filter
from kvdock_server.steps import at_once
from kvdock_server.tiers.host.slots import PAGE_BYTES, SlotAllocator

SLAB = 4 * PAGE_BYTES
ROOMY = Limits(1 << 30, 1 << 20)


def key(*path: int) -> bytes:
    return hashlib.sha256(bytes(path)).digest()


def prompt(*path: int) -> list[bytes]:
    return [key(*path[: length + 1]) for length in range(len(path))]


def full(group_idx: int | None = None, world: int = 1) -> Group:
    return Group(group_idx, GroupKind.FULL_ATTENTION, 0, (PAGE_BYTES,) * world)


def window(group_idx: int) -> Group:
    return Group(group_idx, GroupKind.SLIDING_WINDOW, 20, (2 * PAGE_BYTES,))


def make_core(*groups: Group, slots: int = 16, world: int = 1) -> Core:
    allocator = SlotAllocator(slots // 4 * SLAB, SLAB)
    allocator.add(0, allocator.limit_bytes)
    core = Core(allocator, event_log=ROOMY, clock=lambda: 0.0)
    core.index.register(Namespace("n", 16, world, groups or (full(),)))
    return core


def data_of(keys: list[bytes]) -> list[bytes]:
    """Event data that tells to which chunk it belongs."""
    return [types_pb2.ChunkEventData(block_hashes=[one]).SerializeToString() for one in keys]


def reserve(core: Core, keys: list[bytes], parent: bytes = b"", **where: int) -> list[Slot]:
    outcomes = at_once(
        core.reserve_in_steps(
            None, "n", where.get("group_idx"), where.get("shard", 0), parent, keys, data_of(keys)
        )
    )
    return [outcome for outcome in outcomes if isinstance(outcome, Slot)]


def events_of(core: Core, after: int = 0) -> list[pb.Event]:
    """The log as readers get it."""
    assert core.events is not None
    found = core.events.log.read(after, 1 << 30, 1 << 40)
    assert found is not None
    message = pb.StreamKVEventsResponse.FromString(wire.batch(1, 0, 0, found))
    return list(message.batch.events)


def told(events: list[pb.Event]) -> list[tuple[str, bytes]]:
    return [
        (event.WhichOneof("event"), getattr(event, event.WhichOneof("event")).key)
        for event in events
    ]


def test_a_child_waits_for_its_parent() -> None:
    core = make_core()
    first, second, third = reserve(core, prompt(1, 2, 3))
    core.seal(third)
    core.seal(second)
    assert events_of(core) == []
    core.seal(first)
    assert told(events_of(core)) == [("stored", one) for one in prompt(1, 2, 3)]


def test_a_child_waits_for_a_parent_that_is_stored_anew() -> None:
    core = make_core()
    first, second = reserve(core, prompt(1, 2))
    core.seal(second)
    core.index.abort(first)
    assert events_of(core) == []
    (first,) = reserve(core, prompt(1))
    core.seal(first)
    assert told(events_of(core)) == [("stored", one) for one in prompt(1, 2)]


def test_what_waited_in_vain_is_removed_in_silence() -> None:
    core = make_core()
    first, second = reserve(core, prompt(1, 2))
    core.seal(second)
    core.index.abort(first)
    at_once(core.evict_all_in_steps())
    assert core.index.sealed_bytes == 0
    assert events_of(core) == []


def test_a_part_is_announced_with_its_last_shard_and_once() -> None:
    core = make_core(full(world=2), world=2)
    (left,) = reserve(core, prompt(1))
    core.seal(left)
    assert events_of(core) == []
    (right,) = reserve(core, prompt(1), shard=1)
    core.seal(right)
    assert told(events_of(core)) == [("stored", key(1))]


def test_removal_tells_the_hashes_that_were_announced() -> None:
    for read_before in (True, False):
        core = make_core()
        (slot,) = reserve(core, prompt(1))
        core.seal(slot)
        if read_before:
            events_of(core)
        at_once(core.evict_all_in_steps())
        gone = events_of(core)[-1].removed
        assert (gone.key, list(gone.block_hashes)) == (key(1), [key(1)])


def test_clear_is_one_event_and_what_was_being_written_then_never_appears() -> None:
    core = make_core()
    *done, writing = reserve(core, prompt(1, 2, 3))
    for slot in done:
        core.seal(slot)
    core.clear_all()
    core.seal(writing)
    assert [event.WhichOneof("event") for event in events_of(core)] == [
        "stored",
        "stored",
        "cleared",
    ]
    core.clear_all()
    assert len(events_of(core)) == 3


def test_groups_are_apart_and_evicting_one_leaves_the_other() -> None:
    core = make_core(full(0), window(1))
    for group_idx in (1, 0):
        (slot,) = reserve(core, prompt(1), group_idx=group_idx)
        core.seal(slot)
    at_once(core.evict_in_steps(1))
    events = events_of(core)
    assert [event.stored.group_idx for event in events[:2]] == [1, 0]
    assert [event.stored.window_tokens for event in events[:2]] == [20, 0]
    assert (events[2].removed.group_idx, len(events)) == (1, 3)


def test_absent_group_is_not_group_0() -> None:
    for group_idx in (None, 0):
        core = make_core(full(group_idx))
        (slot,) = reserve(core, prompt(1), **({} if group_idx is None else {"group_idx": 0}))
        core.seal(slot)
        at_once(core.evict_all_in_steps())
        stored, removed = events_of(core)
        assert stored.stored.HasField("group_idx") == (group_idx is not None)
        assert removed.removed.HasField("group_idx") == (group_idx is not None)


def test_each_medium_is_announced_for_itself() -> None:
    core = make_core()
    first, second = reserve(core, prompt(1, 2))
    for slot in (first, second):
        core.seal(slot)
    publisher = core.events
    assert publisher is not None
    # A child waits for its parent on its own medium.
    publisher.stored(second.part, Medium.STORAGE)
    assert len(events_of(core)) == 2
    publisher.stored(first.part, Medium.STORAGE)
    on_disk = events_of(core, 2)
    assert told(on_disk) == [("stored", one) for one in prompt(1, 2)]
    assert {event.stored.medium for event in on_disk} == {pb.MEDIUM_STORAGE}
    # The same is told of it there.
    assert [event.stored.data for event in on_disk] == [
        event.stored.data for event in events_of(core)[:2]
    ]

    at_once(core.evict_all_in_steps())
    gone = events_of(core, 4)
    assert told(gone) == [("removed", one) for one in reversed(prompt(1, 2))]
    assert {event.removed.medium for event in gone} == {pb.MEDIUM_CPU}
    left = wire.snapshot(1, 0, publisher.snapshot(), last=True)
    assert [
        (event.stored.key, event.stored.medium)
        for event in pb.StreamKVEventsResponse.FromString(left).snapshot.stored
    ] == [(one, pb.MEDIUM_STORAGE) for one in prompt(1, 2)]

    publisher.removed(second.part, Medium.STORAGE)
    (event,) = events_of(core, 6)
    assert (event.removed.medium, list(event.removed.block_hashes)) == (
        pb.MEDIUM_STORAGE,
        [key(1, 2)],
    )
    core.clear("n")
    assert events_of(core, 7)[0].WhichOneof("event") == "cleared"
    assert publisher.snapshot() == []


def test_a_filter_lets_one_medium_through_and_every_clearing() -> None:
    core = make_core()
    (slot,) = reserve(core, prompt(1))
    core.seal(slot)
    assert core.events is not None
    core.events.stored(slot.part, Medium.STORAGE)
    core.clear("n")
    found = core.events.log.read(0, 10, 1 << 20)
    assert found is not None
    for medium, numbers in ((pb.MEDIUM_CPU, [1, 3]), (pb.MEDIUM_STORAGE, [2, 3])):
        passes = _filter(pb.StreamKVEventsRequest(medium=medium))
        assert passes is not None
        assert [event.number for event in filter(passes, found)] == numbers
    assert _filter(pb.StreamKVEventsRequest()) is None


def test_messages_are_what_protobuf_would_write() -> None:
    core = make_core(full(0))
    for slot in reserve(core, prompt(1, 2), group_idx=0):
        core.seal(slot)
    at_once(core.evict_all_in_steps())
    assert core.events is not None
    events = core.events.log.read(0, 100, 1 << 20)
    assert events is not None
    encoded = wire.batch(1 << 63, 4, 7, events)
    message = pb.StreamKVEventsResponse.FromString(encoded)
    assert message.SerializeToString() == encoded
    assert (message.cursor.epoch, message.cursor.sequence) == (1 << 63, 4)
    assert [event.sequence for event in message.batch.events] == [1, 2, 3, 4]
    encoded = wire.snapshot(1, 2, events[:2], last=True)
    message = pb.StreamKVEventsResponse.FromString(encoded)
    assert message.SerializeToString() == encoded
    assert message.snapshot.last


def test_nothing_is_kept_of_what_is_gone() -> None:
    core = make_core(full(0), window(1))
    assert core.events is not None
    for _ in range(3):
        for group_idx in (0, 1):
            slots = reserve(core, prompt(1, 2), group_idx=group_idx)
            for slot in slots[1:]:
                core.seal(slot)
            core.index.abort(slots[0])
        at_once(core.evict_all_in_steps())
        (state,) = core.events._known.values()
        assert state.data == {}
        for there in state.media.values():
            assert (there.announced, there.waiting) == ({}, {})
    reserve(core, prompt(1, 2), group_idx=0)
    core.clear_all()
    assert not core.events._known
    for number in range(_MAX_NAMESPACES + 5):
        name = f"n{number}"
        core.index.register(Namespace(name, 16, 1, (full(0),)))
        (slot,) = at_once(
            core.reserve_in_steps(None, name, 0, 0, b"", prompt(1), data_of(prompt(1)))
        )
        assert isinstance(slot, Slot)
        core.seal(slot)
        at_once(core.evict_all_in_steps())
    assert len(core.events._known) <= _MAX_NAMESPACES


class EventsMachine(RuleBasedStateMachine):
    """Random use of three namespace shapes; the events must add up to what is there."""

    slots = Bundle("slots")

    @initialize(shape=st.sampled_from(["one", "sharded", "hybrid"]))
    def setup(self, shape: str) -> None:
        self.world = 2 if shape == "sharded" else 1
        groups = [full(0), window(1)] if shape == "hybrid" else [full(world=self.world)]
        self.core = make_core(*groups, world=self.world)
        self.group_ids = [group.group_idx for group in groups]
        self.mirror: dict[tuple[bytes, int | None], pb.BlockStored] = {}
        self.seen = 0

    paths = st.lists(st.integers(0, 2), min_size=1, max_size=5)

    @rule(target=slots, path=paths, skip=st.integers(0, 3), where=st.integers(0, 3))
    def reserve(self, path: list[int], skip: int, where: int) -> object:
        keys = prompt(*path)
        skip = min(skip, len(keys) - 1)
        outcomes = at_once(
            self.core.reserve_in_steps(
                None,
                "n",
                self.group_ids[where % len(self.group_ids)],
                where % self.world,
                keys[skip - 1] if skip else b"",
                keys[skip:],
                data_of(keys[skip:]),
            )
        )
        return multiple(*[outcome for outcome in outcomes if isinstance(outcome, Slot)])

    @rule(slot=consumes(slots))
    def seal(self, slot: Slot) -> None:
        self.core.seal(slot)

    @rule(slot=consumes(slots))
    def abort(self, slot: Slot) -> None:
        self.core.index.abort(slot)

    @rule(path=paths)
    def look_up(self, path: list[int]) -> None:
        self.core.lookup(None, "n", prompt(*path))

    @rule(nbytes=st.integers(1, 3 * PAGE_BYTES))
    def evict(self, nbytes: int) -> None:
        at_once(self.core.evict_in_steps(nbytes))

    @rule()
    def clear(self) -> None:
        self.core.clear("n")

    @rule()
    def give_up(self) -> None:
        self.core.index.give_up_overdue(1e9)

    @invariant()
    def events_add_up_to_what_can_be_found(self) -> None:
        for event in events_of(self.core, self.seen):
            self.seen += 1
            assert event.sequence == self.seen
            self.apply(event)
        space = self.core.index.space("n")
        expected = {
            (chunk.key, self.group_ids[part.position])
            for chunk in space.chunks.values()
            for part in chunk.parts
            if part is not None and reachable(part)
        }
        assert self.mirror.keys() == expected
        self.a_snapshot_is_what_is_there_parents_first()

    def a_snapshot_is_what_is_there_parents_first(self) -> None:
        assert self.core.events is not None
        encoded = wire.snapshot(1, 0, self.core.events.snapshot(["n"]), last=True)
        seen: dict[tuple[bytes, int | None], pb.BlockStored] = {}
        for event in pb.StreamKVEventsResponse.FromString(encoded).snapshot.stored:
            identity = self.identity(event.stored)
            parent = (event.stored.parent_key, identity[1])
            assert event.stored.kind != 1 or not event.stored.parent_key or parent in seen
            seen[identity] = event.stored
        assert seen == self.mirror
        assert self.core.events.snapshot(["other"]) == []

    def apply(self, event: pb.Event) -> None:
        match event.WhichOneof("event"):
            case "stored":
                identity = self.identity(event.stored)
                assert identity not in self.mirror
                parent = (event.stored.parent_key, identity[1])
                assert (
                    event.stored.kind != 1 or not event.stored.parent_key or parent in self.mirror
                )
                assert list(event.stored.data.block_hashes) == [event.stored.key]
                self.mirror[identity] = event.stored
            case "removed":
                identity = self.identity(event.removed)
                del self.mirror[identity]
                assert list(event.removed.block_hashes) == [event.removed.key]
                assert not any(
                    (one.parent_key, group_idx) == identity and one.kind == 1
                    for (_, group_idx), one in self.mirror.items()
                )
            case "cleared":
                assert self.mirror
                self.mirror.clear()

    @staticmethod
    def identity(event: pb.BlockStored | pb.BlockRemoved) -> tuple[bytes, int | None]:
        return event.key, event.group_idx if event.HasField("group_idx") else None


def reachable(part: Part) -> bool:
    """True if the part and, in a full-attention group, all before it are visible."""
    group = part.chunk.space.namespace.groups[part.position]
    if group.kind is not GroupKind.FULL_ATTENTION:
        return part.visible
    chunk = part.chunk
    while chunk is not None:
        above = chunk.parts[part.position]
        if above is None or not above.visible:
            return False
        chunk = chunk.parent  # type: ignore[assignment]
    return True


EventsMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestEventsMachine = EventsMachine.TestCase
