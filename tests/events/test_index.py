"""The mirror alone: what it takes in, and what it refuses."""

from __future__ import annotations

import pytest

from kvdock import ChunkEventData, GroupKind
from kvdock.errors import InvalidArgument
from kvdock.events import (
    Batch,
    Cleared,
    Compacted,
    Cursor,
    Filter,
    Index,
    Medium,
    OutOfStepError,
    PartId,
    Progress,
    Removed,
    SnapshotPiece,
    Stored,
)
from kvdock.events.messages import message_from_proto
from kvdock.v1 import events_pb2 as pb


def stored(
    sequence: int,
    key: bytes,
    parent: bytes = b"",
    group_idx: int | None = None,
    tag: bytes = b"",
    medium: Medium = Medium.CPU,
) -> Stored:
    data = ChunkEventData((b"hash of " + key + tag,))
    kind = GroupKind.FULL_ATTENTION
    return Stored(sequence, "n", key, parent, data, medium, group_idx, kind, 0)


def removed(
    sequence: int,
    key: bytes,
    group_idx: int | None = None,
    tag: bytes = b"",
    medium: Medium = Medium.CPU,
) -> Removed:
    return Removed(sequence, "n", key, (b"hash of " + key + tag,), medium, group_idx)


def batch(*events: object, epoch: int = 1, upto: int | None = None) -> Batch:
    last = events[-1].sequence if upto is None else upto  # type: ignore[attr-defined]
    return Batch(Cursor(epoch, last), 0, events)  # type: ignore[arg-type]


def snapshot(*parts: Stored, at: int = 0, epoch: int = 1, last: bool = True) -> SnapshotPiece:
    return SnapshotPiece(Cursor(epoch, at), parts, last)


def synced(*parts: Stored, only: Filter | None = None) -> Index:
    index = Index(only)
    assert index.start == "snapshot"
    index.apply(snapshot(*parts))
    return index


def test_absent_group_0_and_1_are_three_parts() -> None:
    index = synced()
    index.apply(batch(*[stored(n + 1, b"a", group_idx=g) for n, g in enumerate((None, 0, 1))]))
    assert len(index) == 3
    index.apply(batch(removed(4, b"a", 0)))
    assert [part.group_idx for part in index] == [None, 1]
    assert PartId("n", b"a", 1, Medium.CPU) in index
    assert PartId("n", b"a", 0, Medium.CPU) not in index
    assert (index.prefix("n", [b"a"], 0), index.prefix("n", [b"a"], 1)) == (0, 1)


def test_a_part_is_on_each_medium_for_itself() -> None:
    on_disk = {"medium": Medium.STORAGE}
    index = synced(stored(1, b"a"))
    index.apply(batch(stored(1, b"a", **on_disk), stored(2, b"b", b"a", **on_disk)))
    index.apply(batch(stored(3, b"b", b"a")))
    assert len(index) == 4
    index.apply(batch(removed(4, b"b"), removed(5, b"a")))
    assert [part.id for part in index] == [
        PartId("n", b"a", None, Medium.STORAGE),
        PartId("n", b"b", None, Medium.STORAGE),
    ]
    with pytest.raises(OutOfStepError):
        index.apply(batch(removed(6, b"a")))


def test_a_prefix_may_be_asked_for_on_one_medium_or_on_any() -> None:
    index = synced(stored(1, b"a"), stored(2, b"b", b"a", medium=Medium.STORAGE))
    keys = [b"a", b"b", b"c"]
    assert index.prefix("n", keys) == 2
    assert index.prefix("n", keys, medium=Medium.CPU) == 1
    assert index.prefix("n", keys, medium=Medium.STORAGE) == 0


def test_clear_empties_every_medium_children_first() -> None:
    on_disk = {"medium": Medium.STORAGE}
    index = synced(
        stored(1, b"a"),
        stored(2, b"a", **on_disk),
        stored(3, b"b", b"a"),
        stored(4, b"b", b"a", **on_disk),
    )
    assert index.apply(batch(Cleared(1, "n"))) == [
        removed(1, b"b", **on_disk),
        removed(1, b"b"),
        removed(1, b"a", **on_disk),
        removed(1, b"a"),
    ]
    assert len(index) == 0


