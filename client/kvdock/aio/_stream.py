"""The session stream of the asyncio face, its tasks and the futures that wait for answers."""

# Timeouts are arguments, as in the blocking face: asyncio.timeout around a call would mean another
# thing. A session gives back what a late answer grants.
# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable
from typing import Any

from google.protobuf.message import Message

from kvdock._protocol import again
from kvdock._stream_base import NO_GRACE, StreamBase
from kvdock.aio._poller import keep_poller
from kvdock.errors import KVDockError, SessionExpired, SessionLost
from kvdock.types import SessionInfo
from kvdock.v1 import session_pb2

StartStream = Callable[[AsyncIterator[session_pb2.SessionRequest]], Any]


class Stream(StreamBase[asyncio.Future[Any]]):
    """For one event loop. ``start`` is given the requests and begins the call."""

    def __init__(
        self, start: StartStream, server: str, on_lost: Callable[[str], None] | None
    ) -> None:
        super().__init__(server, on_lost)
        self._loop = asyncio.get_running_loop()
        # Set when there may be something to send, and when nothing comes any more.
        self._news = asyncio.Event()
        self._is_complete = False
        self._call = start(self._requests())
        self._reader = asyncio.create_task(self._read(), name="kvdock-session")
        self._heart: asyncio.Task[None] | None = None

    async def open(self, opening: session_pb2.OpenRequest, timeout: float) -> SessionInfo:
        """Sends the first message, waits for its answer and starts the heartbeats."""
        try:
            info = SessionInfo.from_proto(await self.result(opening, timeout))
        except SessionLost as lost:
            await self.close(NO_GRACE)
            # What ended the stream tells more than that it ended.
            raise lost.__cause__ or lost from None
        except BaseException:
            await self.close(NO_GRACE)
            raise
        self._heart = asyncio.create_task(self._heartbeat(info.ttl / 3), name="kvdock-heartbeat")
        return info

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
            raise self._late(request, timeout) from None

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
            error = self._end_of_reading(None)
        except asyncio.CancelledError:
            # Either we cancelled the call, or somebody cancels this task.
            if not self._call.cancelled():
                self._call.cancel()
                raise
            error = SessionLost("the session ended: its client was closed")
        except Exception as fault:
            error = self._end_of_reading(fault)
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

    async def _heartbeat(self, interval: float) -> None:
        # An expired session is past saving: its stream goes on, without heartbeats, until close().
        while self.over is None:
            await asyncio.sleep(interval)
            if not self._beat(interval):
                return

    def _end(self, error: KVDockError) -> None:
        first, futures = self._protocol.end(error)
        self._complete()
        if self._heart is not None:
            self._heart.cancel()
        lost = self._protocol.over
        assert lost is not None
        for future in futures:
            if not future.cancelled():
                _fail(future, again(lost))
        if first:
            self._tell_lost(lost)


def _fail(future: asyncio.Future[Any], error: KVDockError) -> None:
    future.set_exception(error)
    # Marks the error as seen: nobody awaits a heartbeat, or an answer that is given back.
    future.exception()
