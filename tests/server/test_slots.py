"""The slot allocator against a model that knows only which bytes are taken."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvdock_server.tiers.host.slots import PAGE_BYTES, SlotAllocator

SLAB = 16 * PAGE_BYTES
SIZES = [1, PAGE_BYTES, 3 * PAGE_BYTES, 5 * PAGE_BYTES + 1, 9 * PAGE_BYTES, 20 * PAGE_BYTES]

operations = st.lists(
    st.one_of(
        st.tuples(st.just("allocate"), st.sampled_from(SIZES)),
        st.tuples(st.just("allocate_anywhere"), st.sampled_from(SIZES)),
        st.tuples(st.just("free"), st.integers(0, 200)),
        st.tuples(st.just("claim"), st.integers(0, 7)),
        st.tuples(st.just("release"), st.integers(0, 7)),
        st.tuples(st.just("start_run"), st.sampled_from(SIZES)),
    ),
    max_size=200,
)


@settings(max_examples=150, deadline=None)
@given(operations, st.sampled_from([None, 0, 1]))
def test_slots_never_overlap_and_all_memory_comes_back(
    steps: list[tuple[str, int]], home: int | None
) -> None:
    slots = SlotAllocator(8 * SLAB, SLAB, 1 if home is None else 2)
    slots.add(0, 3 * SLAB)
    slots.add(3 * SLAB, 5 * SLAB, 0 if home is None else 1)
    taken: dict[int, int] = {}
    claims: list[tuple[int, int]] = []
    for verb, value in steps:
        if verb in ("allocate", "allocate_anywhere"):
            anywhere = verb == "allocate_anywhere"
            offset = slots.allocate_anywhere(value) if anywhere else slots.allocate(value, home)
            if offset is not None:
                end = offset + slots.slot_bytes(value)
                assert 0 <= offset < end <= slots.limit_bytes
                assert all(end <= other or offset >= taken[other] for other in taken)
                assert not any(
                    first * SLAB < end and offset < (first + slabs) * SLAB
                    for first, slabs in claims
                )
                taken[offset] = end
        elif verb == "free" and taken:
            offset = sorted(taken)[value % len(taken)]
            slots.free(offset)
            del taken[offset]
        elif verb == "claim":
            place = value, 1 + len(taken) % 3
            if value + place[1] <= 8 and slots.runs_in(*place) is not None:
                slots.claim(*place)
                claims.append(place)
        elif verb == "release" and claims:
            slots.release(*claims.pop(value % len(claims)))
        elif verb == "start_run":
            size = slots.slot_bytes(value)
            empty = [place for place in claims if slots.is_empty(*place)]
            fitting = [place for place in empty if place[1] * SLAB >= size]
            if fitting:
                offset = slots.start_run(*fitting[0], size)
                assert offset == fitting[0][0] * SLAB
                slots.release(*fitting[0])  # nothing is left to release
                claims.remove(fitting[0])
                taken[offset] = offset + size
    for place in claims:
        slots.release(*place)
    for offset in taken:
        slots.free(offset)
    # One slot of everything: only possible if every slab went back.
    assert slots.allocate(8 * SLAB) == 0


def test_only_memory_that_is_ready_is_handed_out() -> None:
    slots = SlotAllocator(4 * SLAB, SLAB)
    assert slots.allocate(1) is None
    slots.add(2 * SLAB, SLAB)
    assert slots.allocate(SLAB) == 2 * SLAB
    assert slots.allocate(SLAB) is None
    assert slots.ready_bytes == SLAB


def test_slots_stored_together_lie_together() -> None:
    slots = SlotAllocator(4 * SLAB, SLAB)
    slots.add(0, 4 * SLAB)
    assert [slots.allocate(4 * PAGE_BYTES) for _ in range(4)] == [
        index * 4 * PAGE_BYTES for index in range(4)
    ]


def test_a_size_that_wastes_half_a_slab_gets_several_in_a_row() -> None:
    slots = SlotAllocator(64 * SLAB, SLAB)
    slots.add(0, 64 * SLAB)
    size = 9 * PAGE_BYTES  # one to a slab of 16 pages, seven to four of them
    count = 0
    while slots.allocate(size) is not None:
        count += 1
    assert count * size >= 0.95 * slots.limit_bytes


def test_fits_is_about_the_pool_not_about_what_is_free() -> None:
    slots = SlotAllocator(4 * SLAB, SLAB)
    assert slots.fits(4 * SLAB)
    assert not slots.fits(4 * SLAB + 1)


def test_slabs_that_are_being_emptied_serve_nobody_else() -> None:
    slots = SlotAllocator(4 * SLAB, SLAB)
    slots.add(0, 4 * SLAB)
    taken = [slots.allocate(PAGE_BYTES) for _ in range(4 * SLAB // PAGE_BYTES)]
    slots.claim(0, 2)
    for offset in taken[: 2 * SLAB // PAGE_BYTES]:
        assert offset is not None
        slots.free(offset)
        assert slots.allocate(PAGE_BYTES) is None
        assert slots.allocate_anywhere(SLAB) is None
    assert slots.is_empty(0, 2)
    assert slots.start_run(0, 2, 2 * SLAB) == 0
    slots.free(0)
    assert slots.allocate(2 * SLAB) == 0