def test_what_came_back_different_on_one_medium_is_told_anew_there_only() -> None:
    on_disk = {"medium": Medium.STORAGE}
    a, b = stored(1, b"a"), stored(2, b"b", b"a")
    a_on_disk, b_on_disk = stored(3, b"a", **on_disk), stored(4, b"b", b"a", **on_disk)
    index = synced(a, b, a_on_disk, b_on_disk)
    index.apply(Compacted(Cursor(1, 4), Cursor(1, 4)))
    different = stored(5, b"a", tag=b"x", **on_disk)
    assert index.apply(snapshot(a, b, different, b_on_disk, at=9)) == [
        removed(9, b"b", **on_disk),
        removed(9, b"a", **on_disk),
        different,
        b_on_disk,
    ]


def test_what_is_on_media_that_only_newer_clients_know_is_passed_over() -> None:
    index = synced(stored(1, b"a"))
    cursor = pb.Cursor(epoch=1, sequence=4)
    events = [pb.Event(namespace="n", sequence=number) for number in range(1, 5)]
    for event, medium in zip(events, (b"\x20\x62", b"\x20\x63", b"\x18\x62"), strict=False):
        # Medium 98, then 99; then it is gone from 98.
        part: pb.BlockStored | pb.BlockRemoved = event.stored
        if medium[0] == 0x18:
            part = event.removed
        part.key = b"b"
        part.MergeFromString(medium)
    events[3].stored.key = b"c"
    events[3].stored.medium = pb.MEDIUM_STORAGE
    message = pb.StreamKVEventsResponse(cursor=cursor, batch=pb.EventBatch(events=events))
    assert [change.key for change in index.apply(message_from_proto(message))] == [b"c"]
    assert index.cursor == Cursor(1, 4)
    piece = pb.SnapshotPiece(stored=[events[0], events[1], events[3]], last=True)
    index.apply(message_from_proto(pb.StreamKVEventsResponse(cursor=cursor, snapshot=piece)))
    assert [part.key for part in index] == [b"c"]


def test_prefix_ends_at_the_first_chunk_that_is_not_there() -> None:
    index = synced(stored(1, b"a"), stored(2, b"b", b"a"), stored(3, b"d", b"c"))
    assert index.prefix("n", [b"a", b"b", b"c", b"d"]) == 2
    assert index.prefix("n", [b"a", b"b"]) == 2
    assert index.prefix("other", [b"a"]) == 0


def test_clear_removes_children_first() -> None:
    index = synced(stored(1, b"a"), stored(2, b"b", b"a"))
    assert index.apply(batch(Cleared(1, "n"))) == [removed(1, b"b"), removed(1, b"a")]
    assert len(index) == 0


def test_a_resync_tells_the_difference() -> None:
    index = synced(stored(1, b"a"), stored(2, b"b", b"a"), stored(3, b"c", b"b"))
    index.apply(Compacted(Cursor(1, 3), Cursor(1, 3)))
    assert index.start == "snapshot"
    assert index.apply(snapshot(stored(9, b"a"), at=11, epoch=2, last=False)) == []
    assert len(index) == 3
    changes = index.apply(
        snapshot(stored(10, b"b", b"a", tag=b"x"), stored(11, b"d", b"b"), at=11, epoch=2)
    )
    assert changes == [
        removed(11, b"c"),
        removed(11, b"b"),
        stored(10, b"b", b"a", tag=b"x"),
        stored(11, b"d", b"b"),
    ]
    assert index.cursor == Cursor(2, 11)


def test_what_extends_a_part_that_came_back_different_is_told_anew() -> None:
    a, b, c = stored(1, b"a"), stored(2, b"b", b"a"), stored(3, b"c", b"b")
    other = stored(4, b"d")
    index = synced(a, b, c, other)
    index.apply(Compacted(Cursor(1, 4), Cursor(1, 4)))
    different = stored(5, b"a", tag=b"x")
    assert index.apply(snapshot(different, b, c, other, at=9)) == [
        removed(9, b"c"),
        removed(9, b"b"),
        removed(9, b"a"),
        different,
        b,
        c,
    ]


