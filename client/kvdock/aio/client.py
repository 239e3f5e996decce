"""The client of the asyncio face: :class:`kvdock.Client` with coroutines."""

# Deadlines are arguments here as in the blocking face, since passing one has a meaning of its own:
# a transfer's limits each pause, and what a late answer grants on a session is given back (call by
# call nobody hears it).
# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc
import grpc.aio

from kvdock import _health, _verbs
from kvdock._inline import PUT_METHOD, GetTransfer, PutTransfer
from kvdock._verbs import Call, Request, Response, Result
from kvdock.address import Address, default_address, parse
from kvdock.aio._poller import keep_poller
from kvdock.aio.session import Session
from kvdock.channel import Options, options
from kvdock.client import DEFAULT_TIMEOUT, Progress
from kvdock.errors import (
    DeadlineExceeded,
    InvalidArgument,
    ServerError,
    Unavailable,
    from_rpc_error,
)
from kvdock.events.messages import (
    MISSED_SIGNS,
    PROGRESS_INTERVAL,
    Cursor,
    Filter,
    Message,
    message_from_proto,
    stream_request,
)
from kvdock.fork import refuse_broken_fork, refuse_fork_of, remember
from kvdock.trust import Gatekeeper
from kvdock.types import (
    ChunkEventData,
    ChunkStatus,
    Evicted,
    Hit,
    Lease,
    Namespace,
    NamespaceStatus,
    PartStatus,
    SessionRole,
)
from kvdock.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    cache_pb2_grpc,
    events_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer


