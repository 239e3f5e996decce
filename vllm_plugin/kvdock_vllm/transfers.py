"""The ways for a worker's bytes to move, behind one face.

``HostTransfers``: the worker copies between its memory and the pool, both mapped into its process.
``DeviceTransfers``: the server copies between its pool and the GPU memory that the worker exported.

Used by the worker's background threads. Every call ends: it is bounded by a time, after which
nothing touches the blocks any more, because the engine gives them to others then.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from kvdock import Session
from kvdock.errors import DeadlineExceeded
from kvdock.types import ChunkStatus, TransferMode
from kvdock.v1 import cache_pb2
from kvdock_vllm.copier import Copier, CopyStoppedError
from kvdock_vllm.layout import blocks_per_chunk
from kvdock_vllm.metadata import GroupLoad, GroupStore, Target
from kvdock_vllm.parallel import ParallelStrategy

if TYPE_CHECKING:
    import torch

    from kvdock_vllm.layout import GroupLayout, GroupShape

_log = logging.getLogger(__name__)

# The answer to each of these is the work of microseconds. Somebody waits for a load.
_LOAD_RPC_SECONDS = 2.0
# As many as one FreeLocks may name.
_MOST_LOCK_RANGES = 256
_STORE_RPC_SECONDS = 5.0
# How long a copy may take that was told to stop.
_STOP_SECONDS = 5.0
# Within these the server copies. Then it stops by itself, at the latest with the piece it is at.
_DEVICE_LOAD_SECONDS = 10.0
_DEVICE_STORE_SECONDS = 4.0
_PIECE_SECONDS = 1.0
_REGISTER_SECONDS = 10.0

T = TypeVar("T")
Stop = Callable[[], bool]


class Transfers(ABC):
    """Moves the chunks of loads and stores, of one group at a time."""

    @abstractmethod
    def prepare(self, session: Session) -> None:
        """A session was opened, and will be used soon."""

    @abstractmethod
    def expect(self, session: Session, target: Target) -> None:
        """Loads and stores of a namespace will follow. Raises as they do."""

    @abstractmethod
    def mark(self) -> bytes:
        """Stands for what the engine has queued so far, for ``ready``. Called on its thread."""

    @abstractmethod
    def load(
        self,
        session: Session,
        target: Target,
        lease_id: int,
        group: GroupLoad,
        ready: bytes,
        stop: Stop,
    ) -> list[bool]:
        """Fills blocks; for each chunk whether its blocks are filled. Frees the reader's locks.

        Raises KVDockError, or CopyStoppedError when ``stop()`` is true.
        """

    @abstractmethod
    def store(
        self, session: Session, target: Target, group: GroupStore, ready: bytes, stop: Stop
    ) -> list[ChunkStatus]:
        """Stores chunks; what became of each.

        Raises KVDockError, or CopyStoppedError when ``stop()`` is true; then nothing of it becomes
        visible that was not copied before.
        """

    @abstractmethod
    def wait_for_end(self, session: Session) -> None:
        """Waits until nothing uses the memory of a session that is over."""


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
        answers = [
            session.submit(cache_pb2.FreeLocksRequest(locks=locks[at : at + _MOST_LOCK_RANGES]))
            for at in range(0, len(locks), _MOST_LOCK_RANGES)
        ]
        released = [
            count
            for answer in answers
            for count in _answer(answer, "FreeLocks", _LOAD_RPC_SECONDS).released
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


class DeviceTransfers(Transfers):
    """Has the server copy between its pool and this worker's GPU memory."""

    def __init__(
        self,
        layouts: Sequence[GroupLayout],
        shapes: Sequence[GroupShape],
        device: torch.device,
        strategy: ParallelStrategy,
    ) -> None:
        from kvdock_vllm.device_memory import ReadyEvents

        self._layouts = layouts
        self._shapes = shapes
        self._device = device
        self._strategy = strategy
        self._events = ReadyEvents(device)
        self._lock = threading.Lock()
        self._registered: tuple[Session, str] | None = None
        self._not_exportable = False

    def prepare(self, session: Session) -> None:
        """The memory is handed over when its namespace is known."""

    def expect(self, session: Session, target: Target) -> None:
        self._register(session, target)

    def mark(self) -> bytes:
        return self._events.record()

    def load(
        self,
        session: Session,
        target: Target,
        lease_id: int,
        group: GroupLoad,
        ready: bytes,
        stop: Stop,
    ) -> list[bool]:
        self._register(session, target)
        if stop():
            raise CopyStoppedError
        request = cache_pb2.RetrieveRequest(
            lease_id=lease_id,
            group_idx=group.group_idx,
            first_chunk=group.first_chunk,
            end_chunk=group.end_chunk,
            kv_worker_id=self._strategy.kv_worker_id,
            reader=self._strategy.worker_id,
            block_ids=group.block_ids,
            skip_blocks=group.skip_blocks,
            ready_event=ready,
            timeout_ms=round(_DEVICE_LOAD_SECONDS * 1000),
        )
        seconds = _DEVICE_LOAD_SECONDS + _PIECE_SECONDS
        answer = _answer(session.submit(request), "Retrieve", seconds)
        return [chunk.status == ChunkStatus.RETRIEVED.value for chunk in answer.chunks]

    def store(
        self, session: Session, target: Target, group: GroupStore, ready: bytes, stop: Stop
    ) -> list[ChunkStatus]:
        self._register(session, target)
        if stop():
            raise CopyStoppedError
        request = cache_pb2.StoreRequest(
            namespace=target.namespace,
            group_idx=group.group_idx,
            parent_key=group.parent,
            keys=group.keys,
            block_ids=group.block_ids,
            ready_event=ready,
            event_data=[data.to_proto() for data in group.event_data],
            timeout_ms=round(_DEVICE_STORE_SECONDS * 1000),
        )
        seconds = _DEVICE_STORE_SECONDS + _PIECE_SECONDS
        answer = _answer(session.submit(request), "Store", seconds)
        return [ChunkStatus(status) for status in answer.statuses]

    def wait_for_end(self, session: Session) -> None:
        """The server lets go of the memory when the session's stream ends."""

    def _register(self, session: Session, target: Target) -> None:
        """Hands the KV cache to the server, once a session and namespace.

        Raises CopyStoppedError if CUDA cannot export it.
        """
        from kvdock_vllm.device_memory import ExportedGroup, NotExportableError, export_memory

        with self._lock:
            if self._registered == (session, target.namespace):
                return
            if self._not_exportable:
                raise CopyStoppedError
            groups = [
                ExportedGroup(shape.group_idx, layout, blocks_per_chunk(target.chunk_tokens, shape))
                for shape, layout in zip(self._shapes, self._layouts, strict=True)
            ]
            try:
                memory = export_memory(groups, self._device.index or 0)
            except NotExportableError as error:
                self._not_exportable = True
                _log.warning("KVDock does not cache for this worker: %s", error)
                raise CopyStoppedError from error
            began = time.monotonic()
            registration = session.register_memory(
                target.namespace,
                memory.allocations,
                memory.groups,
                mode=TransferMode.SERVER,
                timeout=_REGISTER_SECONDS,
            )
            self._registered = (session, target.namespace)
            _log.info(
                "KVDock copies by the server: %s (%.0f ms)",
                registration.reason,
                (time.monotonic() - began) * 1e3,
            )


def split_blocks(group: GroupLoad, in_chunk: int) -> list[tuple[int, tuple[int, ...]]]:
    """For each chunk, of ``in_chunk`` blocks: how many of them to skip, and the blocks to fill."""
    chunks = []
    taken, skip = 0, group.skip_blocks
    for _ in range(group.first_chunk, group.end_chunk):
        block_ids = group.block_ids[taken : taken + in_chunk - skip]
        chunks.append((skip, block_ids))
        taken += len(block_ids)
        skip = 0
    return chunks


def _answer(future: Future[T], verb: str, seconds: float) -> T:
    """The answer of a request that was submitted. Raises DeadlineExceeded if it does not come."""
    try:
        return future.result(seconds)
    except TimeoutError:
        if not future.cancel():
            return future.result()
        raise DeadlineExceeded(f"the server did not answer {verb} within {seconds:g} s") from None
