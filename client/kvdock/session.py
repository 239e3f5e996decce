"""A session: one stream to the server, for as long as this process wants to hold anything there."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Self

from google.protobuf.message import Message

from kvdock._session_base import SessionBase
from kvdock._session_verbs import SessionVerbs
from kvdock._stream import StartStream, Stream
from kvdock._stream_base import CLOSE_SECONDS
from kvdock._verbs import Call, Request, Response, Result
from kvdock.address import Address
from kvdock.v1 import session_pb2


class Session(SessionBase[Stream], SessionVerbs):
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
