"""The session of the asyncio face: :class:`kvdock.Session` with coroutines."""

# Deadlines are arguments here as in the blocking face, since passing one has a meaning of its own:
# what a late answer grants is given back.
# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
import functools
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, Self

import grpc
from google.protobuf.message import Message

from kvdock import _verbs
from kvdock._protocol import MISSED_HEARTBEATS, SessionProtocol, again, undo
from kvdock._verbs import Call, Request, Response, Result
from kvdock.address import Address
from kvdock.aio._poller import keep_poller
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

StartStream = Callable[[AsyncIterator[session_pb2.SessionRequest]], Any]


class Session:
    """What a process holds on the server. Made by :meth:`kvdock.aio.Client.session`.

    As :class:`kvdock.Session`, for use in one event loop: end copies into or out of the pool before
    close(); an answer that comes after its caller gave up is undone.
    """

    def __init__(self, stream: Stream, info: SessionInfo, address: Address, timeout: float) -> None:
        self.info = info
        self._stream = stream
        self._address = address
        self._timeout = timeout
        self._pool = Pool(
            info.segments, guard=info.guard, server=str(address), is_local=address.is_local
        )
        self._finalizer = weakref.finalize(self, stream.abandon)

    @classmethod
    async def open(
        cls,
        start: StartStream,
        opening: session_pb2.OpenRequest,
        *,
        address: Address,
        timeout: float,
        on_lost: Callable[[str], None] | None,
    ) -> Self:
        """Starts the stream and waits for the server's word."""
        stream = Stream(start, address, on_lost)
        try:
            response: session_pb2.OpenResponse = await stream.result(opening, timeout)
        except SessionLost as lost:
            await stream.close(_NO_GRACE)
            # What ended the stream tells more than that it ended.
            raise lost.__cause__ or lost from None
        except BaseException:
            await stream.close(_NO_GRACE)
            raise
        info = SessionInfo.from_proto(response)
        stream.keep_alive(info.ttl)
        return cls(stream, info, address, timeout)

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

    def submit(self, request: Message) -> asyncio.Future[Any]:
        """As :meth:`kvdock.Session.submit`, with an asyncio future."""
        return self._stream.submit(request)

    async def register_namespace(
        self, namespace: Namespace, *, timeout: float | None = None
    ) -> bool:
        """As :meth:`kvdock.Client.register_namespace`."""
        return await self._call(_verbs.register_namespace(namespace), timeout)

    async def register_memory(
        self,
        namespace: str,
        allocations: Sequence[DeviceAllocation] = (),
        groups: Sequence[GroupMemory] = (),
        *,
        mode: TransferMode = TransferMode.UNSPECIFIED,
        timeout: float | None = None,
    ) -> MemoryRegistration:
        """As :meth:`kvdock.Session.register_memory`."""
        call = _verbs.register_memory(namespace, allocations, groups, mode)
        return await self._call(call, timeout)

    async def lookup(
        self,
        namespace: str,
        keys: Sequence[bytes],
        *,
        readers: int = 1,
        probe: bool = False,
        timeout: float | None = None,
    ) -> Hit:
        """As :meth:`kvdock.Session.lookup`."""
        seconds = self._seconds(timeout)
        call = _verbs.lookup(namespace, keys, readers, probe, timeout=seconds)
        return await self._call(call, seconds)

    async def free_locks(
        self,
        lease: Lease | int,
        first: int = 0,
        end: int = 0,
        *,
        reader: int | None = None,
        group_idx: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """As :meth:`kvdock.Session.free_locks`."""
        call = _verbs.free_locks(lease, first, end, reader, group_idx)
        return await self._call(call, timeout)

    async def reserve(
        self,
        namespace: str,
        keys: Sequence[bytes],
        *,
        parent: bytes = b"",
        group_idx: int | None = None,
        event_data: Sequence[ChunkEventData] | None = None,
        timeout: float | None = None,
    ) -> Reservation:
        """As :meth:`kvdock.Session.reserve`."""
        seconds = self._seconds(timeout)
        call = _verbs.reserve(namespace, keys, parent, group_idx, event_data, seconds)
        return await self._call(call, seconds)

    async def commit(
        self,
        reservation: Reservation | int,
        chunks: Sequence[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[ChunkStatus]:
        """As :meth:`kvdock.Session.commit`."""
        return await self._call(_verbs.commit(reservation, chunks), timeout)

    async def abort(self, reservation: Reservation | int, *, timeout: float | None = None) -> int:
        """As :meth:`kvdock.Session.abort`."""
        return await self._call(_verbs.abort(reservation), timeout)

    async def store(
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
        """As :meth:`kvdock.Session.store`."""
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
        return await self._call(call, timeout)

    async def retrieve(
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
        """As :meth:`kvdock.Session.retrieve`."""
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
        return await self._call(call, timeout)

    async def close(self) -> None:
        """As :meth:`kvdock.Session.close`."""
        self._finalizer.detach()
        await self._stream.close(_CLOSE_SECONDS)
        self._pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def _seconds(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else _verbs.limited(timeout)

    async def _call(self, call: Call[Request, Response, Result], timeout: float | None) -> Result:
        seconds = self._seconds(timeout)
        return call.read(await self._stream.result(call.request, seconds))


class Stream:
    """The stream, its tasks and the futures that wait for answers."""

    def __init__(
        self, start: StartStream, address: Address, on_lost: Callable[[str], None] | None
    ) -> None:
        self._address = address
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._protocol: SessionProtocol[asyncio.Future[Any]] = SessionProtocol()
        self._closing = False
        self._missed_heartbeats = 0
        self._given_up: KVDockError | None = None
        # There may be something to send, or nothing comes any more.
        self._news = asyncio.Event()
        self._is_complete = False
        self._call = start(self._requests())
        self._reader = asyncio.create_task(self._read(), name="kvdock-session")
        self._heart: asyncio.Task[None] | None = None

    @property
    def over(self) -> KVDockError | None:
        return self._protocol.over

    def submit(self, request: Message) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()
        try:
            request_id = self._protocol.request(request, future)
        except KVDockError as error:
            _fail(future, error)
        else:
            self._news.set()
            future.add_done_callback(functools.partial(self._done, request_id))
        return future

    async def result(self, request: Message, timeout: float) -> Any:
        """The answer to ``request``. Raises DeadlineExceeded after ``timeout`` seconds."""
        future = self.submit(request)
        try:
            async with asyncio.timeout(timeout):
                return await future
        except asyncio.CancelledError:
            # The answer may have come in the same turn of the loop.
            if future.done() and not future.cancelled() and future.exception() is None:
                self._give_back(future.result())
            raise
        except TimeoutError:
            if future.done() and not future.cancelled():
                return future.result()
            raise DeadlineExceeded(
                f"the server at {self._address} did not answer {type(request).__name__} within "
                f"{timeout:g} s"
            ) from None

    def keep_alive(self, ttl: float) -> None:
        """Starts the heartbeats. ``ttl`` in seconds."""
        self._heart = asyncio.create_task(self._heartbeat(ttl / 3), name="kvdock-heartbeat")

    async def close(self, grace: float) -> None:
        """Ends the stream in order, and cuts it off after ``grace`` seconds."""
        self._closing = True
        self._end(SessionLost("the session was closed"))
        if asyncio.current_task() is self._reader:
            return
        _, pending = await asyncio.wait([self._reader], timeout=grace)
        if pending:
            keep_poller()
        self._call.cancel()
        await asyncio.wait([self._reader])

    def abandon(self) -> None:
        """Closes the stream from a garbage collector, on whatever thread."""
        self._closing = True
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._complete)

    async def _requests(self) -> AsyncIterator[session_pb2.SessionRequest]:
        """gRPC closes our half of the stream when this ends."""
        while not self._is_complete:
            await self._news.wait()
            self._news.clear()
            while (request := self._protocol.next_request()) is not None:
                yield request

    def _complete(self) -> None:
        self._is_complete = True
        self._news.set()

    def _done(self, request_id: int, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            self._protocol.give_up(request_id)

    async def _read(self) -> None:
        error: KVDockError = SessionLost("the event loop stopped")
        try:
            async for response in self._call:
                self._missed_heartbeats = 0
                self._settle(response)
            error = Unavailable(f"the server at {self._address} ended the session")
        except grpc.RpcError as rpc_error:
            error = from_rpc_error(rpc_error, str(self._address))
        except asyncio.CancelledError:
            # Either we cancelled the call, or somebody this task.
            if not self._call.cancelled():
                self._call.cancel()
                raise
            error = SessionLost("the session ended: its client was closed")
        except Exception as fault:
            _log.exception("reading from the session's stream failed")
            error = ServerError(f"reading from the session's stream failed: {fault!r}")
            self._call.cancel()
        finally:
            self._end(self._given_up or error)

    def _settle(self, response: session_pb2.SessionResponse) -> None:
        settled = self._protocol.response(response)
        if self._protocol.has_next:
            self._news.set()
        if settled is None:
            return
        future, answer = settled
        if isinstance(answer, KVDockError):
            if not future.cancelled():
                _fail(future, answer)
            if isinstance(answer, SessionExpired) and self._protocol.expire(answer):
                self._tell_lost(answer)
        elif not future.cancelled():
            future.set_result(answer)
        else:
            self._give_back(answer)

    def _give_back(self, answer: Message) -> None:
        """Undoes what an answer granted that nobody takes."""
        if (giving_back := undo(answer)) is not None:
            self.submit(giving_back)

    async def _heartbeat(self, interval: float) -> None:
        # An expired session is past saving, and its stream stays until close().
        while self.over is None:
            await asyncio.sleep(interval)
            self._missed_heartbeats += 1
            if self._missed_heartbeats > MISSED_HEARTBEATS:
                silent_for = interval * MISSED_HEARTBEATS
                self._given_up = Unavailable(
                    f"the server at {self._address} did not answer for {silent_for:g} s"
                )
                # Wakes the reader, which ends the session.
                self._call.cancel()
                return
            self.submit(session_pb2.HeartbeatRequest())

    def _end(self, error: KVDockError) -> None:
        first, futures = self._protocol.end(error)
        self._complete()
        if self._heart is not None:
            self._heart.cancel()
        lost = self._protocol.over
        if lost is None:
            return
        for future in futures:
            if not future.cancelled():
                _fail(future, again(lost))
        if first:
            self._tell_lost(lost)

    def _tell_lost(self, error: KVDockError) -> None:
        if self._closing or self._on_lost is None:
            return
        try:
            self._on_lost(error.message)
        except Exception:
            _log.exception("on_lost of a session raised")


def _fail(future: asyncio.Future[Any], error: KVDockError) -> None:
    future.set_exception(error)
    # Nobody need look at the failure: of a heartbeat, or of an answer that is given back.
    future.exception()
