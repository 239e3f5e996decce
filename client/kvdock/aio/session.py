"""The session of the asyncio face: :class:`kvdock.Session` with coroutines."""

# Timeouts are arguments, as in the blocking face: asyncio.timeout around a call would mean another
# thing. A session gives back what a late answer grants.
# ruff: noqa: ASYNC109

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Self

from google.protobuf.message import Message

from kvdock._pieces import Steps, T, in_turn_async
from kvdock._session_base import SessionBase
from kvdock._session_verbs import SessionVerbs
from kvdock._stream_base import CLOSE_SECONDS
from kvdock._verbs import Call, Request, Response, Result
from kvdock.address import Address
from kvdock.aio._awaited import awaited
from kvdock.aio._stream import StartStream, Stream
from kvdock.v1 import session_pb2


class Session(SessionBase[Stream]):
    """What a process holds on the server. Made by :meth:`kvdock.aio.Client.session`.

    As :class:`kvdock.Session`, for use in one event loop: end copies into or out of the pool before
    close(); an answer that comes after its caller gave up is undone.
    """

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
        """Starts the stream and waits for the server's answer."""
        stream = Stream(start, str(address), on_lost)
        return cls(stream, await stream.open(opening, timeout), address=address, timeout=timeout)

    def submit(self, request: Message) -> asyncio.Future[Any]:
        """As :meth:`kvdock.Session.submit`, with an asyncio future."""
        return self._stream.submit(request)

    register_namespace = awaited(SessionVerbs.register_namespace)
    register_memory = awaited(SessionVerbs.register_memory)
    lookup = awaited(SessionVerbs.lookup)
    free_locks = awaited(SessionVerbs.free_locks)
    reserve = awaited(SessionVerbs.reserve)
    commit = awaited(SessionVerbs.commit)
    abort = awaited(SessionVerbs.abort)
    store = awaited(SessionVerbs.store)
    retrieve = awaited(SessionVerbs.retrieve)
    await_fill = awaited(SessionVerbs.await_fill)

    async def close(self) -> None:
        """As :meth:`kvdock.Session.close`."""
        self._finalizer.detach()
        await self._stream.close(CLOSE_SECONDS)
        self._pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def _in_turn(self, steps: Steps[T]) -> T:
        return await in_turn_async(steps)

    async def _call(self, call: Call[Request, Response, Result], timeout: float | None) -> Result:
        return call.read(await self._stream.result(call.request, self._seconds(timeout)))
