"""What the session streams of both faces share: everything but threads, tasks and futures."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from kvdock._protocol import MISSED_HEARTBEATS, SessionProtocol, undo
from kvdock.errors import (
    DeadlineExceeded,
    KVDockError,
    ServerError,
    Unavailable,
    from_rpc_error,
)
from kvdock.v1 import session_pb2

_log = logging.getLogger(__name__)

CLOSE_SECONDS = 1.0
"""How long close() lets the server end the stream in order before the stream is cut off."""

NO_GRACE = 0.0

FutureT = TypeVar("FutureT")
"""The face's kind of future."""


class StreamBase(ABC, Generic[FutureT]):
    """A stream's protocol, its heartbeats, and how its errors are told."""

    _call: Any
    """gRPC's call, in the face's kind."""

    def __init__(self, server: str, on_lost: Callable[[str], None] | None) -> None:
        self._server = server
        self._on_lost = on_lost
        self._protocol: SessionProtocol[FutureT] = SessionProtocol()
        self._closing = False
        self._missed_heartbeats = 0
        self._given_up: KVDockError | None = None

    @property
    def over(self) -> KVDockError | None:
        """Why no further request can succeed; None while the session is open."""
        return self._protocol.over

    @abstractmethod
    def submit(self, request: Message) -> FutureT:
        """Sends ``request``, without waiting. The future brings the answer, or a KVDockError."""

    @abstractmethod
    def abandon(self) -> None:
        """Closes the stream from a garbage collector, on whatever thread."""

    def _give_back(self, answer: Message) -> None:
        """Undoes what an answer granted to a caller who has gone."""
        if (giving_back := undo(answer)) is not None:
            self.submit(giving_back)

    def _beat(self, interval: float) -> bool:
        """Sends a heartbeat, ``interval`` seconds after the last one.

        False if the server left too many unanswered: the stream is cut off then.
        """
        self._missed_heartbeats += 1
        if self._missed_heartbeats <= MISSED_HEARTBEATS:
            self.submit(session_pb2.HeartbeatRequest())
            return True
        silent_for = interval * MISSED_HEARTBEATS
        self._given_up = Unavailable(
            f"the server at {self._server} did not answer for {silent_for:g} s"
        )
        # Wakes the reader, which ends the session.
        self._call.cancel()
        return False

    def _late(self, request: Message, timeout: float) -> DeadlineExceeded:
        """The error of a request that had no answer within ``timeout`` seconds."""
        return DeadlineExceeded(
            f"the server at {self._server} did not answer {type(request).__name__} within "
            f"{timeout:g} s"
        )

    def _end_of_reading(self, error: Exception | None) -> KVDockError:
        """Why the session ends: reading its stream raised ``error``, or came to the end (None).

        To be called in the handler of ``error``, which is logged if it is a bug.
        """
        if error is None:
            return Unavailable(f"the server at {self._server} ended the session")
        if isinstance(error, grpc.RpcError):
            return from_rpc_error(error, self._server)
        _log.exception("reading from the session's stream failed")
        self._call.cancel()
        return ServerError(f"reading from the session's stream failed: {error!r}")

    def _tell_lost(self, error: KVDockError) -> None:
        if self._closing or self._on_lost is None:
            return
        try:
            self._on_lost(error.message)
        except Exception:
            _log.exception("on_lost of a session raised")
