"""A session: one stream to the server, for as long as this process wants to hold anything there.

Three threads serve it: gRPC's own sends what :meth:`Session.submit` takes, a reader settles the
futures, a third makes heartbeats. They belong to an inner object and hold no reference to the
Session, so that one that is dropped without close() ends as if it had been closed. (Unless
``on_lost`` refers to it: what they call, they hold.)
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.message import Message

from kvdock import _verbs
from kvdock._protocol import MISSED_HEARTBEATS, SessionProtocol, again, undo
from kvdock._verbs import Call, Request, Response, Result
from kvdock.address import Address
from kvdock.errors import (
    DeadlineExceeded,
    KVDockError,
    ServerError,
    SessionExpired,
    SessionLost,
    Unavailable,
    from_rpc_error,
)
from kvdock.pool import Pool
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
    SessionInfo,
    TransferMode,
)
from kvdock.v1 import session_pb2

_log = logging.getLogger(__name__)

# Seconds that close() gives the server to end the stream in order before it is cut off.
_CLOSE_SECONDS = 1.0
_NO_GRACE = 0.0

StartStream = Callable[[Iterator[session_pb2.SessionRequest]], Any]


class Session:
    """What a process holds on the server. Made by :meth:`kvdock.Client.session`.

    Everything it holds (leases, locks, reservations) is released when it ends: by close(), by the
    death of this process, or by the loss of the server. **End copies into or out of the pool before
    close()**: it waits for nothing, and the memory may be given to somebody else at once.

    Thread-safe. Each verb blocks for at most ``timeout`` seconds and raises a subclass of
    KVDockError; :meth:`submit` never blocks. An answer that comes after its caller gave up (by
    timeout or by cancelling the future) is undone: its locks are freed, its memory is returned.
    """

    def __init__(
        self,
        start: StartStream,
        opening: session_pb2.OpenRequest,
        *,
        address: Address,
        timeout: float,
        on_lost: Callable[[str], None] | None,
    ) -> None:
        self._address = address
        self._timeout = timeout
        self._stream = _Stream(start, str(address), on_lost)
        try:
            response: session_pb2.OpenResponse = self._result(opening, timeout)
        except SessionLost as lost:
            self._stream.close(_NO_GRACE)
            # What ended the stream tells more than that it ended.
            raise lost.__cause__ or lost from None
        except BaseException:
            self._stream.close(_NO_GRACE)
            raise
        self._finalizer = weakref.finalize(self, self._stream.abandon)
        self.info = SessionInfo.from_proto(response)
        self._pool = Pool(
            self.info.segments,
            guard=self.info.guard,
            server=str(address),
            is_local=address.is_local,
        )
        self._stream.keep_alive(self.info.ttl)

    @property
    def id(self) -> int:
        """The session's public name, as Status shows it."""
        return self.info.id

    @property
    def epoch(self) -> int:
        """The server's epoch. One session never sees two: a restart ends it."""
        return self.info.epoch

    @property
    def chunk_tokens(self) -> int:
        """The chunk size that engines of this host should use, in tokens."""
        return self.info.chunk_tokens

    @property
    def server_version(self) -> str:
        """The server's version."""
        return self.info.server_version

    @property
    def alive(self) -> bool:
        """False once no request can succeed any more."""
        return self._stream.over is None

    @property
    def lost(self) -> str | None:
        """Why the session is not alive; None while it is."""
        over = self._stream.over
        return None if over is None else over.message

    @property
    def pool(self) -> Pool:
        """The server's memory. Closed with the session; views taken before stay valid."""
        return self._pool

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
        self._stream.close(_CLOSE_SECONDS)
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else _verbs.limited(timeout)

    def _call(self, call: Call[Request, Response, Result], timeout: float | None) -> Result:
        seconds = self._seconds(timeout)
        return call.read(self._result(call.request, seconds))

    def _result(self, request: Message, timeout: float) -> Any:
        future = self._stream.submit(request)
        try:
            return future.result(timeout)
        except TimeoutError:
            if not future.cancel():
                return future.result()
            raise DeadlineExceeded(
                f"the server at {self._address} did not answer {type(request).__name__} within "
                f"{timeout:g} s"
            ) from None
        except KVDockError:
            raise
        except BaseException:
            # Ctrl-C, for one. The answer may have come at the same moment.
            if not future.cancel() and future.exception() is None:
                self._stream.give_back(future.result())
            raise


