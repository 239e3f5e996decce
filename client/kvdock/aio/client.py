"""The client of the asyncio face: :class:`kvdock.Client` with coroutines."""

# Timeouts are arguments, as in the blocking face: asyncio.timeout around a call would mean another
# thing. A transfer's timeout limits each pause, and a session gives back what a late answer grants.
# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from typing import Self

import grpc
import grpc.aio

from kvdock import _health, _verbs
from kvdock import client as blocking
from kvdock._client_base import DEFAULT_TIMEOUT, ClientBase, closed
from kvdock._inline import PUT_METHOD, PutTransfer
from kvdock._pieces import Steps, T, in_turn_async
from kvdock._verbs import Call, Request, Response, Result
from kvdock.aio._awaited import awaited
from kvdock.aio._poller import keep_poller
from kvdock.aio.session import Session
from kvdock.channel import Options
from kvdock.errors import DeadlineExceeded, from_rpc_error
from kvdock.events.messages import (
    PROGRESS_INTERVAL,
    Cursor,
    Filter,
    Message,
    message_from_proto,
    stream_request,
)
from kvdock.fork import remember
from kvdock.types import ChunkStatus, PartStatus, SessionRole
from kvdock.v1 import (
    admin_pb2_grpc,
    cache_pb2,
    cache_pb2_grpc,
    events_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
)


class Client(ClientBase):
    """A server, asked call by call. As :class:`kvdock.Client`; make it inside its event loop."""

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        channel_options: Options = (),
    ) -> None:
        super().__init__(address, timeout, channel_options)
        self._channel = grpc.aio.insecure_channel(self.address.target, self._channel_options)
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

    register_namespace = awaited(blocking.Client.register_namespace)
    lookup = awaited(blocking.Client.lookup)
    free_locks = awaited(blocking.Client.free_locks)
    put = awaited(blocking.Client.put)
    get = awaited(blocking.Client.get)
    get_into = awaited(blocking.Client.get_into)
    status = awaited(blocking.Client.status)
    namespaces = awaited(blocking.Client.namespaces)
    pin = awaited(blocking.Client.pin)
    unpin = awaited(blocking.Client.unpin)
    pins = awaited(blocking.Client.pins)
    clear = awaited(blocking.Client.clear)
    evict = awaited(blocking.Client.evict)

    async def chunks(
        self, namespace: str, *, group_idx: int | None = None, timeout: float | None = None
    ) -> AsyncIterator[PartStatus]:
        """As :meth:`kvdock.Client.chunks`."""
        request = _verbs.list_chunks(namespace, group_idx)
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
        """As :meth:`kvdock.Client.events`, but the call begins when the first message is asked for.

        Errors come then, and ``"now"`` is then.
        """
        request = stream_request(start, only or Filter(), progress_interval)
        with self._starting():
            responses = self._events.StreamKVEvents(request)
        seconds = self._longest_silence(progress_interval)
        async with contextlib.aclosing(self._each(responses, seconds)) as messages:
            async for message in messages:
                yield message_from_proto(message)

    async def health(self, service: str = "", *, timeout: float | None = None) -> str:
        """As :meth:`kvdock.Client.health`."""
        request = _health.request(service)
        with _health.service_errors(service), self._starting():
            status: str = await self._check_health(request, timeout=self._seconds(timeout))
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
        """As :meth:`kvdock.Client.session`."""
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

    async def __aexit__(self, *exc: object) -> None:
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

    async def _in_turn(self, steps: Steps[T]) -> T:
        return await in_turn_async(steps)

    async def _upload(self, transfer: PutTransfer, timeout: float | None) -> list[ChunkStatus]:
        """Sends what the server's first answer asks for, and returns what became of each chunk."""
        answered = asyncio.Event()

        async def requests() -> AsyncIterator[bytes]:
            # Runs in a task of gRPC's.
            yield transfer.open
            await answered.wait()
            for message, nbytes in transfer.data():
                yield message
                touch()
                if not transfer.sent(nbytes):
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
        return transfer.result()

    async def _download(
        self,
        method: grpc.aio.UnaryStreamMultiCallable[Request, Response],
        request: Request,
        feed: Callable[[Response], object],
        result: Callable[[], Result],
        timeout: float | None,
    ) -> Result:
        """Feeds every answer, and returns the result after the last."""
        with self._starting():
            responses = method(request)
        async with self._stream(responses, timeout) as touch:
            async for response in responses:
                touch()
                feed(response)
        return result()

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
        """Around the start of a call: checks the server, and translates what gRPC raises."""
        self._check_server()
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
            # gRPC raises this if the channel was closed.
            raise closed() from error
        except asyncio.CancelledError:
            if _is_being_cancelled():
                raise
            # gRPC cancels whoever waits when the channel is closed.
            raise closed() from None

    @contextlib.asynccontextmanager
    async def _stream(
        self, call: grpc.aio.Call, timeout: float | None
    ) -> AsyncIterator[Callable[[], None]]:
        """Limits the pauses of a stream, translates its errors, and ends it with the block.

        The block gets a function to call whenever the stream has moved.
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
            raise self._stalled(seconds) from None


def _is_being_cancelled() -> bool:
    """Whether the running task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
