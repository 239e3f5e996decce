"""Which parts of which groups a store takes, and which stores read a block."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvdock.types import GroupKind
from kvdock_vllm.engine.groups import GroupShape
from kvdock_vllm.engine.records import CacheScope, ExtraTokens, Record
from kvdock_vllm.engine.specs import StoreOutcome, StoreSpec, Target
from kvdock_vllm.engine.stores import Stores

CHUNK = 32
WINDOW = GroupShape(0, GroupKind.SLIDING_WINDOW, 16, ("a",), window_tokens=40)
FULL = GroupShape(1, GroupKind.FULL_ATTENTION, 8, ("b",))
TARGET = Target(epoch=1, namespace="n", chunk_tokens=CHUNK)


@pytest.fixture
def record() -> Record:
    """Five chunks: a window's blocks 101 to 110, those of full attention 201 to 220."""
    tokens = list(range(5 * CHUNK))
    request: Any = SimpleNamespace(request_id="r", all_token_ids=tokens, num_prompt_tokens=160)
    return Record(request, ExtraTokens(), [list(range(101, 111)), list(range(201, 221))])


@pytest.fixture
def stores() -> Stores:
    describe: Any = None
    return Stores([WINDOW, FULL], lambda *_: CacheScope((), None), describe, workers=1)


def chunks(spec: StoreSpec | None) -> dict[int, tuple[int, int]]:
    """For each group the first chunk and how many, in the order in which they are stored."""
    assert spec is not None
    return {group.position: (group.first_chunk, len(group.keys)) for group in spec.groups}


def test_full_attention_first_since_a_window_may_begin_behind_it(
    stores: Stores, record: Record
) -> None:
    spec = stores.plan(record, 5 * CHUNK, TARGET)
    assert list(chunks(spec).items()) == [(1, (0, 5)), (0, (0, 5))]
    assert spec is not None
    assert [group.block_ids for group in spec.groups] == [
        tuple(range(201, 221)),
        tuple(range(101, 111)),
    ]
    assert stores.plan(record, 5 * CHUNK, TARGET) is None, "once"


@pytest.mark.parametrize(
    ("held_from", "first_of_window"),
    # The window behind 54 tokens begins in the first block, behind 55 in the second, and so on.
    [(0, 0), (54, 0), (55, 1), (86, 1), (87, 2), (118, 2), (119, 3)],
)
def test_what_a_window_left_behind_is_not_stored(
    stores: Stores, record: Record, held_from: int, first_of_window: int
) -> None:
    spec = stores.plan(record, 5 * CHUNK, TARGET, held_from=held_from)
    assert chunks(spec)[1] == (0, 5)
    assert chunks(spec)[0] == (first_of_window, 5 - first_of_window)
    assert spec is not None
    (of_window,) = (group for group in spec.groups if group.position == 0)
    assert of_window.block_ids == tuple(range(101 + 2 * first_of_window, 111))
    parents = {group.first_chunk: group.parent for group in spec.groups}
    keys = dict(enumerate(spec.groups[0].keys))
    assert all(parent == (keys[first - 1] if first else b"") for first, parent in parents.items())


def test_null_blocks_are_not_stored(stores: Stores, record: Record) -> None:
    # Of the third chunk half is there, which is not enough.
    record.tables[0][:5] = [0] * 5
    assert chunks(stores.plan(record, 5 * CHUNK, TARGET))[0] == (3, 2)


def test_nothing_of_a_window_is_nothing_but_of_that_group(stores: Stores, record: Record) -> None:
    record.tables[0][:] = [0] * 10
    assert chunks(stores.plan(record, 5 * CHUNK, TARGET)) == {1: (0, 5)}


