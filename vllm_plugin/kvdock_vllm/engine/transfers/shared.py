"""Shared mode: the worker maps the pool and copies by itself.

To store, it reserves memory, copies, and commits. To load, it asks where the chunks are, copies,
and frees the locks. Only a lock that was still held after the copy proves that the bytes were the
chunk's. A ``Mover`` makes the copies: one for host memory, another for a GPU's.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from kvdock import Session
from kvdock.types import ChunkStatus, Location, TransferMode
from kvdock.v1 import cache_pb2
from kvdock_vllm.engine.copier import Copier, CopyStoppedError, HostBlocks, Stop
from kvdock_vllm.engine.groups import GroupShape
from kvdock_vllm.engine.layout import GroupLayout
from kvdock_vllm.engine.parallel import ParallelStrategy
from kvdock_vllm.engine.specs import GroupLoad, GroupStore, Target
from kvdock_vllm.engine.transfers.base import (
    CopyRequest,
    CountWorkers,
    Mark,
    Transfers,
    answer,
    split_blocks,
    warn_of_limit,
)

_log = logging.getLogger(__name__)

# Each answer takes the server microseconds. The engine waits for a load.
_LOAD_RPC_SECONDS = 2.0
# What one FreeLocks may name.
_MOST_LOCK_RANGES = 256
_STORE_RPC_SECONDS = 5.0
# How long a copy that was told to stop may take to stop.
_STOP_SECONDS = 5.0
# How long the engine may take to compute what it has queued.
_LOAD_READY_SECONDS = 10.0
_STORE_READY_SECONDS = 4.0
_FIRST_POLL_SECONDS = 50e-6
_LONGEST_POLL_SECONDS = 1e-3


class Mover(ABC):
    """Copies between the blocks of all groups and the mapped pool. Thread-safe."""

    @abstractmethod
    def open(self, session: Session) -> None:
        """Prepares for copies from and to the session's pool."""

    @abstractmethod
    def close(self, session: Session) -> None:
        """No copy is under way any more, and none will follow."""

    @abstractmethod
    def gather(
        self, session: Session, position: int, parts: Sequence[HostBlocks], stop: Stop
    ) -> None:
        """Copies blocks of the group at ``position`` to the session's pool. However this ends, no
        copy is under way any more.

        Raises CopyStoppedError as soon as ``stop()`` is true.
        """

    @abstractmethod
    def scatter(
        self, session: Session, position: int, parts: Sequence[HostBlocks], stop: Stop
    ) -> None:
        """Copies blocks from the pool, like :meth:`gather`."""


class HostMover(Mover):
    """For blocks in this process's own memory."""

    def __init__(self, layouts: Sequence[GroupLayout]) -> None:
        self._copiers = [Copier(layout) for layout in layouts]

    def open(self, session: Session) -> None:
        """Does nothing: the pool is mapped already."""

    def close(self, session: Session) -> None:
        """Does nothing: nothing was kept."""

    def gather(
        self, session: Session, position: int, parts: Sequence[HostBlocks], stop: Stop
    ) -> None:
        self._copiers[position].gather(parts, stop)

    def scatter(
        self, session: Session, position: int, parts: Sequence[HostBlocks], stop: Stop
    ) -> None:
        self._copiers[position].scatter(parts, stop)


