"""Priority in eviction: what is evicted first, of parts that were used at about the same time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvdock_server.core import Core, Group, GroupKind, Namespace, Priority, ReserveStatus, Slot
from kvdock_server.index.policies import POLICIES
from kvdock_server.steps import at_once
from kvdock_server.tiers.host.slots import PAGE_BYTES, SlotAllocator

PARTS = 64
LOW, NORMAL, HIGH = Priority.LOW, Priority.NORMAL, Priority.HIGH


@pytest.fixture(params=list(POLICIES))
def core(request: pytest.FixtureRequest) -> Core:
    slots = SlotAllocator(PARTS * PAGE_BYTES, PARTS * PAGE_BYTES)
    slots.add(0, PARTS * PAGE_BYTES)
    core = Core(slots, policy=POLICIES[request.param](PARTS * PAGE_BYTES))
    core.index.register(
        Namespace("n", 16, 1, (Group(None, GroupKind.FULL_ATTENTION, 0, (PAGE_BYTES,)),))
    )
    return core


def key(number: int, depth: int = 0) -> bytes:
    return bytes([number // 256, number % 256, depth]).ljust(32, b"k")


def prompt(number: int, length: int = 1) -> list[bytes]:
    return [key(number, depth) for depth in range(length)]


def store(core: Core, keys: Sequence[bytes], priority: Priority = NORMAL) -> None:
    outcomes = at_once(core.reserve_in_steps(None, "n", None, 0, b"", keys, (), None, priority))
    for outcome in outcomes:
        assert isinstance(outcome, Slot) or outcome is ReserveStatus.EXISTS, outcome
        if isinstance(outcome, Slot):
            core.seal(outcome)


def there(core: Core, number: int) -> bool:
    return core.lookup(None, "n", prompt(number), probe=True).chunks == 1


def fill(core: Core, first: int, count: int) -> None:
    for number in range(first, first + count):
        store(core, prompt(number))


def test_low_goes_before_what_was_used_earlier(core: Core) -> None:
    fill(core, 0, PARTS - 4)
    for number in range(500, 504):
        store(core, prompt(number), LOW)
    fill(core, 100, 4)
    assert [there(core, number) for number in range(500, 504)] == [False] * 4
    assert there(core, 0)
    fill(core, 104, 1)
    assert not there(core, 0)


def test_low_that_a_lookup_has_hit_is_as_normal(core: Core) -> None:
    fill(core, 0, 10)
    store(core, prompt(500), LOW)
    store(core, prompt(501), LOW)
    found = core.lookup(None, "n", prompt(500))
    assert found.lease is not None
    at_once(core.leases.release_in_steps(found.lease))
    fill(core, 100, PARTS - 10 + 3)
    # One of low priority went, and four of normal that were used before.
    assert (there(core, 500), there(core, 501)) == (True, False)
    assert [there(core, number) for number in range(6)] == [False] * 4 + [True] * 2


def test_high_stays_for_one_filling_longer(core: Core) -> None:
    store(core, prompt(500), HIGH)
    store(core, prompt(501))
    fill(core, 0, 2 * PARTS - 6)
    assert (there(core, 500), there(core, 501)) == (True, False)
    fill(core, 200, 12)
    assert not there(core, 500), "but not for ever"


def test_a_higher_priority_is_taken_and_a_lower_is_not(core: Core) -> None:
    store(core, prompt(500), LOW)
    store(core, prompt(500))
    store(core, prompt(501))
    store(core, prompt(501), HIGH)
    store(core, prompt(502), HIGH)
    store(core, prompt(502), LOW)
    store(core, prompt(503), LOW)
    fill(core, 0, PARTS - 3)
    assert [there(core, number) for number in range(500, 504)] == [True, True, True, False]
    fill(core, 100, 3)
    assert [there(core, number) for number in range(500, 504)] == [False, True, True, False]


def test_a_prompt_of_low_priority_is_evicted_from_its_end(core: Core) -> None:
    store(core, prompt(500, 8), LOW)
    fill(core, 0, PARTS - 4)
    assert core.lookup(None, "n", prompt(500, 8), probe=True).chunks == 4


def test_nothing_is_remembered_of_parts_that_left(core: Core) -> None:
    for number in range(4 * PARTS):
        store(core, prompt(number), HIGH if number % 2 else LOW)
    (space,) = core.index.spaces
    assert len(space.priorities) <= PARTS
    at_once(core.evict_all_in_steps())
    assert not space.priorities
