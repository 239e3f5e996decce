"""The verbs of a session: each builds its request and reads its answer. Nothing here does I/O."""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from kvdock import _verbs
from kvdock._pieces import Piece, Steps, in_turn, pieces
from kvdock._verbs import Call, Request, Response, Result, within_limits
from kvdock.errors import InvalidArgument, UnknownReservation
from kvdock.pin import Keep
from kvdock.types import (
    NORMAL_PRIORITY,
    ChunkEventData,
    ChunkResult,
    ChunkStatus,
    DeviceAllocation,
    EvictionPriority,
    GroupMemory,
    Hit,
    Lease,
    MemoryRegistration,
    Namespace,
    Reservation,
    TransferMode,
    chunk_status,
)
from kvdock.v1 import cache_pb2, session_pb2, types_pb2

Taken = TypeVar("Taken")


class SessionVerbs(ABC):
    """What can be asked on a session. A face says in ``_call`` how a request is sent."""

    @abstractmethod
    def _call(self, call: Call[Request, Response, Result], timeout: float | None) -> Result:
        """Sends the request, and returns what the call makes of the answer."""

    def _in_turn(self, steps: Steps[Taken]) -> Taken:
        """The result of a call that takes several requests."""
        return in_turn(steps)

    @abstractmethod
    def submit(self, request: Message) -> Any:
        """Sends a request without waiting for its answer."""

    @abstractmethod
    def _seconds(self, timeout: float | None) -> float:
        """``timeout``, or the session's own for None."""

    def register_namespace(self, namespace: Namespace, *, timeout: float | None = None) -> bool:
        """As :meth:`kvdock.Client.register_namespace`."""
        return self._call(_verbs.register_namespace(namespace), timeout)

    def register_memory(
        self,
        namespace: str,
        allocations: Sequence[DeviceAllocation] = (),
        groups: Sequence[GroupMemory] = (),
        *,
        mode: TransferMode = TransferMode.UNSPECIFIED,
        timeout: float | None = None,
    ) -> MemoryRegistration:
        """Hands a worker's KV-cache memory to the server. It replaces what was registered before.

        ``mode`` UNSPECIFIED lets the server choose between SERVER and SHARED. Raises DeviceMemory
        if the server cannot open the memory.
        """
        with within_limits("register_memory"):
            request = session_pb2.RegisterMemoryRequest(
                namespace=namespace,
                mode=types_pb2.TransferMode.ValueType(mode),
                allocations=[allocation.to_proto() for allocation in allocations],
                groups=[group.to_proto() for group in groups],
            )
        return self._call(Call(request, MemoryRegistration.from_proto), timeout)

    def lookup(
        self,
        namespace: str,
        keys: Sequence[bytes],
        *,
        readers: int = 1,
        probe: bool = False,
        timeout: float | None = None,
    ) -> Hit:
        """Finds how many of a prompt's chunks, from the first on, are cached, and locks them.

        Each of ``readers`` workers gets a lock of its own on every part. The lease lives as long as
        this session. With ``probe`` nothing is locked.
        """
        seconds = self._seconds(timeout)
        call = _verbs.lookup(namespace, keys, readers, probe, timeout=seconds)
        return self._call(call, seconds)

    def free_locks(
        self,
        lease: Lease | int,
        first: int = 0,
        end: int | None = None,
        *,
        reader: int | None = None,
        group_idx: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Frees locks on chunks [first, end) of the lookup; ``end`` None means to the end.

        Returns how many locks it freed: a second call frees none. ``reader`` None frees the locks
        of all readers, and on a worker's session the worker's own. ``group_idx`` None frees those
        of all groups. Raises ForeignLease.
        """
        return self._call(_verbs.free_locks(lease, first, end, reader, group_idx), timeout)

    def reserve(
        self,
        namespace: str,
        keys: Sequence[bytes],
        *,
        parent: bytes = b"",
        group_idx: int | None = None,
        event_data: Sequence[ChunkEventData] | None = None,
        keep: Keep | None = None,
        priority: EvictionPriority = NORMAL_PRIORITY,
        timeout: float | None = None,
    ) -> Reservation:
        """Asks for memory to copy consecutive chunks of one prompt into.

        ``parent`` is the key of the chunk before the first; it is empty for a prompt's first chunk.
        Copy into the chunks that are RESERVED, then commit. ``keep`` pins these, and those that
        EXIST, as far as pins may keep them (``Reservation.kept_chunks``). What one message cannot
        hold takes several requests, within the same ``timeout``. Raises WrongMode outside shared
        mode, ChunkTooLarge if the whole pool could not hold one chunk.
        """
        seconds = self._seconds(timeout)
        with within_limits("reserve"):
            told = _verbs.event_data_messages(event_data)
            parted = pieces(keys, parent, told)

        def call(piece: Piece, left: float) -> _ReserveCall:
            with within_limits("reserve"):
                request = cache_pb2.ReserveRequest(
                    namespace=namespace,
                    group_idx=group_idx,
                    parent_key=piece.parent,
                    keys=keys[piece.first : piece.end],
                    event_data=told[piece.first : piece.end] if len(parted) > 1 else told,
                    timeout_ms=_verbs.limit_ms(left),
                    keep=keep.to_proto() if keep else None,
                    priority=priority.to_proto(),
                )
            return Call(request, Reservation.from_proto)

        if len(parted) == 1:
            return self._call(call(parted[0], seconds), seconds)
        return self._in_turn(_reserve_pieces(self, parted, call, seconds))

    def commit(
        self,
        reservation: Reservation | int,
        chunks: Sequence[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[ChunkStatus]:
        """Seals chunks whose bytes are complete.

        ``chunks`` are indexes into the reservation's keys, None for all. Returns STORED or FAILED
        for each. A reservation that took several requests is committed with as many. Raises
        UnknownReservation, ForeignReservation.
        """
        if chunks is not None and not chunks:
            # On the wire an empty list means every chunk.
            raise InvalidArgument("commit names no chunks; pass None for all that are still open")
        if isinstance(reservation, Reservation) and reservation.pieces:
            wanted = reservation.by_piece(chunks)
            return self._in_turn(_commit_pieces(self, wanted, chunks, self._seconds(timeout)))
        return self._call(_commit(_reservation_id(reservation), chunks), timeout)

    def abort(self, reservation: Reservation | int, *, timeout: float | None = None) -> int:
        """Gives back the memory of a reservation's open chunks, and says how many there were.

        A second call finds none.
        """
        if isinstance(reservation, Reservation) and reservation.pieces:
            return self._in_turn(_abort_pieces(self, reservation, self._seconds(timeout)))
        return self._call(_abort(_reservation_id(reservation)), timeout)

    def store(
        self,
        namespace: str,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        *,
        parent: bytes = b"",
        group_idx: int | None = None,
        ready_event: bytes = b"",
        event_data: Sequence[ChunkEventData] | None = None,
        keep: Keep | None = None,
        priority: EvictionPriority = NORMAL_PRIORITY,
        timeout: float | None = None,
    ) -> list[ChunkStatus]:
        """Has the server copy chunks out of the registered memory (server mode).

        ``block_ids`` are the blocks of all chunks, chunk by chunk. ``ready_event`` is the handle of
        a CUDA IPC event that the copy waits for. ``keep`` is as in :meth:`reserve`. A chunk that is
        not copied within ``timeout`` never becomes visible, so after DeadlineExceeded the blocks
        may be used again. What one message cannot hold takes several requests, within the same
        ``timeout``. Raises WrongMode, DeviceMemory.
        """
        seconds = self._seconds(timeout)
        with within_limits("store"):
            told = _verbs.event_data_messages(event_data)
            parted = pieces(keys, parent, told, block_ids)
        blocks = len(block_ids) // (len(keys) or 1)

        def call(piece: Piece, left: float) -> _StoreCall:
            is_whole = len(parted) == 1
            with within_limits("store"):
                timeout_ms = _verbs.limit_ms(left)
                request = cache_pb2.StoreRequest(
                    namespace=namespace,
                    group_idx=group_idx,
                    parent_key=piece.parent,
                    keys=keys[piece.first : piece.end],
                    block_ids=(
                        block_ids
                        if is_whole
                        else block_ids[piece.first * blocks : piece.end * blocks]
                    ),
                    ready_event=ready_event,
                    event_data=told if is_whole else told[piece.first : piece.end],
                    timeout_ms=timeout_ms,
                    deadline_ns=time.monotonic_ns() + timeout_ms * 1_000_000,
                    keep=keep.to_proto() if keep else None,
                    priority=priority.to_proto(),
                )
            return Call(request, _statuses)

        if len(parted) == 1:
            return self._call(call(parted[0], seconds), seconds)
        return self._in_turn(_store_pieces(self, parted, call, seconds))

    def retrieve(
        self,
        lease: Lease | int,
        first: int = 0,
        end: int | None = None,
        *,
        group_idx: int | None = None,
        kv_worker_id: int = 0,
        reader: int = 0,
        block_ids: Sequence[int] = (),
        skip_blocks: int = 0,
        ready_event: bytes = b"",
        also_fill: Sequence[int] = (),
        timeout: float | None = None,
    ) -> list[ChunkResult]:
        """Delivers the locked chunks [first, end) of the lookup; ``end`` None means to the end.

        In shared mode the answer says where the chunks lie. Copy them, then free the locks, and use
        the copy only if :meth:`free_locks` released every lock.

        In server mode the server has copied the chunks to ``block_ids`` when it answers, and the
        locks are free. ``also_fill`` names other readers of the same shard, which get the same
        bytes. Each of them learns the outcome by :meth:`await_fill`. After DeadlineExceeded or
        SessionLost the server may still write to the blocks, until its process has ended
        (:class:`kvdock.liveness.ServerProcess`), or until a new session of the worker has
        registered the memory.

        Raises UnknownLease, ForeignLease, DeviceMemory.
        """
        with within_limits("retrieve"):
            request = cache_pb2.RetrieveRequest(
                lease_id=_verbs.lease_id(lease),
                group_idx=group_idx,
                first_chunk=first,
                end_chunk=end,
                kv_worker_id=kv_worker_id,
                reader=reader,
                block_ids=block_ids,
                skip_blocks=skip_blocks,
                ready_event=ready_event,
                also_fill=also_fill,
            )
        return self._call(Call(request, _results), timeout)

    def await_fill(
        self,
        lease: Lease | int,
        first: int,
        end: int,
        *,
        filled_by: int,
        group_idx: int | None = None,
        kv_worker_id: int = 0,
        reader: int = 0,
        timeout: float | None = None,
    ) -> list[ChunkStatus]:
        """Waits until the retrieve of reader ``filled_by`` has filled this reader (server mode).

        That call names this reader in ``also_fill``, and the same lease, group and chunks
        [first, end). Either call may come first. Returns RETRIEVED, NOT_LOCKED or FAILED for each
        chunk; this reader's locks on them are free then. After ``timeout`` the reader gives up:
        nothing writes to its blocks any more.

        Raises DeviceMemory if this reader must retrieve by itself, since it or the other has
        registered no memory; WrongMode, UnknownLease, ForeignLease.
        """
        seconds = self._seconds(timeout)
        with within_limits("await_fill"):
            timeout_ms = _verbs.limit_ms(seconds)
            request = cache_pb2.AwaitFillRequest(
                lease_id=_verbs.lease_id(lease),
                group_idx=group_idx,
                first_chunk=first,
                end_chunk=end,
                kv_worker_id=kv_worker_id,
                reader=reader,
                filled_by=filled_by,
                timeout_ms=timeout_ms,
                deadline_ns=time.monotonic_ns() + timeout_ms * 1_000_000,
            )
        return self._call(Call(request, _statuses), seconds)


_ReserveCall = Call[cache_pb2.ReserveRequest, cache_pb2.ReserveResponse, Reservation]
_StoreCall = Call[cache_pb2.StoreRequest, cache_pb2.StoreResponse, list[ChunkStatus]]
_CommitCall = Call[cache_pb2.CommitRequest, cache_pb2.CommitResponse, list[ChunkStatus]]
_AbortCall = Call[cache_pb2.AbortRequest, cache_pb2.AbortResponse, int]


@within_limits("commit")
def _commit(reservation_id: int, chunks: Sequence[int] | None) -> _CommitCall:
    request = cache_pb2.CommitRequest(reservation_id=reservation_id, chunks=chunks)
    return Call(request, _statuses)


@within_limits("abort")
def _abort(reservation_id: int) -> _AbortCall:
    return Call(cache_pb2.AbortRequest(reservation_id=reservation_id), _aborted)


def _reserve_pieces(
    verbs: SessionVerbs,
    parted: Sequence[Piece],
    call: Callable[[Piece, float], _ReserveCall],
    seconds: float,
) -> Steps[Reservation]:
    """Reserves piece by piece. If one fails, what the others have reserved is given back."""
    until = time.monotonic() + seconds
    made: list[Reservation] = []
    try:
        for piece in parted:
            reservation = yield _sender(verbs, functools.partial(call, piece), until)
            made.append(reservation)
    except BaseException:
        for reservation in made:
            if reservation.id:
                verbs.submit(cache_pb2.AbortRequest(reservation_id=reservation.id))
        raise
    return Reservation.joined(made)


def _store_pieces(
    verbs: SessionVerbs,
    parted: Sequence[Piece],
    call: Callable[[Piece, float], _StoreCall],
    seconds: float,
) -> Steps[list[ChunkStatus]]:
    until = time.monotonic() + seconds
    statuses: list[ChunkStatus] = []
    for piece in parted:
        statuses += yield _sender(verbs, functools.partial(call, piece), until)
    return statuses


def _commit_pieces(
    verbs: SessionVerbs,
    wanted: Mapping[int, Sequence[tuple[int, int]] | None],
    chunks: Sequence[int] | None,
    seconds: float,
) -> Steps[list[ChunkStatus]]:
    """Commits piece by piece. If one has no answer, the rest are committed all the same.

    ``wanted`` has for each reservation id the chunks as place in ``chunks`` and own index.
    """
    until = time.monotonic() + seconds
    found: list[ChunkStatus] = [ChunkStatus.FAILED] * len(chunks or ())
    unknown: list[UnknownReservation] = []
    left = [
        (named, _commit(number, None if named is None else [own for _, own in named]))
        for number, named in wanted.items()
    ]
    try:
        while left:
            named, call = left.pop(0)
            try:
                statuses = yield _sender(verbs, _always(call), until)
            except UnknownReservation as error:
                if named is not None:
                    raise
                unknown.append(error)  # no chunk of this one is still open
                continue
            if named is None:
                found += statuses
            else:
                for (place, _), status in zip(named, statuses, strict=True):
                    found[place] = status
    except BaseException:
        for _, call in left:
            verbs.submit(call.request)
        raise
    if unknown and len(unknown) == len(wanted):
        raise unknown[0]
    return found


def _abort_pieces(verbs: SessionVerbs, reservation: Reservation, seconds: float) -> Steps[int]:
    """Aborts piece by piece. If one has no answer, the rest are aborted all the same."""
    until = time.monotonic() + seconds
    aborted = 0
    left = list(reservation.ids)
    try:
        while left:
            aborted += yield _sender(verbs, _always(_abort(left.pop(0))), until)
    except BaseException:
        for number in left:
            verbs.submit(cache_pb2.AbortRequest(reservation_id=number))
        raise
    return aborted


def _sender(
    verbs: SessionVerbs, make: Callable[[float], Call[Any, Any, Any]], until: float
) -> Callable[[], Any]:
    """What sends one of a call's requests, made for the seconds that are left."""

    def send() -> Any:
        left = max(until - time.monotonic(), 0.0)
        return verbs._call(make(left), left)

    return send


def _always(call: Call[Any, Any, Any]) -> Callable[[float], Call[Any, Any, Any]]:
    """For a request that says nothing of its time."""
    return lambda _: call


def _reservation_id(reservation: Reservation | int) -> int:
    return reservation.id if isinstance(reservation, Reservation) else reservation


def _statuses(
    response: cache_pb2.CommitResponse | cache_pb2.StoreResponse | cache_pb2.AwaitFillResponse,
) -> list[ChunkStatus]:
    return [chunk_status(chunk.status) for chunk in response.chunks]


def _aborted(response: cache_pb2.AbortResponse) -> int:
    return response.aborted


def _results(response: cache_pb2.RetrieveResponse) -> list[ChunkResult]:
    return [ChunkResult.from_proto(chunk) for chunk in response.chunks]
