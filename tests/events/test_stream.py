"""StreamKVEvents of a real server: where it begins, what it lets through, and how it ends."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest

import kvdock
from kvdock import ChunkEventData, Client, Group, GroupKind, Namespace
from kvdock.errors import Draining, InvalidArgument, NoEventLog
from kvdock.events import (
    Batch,
    Cleared,
    Compacted,
    Cursor,
    Event,
    Filter,
    Index,
    Medium,
    Message,
    Progress,
    Removed,
    SnapshotPiece,
    Stored,
)
from kvdock.v1 import events_pb2, events_pb2_grpc

SHARD = 4096


def key(*path: int) -> bytes:
    return hashlib.sha256(bytes(path)).digest()


def prompt(*path: int) -> list[bytes]:
    return [key(*path[: length + 1]) for length in range(len(path))]


def data(one: bytes, token_bytes: int = 64) -> ChunkEventData:
    extra_keys = (("adapter", ("a picture", -3), one), ())
    hashes = one[:8], one[8:]
    return ChunkEventData(hashes, b"parent", bytes(token_bytes), 8, "adapter", "", extra_keys)


def put(client: Client, keys: list[bytes], name: str = "n", **more: int) -> None:
    statuses = client.put(
        name, keys, [bytes(SHARD)] * len(keys), event_data=[data(one) for one in keys], **more
    )
    assert set(statuses) <= {kvdock.ChunkStatus.STORED, kvdock.ChunkStatus.EXISTS}


def register(client: Client, name: str = "n", *groups: Group) -> None:
    groups = groups or (Group(shard_bytes=(SHARD,)),)
    client.register_namespace(Namespace(name, 16, 1, groups))


@pytest.fixture
def logging_server(start_server):  # type: ignore[no-untyped-def]
    return start_server("--event-log", "16MiB")


@pytest.fixture
def client(logging_server) -> Iterator[Client]:  # type: ignore[no-untyped-def]
    with Client(logging_server.address) as client:
        register(client)
        yield client


def read(
    client: Client, start: Cursor | str, only: Filter | None = None, until: int | None = None
) -> list[Message]:
    """Messages of a stream up to its first idle progress mark, or up to an event's number."""
    messages = []
    began = False
    for message in client.events(start, only=only, progress_interval=0.2):
        messages.append(message)
        match message:
            case Compacted():
                break
            case Progress() if began or start == "snapshot":
                break
            case _ if until is not None and message.cursor.sequence >= until and began:
                break
        began = True
    return messages


def events(messages: list[Message]) -> list[Event]:
    found: list[Event] = []
    for message in messages:
        if isinstance(message, Batch):
            found += message.events
    return found


def test_off_by_default_and_says_how_to_turn_it_on(server) -> None:  # type: ignore[no-untyped-def]
    with Client(server.address) as client:
        register(client)
        put(client, prompt(1))
        with pytest.raises(NoEventLog, match="--event-log"):
            client.events()


def test_a_stream_from_now_begins_with_the_call(client: Client) -> None:
    put(client, prompt(1))
    stream = client.events(progress_interval=0.2)
    put(client, prompt(2))
    found = events(list(itertools.islice(stream, 3)))
    assert [event.sequence for event in found] == [2]


def test_an_event_says_everything_that_was_told(client: Client) -> None:
    start = next(client.events()).cursor
    put(client, prompt(1, 2))
    (first, second), cursor = events(read(client, start)), read(client, start)[-1].cursor
    assert first == Stored(
        1,
        "n",
        key(1),
        b"",
        data(key(1)),
        Medium.CPU,
        None,
        GroupKind.FULL_ATTENTION,
        0,
    )
    assert isinstance(second, Stored)
    assert (second.key, second.parent_key, second.sequence) == (key(1, 2), key(1), 2)
    (snapshot, *_) = read(client, "snapshot")
    assert isinstance(snapshot, SnapshotPiece)
    assert snapshot.stored == (first, second)
    client.evict(SHARD)
    (gone,) = events(read(client, cursor))
    assert gone == Removed(3, "n", key(1, 2), (key(1, 2)[:8], key(1, 2)[8:]), Medium.CPU, None)
    client.clear(all=True)
    assert events(read(client, cursor))[-1] == Cleared(4, "n")


