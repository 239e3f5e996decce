"""The blocking client."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Self

import grpc

from kvdock import _health, _verbs
from kvdock._client_base import DEFAULT_TIMEOUT, ClientBase, closed
from kvdock._idle import Cancellable, IdleLimit
from kvdock._inline import PUT_METHOD, GetTransfer, Progress, PutTransfer, put_event_data
from kvdock._pieces import Piece, Steps, T, in_turn, pieces
from kvdock._pin_verbs import PinVerbs
from kvdock._verbs import Call, Request, Response, Result
from kvdock.channel import Options
from kvdock.errors import from_rpc_error
from kvdock.events.messages import (
    PROGRESS_INTERVAL,
    Cursor,
    Filter,
    Message,
    message_from_proto,
    stream_request,
)
from kvdock.fork import remember
from kvdock.pin import Keep
from kvdock.session import Session
from kvdock.types import (
    NORMAL_PRIORITY,
    ChunkEventData,
    ChunkStatus,
    Evicted,
    EvictionPriority,
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

_log = logging.getLogger(__name__)

# Seconds that close() gives gRPC to end the connection in order.
_CLOSE_SECONDS = 1.0


class Client(PinVerbs, ClientBase):
    """A server, asked call by call. Thread-safe; connects when it is first used.

    ``address`` None finds this host's server (:mod:`kvdock.address`). ``channel_options`` are
    options of gRPC, added to those of every client.

    Each call takes at most ``timeout`` seconds. In put, get and listings ``timeout`` limits each
    pause instead, and a pause may last twice as long before it is noticed. A call that fails raises
    a subclass of KVDockError: UntrustedServer if another user may be listening at a Unix socket
    (:mod:`kvdock.trust`), Forked in a process where gRPC cannot work (:mod:`kvdock.fork`).
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        channel_options: Options = (),
    ) -> None:
        super().__init__(address, timeout, channel_options)
        self._channel = grpc.insecure_channel(self.address.target, self._channel_options)
        remember(self._channel)
        self._cache = cache_pb2_grpc.CacheServiceStub(self._channel)
        # Stubs are made now: making one from a channel that was closed crashes the process.
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

    def register_namespace(self, namespace: Namespace, *, timeout: float | None = None) -> bool:
        """Makes a namespace known. Returns False if it was known before.

        Raises NamespaceConflict if it is known with other contents.
        """
        call = _verbs.register_namespace(namespace)
        return self._call(self._cache.RegisterNamespace, call, timeout)

    def lookup(
        self,
        namespace: str,
        keys: Sequence[bytes],
        *,
        readers: int = 1,
        probe: bool = False,
        ttl: float | None = None,
        timeout: float | None = None,
    ) -> Hit:
        """Finds how many of a prompt's chunks, from the first on, are cached, and locks them.

        The lease lives for ``ttl`` seconds; None: the server's default of 30. With ``probe``
        nothing is locked. Raises UnknownNamespace. After DeadlineExceeded there may be a lease that
        nobody knows of, until its ``ttl`` is over. (A session gives such a lease back.)
        """
        call = _verbs.lookup(namespace, keys, readers, probe, ttl=ttl)
        return self._call(self._cache.Lookup, call, timeout)

    def free_locks(
        self,
        lease: Lease | int,
        first: int = 0,
        end: int | None = None,
        *,
        reader: int | None = None,
        group_idx: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Frees locks on chunks [first, end) of a lookup; ``end`` None means to the end.

        Returns how many locks it freed: a second call frees none. Raises ForeignLease for a lease
        that was asked for on a session: only a session can free that.
        """
        call = _verbs.free_locks(lease, first, end, reader, group_idx)
        return self._call(self._cache.FreeLocks, call, timeout)

    def put(
        self,
        namespace: str,
        keys: Sequence[bytes],
        shards: Sequence[ReadableBuffer],
        *,
        parent: bytes = b"",
        group_idx: int | None = None,
        kv_worker_id: int = 0,
        event_data: Sequence[ChunkEventData] | None = None,
        keep: Keep | None = None,
        priority: EvictionPriority = NORMAL_PRIORITY,
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> list[ChunkStatus]:
        """Stores consecutive chunks of one prompt, one shard of each, by sending their bytes.

        What the server already has is not sent. What one message cannot name (event data may be
        long) takes several Puts, one after the other. ``parent`` is the key of the chunk before the
        first; it is empty for a prompt's first chunk. ``keep`` pins what is stored, and what is
        there, as far as pins may keep it. Returns for each chunk STORED, EXISTS,
        NO_SPACE, PARENT_MISSING or FAILED. Raises WrongLength if a shard has another length than
        the namespace's shards, UnknownNamespace, ChunkTooLarge.
        """
        told = put_event_data(keys, shards, event_data)
        parted = pieces(keys, parent, told)

        def transfer(piece: Piece) -> PutTransfer:
            is_whole = len(parted) == 1
            return PutTransfer(
                namespace,
                keys[piece.first : piece.end],
                shards[piece.first : piece.end],
                parent=piece.parent,
                group_idx=group_idx,
                kv_worker_id=kv_worker_id,
                event_data=told if is_whole else told[piece.first : piece.end],
                keep=keep,
                priority=priority,
                progress=progress,
            )

        if len(parted) == 1:
            return self._upload(transfer(parted[0]), timeout)
        return self._in_turn(_put_pieces(self, parted, transfer, timeout))

    def get(
        self,
        namespace: str,
        keys: Sequence[bytes],
        *,
        group_idx: int | None = None,
        kv_worker_id: int = 0,
        progress: Progress | None = None,
        timeout: float | None = None,
    ) -> list[bytes | None]:
        """The bytes of one shard of each chunk; None from the first missing chunk on."""
        transfer = GetTransfer(
            namespace, keys, group_idx=group_idx, kv_worker_id=kv_worker_id, progress=progress
        )
        return self._download(
            self._cache.Get, transfer.request, transfer.feed, transfer.result, timeout
        )

    def get_into(
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
        """As :meth:`get`, into one buffer for each key. Returns how many buffers were filled.

        Raises WrongLength if a buffer has another length than the namespace's shards.
        """
        transfer = GetTransfer(
            namespace,
            keys,
            group_idx=group_idx,
            kv_worker_id=kv_worker_id,
            progress=progress,
            buffers=buffers,
        )
        return self._download(
            self._cache.Get, transfer.request, transfer.feed, lambda: transfer.num_complete, timeout
        )

    def status(self, *, timeout: float | None = None) -> admin_pb2.StatusResponse:
        """State, sessions, pool and counters of the server, as the protocol's message."""
        return self._call(self._admin.Status, _verbs.status(), timeout)

    def namespaces(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        name_prefix: str = "",
        timeout: float | None = None,
    ) -> list[NamespaceStatus]:
        """The registered namespaces, in the order of registration.

        With ``labels`` only those that have all of these labels, with ``name_prefix`` only those
        whose name begins so.
        """
        found: list[NamespaceStatus] = []
        return self._download(
            self._admin.ListNamespaces,
            _verbs.list_namespaces(labels, name_prefix),
            lambda response: found.append(NamespaceStatus.from_proto(response.namespace)),
            lambda: found,
            timeout,
        )

    def chunks(
        self, namespace: str, *, group_idx: int | None = None, timeout: float | None = None
    ) -> Iterator[PartStatus]:
        """The parts that a namespace has, parents before children; ``group_idx``: of one group.

        Raises UnknownNamespace.
        """
        request = _verbs.list_chunks(namespace, group_idx)
        with self._errors():
            responses = self._admin.ListChunks(request)
        for response in self._each(responses, timeout):
            yield from map(PartStatus.from_proto, response.parts)

    def events(
        self,
        start: Cursor | str = "now",
        *,
        only: Filter | None = None,
        progress_interval: float = PROGRESS_INTERVAL,
    ) -> Generator[Message, None, None]:
        """The stream of KV events (:mod:`kvdock.events`).

        ``start`` is a cursor, ``"now"``, or ``"snapshot"``: all that is there, then the events
        after it. The call returns when the server has begun, so no event after it is missed,
        however late the stream is read. The stream ends after Compacted. A Progress comes after
        ``progress_interval`` seconds without events (at least 0.1). Raises NoEventLog if the server
        keeps no log, DeadlineExceeded if it falls silent.
        """
        request = stream_request(start, only or Filter(), progress_interval)
        with self._errors():
            call = self._events.StreamKVEvents(request)
        responses = self._each(call, self._longest_silence(progress_interval))
        # A generator ends its call when it is dropped, but only if it has begun.
        first = list(itertools.islice(responses, 1))
        return (message_from_proto(response) for response in itertools.chain(first, responses))

    def clear(
        self, namespace: str | None = None, *, all: bool = False, timeout: float | None = None
    ) -> int:
        """Makes everything in a namespace invisible, or with ``all`` everything in every namespace.

        Returns how many parts there were. Raises InvalidArgument unless one of the two is given,
        UnknownNamespace.
        """
        return self._call(self._admin.Clear, _verbs.clear(namespace, all), timeout)

    def evict(
        self, nbytes: int | None = None, *, all: bool = False, timeout: float | None = None
    ) -> Evicted:
        """Drops at least ``nbytes`` of unlocked parts, the least useful first, or ``all`` of them.

        Raises InvalidArgument unless one of the two is given.
        """
        return self._call(self._admin.Evict, _verbs.evict(nbytes, all), timeout)

    def health(self, service: str = "", *, timeout: float | None = None) -> str:
        """``SERVING`` or ``NOT_SERVING``, of one service or of the server as a whole."""
        request = _health.request(service)
        with _health.service_errors(service), self._errors():
            status: str = self._check_health(request, timeout=self._seconds(timeout))
        return status

    def session(
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
        """Opens a session.

        * ``engine_id``: one name for all processes of one engine; None makes one up.
        * ``worker_id``, ``kv_worker_id``: a worker's rank and shard.
        * ``ttl``: after so many seconds of silence the server takes the locks back; None: 30.
        * ``client``: the program and its version, for listings.
        * ``on_lost``: is called once with the reason when the session is lost, but not after
          close(). It runs on the session's reader thread (with ``kvdock.aio`` in the event loop). A
          session that it refers to does not end by being dropped, only by close().
        """
        session = Session.open(
            self._start_session,
            _verbs.open_session(engine_id, role, worker_id, kv_worker_id, ttl, client),
            address=self.address,
            timeout=self._seconds(timeout),
            on_lost=on_lost,
        )
        self._sessions.add(session)
        return session

    def close(self) -> None:
        """Closes the connection and every session made here. A second call does nothing.

        Calls under way fail with Unavailable. If the server reads nothing any more, close() takes a
        second for the connection, and one for each session.
        """
        if os.getpid() != self._pid:
            # The connection is the parent's: closing it here would close it there.
            return
        for session in list(self._sessions):
            session.close()
        # gRPC waits until the server has taken what is being written, for ever if need be.
        closing = threading.Thread(target=self._channel.close, name="kvdock-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)
        if closing.is_alive():
            _log.info("%s takes nothing: the connection ends when it does", self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _call(
        self,
        method: grpc.UnaryUnaryMultiCallable[Request, Response],
        call: Call[Request, Response, Result],
        timeout: float | None,
    ) -> Result:
        _verbs.check_size(call.request)
        with self._errors():
            response = method(call.request, timeout=self._seconds(timeout))
        return call.read(response)

    def _in_turn(self, steps: Steps[T]) -> T:
        return in_turn(steps)

    def _upload(self, transfer: PutTransfer, timeout: float | None) -> list[ChunkStatus]:
        """Sends what the server's first answer asks for, and returns what became of each chunk."""
        answered = threading.Event()

        def requests() -> Iterator[bytes]:
            # Runs on a thread of gRPC's.
            yield transfer.open
            answered.wait()
            for message, nbytes in transfer.data():
                yield message
                idle.touch()
                if not transfer.sent(nbytes):
                    return

        with self._errors():
            responses = self._put(requests())
        with self._stream(responses, timeout) as idle:
            try:
                for response in responses:
                    idle.touch()
                    transfer.feed(response)
                    answered.set()
            finally:
                answered.set()
        return transfer.result()

    def _download(
        self,
        method: grpc.UnaryStreamMultiCallable[Request, Response],
        request: Request,
        feed: Callable[[Response], object],
        result: Callable[[], Result],
        timeout: float | None,
    ) -> Result:
        """Feeds every answer, and returns the result after the last."""
        with self._errors():
            responses = method(request)
        with self._stream(responses, timeout) as idle:
            for response in responses:
                idle.touch()
                feed(response)
        return result()

    def _each(
        self, responses: grpc.CallIterator[Response], timeout: float | None
    ) -> Generator[Response, None, None]:
        """A stream's messages, for a reader that may take its time between them."""
        with self._stream(responses, timeout) as idle:
            for response in responses:
                idle.paused = True
                yield response
                idle.touch()
                idle.paused = False

    def _start_session(
        self, requests: Iterator[session_pb2.SessionRequest]
    ) -> grpc.CallIterator[session_pb2.SessionResponse]:
        with self._errors():
            return self._open_session(requests)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Around the start of a call: checks the server, and translates what gRPC raises."""
        self._check_server()
        try:
            yield
        except grpc.RpcError as error:
            raise from_rpc_error(error, str(self.address)) from error
        except ValueError as error:
            # gRPC raises this if the channel was closed, and never else.
            raise closed() from error

    @contextlib.contextmanager
    def _stream(self, call: Cancellable, timeout: float | None) -> Iterator[IdleLimit]:
        """Limits the pauses of a stream, translates its errors, and ends it with the block."""
        seconds = self._seconds(timeout)
        with IdleLimit(call, seconds) as idle:
            try:
                yield idle
            except grpc.RpcError as error:
                if idle.exceeded:
                    raise self._stalled(seconds) from error
                raise from_rpc_error(error, str(self.address)) from error
            finally:
                call.cancel()


def _put_pieces(
    client: Client,
    parted: Sequence[Piece],
    transfer: Callable[[Piece], PutTransfer],
    timeout: float | None,
) -> Steps[list[ChunkStatus]]:
    statuses: list[ChunkStatus] = []
    for piece in parted:
        statuses += yield functools.partial(client._upload, transfer(piece), timeout)
    return statuses