class SharedTransfers(Transfers):
    """Copies between the worker's blocks and the mapped pool."""

    def __init__(
        self,
        mover: Mover,
        layouts: Sequence[GroupLayout],
        shapes: Sequence[GroupShape],
        strategy: ParallelStrategy,
        count_workers: CountWorkers,
    ) -> None:
        self._mover = mover
        self._layouts = layouts
        self._shapes = shapes
        self._strategy = strategy
        self._count_workers = count_workers
        self._changed = threading.Condition()
        self._running: dict[Session, int] = {}
        self._open: weakref.WeakSet[Session] = weakref.WeakSet()

    def prepare(self, session: Session) -> None:
        """Raises PoolUnmappable."""
        # Then even the first copies run at the speed of memory.
        session.pool.prefault()
        self._mover.open(session)
        with self._changed:
            self._open.add(session)
        self._count_workers(TransferMode.SHARED, 1)

    def expect(self, session: Session, target: Target) -> None:
        """Does nothing: no preparation depends on the namespace."""

    def mark(self) -> Mark:
        return Mark()

    def load(self, request: CopyRequest[GroupLoad]) -> list[bool]:
        session, group = request.session, request.group
        in_part = self._shapes[group.position].part_blocks(request.target.chunk_tokens)
        block_bytes = self._layouts[group.position].block_bytes
        found = session.retrieve(
            group.lease_id,
            group.first_chunk,
            group.end_chunk,
            group_idx=group.group_idx,
            kv_worker_id=self._strategy.kv_worker_id,
            reader=self._strategy.worker_id,
            timeout=_LOAD_RPC_SECONDS,
        )
        filled = []
        located = []
        for result, (skip, block_ids) in zip(found, split_blocks(group, in_part), strict=True):
            location = result.location if result.status is ChunkStatus.RETRIEVED else None
            if location is not None:
                begin, nbytes = skip * block_bytes, len(block_ids) * block_bytes
                if begin + nbytes > location.length:
                    raise ValueError(f"{location} is shorter than {skip + len(block_ids)} blocks")
                wanted = Location(location.segment_id, location.offset + begin, nbytes)
                located.append((wanted, block_ids))
            filled.append(location is not None)
        parts = joined(session, located)
        if parts:
            _wait(request.ready, request.stop, _LOAD_READY_SECONDS)
            with self._using(session):
                self._mover.scatter(session, group.position, parts, request.stop)
        # One range costs the server less, but tells nothing if some chunks were missing.
        held = self._free_locks(session, group, one_range=all(filled))
        return [ok and lock for ok, lock in zip(filled, held, strict=True)]

    def _free_locks(self, session: Session, group: GroupLoad, *, one_range: bool) -> list[bool]:
        """Frees this reader's locks. Tells for each chunk whether its lock was held for certain."""
        chunks = group.end_chunk - group.first_chunk
        width = chunks if one_range else 1
        locks = [
            cache_pb2.LockRange(
                lease_id=group.lease_id,
                first_chunk=first,
                end_chunk=first + width,
                group_idx=group.group_idx,
            )
            for first in range(group.first_chunk, group.end_chunk, width)
        ]
        futures = [
            session.submit(cache_pb2.FreeLocksRequest(locks=locks[at : at + _MOST_LOCK_RANGES]))
            for at in range(0, len(locks), _MOST_LOCK_RANGES)
        ]
        released = [
            freed.released
            for future in futures
            for freed in answer(future, "FreeLocks", _LOAD_RPC_SECONDS).freed
        ]
        return [count == width for count in released for _ in range(width)]

    def store(self, request: CopyRequest[GroupStore]) -> list[ChunkStatus]:
        session, group = request.session, request.group
        in_part = self._shapes[group.position].part_blocks(request.target.chunk_tokens)
        reservation = session.reserve(
            request.target.namespace,
            group.keys,
            parent=group.parent,
            group_idx=group.group_idx,
            event_data=group.event_data,
            keep=group.keep,
            priority=group.priority,
            timeout=_STORE_RPC_SECONDS,
        )
        statuses = [chunk.status for chunk in reservation.chunks]
        warn_of_limit(group, statuses, reservation.kept_chunks)
        wanted = [i for i, status in enumerate(statuses) if status is ChunkStatus.RESERVED]
        if not wanted:
            return statuses
        try:
            located = []
            for index in wanted:
                location = reservation.chunks[index].location
                if location is None:
                    raise ValueError(f"the server reserved chunk {index} and did not say where")
                block_ids = group.block_ids[index * in_part : (index + 1) * in_part]
                located.append((location, block_ids))
            parts = joined(session, located)
            with request.reading():
                _wait(request.ready, request.stop, _STORE_READY_SECONDS)
                with self._using(session):
                    self._mover.gather(session, group.position, parts, request.stop)
            if request.stop():
                raise CopyStoppedError
        except BaseException:
            for number in reservation.ids:
                session.submit(cache_pb2.AbortRequest(reservation_id=number))
            raise
        sealed = session.commit(reservation, wanted, timeout=_STORE_RPC_SECONDS)
        for index, status in zip(wanted, sealed, strict=True):
            statuses[index] = status
        return statuses

    def wait_for_end(self, session: Session) -> None:
        with self._changed:
            if session not in self._open:
                return
            self._open.discard(session)
            ended = self._changed.wait_for(lambda: session not in self._running, _STOP_SECONDS)
        self._count_workers(TransferMode.SHARED, -1)
        if ended:
            self._mover.close(session)
        else:
            _log.error("a copy goes on after the end of its session")

    @contextmanager
    def _using(self, session: Session) -> Iterator[None]:
        """While a copy uses the session's pool. Raises CopyStoppedError if the session is over."""
        with self._changed:
            if session not in self._open:
                raise CopyStoppedError
            self._running[session] = self._running.get(session, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._running[session] -= 1
                if not self._running[session]:
                    del self._running[session]
                    self._changed.notify_all()


def joined(session: Session, located: Iterable[tuple[Location, Sequence[int]]]) -> list[HostBlocks]:
    """Blocks by where they lie in the pool. What lies one behind the other is one piece: small
    chunks would cost more than their copies do.
    """
    runs: list[tuple[int, int, int, list[int]]] = []
    segment_id = end = -1
    for location, block_ids in located:
        if location.segment_id == segment_id and location.offset == end:
            segment_id, begin, end, ids = runs.pop()
        else:
            segment_id, begin, ids = location.segment_id, location.offset, []
        end = location.offset + location.length
        ids += block_ids
        runs.append((segment_id, begin, end, ids))
    return [
        HostBlocks(ids, session.pool.array(Location(segment_id, begin, end - begin)))
        for segment_id, begin, end, ids in runs
    ]


def _wait(ready: Mark, stop: Stop, seconds: float) -> None:
    """Waits until the engine has computed what it had queued. Raises CopyStoppedError after
    ``seconds``, or when ``stop()`` is true.

    It polls the device and does not queue copies behind the work, so no copy has begun then.
    """
    deadline = time.monotonic() + seconds
    poll = _FIRST_POLL_SECONDS
    while not ready.is_done():
        if stop():
            raise CopyStoppedError
        if time.monotonic() > deadline:
            _log.warning("what the engine had queued took longer than %g s to compute", seconds)
            raise CopyStoppedError
        time.sleep(poll)
        poll = min(2 * poll, _LONGEST_POLL_SECONDS)
