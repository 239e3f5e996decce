"""Followers: they keep an index equal to a server, whatever happens to the connection.

The window of a follower's connection is small and fixed. gRPC would let the window grow until
megabytes of small batches lie between server and reader. A slow reader would then read events that
are long past, and neither side would know.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

from kvdock.errors import InvalidArgument, KVDockError, NoEventLog
from kvdock.events.index import Index, OutOfStepError
from kvdock.events.messages import PROGRESS_INTERVAL, Message, Removed, Stored

if TYPE_CHECKING:
    from kvdock.aio.client import Client as AsyncClient
    from kvdock.client import Client

_log = logging.getLogger(__name__)

_FIRST_DELAY: Final = 0.1
_LONGEST_DELAY: Final = 2.0

_CHANNEL_OPTIONS: Final = [("grpc.http2.bdp_probe", 0)]


@dataclass(frozen=True, slots=True)
class Update:
    """What a follower learned."""

    changes: Sequence[Stored | Removed]
    """What changed in the index; empty after a sign of life."""
    lost: KVDockError | None = None
    """Why there is no connection now; None if there is one. The follower goes on trying."""


class _Attempts:
    """How long to wait before the next attempt, and which failures are final."""

    def __init__(self) -> None:
        self._delay = _FIRST_DELAY

    def succeeded(self) -> None:
        self._delay = _FIRST_DELAY

    def failed(self, error: KVDockError) -> float:
        """Seconds until the next attempt. Raises the error if that would fail as well."""
        if isinstance(error, NoEventLog | InvalidArgument):
            raise error
        delay, self._delay = self._delay, min(2 * self._delay, _LONGEST_DELAY)
        return delay


def _apply(index: Index, message: Message) -> Update | None:
    """None if the stream is of no use any more."""
    try:
        return Update(index.apply(message))
    except OutOfStepError as error:
        _log.warning("the event stream is out of step, taking a snapshot: %s", error)
        return None


class Follower:
    """Keeps an index equal to a server. The work is done by iterating, on the thread that iterates.

    A follower has a connection of its own, so that a slow reader holds up no other calls. While
    there is a connection, an Update comes at least every ``progress_interval`` seconds. The
    iteration ends with :meth:`close`, which may be called on any thread. Raises NoEventLog if the
    server keeps no log.
    """

    def __init__(
        self,
        index: Index,
        address: str | None = None,
        *,
        progress_interval: float = PROGRESS_INTERVAL,
    ) -> None:
        from kvdock.client import Client

        self.index = index
        self._client: Client = Client(address, channel_options=_CHANNEL_OPTIONS)
        self._progress_interval = progress_interval
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[Update]:
        attempts = _Attempts()
        while not self._closed.is_set():
            delay = _FIRST_DELAY
            try:
                with contextlib.closing(self._messages()) as messages:
                    for message in messages:
                        attempts.succeeded()
                        update = _apply(self.index, message)
                        if update is None:
                            break
                        yield update
            except KVDockError as error:
                if self._closed.is_set():
                    return
                delay = attempts.failed(error)
                yield Update((), error)
            self._closed.wait(delay)

    def _messages(self) -> Generator[Message, None, None]:
        return self._client.events(
            self.index.start, only=self.index.only, progress_interval=self._progress_interval
        )

    def close(self) -> None:
        """Ends the iteration and the connection."""
        self._closed.set()
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class AsyncFollower:
    """As :class:`Follower`, in the event loop in which it is made."""

    def __init__(
        self,
        index: Index,
        address: str | None = None,
        *,
        progress_interval: float = PROGRESS_INTERVAL,
    ) -> None:
        from kvdock.aio.client import Client

        self.index = index
        self._client: AsyncClient = Client(address, channel_options=_CHANNEL_OPTIONS)
        self._progress_interval = progress_interval
        self._closed = False

    async def __aiter__(self) -> AsyncIterator[Update]:
        attempts = _Attempts()
        while not self._closed:
            delay = _FIRST_DELAY
            messages = self._client.events(
                self.index.start, only=self.index.only, progress_interval=self._progress_interval
            )
            try:
                async for message in messages:
                    attempts.succeeded()
                    update = _apply(self.index, message)
                    if update is None:
                        break
                    yield update
            except KVDockError as error:
                if self._closed:
                    return
                delay = attempts.failed(error)
                yield Update((), error)
            finally:
                await messages.aclose()
            await asyncio.sleep(delay)

    async def close(self) -> None:
        """Ends the iteration and the connection."""
        self._closed = True
        await self._client.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