def test_resuming_anywhere_leaves_no_gap_and_repeats_nothing(client: Client) -> None:
    start = next(client.events()).cursor
    for number in range(8):
        put(client, prompt(number, 1, 2))
        if number % 3 == 0:
            client.evict(SHARD)
    everything = events(read(client, start))
    assert [event.sequence for event in everything] == list(range(1, len(everything) + 1))
    for place in range(len(everything) + 1):
        resumed = read(client, Cursor(start.epoch, place))
        assert resumed[0] == Progress(Cursor(start.epoch, place))
        assert events(resumed) == everything[place:]
        assert resumed[-1].cursor.sequence == len(everything)


def test_a_place_that_is_gone_is_compacted_and_a_snapshot_with_its_tail_is_not(
    start_server: Callable[..., object],
) -> None:
    server = start_server("--event-log", "16MiB", "--event-log-count", "10")
    with Client(server.address) as client:  # type: ignore[attr-defined]
        register(client)
        start = next(client.events()).cursor
        for number in range(9):
            put(client, prompt(number, 1))
        (answer,) = read(client, start)
        assert answer == Compacted(Cursor(start.epoch, 8), Cursor(start.epoch, 8))
        assert len(events(read(client, Cursor(start.epoch, 8)))) == 10
        index = Index()
        for message in read(client, index.start):
            index.apply(message)
        assert index.cursor == Cursor(start.epoch, 18)
        assert len(index) == 18
        put(client, prompt(9))
        for message in read(client, index.start):
            index.apply(message)
        assert len(index) == 19


def test_a_restart_is_another_epoch_and_no_number_is_used_twice(client, logging_server) -> None:  # type: ignore[no-untyped-def]
    put(client, prompt(1, 2))
    index = Index()
    for message in read(client, index.start):
        index.apply(message)
    before = index.cursor
    logging_server.restart()
    with Client(logging_server.address) as again:
        (answer,) = read(again, before)
        assert isinstance(answer, Compacted)
        assert answer.oldest.epoch != before.epoch
        assert index.apply(answer) == []
        assert len(index) == 2  # what it knows stays until it knows better
        register(again)
        put(again, prompt(1))
        changes = []
        for message in read(again, index.start):
            changes += index.apply(message)
        assert [(type(change), change.key) for change in changes] == [(Removed, key(1, 2))]
        assert index.cursor.epoch == answer.oldest.epoch


def test_a_number_that_was_not_given_yet_is_refused(client: Client) -> None:
    start = next(client.events()).cursor
    with pytest.raises(InvalidArgument, match="no number beyond 0"):
        next(client.events(Cursor(start.epoch, 1)))
    with pytest.raises(InvalidArgument, match="progress_interval_ms 5: at least 100"):
        next(client.events(progress_interval=0.005))


def test_filters(client: Client) -> None:
    register(
        client,
        "hybrid",
        Group(group_idx=0, shard_bytes=(SHARD,)),
        Group(kind=GroupKind.SLIDING_WINDOW, group_idx=1, window_tokens=32, shard_bytes=(SHARD,)),
    )
    start = next(client.events()).cursor
    put(client, prompt(1))
    put(client, prompt(2), "hybrid", group_idx=0)
    put(client, prompt(2), "hybrid", group_idx=1)
    client.clear("hybrid")

    def numbers(only: Filter) -> list[int]:
        messages = read(client, start, only)
        assert messages[-1].cursor.sequence == 4
        return [event.sequence for event in events(messages)]

    assert numbers(Filter()) == [1, 2, 3, 4]
    assert numbers(Filter(("n",))) == [1]
    assert numbers(Filter(("hybrid", "n"))) == [1, 2, 3, 4]
    assert numbers(Filter(group_idx=0)) == [2, 4]
    assert numbers(Filter(("hybrid",), group_idx=1)) == [3, 4]
    assert numbers(Filter(medium=Medium.CPU)) == [1, 2, 3, 4]
    assert numbers(Filter(medium=Medium.STORAGE)) == [4]
    assert numbers(Filter(("other",))) == []