def test_a_part_of_a_window_stays_though_its_parent_goes() -> None:
    parent, child = stored(1, b"a", group_idx=1), stored(2, b"b", b"a", group_idx=1)
    index = synced(parent, child)
    index.apply(Compacted(Cursor(1, 2), Cursor(1, 2)))
    assert index.apply(snapshot(child, at=9)) == [removed(9, b"a", 1)]


def test_what_only_a_newer_server_tells_has_a_number_and_changes_nothing() -> None:
    index = synced(stored(1, b"a"))
    cursor = pb.Cursor(epoch=1, sequence=2)
    events = [
        pb.Event(namespace="n", sequence=1),  # of a kind that is not known
        pb.Event(namespace="n", sequence=2, stored=pb.BlockStored(key=b"b")),
    ]
    events[1].stored.MergeFromString(b"\x30\x63")  # kind, 99
    message = pb.StreamKVEventsResponse(cursor=cursor, batch=pb.EventBatch(events=events))

    (change,) = index.apply(message_from_proto(message))

    assert isinstance(change, Stored)
    assert (change.key, change.kind) == (b"b", GroupKind.UNSPECIFIED)
    assert [part.key for part in index] == [b"a", b"b"]
    assert index.cursor == Cursor(1, 2)
    piece = pb.SnapshotPiece(stored=events, last=True)
    index.apply(message_from_proto(pb.StreamKVEventsResponse(cursor=cursor, snapshot=piece)))
    assert [part.key for part in index] == [b"b"]


def test_a_snapshot_that_was_cut_off_leaves_nothing() -> None:
    index = synced()
    index.apply(Compacted(Cursor(1, 3), Cursor(1, 3)))
    index.apply(snapshot(stored(1, b"a"), at=5, last=False))
    index.apply(snapshot(stored(6, b"b"), at=6, last=True))
    assert [part.key for part in index] == [b"b"]


@pytest.mark.parametrize(
    "message",
    [
        batch(stored(3, b"z")),  # a repetition
        batch(stored(4, b"a")),  # is there
        batch(removed(4, b"z")),  # is not there
        batch(removed(4, b"a", 0)),  # of another group
        batch(stored(4, b"z"), upto=3),
        batch(stored(4, b"z"), epoch=2),
        Progress(Cursor(2, 4)),
        Progress(Cursor(1, 2)),
    ],
)
def test_what_does_not_follow_is_refused_and_a_snapshot_asked_for(message: object) -> None:
    index = synced()
    index.apply(batch(stored(1, b"a"), stored(2, b"b"), stored(3, b"c")))
    with pytest.raises(OutOfStepError):
        index.apply(message)  # type: ignore[arg-type]
    assert index.start == "snapshot"


@pytest.mark.parametrize("only", [Filter(), Filter(("n",))])
def test_numbers_may_be_left_out_but_not_repeated(only: Filter) -> None:
    # Also without a filter: a server with tiers leaves out what other hosts hold.
    index = synced(only=only)
    index.apply(batch(stored(4, b"a"), upto=9))
    index.apply(Progress(Cursor(1, 20)))
    with pytest.raises(OutOfStepError):
        index.apply(batch(stored(20, b"b"), upto=21))


def test_forgetting_removes_everything_children_first() -> None:
    index = synced(stored(1, b"a"), stored(2, b"b", b"a"))
    assert index.forget() == [removed(0, b"b"), removed(0, b"a")]
    assert (len(index), index.start) == (0, "snapshot")


def test_cursors_are_text_too() -> None:
    cursor = Cursor((1 << 64) - 1, 7)
    assert Cursor.parse(str(cursor)) == cursor
    for text in ("", "1", "1:", ":1", "a:b", "1:-1"):
        with pytest.raises(InvalidArgument, match="no cursor"):
            Cursor.parse(text)
