"""Which blocks another connector may write to, and which it may have failed to fill."""

from __future__ import annotations

from kvdock.types import GroupKind
from kvdock_vllm.engine.groups import GroupShape
from kvdock_vllm.engine.others_loads import OthersLoads
from kvdock_vllm.metadata import WorkerReport

SHAPES = [
    GroupShape(0, GroupKind.FULL_ATTENTION, 16, ("a",)),
    GroupShape(1, GroupKind.SLIDING_WINDOW, 32, ("b",), window_tokens=32),
]
TABLES = [[1, 2, 3, 4, 5, 6], [0, 8, 9]]


def test_all_blocks_behind_the_computed_ones_may_be_written_in_the_next_step_only() -> None:
    loads = OthersLoads(SHAPES)
    loads.note_given("r", 32, TABLES)
    assert sorted(loads.may_be_written()) == [3, 4, 5, 6, 8, 9]
    assert loads.begin_step({}) == 0
    assert list(loads.may_be_written()) == []


def test_what_counts_as_computed_and_was_not_is_in_doubt_until_the_step_is_reported() -> None:
    loads = OthersLoads(SHAPES)
    loads.note_given("r", 16, TABLES)
    loads.note_given("none", 64, [[31, 32, 33, 34, 35], [36, 37, 38]])
    first = loads.begin_step({"r": 64, "none": 64, "unknown": 5})
    assert first > 0
    for block in (2, 3, 4, 8):
        assert loads.are_in_doubt([[77], [block]]), block
    for block in (1, 5, 6, 9, 0, 35, 38):
        assert not loads.are_in_doubt([[block]]), block
    loads.note_given("later", 0, [[41], []])
    second = loads.begin_step({"later": 16})
    assert second > first
    loads.end_step(first)
    assert not loads.are_in_doubt(TABLES)
    assert loads.are_in_doubt([[41]])
    # A report that says nothing of a doubt ends none.
    loads.end_step(0)
    assert loads.are_in_doubt([[41]])
    loads.end_step(second)
    assert not loads.are_in_doubt([[41]])


def test_the_reports_of_several_workers_say_it_once() -> None:
    assert WorkerReport({}, in_doubt=3).aggregate(WorkerReport({})).in_doubt == 3