class Client:
    """A server, asked call by call. As :class:`kvdock.Client`; make it inside its event loop."""

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        channel_options: Options = (),
    ) -> None:
        self.address: Address = parse(default_address() if address is None else address)
        self.timeout = timeout
        self._gatekeeper = Gatekeeper(self.address)
        self._pid = os.getpid()
        refuse_broken_fork()
        self._channel = grpc.aio.insecure_channel(
            self.address.target, [*options(self.address), *channel_options]
        )
        remember(self._channel)
        self._cache = cache_pb2_grpc.CacheServiceStub(self._channel)
        self._open_session = session_pb2_grpc.SessionServiceStub(self._channel).Session
        self._check_health = self._channel.unary_unary(
            _health.CHECK,
            request_serializer=None,
            response_deserializer=_health.status,
        )
        # Takes serialized requests: see kvdock._inline.
        self._put = self._channel.stream_stream(
            PUT_METHOD,
            request_serializer=None,
            response_deserializer=cache_pb2.PutResponse.FromString,
        )
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._events = events_pb2_grpc.EventServiceStub(self._channel)
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()

    async def register_namespace(
        self, namespace: Namespace, *, timeout: float | None = None
    ) -> bool:
        """As :meth:`kvdock.Client.register_namespace`."""
        call = _verbs.register_namespace(namespace)
        return await self._call(self._cache.RegisterNamespace, call, timeout)

    async def lookup(
        self,
        namespace: str,
        keys: Sequence[bytes],
        *,
        readers: int = 1,
        probe: bool = False,
        ttl: float | None = None,
        timeout: float | None = None,
    ) -> Hit:
        """As :meth:`kvdock.Client.lookup`."""
        call = _verbs.lookup(namespace, keys, readers, probe, ttl=ttl)
        return await self._call(self._cache.Lookup, call, timeout)

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
        """As :meth:`kvdock.Client.free_locks`."""
        call = _verbs.free_locks(lease, first, end, reader, group_idx)
        return await self._call(self._cache.FreeLocks, call, timeout)

    async def put(
        self,
        namespace: str,
        keys: Sequence[bytes],
        shards: Sequence[ReadableBuffer],
        *,
        parent: bytes = b"",
        group_idx: int | None = None,
        kv_worker_id: int = 0,
        event_data: Sequence[ChunkEventData] | None = None,
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> list[ChunkStatus]:
        """As :meth:`kvdock.Client.put`."""
        transfer = PutTransfer(
            namespace,
            keys,
            shards,
            parent=parent,
            group_idx=group_idx,
            kv_worker_id=kv_worker_id,
            event_data=event_data,
        )
        # What progress raised: for our caller, not for gRPC, which would only cancel the call.
        faults: list[Exception] = []
        answered = asyncio.Event()

        async def requests() -> AsyncIterator[bytes]:
            # Runs in a task of gRPC's.
            yield transfer.open
            await answered.wait()
            for message, nbytes in transfer.data():
                yield message
                touch()
                if progress is not None:
                    try:
                        progress(nbytes)
                    except Exception as fault:
                        faults.append(fault)
                        return

        with self._starting():
            responses = self._put(requests())
        async with self._stream(responses, timeout) as touch:
            try:
                async for response in responses:
                    touch()
                    transfer.feed(response)
                    answered.set()
            finally:
                answered.set()
        if faults:
            raise faults[0]
        return transfer.result()

    async def get(
        self,
        namespace: str,
        keys: Sequence[bytes],
        *,
        group_idx: int | None = None,
        kv_worker_id: int = 0,
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> list[bytes | None]:
        """As :meth:`kvdock.Client.get`."""
        transfer = GetTransfer(namespace, keys, group_idx=group_idx, kv_worker_id=kv_worker_id)
        await self._get(transfer, progress, timeout)
        return transfer.result()

    async def get_into(
        self,
        namespace: str,
        keys: Sequence[bytes],
        buffers: Sequence[WriteableBuffer],
        *,
        group_idx: int | None = None,
        kv_worker_id: int = 0,
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> int:
        """As :meth:`kvdock.Client.get_into`."""
        transfer = GetTransfer(
            namespace, keys, group_idx=group_idx, kv_worker_id=kv_worker_id, buffers=buffers
        )
        await self._get(transfer, progress, timeout)
        return transfer.num_complete

    async def status(self, *, timeout: float | None = None) -> admin_pb2.StatusResponse:
        """As :meth:`kvdock.Client.status`."""
        return await self._call(self._admin.Status, _verbs.status(), timeout)

    async def namespaces(self, *, timeout: float | None = None) -> list[NamespaceStatus]:
        """As :meth:`kvdock.Client.namespaces`."""
        with self._starting():
            responses = self._admin.ListNamespaces(admin_pb2.ListNamespacesRequest())
        found = []
        async with self._stream(responses, timeout) as touch:
            async for response in responses:
                touch()
                found.append(NamespaceStatus.from_proto(response.namespace))
        return found

    async def chunks(
        self, namespace: str, *, timeout: float | None = None
    ) -> AsyncIterator[PartStatus]:
        """As :meth:`kvdock.Client.chunks`."""
        request = _verbs.list_chunks(namespace)
        with self._starting():
            responses = self._admin.ListChunks(request)
        async with contextlib.aclosing(self._each(responses, self._seconds(timeout))) as messages:
            async for message in messages:
                for part in message.parts:
                    yield PartStatus.from_proto(part)

    async def events(
        self,
        start: Cursor | str = "now",
        *,
        only: Filter | None = None,
        progress_interval: float = PROGRESS_INTERVAL,
    ) -> AsyncGenerator[Message, None]:
        """As :meth:`kvdock.Client.events`, but begins when its first message is asked for: errors
        come then, and what happens before is not told from ``"now"`` on.
        """
        request = stream_request(start, only or Filter(), progress_interval)
        seconds = max(MISSED_SIGNS * progress_interval, self.timeout)
        with self._starting():
            responses = self._events.StreamKVEvents(request)
        async with contextlib.aclosing(self._each(responses, seconds)) as messages:
            async for message in messages:
                yield message_from_proto(message)

    async def clear(self, namespace: str = "", *, timeout: float | None = None) -> int:
        """As :meth:`kvdock.Client.clear`."""
        return await self._call(self._admin.Clear, _verbs.clear(namespace), timeout)

    async def evict(self, nbytes: int = 0, *, timeout: float | None = None) -> Evicted:
        """As :meth:`kvdock.Client.evict`."""
        return await self._call(self._admin.Evict, _verbs.evict(nbytes), timeout)

    async def health(self, service: str = "", *, timeout: float | None = None) -> str:
        """As :meth:`kvdock.Client.health`."""
        request = _health.request(service)
        try:
            with self._starting():
                status: str = await self._check_health(request, timeout=self._seconds(timeout))
        except ServerError as error:
            if error.code is not grpc.StatusCode.NOT_FOUND:
                raise
            raise InvalidArgument(f"the server has no service {service!r}") from error
        return status

    async def session(
        self,
        engine_id: str | None = None,
        *,
        role: SessionRole | str = SessionRole.TOOL,
        worker_id: int = 0,
        kv_worker_id: int = 0,
        ttl: float | None = None,
        client: str | None = None,
        on_lost: Callable[[str], None] | None = None,
        timeout: float | None = None,
    ) -> Session:
        """As :meth:`kvdock.Client.session`; ``on_lost`` is called in the event loop."""
        session = await Session.open(
            self._start_session,
            _verbs.open_session(engine_id, role, worker_id, kv_worker_id, ttl, client),
            address=self.address,
            timeout=self._seconds(timeout),
            on_lost=on_lost,
        )
        self._sessions.add(session)
        return session

    async def close(self) -> None:
        """As :meth:`kvdock.Client.close`."""
        for session in list(self._sessions):
            await session.close()
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[Request, Response],
        call: Call[Request, Response, Result],
        timeout: float | None,
    ) -> Result:
        _verbs.check_size(call.request)
        with self._starting():
            response = await method(call.request, timeout=self._seconds(timeout))
        return call.read(response)

    async def _get(
        self, transfer: GetTransfer, progress: Progress | None, timeout: float | None
    ) -> None:
        with self._starting():
            responses = self._cache.Get(transfer.request)
        async with self._stream(responses, timeout) as touch:
            async for response in responses:
                touch()
                moved = transfer.feed(response)
                if progress is not None:
                    progress(moved)

    async def _each(
        self, call: grpc.aio.UnaryStreamCall[Request, Response], seconds: float
    ) -> AsyncGenerator[Response, None]:
        """A stream's messages, for a reader that may take its time between them."""
        responses = aiter(call)
        try:
            while True:
                try:
                    with self._errors():
                        async with asyncio.timeout(seconds):
                            response = await anext(responses, None)
                except TimeoutError:
                    raise DeadlineExceeded(f"{self.address} was silent for {seconds:g} s") from None
                if response is None:
                    return
                yield response
        finally:
            call.cancel()

    def _start_session(
        self, requests: AsyncIterator[session_pb2.SessionRequest]
    ) -> grpc.aio.StreamStreamCall[session_pb2.SessionRequest, session_pb2.SessionResponse]:
        with self._starting():
            return self._open_session(requests)

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        """For the start of a call: sees who would get it, and translates what gRPC raises."""
        refuse_fork_of(self._pid)
        self._gatekeeper.check()
        with self._errors():
            yield

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Translates what gRPC raises when a call starts or fails."""
        try:
            yield
        except grpc.RpcError as error:
            raise from_rpc_error(error, str(self.address)) from error
        except grpc.aio.UsageError as error:
            # What gRPC raises if the channel was closed.
            raise Unavailable("this client was closed; make another") from error
        except asyncio.CancelledError:
            if _is_being_cancelled():
                raise
            # What gRPC raises in whoever waits when the channel is closed.
            raise Unavailable("this client was closed; make another") from None

    @contextlib.asynccontextmanager
    async def _stream(
        self, call: grpc.aio.Call, timeout: float | None
    ) -> AsyncIterator[Callable[[], None]]:
        """Limits the pauses of a stream, translates its errors, and ends it with the block.

        Gives the function that says that the stream moves.
        """
        seconds = self._seconds(timeout)
        loop = asyncio.get_running_loop()

        def touch() -> None:
            if not call.done():
                limit.reschedule(loop.time() + seconds)

        try:
            with self._errors():
                async with asyncio.timeout(seconds) as limit:
                    try:
                        yield touch
                    finally:
                        call.cancel()
        except TimeoutError:
            keep_poller()
            raise DeadlineExceeded(
                f"nothing moved from or to {self.address} for {seconds:g} s"
            ) from None

    def _seconds(self, timeout: float | None) -> float:
        return _verbs.limited(self.timeout if timeout is None else timeout)


def _is_being_cancelled() -> bool:
    """Whether somebody cancels the running task."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
