"""The worker copies between its memory and the pool, both mapped into its process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvdock import Session
from kvdock.types import ChunkStatus
from kvdock.v1 import cache_pb2
from kvdock_vllm.copier import Copier, CopyStoppedError
from kvdock_vllm.layout import GroupLayout, GroupShape, blocks_per_chunk
from kvdock_vllm.metadata import GroupLoad, GroupStore, Target
from kvdock_vllm.parallel import ParallelStrategy
from kvdock_vllm.transfers.base import Stop, Transfers, answer, split_blocks

_log = logging.getLogger(__name__)

# The answer to each of these is the work of microseconds. Somebody waits for a load.
_LOAD_RPC_SECONDS = 2.0
# As many as one FreeLocks may name.
_MOST_LOCK_RANGES = 256
_STORE_RPC_SECONDS = 5.0
# How long a copy may take that was told to stop.
_STOP_SECONDS = 5.0


class HostTransfers(Transfers):
    """Copies between blocks in this process's memory and the mapped pool."""

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        shapes: Sequence[GroupShape],
        strategy: ParallelStrategy,
    ) -> None:
        self._copiers = [Copier(layout) for layout in layouts]
        self._shapes = shapes
        self._strategy = strategy
        self._changed = threading.Condition()
        self._running: dict[Session, int] = {}

    def prepare(self, session: Session) -> None:
        # Copies then run at the speed of memory from the first on.
        session.pool.prefault()

    def expect(self, session: Session, target: Target) -> None:
        """Nothing of it depends on the namespace."""

    def mark(self) -> bytes:
        return b""

    def load(
        self,
        session: Session,
        target: Target,
        lease_id: int,
        group: GroupLoad,
        ready: bytes,
        stop: Stop,
    ) -> list[bool]:
        copier = self._copiers[group.position]
        in_chunk = blocks_per_chunk(target.chunk_tokens, self._shapes[group.position])
        found = session.retrieve(
            lease_id,
            group.first_chunk,
            group.end_chunk,
            group_idx=group.group_idx,
            kv_worker_id=self._strategy.kv_worker_id,
            reader=self._strategy.worker_id,
            timeout=_LOAD_RPC_SECONDS,
        )
        filled = []
        for result, (skip, block_ids) in zip(found, split_blocks(group, in_chunk), strict=True):
            if result.status is ChunkStatus.RETRIEVED and result.location is not None:
                with self._using(session):
                    host = session.pool.array(result.location)
                    begin = skip * copier.block_bytes
                    end = begin + len(block_ids) * copier.block_bytes
                    copier.scatter(host[begin:end], block_ids, stop)
                filled.append(True)
            else:
                filled.append(False)
        # Only locks that were still held after the copy prove that the bytes were the chunks'. One
        # range costs the server less, but says nothing where some were not to be had.
        held = self._free_locks(session, lease_id, group, one_range=all(filled))
        return [ok and lock for ok, lock in zip(filled, held, strict=True)]

    def _free_locks(
        self, session: Session, lease_id: int, group: GroupLoad, *, one_range: bool
    ) -> list[bool]:
        """Frees this reader's locks; for each chunk whether its lock is known to have been held."""
        chunks = group.end_chunk - group.first_chunk
        width = chunks if one_range else 1
        locks = [
            cache_pb2.LockRange(
                lease_id=lease_id,
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
            count
            for future in futures
            for count in answer(future, "FreeLocks", _LOAD_RPC_SECONDS).released
        ]
        return [count == width for count in released for _ in range(width)]

    def store(
        self, session: Session, target: Target, group: GroupStore, ready: bytes, stop: Stop
    ) -> list[ChunkStatus]:
        copier = self._copiers[group.position]
        in_chunk = blocks_per_chunk(target.chunk_tokens, self._shapes[group.position])
        reservation = session.reserve(
            target.namespace,
            group.keys,
            parent=group.parent,
            group_idx=group.group_idx,
            event_data=group.event_data,
            timeout=_STORE_RPC_SECONDS,
        )
        statuses = [chunk.status for chunk in reservation.chunks]
        wanted = [i for i, status in enumerate(statuses) if status is ChunkStatus.RESERVED]
        if not wanted:
            return statuses
        try:
            for index in wanted:
                location = reservation.chunks[index].location
                if location is None:
                    raise ValueError(f"the server reserved chunk {index} and did not say where")
                block_ids = group.block_ids[index * in_chunk : (index + 1) * in_chunk]
                with self._using(session):
                    copier.gather(block_ids, session.pool.array(location), stop)
            if stop():
                raise CopyStoppedError
        except BaseException:
            session.submit(cache_pb2.AbortRequest(reservation_id=reservation.id))
            raise
        sealed = session.commit(reservation, wanted, timeout=_STORE_RPC_SECONDS)
        for index, status in zip(wanted, sealed, strict=True):
            statuses[index] = status
        return statuses

    def wait_for_end(self, session: Session) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: session not in self._running, _STOP_SECONDS):
                _log.error("a copy goes on after the end of its session")

    @contextmanager
    def _using(self, session: Session) -> Iterator[None]:
        with self._changed:
            self._running[session] = self._running.get(session, 0) + 1
        try:
            yield
        finally:
            with self._changed:
                self._running[session] -= 1
                if not self._running[session]:
                    del self._running[session]
                    self._changed.notify_all()
