"""Does every mirror equal the server, whatever happens?

Random stores (in any order, by several sessions, in three shapes of namespace), aborts, evictions,
clears, lost sessions, restarts and kills of the server; readers that are fast, slow, filtered,
asynchronous, that drop their connection, or that are stopped and continued. Again and again all is
quiet for a moment: then each reader's mirror must be what the server lists, with the data that was
told of it. The log is short, so that readers do fall behind it.

    python tests/events/mirror_check.py --seconds 600 --seed 7
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from kvdock import (
    ChunkEventData,
    ChunkStatus,
    Client,
    Group,
    GroupKind,
    KVDockError,
    Namespace,
    Reservation,
    Session,
)
from kvdock.events import AsyncFollower, Cursor, Filter, Follower, Index, Update

SHARD = 4096
LOG_EVENTS = 600
PROGRESS = 0.1
ANSWER_SECONDS = 60.0

NAMESPACES = {
    "plain": Namespace("plain", 16, 1, (Group(shard_bytes=(SHARD,)),)),
    "sharded": Namespace("sharded", 16, 2, (Group(group_idx=0, shard_bytes=(SHARD,)),)),
    "hybrid": Namespace(
        "hybrid",
        16,
        1,
        (
            Group(group_idx=0, shard_bytes=(SHARD,)),
            Group(
                group_idx=1,
                kind=GroupKind.SLIDING_WINDOW,
                window_tokens=40,
                shard_bytes=(2 * SHARD,),
            ),
        ),
    ),
}


class Entry(NamedTuple):
    """One part as both sides must see it."""

    namespace: str
    key: bytes
    parent_key: bytes
    group_idx: int | None
    told: bytes


def told_of(key: bytes, group_idx: int | None) -> bytes:
    """The block hash that the writers tell of a part."""
    return hashlib.md5(key + repr(group_idx).encode()).digest()


# Readers, each in a process of its own


@dataclass(frozen=True)
class Kind:
    """How a reader behaves."""

    name: str
    only: Filter = field(default_factory=Filter)
    pause: float = 0.0
    """Seconds that it takes over each change."""
    reconnect: bool = False
    asynchronous: bool = False
    stopped: bool = False
    lagging: bool = False
    """It is stopped for whole rounds, until it has fallen behind the log at any machine's pace."""


KINDS = [
    Kind("fast"),
    Kind("fast 2"),
    Kind("asyncio", asynchronous=True),
    Kind("slow", pause=0.0005),
    Kind("very slow", pause=0.003, lagging=True),
    Kind("reconnecting", reconnect=True),
    Kind("stopped", stopped=True),
    Kind("one namespace", only=Filter(("hybrid",))),
    Kind("one group", only=Filter(group_idx=1)),
]


class Answering:
    """Answers the main process's questions from the index, once it is true for what is asked."""

    def __init__(self, kind: Kind, pipe: Connection) -> None:
        self.kind = kind
        self.pipe = pipe
        self.index = Index(kind.only)
        self.asked: Cursor | None = None
        self.ended = False
        self.counts: Counter[str] = Counter()
        self._cursor: Cursor | None = None

    def update(self, update: Update) -> None:
        self.counts["changes"] += len(update.changes)
        self.counts["lost"] += update.lost is not None
        self.counts["resyncs"] += self.index.cursor is None and self._cursor is not None
        self._cursor = self.index.cursor
        if self.asked is None and self.pipe.poll():
            self.asked = self.pipe.recv()
            self.ended = self.asked is None
        cursor, asked = self.index.cursor, self.asked
        if cursor and asked and cursor.epoch == asked.epoch and cursor.sequence >= asked.sequence:
            entries = {
                Entry(
                    part.namespace,
                    part.key,
                    part.parent_key,
                    part.group_idx,
                    part.data.block_hashes[0] if part.data else b"",
                )
                for part in self.index
            }
            self.pipe.send((entries, self.counts))
            self.asked = None


def read(kind: Kind, address: str, pipe: Connection) -> None:
    """A reader's main function."""
    answering = Answering(kind, pipe)
    if kind.asynchronous:
        asyncio.run(_read_async(answering, address))
        return
    chance = random.Random(kind.name)
    while not answering.ended:
        with Follower(answering.index, address, progress_interval=PROGRESS) as follower:
            for update in follower:
                answering.update(update)
                if answering.ended or (kind.reconnect and chance.random() < 0.2):
                    break
                time.sleep(kind.pause * len(update.changes))


async def _read_async(answering: Answering, address: str) -> None:
    async with AsyncFollower(answering.index, address, progress_interval=PROGRESS) as follower:
        async for update in follower:
            answering.update(update)
            if answering.ended:
                return


