"""What is read and written is let go of on every way out."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest

from kvdock_server.core import Core, Group, GroupKind, LeaseRange, Namespace, Role, Writing
from kvdock_server.steps import at_once
from kvdock_server.tiers.host.slots import PAGE_BYTES, SlotAllocator

KEYS = [bytes([n + 1]) * 32 for n in range(4)]


class WayOut(BaseException):
    """As a cancelled call leaves."""


@pytest.fixture
def core() -> Core:
    slots = SlotAllocator(16 * PAGE_BYTES, PAGE_BYTES)
    slots.add(0, 16 * PAGE_BYTES)
    core = Core(slots)
    group = Group(None, GroupKind.FULL_ATTENTION, 0, (PAGE_BYTES,))
    core.index.register(Namespace("model", 16, 1, (group,)))
    return core


def write(core: Core) -> AbstractContextManager[Writing]:
    return core.writing(at_once(core.reserve_in_steps(None, "model", None, 0, b"", KEYS)))


def test_a_write_gives_back_what_it_has_not_sealed(core: Core) -> None:
    with pytest.raises(WayOut), write(core) as writing:
        assert writing.seal(0)
        assert core.index.reserved_bytes == 3 * PAGE_BYTES
        raise WayOut
    assert not writing.open
    assert (core.index.reserved_bytes, core.index.sealed_bytes) == (0, PAGE_BYTES)
    assert core.lookup(None, "model", KEYS, probe=True).chunks == 1


def test_a_write_that_ends_by_itself_gives_back_the_rest_too(core: Core) -> None:
    with write(core) as writing:
        for chunk in range(3):
            writing.seal(chunk)
    assert core.index.reserved_bytes == 0
    assert core.lookup(None, "model", KEYS, probe=True).chunks == 3


def test_a_reading_unpins_and_frees_the_locks_of_its_readers(core: Core) -> None:
    with write(core) as writing:
        for chunk in range(4):
            writing.seal(chunk)
    scheduler = core.open_session(engine_id="one", role=Role.SCHEDULER)
    lease = core.lookup(scheduler, "model", KEYS, readers=3).lease
    assert lease is not None
    asked = LeaseRange(lease.lease_id, None, 1, 3)
    locked = at_once(core.locate_in_steps(scheduler, asked, shard=0, reader=0))
    assert list(locked.located) == [0, 1]
    assert locked.are_held_by(2)
    assert not locked.are_held_by(3)
    with pytest.raises(WayOut), locked.reading([0, 2]):
        core.clear("model")
        assert core.index.sealed_bytes
        raise WayOut
    assert lease.locks == 4 + 2 + 2
    again = at_once(core.locate_in_steps(scheduler, asked, shard=0, reader=2))
    assert again.shards == [None, None]
    core.close_session(scheduler)
    assert (core.index.pinned_parts, core.index.sealed_bytes) == (0, 0)


def test_a_range_without_end_ends_with_what_is_locked(core: Core) -> None:
    with write(core) as writing:
        for chunk in range(4):
            writing.seal(chunk)
    scheduler = core.open_session(engine_id="one", role=Role.SCHEDULER)
    lease = core.lookup(scheduler, "model", KEYS).lease
    assert lease is not None
    asked = LeaseRange(lease.lease_id, None, 1)
    locked = at_once(core.locate_in_steps(scheduler, asked, shard=0, reader=0))
    assert locked.range == LeaseRange(lease.lease_id, None, 1, 4)
