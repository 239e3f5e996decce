"""A session: one stream to the server, for as long as this process wants to hold anything there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Self

from google.protobuf.message import Message

from kvdock import _verbs
from kvdock._session_base import SessionBase
from kvdock._stream import StartStream, Stream
from kvdock._stream_base import CLOSE_SECONDS
from kvdock._verbs import Call, Request, Response, Result
from kvdock.address import Address
from kvdock.types import (
    ChunkEventData,
    ChunkResult,
    ChunkStatus,
    DeviceAllocation,
    GroupMemory,
    Hit,
    Lease,
    MemoryRegistration,
    Namespace,
    Reservation,
    TransferMode,
)
from kvdock.v1 import session_pb2


class Session(SessionBase[Stream]):
    """What a process holds on the server. Made by :meth:`kvdock.Client.session`.

    A session ends by close(), by the death of this process, or by the loss of the server. All that
    it holds is released then: leases, locks, reservations. **End copies into or out of the pool
    before close()**: close() does not wait for them, and the server may give the memory to somebody
    else at once.

    Thread-safe. Each verb blocks for at most ``timeout`` seconds and raises a subclass of
    KVDockError; :meth:`submit` never blocks. An answer that comes after its caller gave up (by
    timeout or by cancelling the future) is undone: its locks are freed, its memory is returned.
    """

    @classmethod
    def open(
        cls,
        start: StartStream,
        opening: session_pb2.OpenRequest,
        *,
        address: Address,
        timeout: float,
        on_lost: Callable[[str], None] | None,
    ) -> Self:
        """Starts the stream and waits for the server's answer."""
        stream = Stream(start, str(address), on_lost)
        return cls(stream, stream.open(opening, timeout), address=address, timeout=timeout)

    def submit(self, request: Message) -> Future[Any]:
        """Sends a request message of the protocol; the future brings its response message.

        Never blocks. The future fails with a KVDockError: at the latest when the session ends, and
        at once with Overloaded if 16 MiB of requests wait to be sent. Requests are sent in order,
        lookups after all others: at most eight lookups are on their way at a time, and of those
        that wait the latest goes first. **Cancel a future that nobody awaits any more**: a request
        that still waits is then never sent, unless it gives something back.
        Raises TypeError if a session does not carry requests of this type.
        """
        return self._stream.submit(request)

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
        return self._call(_verbs.register_memory(namespace, allocations, groups, mode), timeout)

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
        end: int = 0,
        *,
        reader: int | None = None,
        group_idx: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Frees locks on chunks [first, end) of the lookup; ``end`` 0 means to the end.

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
        timeout: float | None = None,
    ) -> Reservation:
        """Asks for memory to copy consecutive chunks of one prompt into.

        ``parent`` is the key of the chunk before the first; it is empty for a prompt's first chunk.
        Copy into the chunks that are RESERVED, then commit. Raises WrongMode outside shared mode,
        ChunkTooLarge if the whole pool could not hold one chunk.
        """
        seconds = self._seconds(timeout)
        call = _verbs.reserve(namespace, keys, parent, group_idx, event_data, seconds)
        return self._call(call, seconds)

    def commit(
        self,
        reservation: Reservation | int,
        chunks: Sequence[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[ChunkStatus]:
        """Seals chunks whose bytes are complete.

        ``chunks`` are indexes into the reservation's keys, None for all. Returns STORED or FAILED
        for each. Raises UnknownReservation, ForeignReservation.
        """
        return self._call(_verbs.commit(reservation, chunks), timeout)

    def abort(self, reservation: Reservation | int, *, timeout: float | None = None) -> int:
        """Gives back the memory of a reservation's open chunks, and says how many there were.

        A second call finds none.
        """
        return self._call(_verbs.abort(reservation), timeout)

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
        timeout: float | None = None,
    ) -> list[ChunkStatus]:
        """Has the server copy chunks out of the registered memory (server mode).

        ``block_ids`` are the blocks of all chunks, chunk by chunk. ``ready_event`` is the handle of
        a CUDA IPC event that the copy waits for. A chunk that is not copied within ``timeout``
        never becomes visible, so after DeadlineExceeded the blocks may be used again. Raises
        WrongMode, DeviceMemory.
        """
        call = _verbs.store(
            namespace,
            keys,
            block_ids,
            parent,
            group_idx,
            ready_event,
            event_data,
            self._seconds(timeout),
        )
        return self._call(call, timeout)

    def retrieve(
        self,
        lease: Lease | int,
        first: int = 0,
        end: int = 0,
        *,
        group_idx: int | None = None,
        kv_worker_id: int = 0,
        reader: int = 0,
        block_ids: Sequence[int] = (),
        skip_blocks: int = 0,
        ready_event: bytes = b"",
        also_fill: Sequence[int] = (),
        filled_by: int | None = None,
        timeout: float | None = None,
    ) -> list[ChunkResult]:
        """Delivers the locked chunks [first, end) of the lookup; ``end`` 0 means to the end.

        In shared mode the answer says where the chunks lie. Copy them, then free the locks, and use
        the copy only if :meth:`free_locks` released every lock.

        In server mode the server has copied the chunks to ``block_ids`` when it answers, and the
        locks are free. ``also_fill`` names other readers of the same shard, which get the same
        bytes. Each of them calls retrieve with ``filled_by``, the reader that fills it, to learn
        the outcome. After DeadlineExceeded or SessionLost the server may still write to the blocks,
        until its process has ended (:class:`kvdock.liveness.ServerProcess`), or until a new session
        of the worker has registered the memory.

        Raises UnknownLease, ForeignLease, DeviceMemory.
        """
        call = _verbs.retrieve(
            lease,
            first,
            end,
            group_idx,
            kv_worker_id,
            reader,
            block_ids,
            skip_blocks,
            ready_event,
            also_fill,
            filled_by,
        )
        return self._call(call, timeout)

    def close(self) -> None:
        """Ends the session and releases what it holds. Pending futures fail with SessionLost.

        Does not wait for copies: end yours first. A second call does nothing.
        """
        self._finalizer.detach()
        self._stream.close(CLOSE_SECONDS)
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _call(self, call: Call[Request, Response, Result], timeout: float | None) -> Result:
        return call.read(self._stream.result(call.request, self._seconds(timeout)))
