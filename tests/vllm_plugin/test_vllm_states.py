"""Which states are noted, and how long: by what vLLM's scheduler tells with a step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvdock.types import GroupKind
from kvdock_vllm.blocks import blocks_written, follow_blocks
from kvdock_vllm.engine.groups import GroupShape
from kvdock_vllm.engine.records import ExtraTokens, Record
from kvdock_vllm.vllm_states import (
    StateBlocks,
    forget_taken_states,
    keep_loaded_state,
)

B = 4
SHAPES = (
    GroupShape(0, GroupKind.RECURRENT_STATE, B, ("a",)),
    GroupShape(1, GroupKind.FULL_ATTENTION, B, ("b",)),
    GroupShape(2, GroupKind.RECURRENT_STATE, B, ("c",)),
)


def record(computed: int = 0) -> Record:
    request: Any = SimpleNamespace(request_id="one", num_computed_tokens=computed)
    return Record(request, ExtraTokens(), [[], [], []])


def step(
    scheduled: int,
    *,
    tables: tuple[list[int], ...] = ([], [], []),
    offers: list[tuple[int, int, int]] | None = None,
    drafts: list[int] | None = None,
    **more: Any,
) -> Any:
    states = SimpleNamespace(
        boundary_state_offloads={"one": offers} if offers else {},
        get_block_ids=lambda request_id: tables,
    )
    fields: dict[str, Any] = {
        "num_scheduled_tokens": {"one": scheduled},
        "scheduled_spec_decode_tokens": {"one": drafts} if drafts else {},
        "kv_connector_block_state": states,
        "preempted_req_ids": None,
        "scheduled_new_reqs": [],
        "scheduled_cached_reqs": SimpleNamespace(
            req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set()
        ),
        **more,
    }
    return SimpleNamespace(**fields)


def test_offers_are_noted_by_group_and_tokens() -> None:
    one = record()
    StateBlocks(SHAPES, None).follow({"one": one}, step(8, offers=[(0, 7, 8), (2, 9, 8)]))
    assert one.states == {(0, 8): 7, (2, 8): 9}


def test_offers_inside_a_block_are_not() -> None:
    one = record()
    StateBlocks(SHAPES, None).follow({"one": one}, step(6, offers=[(0, 7, 6), (2, 9, 4)]))
    assert one.states == {(2, 4): 9}


def test_nothing_is_noted_of_a_step_with_drafts() -> None:
    one = record()
    drafted = step(8, tables=([0, 7], [1, 2], [0, 9]), offers=[(0, 7, 8)], drafts=[5])
    StateBlocks(SHAPES, 1).follow({"one": one}, drafted)
    assert not one.states


@pytest.mark.parametrize(
    ("computed", "scheduled", "found"),
    [
        (0, 8, {(0, 8): 7, (2, 8): 9}),
        (4, 4, {(0, 8): 7, (2, 8): 9}),
        (7, 1, {(0, 8): 7, (2, 8): 9}),
        (0, 7, {}),  # ends inside a block
        (0, 4, {}),  # too near, and there is no state
    ],
)
def test_an_interval_takes_the_last_state_from_the_table(
    computed: int, scheduled: int, found: dict[tuple[int, int], int]
) -> None:
    one = record(computed)
    output = step(scheduled, tables=([0, 7, 3], [1, 2], [0, 9, 4]))
    StateBlocks(SHAPES, 5).follow({"one": one}, output)
    assert one.states == found


def test_an_interval_counts_from_the_last_state() -> None:
    one, states = record(), StateBlocks(SHAPES, 8)
    tables: tuple[list[int], ...] = ([10], [11], [12])
    noted = []
    for _ in range(6):
        states.follow({"one": one}, step(4, tables=tables))
        request: Any = one.request
        request.num_computed_tokens += 4
        noted.append((0, request.num_computed_tokens) in one.states)
        for table in tables:
            table.append(table[-1] + 10)
    assert noted == [False, True, False, True, False, True]


def test_a_state_is_forgotten_when_its_block_is_taken_back() -> None:
    one, states = record(), StateBlocks(SHAPES, None)
    states.follow({"one": one}, step(8, offers=[(0, 7, 8), (2, 9, 8)]))
    states.follow({"one": one}, step(1, tables=([0, 7, 5], [1, 2, 3], [0, 9, 6])))
    assert len(one.states) == 2
    states.follow({"one": one}, step(1, tables=([0, 0, 5], [1, 2, 3], [0, 8, 6])))
    assert not one.states


def test_a_state_is_forgotten_when_its_request_ends_without_the_block() -> None:
    one = record()
    one.states = {(0, 8): 7, (2, 8): 9}
    forget_taken_states(one, SHAPES, ([0, 7], [1, 2], [0]))
    assert one.states == {(0, 8): 7}


def test_a_preempted_request_has_no_states() -> None:
    one = record()
    one.states, one.state_tokens = {(0, 8): 7}, 8
    follow_blocks({"one": one}, step(0, preempted_req_ids={"one"}), loading=())
    assert (one.states, one.state_tokens) == ({}, 0)


def test_blocks_that_vllm_copies_to_are_written() -> None:
    copies = [SimpleNamespace(src_block_id=3, dst_block_id=4)]
    assert list(blocks_written(SHAPES, step(1, kv_cache_block_copies=copies))) == [4]


@pytest.mark.parametrize(("parting", "kept"), [(0, True), (8, True), (16, True), (20, False)])
def test_vllm_keeps_a_loaded_state_unless_it_keeps_a_later_one(parting: int, kept: bool) -> None:
    request: Any = SimpleNamespace(shared_prefix_boundary=parting)
    assert keep_loaded_state(request, 16) is kept
    assert request.shared_prefix_boundary == (16 if kept else parting)


def test_a_vllm_that_cannot_keep_it_does_not() -> None:
    request: Any = SimpleNamespace()
    assert not keep_loaded_state(request, 16)
