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

    Everything it holds (leases, locks, reservations) is released when it ends: by close(), by the
    death of this process, or by the loss of the server. **End copies into or out of the pool before
    close()**: it waits for nothing, and the memory may be given to somebody else at once.

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

        Never blocks. The future fails with a KVDockError, at the latest when the session ends; at
        once with Overloaded if 16 MiB of requests wait to be sent. Requests are sent in order, but
        for lookups: at most eight are on their way at a time, and of those that wait the latest
        goes first, after all else. **Cancel a future that nobody awaits any more**: what waits is
        then never sent, unless it gives something back.
        Raises TypeError if ``request`` is not a request that a session carries.
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
        """Hands a worker's KV-cache memory to the server, in place of what was registered before.

        UNSPECIFIED lets the server choose between SERVER and SHARED. Raises DeviceMemory if the
        memory cannot be opened.
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
        """How many of the prompt's chunks, from the first on, are cached; and locks them.

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

        Returns how many were held and are free now. Idempotent. ``reader`` None: those of all
        readers, on a worker's session its own. ``group_idx`` None: all groups'.
        Raises ForeignLease.
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

        ``parent`` is the key of the chunk before the first, empty for a prompt's first chunk. Copy
        into the chunks that are RESERVED, then commit. Raises WrongMode outside shared mode,
        ChunkTooLarge if the pool could not hold one.
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
        """Seals chunks whose bytes are complete: indexes into the reservation's keys, None for all.

        Answers STORED or FAILED for each. Raises UnknownReservation, ForeignReservation.
        """
        return self._call(_verbs.commit(reservation, chunks), timeout)

    def abort(self, reservation: Reservation | int, *, timeout: float | None = None) -> int:
        """Returns what a reservation still holds, and how many chunks that were. Idempotent."""
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
        """Server mode: the server copies chunks out of the registered memory, then answers.

        ``block_ids`` are the blocks of all chunks, chunk by chunk; ``ready_event`` a CUDA IPC event
        handle that the copy waits for. What is not copied within ``timeout`` never becomes visible,
        so after DeadlineExceeded the blocks may be used again. Raises WrongMode, DeviceMemory.
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

        In shared mode it says where they lie: copy, then free the locks, and use the copy only if
        :meth:`free_locks` reports every one as released. In server mode the bytes are in
        ``block_ids`` when it answers, and the locks are free; ``also_fill`` names other readers of
        the same shard that get the same bytes, and each of those asks with ``filled_by``,
        the reader that fills it, what came of it. Raises UnknownLease, ForeignLease, DeviceMemory.

        After DeadlineExceeded or SessionLost the server may still write to the blocks: until its
        process has ended (:class:`kvdock.liveness.ServerProcess`), or a new session of the worker
        has registered its memory.
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
        """Ends the session, and with it all it holds. Pending futures fail with SessionLost.

        Waits for no copy: end yours first. A second call does nothing.
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