class Reader:
    """A reader as the main process sees it."""

    def __init__(self, kind: Kind, address: str) -> None:
        self.kind = kind
        self.counts: Counter[str] = Counter()
        self._pipe, theirs = multiprocessing.Pipe()
        self.process = multiprocessing.get_context("spawn").Process(
            target=read, args=(kind, address, theirs), daemon=True
        )
        self.process.start()

    def entries(self, at: Cursor) -> set[Entry]:
        """The reader's mirror, once it is true for that moment."""
        self._pipe.send(at)
        if not self._pipe.poll(ANSWER_SECONDS):
            raise AssertionError(f"reader {self.kind.name!r} never got to {at}")
        entries, self.counts = self._pipe.recv()
        return entries

    def signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self._pipe.send(None)
        self.process.join(10)


# The writer


class Open(NamedTuple):
    """A reservation under way."""

    session: Session
    reservation: Reservation
    chunks: list[int]


class Writer:
    """Does what engines, operators and accidents do, at random."""

    def __init__(self, address: str, chance: random.Random) -> None:
        self._chance = chance
        self._address = address
        self.done: Counter[str] = Counter()
        self.connect()

    def connect(self) -> None:
        self.client = Client(self._address)
        for namespace in NAMESPACES.values():
            self.client.register_namespace(namespace)
        self._sessions: dict[int, list[Session]] = {0: [], 1: []}
        self._open: list[Open] = []
        self._lease = 0

    def step(self) -> None:
        """One random thing."""
        weights = {
            self.reserve: 30,
            self.commit: 60,
            self.abort: 3,
            self.put: 10,
            self.look_up: 5,
            self.evict: 4,
            self.lose_session: 2,
            self.clear: 0.3,
        }
        (action,) = self._chance.choices(list(weights), list(weights.values()))
        action()
        self.done[action.__name__.replace("_", " ")] += 1

    def finish(self) -> None:
        """Let nothing be under way."""
        for sessions in self._sessions.values():
            for session in sessions:
                session.close()
            sessions.clear()
        self._open.clear()

    def _session(self, shard: int) -> Session:
        sessions = self._sessions[shard]
        if len(sessions) < 3:
            sessions.append(self.client.session(role="worker", kv_worker_id=shard))
        return self._chance.choice(sessions)

    def _what(self) -> tuple[str, int | None, int, bytes, list[bytes]]:
        """Namespace, group, shard, parent and keys of some chunks of some prompt."""
        namespace = self._chance.choice(list(NAMESPACES.values()))
        group = self._chance.choice(namespace.groups)
        length = self._chance.randint(1, 12)
        path = [self._chance.randint(0, 2 if depth < 4 else 1) for depth in range(length)]
        keys = [
            hashlib.sha256(f"{namespace.name} {path[: depth + 1]}".encode()).digest()
            for depth in range(length)
        ]
        skip = self._chance.choice([0, 0, 0, self._chance.randrange(length)])
        shard = self._chance.randrange(namespace.kv_world_size)
        return (
            namespace.name,
            group.group_idx,
            shard,
            keys[skip - 1] if skip else b"",
            keys[skip:],
        )

    def reserve(self) -> None:
        if len(self._open) >= 12:
            return
        namespace, group_idx, shard, parent, keys = self._what()
        session = self._session(shard)
        reservation = session.reserve(
            namespace,
            keys,
            parent=parent,
            group_idx=group_idx,
            event_data=[ChunkEventData((told_of(key, group_idx),)) for key in keys],
        )
        chunks = [
            index
            for index, chunk in enumerate(reservation.chunks)
            if chunk.status is ChunkStatus.RESERVED
        ]
        if chunks:
            self._chance.shuffle(chunks)
            self._open.append(Open(session, reservation, chunks))

    def commit(self) -> None:
        if not self._open:
            return
        chosen = self._chance.choice(self._open)
        count = self._chance.randint(1, 3)
        now, chosen.chunks[:] = chosen.chunks[:count], chosen.chunks[count:]
        chosen.session.commit(chosen.reservation, now)
        if not chosen.chunks:
            self._open.remove(chosen)

    def abort(self) -> None:
        if self._open:
            chosen = self._open.pop(self._chance.randrange(len(self._open)))
            chosen.session.abort(chosen.reservation)

    def put(self) -> None:
        namespace, group_idx, shard, parent, keys = self._what()
        size = 2 * SHARD if group_idx == 1 else SHARD
        self.client.put(
            namespace,
            keys,
            [bytes(size)] * len(keys),
            parent=parent,
            group_idx=group_idx,
            kv_worker_id=shard,
            event_data=[ChunkEventData((told_of(key, group_idx),)) for key in keys],
        )

    def look_up(self) -> None:
        namespace, _, _, _, keys = self._what()
        hit = self.client.lookup(namespace, keys, ttl=1.0)
        if hit.lease and self._chance.random() < 0.7:
            self.client.free_locks(hit.lease)

    def evict(self) -> None:
        self.client.evict(self._chance.randint(1, 40) * SHARD)

    def clear(self) -> None:
        namespace = self._chance.choice([None, *NAMESPACES])
        self.client.clear(namespace, all=namespace is None)

    def lose_session(self) -> None:
        sessions = self._chance.choice(list(self._sessions.values()))
        if sessions:
            lost = sessions.pop(self._chance.randrange(len(sessions)))
            lost.close()
            self._open = [open_ for open_ in self._open if open_.session is not lost]