class _Stream:
    """The stream, its threads and the futures that wait for answers."""

    def __init__(
        self, start: StartStream, server: str, on_lost: Callable[[str], None] | None
    ) -> None:
        self._server = server
        self._on_lost = on_lost
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._protocol: SessionProtocol[Future[Any]] = SessionProtocol()
        self._closing = False
        self._ended = threading.Event()
        self._missed_heartbeats = 0
        self._given_up: KVDockError | None = None
        # True: there may be something to send. False: nothing comes any more.
        self._wakeups: SimpleQueue[bool] = SimpleQueue()
        self._sender_is_awake = False
        self._call = start(self._requests())
        self._reader = threading.Thread(target=self._read, name="kvdock-session", daemon=True)
        self._reader.start()

    @property
    def over(self) -> KVDockError | None:
        return self._protocol.over

    def submit(self, request: Message) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            if os.getpid() != self._pid:
                raise SessionLost(
                    f"the session belongs to process {self._pid}, this is its fork {os.getpid()}: "
                    f"open another here"
                )
            with self._lock:
                request_id = self._protocol.request(request, future)
                self._wake_sender()
        except KVDockError as error:
            future.set_exception(error)
        else:
            future.add_done_callback(functools.partial(self._done, request_id))
        return future

    def keep_alive(self, ttl: float) -> None:
        """Starts the heartbeats. ``ttl`` in seconds."""
        threading.Thread(
            target=self._heartbeat, args=(ttl / 3,), name="kvdock-heartbeat", daemon=True
        ).start()

    def close(self, grace: float) -> None:
        """Ends the stream in order, and cuts it off after ``grace`` seconds."""
        self._closing = True
        if os.getpid() != self._pid:
            return
        self._end(SessionLost("the session was closed"))
        if threading.current_thread() is not self._reader:
            self._reader.join(grace)
        if self._reader.is_alive():
            self._call.cancel()

    def abandon(self) -> None:
        """Closes the stream from a garbage collector, which may hold any lock: takes none."""
        self._closing = True
        self._wakeups.put(False)

    def _requests(self) -> Iterator[session_pb2.SessionRequest]:
        """Runs on gRPC's thread, which closes our half of the stream when this ends."""
        while self._wakeups.get():
            while (request := self._next_request()) is not None:
                yield request

    def _next_request(self) -> session_pb2.SessionRequest | None:
        with self._lock:
            request = self._protocol.next_request()
            self._sender_is_awake = request is not None
            return request

    def _wake_sender(self) -> None:
        """With the lock held."""
        if self._protocol.has_next and not self._sender_is_awake:
            self._sender_is_awake = True
            self._wakeups.put(True)

    def _done(self, request_id: int, future: Future[Any]) -> None:
        if future.cancelled():
            with self._lock:
                self._protocol.give_up(request_id)

    def _read(self) -> None:
        error: KVDockError
        try:
            for response in self._call:
                self._missed_heartbeats = 0
                self._settle(response)
            error = Unavailable(f"the server at {self._server} ended the session")
        except grpc.RpcError as rpc_error:
            error = self._given_up or from_rpc_error(rpc_error, self._server)
        except Exception as fault:
            _log.exception("reading from the session's stream failed")
            error = ServerError(f"reading from the session's stream failed: {fault!r}")
            self._call.cancel()
        self._end(error)

    def _settle(self, response: session_pb2.SessionResponse) -> None:
        with self._lock:
            settled = self._protocol.response(response)
            self._wake_sender()
        if settled is None:
            return
        future, answer = settled
        wanted = future.set_running_or_notify_cancel()
        if isinstance(answer, KVDockError):
            if wanted:
                future.set_exception(answer)
            if isinstance(answer, SessionExpired):
                self._expire(answer)
        elif wanted:
            future.set_result(answer)
        else:
            self.give_back(answer)

    def give_back(self, answer: Message) -> None:
        """Undoes what an answer granted that nobody takes."""
        if (giving_back := undo(answer)) is not None:
            self.submit(giving_back)

    def _heartbeat(self, interval: float) -> None:
        # An expired session is past saving, and its stream stays until close().
        while not self._ended.wait(interval) and self.over is None:
            self._missed_heartbeats += 1
            if self._missed_heartbeats > MISSED_HEARTBEATS:
                silent_for = interval * MISSED_HEARTBEATS
                self._given_up = Unavailable(
                    f"the server at {self._server} did not answer for {silent_for:g} s"
                )
                # Wakes the reader, which ends the session.
                self._call.cancel()
                return
            self.submit(session_pb2.HeartbeatRequest())

    def _expire(self, error: SessionExpired) -> None:
        # The stream stays: until it ends, the server keeps reserved memory out of use, and copies
        # into it may still be running here.
        with self._lock:
            first = self._protocol.expire(error)
        if first:
            self._tell_lost(error)

    def _end(self, error: KVDockError) -> None:
        with self._lock:
            first, futures = self._protocol.end(error)
            self._wake_sender()
            self._wakeups.put(False)
        self._ended.set()
        lost = self._protocol.over
        assert lost is not None
        for future in futures:
            if future.set_running_or_notify_cancel():
                future.set_exception(again(lost))
        if first:
            self._tell_lost(lost)

    def _tell_lost(self, error: KVDockError) -> None:
        if self._closing or self._on_lost is None:
            return
        try:
            self._on_lost(error.message)
        except Exception:
            _log.exception("on_lost of a session raised")