def test_a_snapshot_comes_in_pieces_while_the_log_goes_on(client: Client) -> None:
    keys = [key(number & 255, number >> 8) for number in range(4_000)]
    last_key = key(4, 5, 6)
    put(client, keys)
    stop = threading.Event()

    def churn() -> None:
        with Client(str(client.address)) as other:
            number = 0
            while not stop.is_set():
                put(other, [key(1, 2, 3, number & 255, number >> 8)])
                other.evict(3 * SHARD)
                number += 1

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        index = Index()
        pieces = 0
        for message in client.events(index.start, progress_interval=0.2):
            index.apply(message)
            pieces += isinstance(message, SnapshotPiece)
            if isinstance(message, SnapshotPiece) and message.last:
                stop.set()
                thread.join()
                put(client, [last_key])
            if last_key in {part.key for part in index}:
                break
    finally:
        stop.set()
        thread.join()
    assert pieces >= 8
    assert {part.key for part in index} == {part.key for part in client.chunks("n")}


def test_quiet_is_told_from_dead(client: Client) -> None:
    began = time.monotonic()
    marks = list(itertools.islice(client.events(progress_interval=0.1), 6))
    assert all(isinstance(mark, Progress) for mark in marks)
    assert time.monotonic() - began >= 0.45


def test_a_stop_ends_the_stream_after_everything_that_happened(client, logging_server) -> None:  # type: ignore[no-untyped-def]
    stream = client.events()
    next(stream)
    put(client, prompt(1, 2, 3))
    seen: list[Message] = []
    logging_server.process.terminate()
    with pytest.raises(Draining):
        seen.extend(stream)
    assert len(events(seen)) == 3


def test_event_data_is_checked_and_its_size_is_limited(client: Client) -> None:
    large = ChunkEventData(token_ids=bytes((1 << 20) + 1))
    with pytest.raises(InvalidArgument, match=r"event_data 0 of .* at most 1 MiB"):
        client.put("n", prompt(1), [bytes(SHARD)], event_data=[large])
    with pytest.raises(InvalidArgument, match="1 event_data for 2 keys"):
        client.put("n", prompt(1, 2), [bytes(SHARD)] * 2, event_data=[data(key(1))])
    start = next(client.events()).cursor
    fits = ChunkEventData(token_ids=bytes((1 << 20) - 8))
    for number in range(6):
        client.put("n", prompt(number), [bytes(SHARD)], event_data=[fits])
    assert len(events(read(client, start))) == 6


def test_reserve_and_commit_tell_as_well(client: Client) -> None:
    start = next(client.events()).cursor
    keys = prompt(1, 2)
    with client.session(role="worker") as session:
        reservation = session.reserve("n", keys, event_data=[data(one) for one in keys])
        session.commit(reservation)
    assert [event.data for event in events(read(client, start))] == [data(one) for one in keys]  # type: ignore[union-attr]


def test_by_hand_without_a_start_is_from_now(logging_server, client: Client) -> None:  # type: ignore[no-untyped-def]
    import grpc

    put(client, prompt(1))
    with grpc.insecure_channel(f"unix:{logging_server.socket}") as channel:
        stub = events_pb2_grpc.EventServiceStub(channel)
        first = next(iter(stub.StreamKVEvents(events_pb2.StreamKVEventsRequest())))
    assert first.WhichOneof("message") == "progress"
    assert first.cursor.sequence == 1