def listed(client: Client) -> set[Entry]:
    """What the server lists and can be found: with all before it, in full-attention groups."""
    entries: set[Entry] = set()
    for namespace in NAMESPACES.values():
        full = {
            group.group_idx for group in namespace.groups if group.kind is GroupKind.FULL_ATTENTION
        }
        found: set[tuple[bytes, int | None]] = set()
        for part in client.chunks(namespace.name):
            reached = not part.parent_key or (part.parent_key, part.group_idx) in found
            if part.visible and (reached or part.group_idx not in full):
                found.add((part.key, part.group_idx))
                told = told_of(part.key, part.group_idx)
                entries.add(Entry(namespace.name, part.key, part.parent_key, part.group_idx, told))
    return entries


def quiet_points(seconds: float, chance: random.Random) -> Iterator[float]:
    """Times at which the next round of random things ends."""
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        yield now + chance.uniform(0.5, 3.0)


def check(seconds: float, seed: int) -> Counter[str]:
    """Run; what was done. AssertionError at the first difference."""
    from serverkit import ServerProcess

    chance = random.Random(seed)
    totals: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="kvdock-mirror-") as folder:

        def start() -> ServerProcess:
            return ServerProcess(
                Path(folder),
                memory="2MiB",
                chunk_tokens=16,
                arguments=["--event-log", "4MiB", "--event-log-count", str(LOG_EVENTS)],
            )

        server = start()
        readers = [Reader(kind, server.address) for kind in KINDS]
        writer = Writer(server.address, chance)
        (lagging,) = (reader for reader in readers if reader.kind.lagging)
        lag_steps = 2 * LOG_EVENTS
        try:
            for point, until in enumerate(quiet_points(seconds, chance)):
                lags = point % 5 in (1, 4)
                resyncs = lagging.counts["resyncs"]
                if lags:
                    lagging.signal(signal.SIGSTOP)
                steps = 0
                while time.monotonic() < until or (lags and steps < lag_steps):
                    steps += 1
                    for reader in readers:
                        if reader.kind.stopped and chance.random() < 0.01:
                            reader.signal(chance.choice([signal.SIGSTOP, signal.SIGCONT]))
                    writer.step()
                if point % 5 == 2:
                    # While sessions are open and copies under way.
                    totals["restarts"] += 1
                    if chance.random() < 0.5:
                        server.kill()
                    else:
                        server.close()
                    server = start()
                    writer.client.close()
                    writer.connect()
                    for _ in range(chance.randint(0, 300)):
                        writer.step()
                else:
                    writer.finish()
                for reader in readers:
                    if reader.kind.stopped or reader.kind.lagging:
                        reader.signal(signal.SIGCONT)
                compare(writer.client, readers, totals)
                if lags and lagging.counts["resyncs"] == resyncs:
                    lag_steps *= 2  # the reader still got all that happened
        except KVDockError as error:
            raise AssertionError(f"the writer failed: {error}\n{server.log_text}") from error
        finally:
            for reader in readers:
                reader.end()
            writer.client.close()
            server.close()
    for reader in readers:
        totals[f"changes, {reader.kind.name}"] = reader.counts["changes"]
        totals[f"resyncs, {reader.kind.name}"] = reader.counts["resyncs"]
    return totals + writer.done


def compare(client: Client, readers: list[Reader], totals: Counter[str]) -> None:
    """All is quiet: every mirror must be what the server lists."""
    # Leases by hand run out at some time, but that changes nothing that can be found.
    expected = listed(client)
    stream = client.events()
    at = next(stream).cursor
    stream.close()
    totals["quiet points"] += 1
    totals["parts compared"] += len(expected) * len(readers)
    totals["events"] = at.sequence
    for reader in readers:
        only = reader.kind.only
        wanted = {
            entry
            for entry in expected
            if (not only.namespaces or entry.namespace in only.namespaces)
            and only.group_idx in (None, entry.group_idx)
        }
        entries = reader.entries(at)
        assert entries == wanted, (
            f"reader {reader.kind.name!r} differs at {at}: lacks {sorted(wanted - entries)[:3]}, "
            f"has beyond {sorted(entries - wanted)[:3]}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="of the random things (%(default)s)")
    arguments = parser.parse_args()
    totals = check(arguments.seconds, arguments.seed)
    for name, count in totals.items():
        print(f"{name:28} {count:12,}")


if __name__ == "__main__":
    main()