def test_what_was_refused_is_offered_again_as_far_as_it_is_there(
    stores: Stores, record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("kvdock_vllm.engine.stores.time.monotonic", lambda: now)
    spec = stores.plan(record, 4 * CHUNK, TARGET)
    assert spec is not None
    assert stores.note(spec.job_id, StoreOutcome(workers=1, refused_from=1))
    record.tables[0][:6] = [0] * 6
    assert stores.plan(record, 5 * CHUNK, TARGET) is None, "not at once"
    now += 2
    assert chunks(stores.plan(record, 5 * CHUNK, TARGET)) == {1: (1, 4), 0: (3, 2)}


def test_what_was_refused_is_offered_at_once_when_its_request_ends(
    stores: Stores, record: Record
) -> None:
    spec = stores.plan(record, 5 * CHUNK, TARGET)
    assert spec is not None
    assert stores.note(spec.job_id, StoreOutcome(workers=1, refused_from=2))
    assert stores.plan(record, 5 * CHUNK, TARGET) is None
    assert chunks(stores.plan(record, 5 * CHUNK, TARGET, is_last=True)) == {1: (2, 3), 0: (2, 3)}


def test_what_windows_leave_behind_while_it_is_read(stores: Stores, record: Record) -> None:
    request: Any = record.request
    request.num_computed_tokens = 0
    request.is_finished = lambda: False
    first = stores.plan(record, 2 * CHUNK, TARGET)
    second = stores.plan(record, 4 * CHUNK, TARGET, held_from=2 * CHUNK)
    assert first is not None
    assert second is not None
    # The window behind 54 tokens begins in the first block, behind 55 in the second, and so on.
    parts = {1: [101, 102], 2: [101, 102, 103, 104]}
    for computed, count in ((54, 0), (55, 1), (86, 1), (87, 2), (118, 2)):
        assert stores.leaving({"r": computed}) == ({first.job_id: parts[count]} if count else {})
    request.num_computed_tokens = 118
    left = {first.job_id: parts[2], second.job_id: [105, 106]}
    assert stores.leaving({}) == {first.job_id: parts[2]}
    assert stores.leaving({"r": 1}) == left
    assert stores.note(first.job_id, StoreOutcome(workers=1, refused_from=None))
    assert stores.leaving({"r": 1}) == {second.job_id: [105, 106]}
    record.jobs.clear()
    assert stores.leaving({"r": 1}) == {}, "a preempted request's blocks are not its own"


def test_the_stores_that_read_a_block(stores: Stores, record: Record) -> None:
    first = stores.plan(record, 2 * CHUNK, TARGET)
    second = stores.plan(record, 5 * CHUNK, TARGET)
    assert first is not None
    assert second is not None
    assert stores.reading([104]) == stores.reading([208]) == [first.job_id]
    assert stores.reading([105, 300]) == [second.job_id]
    assert stores.reading([104, 220]) == [first.job_id, second.job_id]
    assert stores.reading([300]) == []
    assert record.jobs == {first.job_id, second.job_id}
    assert stores.note(first.job_id, StoreOutcome(workers=1, refused_from=None))
    assert stores.reading([104]) == []
    assert record.jobs == {second.job_id}


def test_generated_tokens_are_stored_together() -> None:
    describe: Any = None
    stores = Stores([FULL], lambda *_: CacheScope((), None), describe, workers=1)
    tokens = list(range(20 * CHUNK))
    request: Any = SimpleNamespace(request_id="r", all_token_ids=tokens, num_prompt_tokens=70)
    record = Record(request, ExtraTokens(), [list(range(1, 81))])
    stored = [
        (num_tokens, chunks(spec)[0])
        for num_tokens in range(70, 20 * CHUNK)
        if (spec := stores.plan(record, num_tokens, TARGET)) is not None
    ]
    assert stored == [(70, (0, 2)), (64 + 256, (2, 8)), (64 + 512, (10, 8))]
    assert chunks(stores.plan(record, 20 * CHUNK - 1, TARGET, is_last=True))[0] == (18, 1)


def test_generated_tokens_do_not_wait_where_a_window_leaves_them_behind(stores: Stores) -> None:
    tokens = list(range(5 * CHUNK))
    request: Any = SimpleNamespace(request_id="r", all_token_ids=tokens, num_prompt_tokens=CHUNK)
    record = Record(request, ExtraTokens(), [list(range(101, 111)), list(range(201, 221))])
    ends = [n for n in range(5 * CHUNK + 1) if stores.plan(record, n, TARGET) is not None]
    assert ends == [chunk * CHUNK for chunk in range(1, 6)]


def test_more_chunks_than_a_call_may_name_take_several_stores() -> None:
    describe: Any = None
    stores = Stores([FULL], lambda *_: CacheScope((), None), describe, workers=1)
    tokens = list(range(20_000 * CHUNK))
    request: Any = SimpleNamespace(
        request_id="r", all_token_ids=tokens, num_prompt_tokens=len(tokens)
    )
    record = Record(request, ExtraTokens(), [list(range(1, 80_001))])
    planned = [chunks(stores.plan(record, len(tokens), TARGET))[0] for _ in range(2)]
    assert planned == [(0, 16_384), (16_384, 3_616)]
    assert stores.plan(record, len(tokens), TARGET) is None
