"""The session stream of the blocking face, its threads and the futures that wait for answers.

Three threads serve a stream. One of gRPC's sends what :meth:`Stream.submit` takes, a reader settles
the futures, and a third sends heartbeats. None of them refers to the Session, so that a Session
that is dropped without close() ends as if it had been closed.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from google.protobuf.message import Message

from kvdock._protocol import again
from kvdock._stream_base import NO_GRACE, StreamBase
from kvdock.errors import KVDockError, SessionExpired, SessionLost
from kvdock.types import SessionInfo
from kvdock.v1 import session_pb2

StartStream = Callable[[Iterator[session_pb2.SessionRequest]], Any]


class Stream(StreamBase[Future[Any]]):
    """Thread-safe. ``start`` is given the requests and begins the call."""

    def __init__(
        self, start: StartStream, server: str, on_lost: Callable[[str], None] | None
    ) -> None:
        super().__init__(server, on_lost)
        self._pid = os.getpid()
        # Guards the protocol.
        self._lock = threading.Lock()
        self._ended = threading.Event()
        # True: there may be something to send. False: nothing comes any more.
        self._wakeups: SimpleQueue[bool] = SimpleQueue()
        self._sender_is_awake = False
        self._call = start(self._requests())
        self._reader = threading.Thread(target=self._read, name="kvdock-session", daemon=True)
        self._reader.start()

    def open(self, opening: session_pb2.OpenRequest, timeout: float) -> SessionInfo:
        """Sends the first message, waits for its answer and starts the heartbeats."""
        try:
            info = SessionInfo.from_proto(self.result(opening, timeout))
        except SessionLost as lost:
            self.close(NO_GRACE)
            # What ended the stream tells more than that it ended.
            raise lost.__cause__ or lost from None
        except BaseException:
            self.close(NO_GRACE)
            raise
        threading.Thread(
            target=self._heartbeat, args=(info.ttl / 3,), name="kvdock-heartbeat", daemon=True
        ).start()
        return info

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

    def result(self, request: Message, timeout: float) -> Any:
        """The answer to ``request``. Raises DeadlineExceeded after ``timeout`` seconds."""
        future = self.submit(request)
        try:
            return future.result(timeout)
        except TimeoutError:
            if not future.cancel():
                return future.result()
            raise self._late(request, timeout) from None
        except KVDockError:
            raise
        except BaseException:
            # Ctrl-C, for one. The answer may have come at the same moment.
            if not future.cancel() and future.exception() is None:
                self._give_back(future.result())
            raise

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
        try:
            for response in self._call:
                self._missed_heartbeats = 0
                self._settle(response)
            error = self._end_of_reading(None)
        except Exception as fault:
            error = self._end_of_reading(fault)
        self._end(self._given_up or error)

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
            self._give_back(answer)

    def _heartbeat(self, interval: float) -> None:
        # An expired session is past saving: its stream goes on, without heartbeats, until close().
        while not self._ended.wait(interval) and self.over is None:
            if not self._beat(interval):
                return

    def _expire(self, error: SessionExpired) -> None:
        # The stream stays: until it ends, the server keeps reserved memory out of use, and copies
        # into that memory may still be running here.
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
