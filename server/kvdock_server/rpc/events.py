"""EventService: streams the event log to its readers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

import grpc

from kvdock.v1 import events_pb2 as pb
from kvdock_server.core import Core
from kvdock_server.errors import Reason, RequestError, invalid
from kvdock_server.events import wire
from kvdock_server.events.event import Event
from kvdock_server.events.publisher import Publisher
from kvdock_server.events.subscribers import Subscriber
from kvdock_server.rpc.conversions import group_idx
from kvdock_server.rpc.grpc_errors import Context, streaming

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["EventService"].full_name

_DEFAULT_PROGRESS_MS = 10_000
_SHORTEST_PROGRESS_MS = 100

# A message ends where one of these limits is reached. Events are encoded when they are first sent,
# and encoding must not hold up the loop for long. Messages must stay well below the protocol's
# 4 MiB, and one event may bring up to 1 MiB of data.
_MESSAGE_EVENTS = 500
_MESSAGE_BYTES = 512 << 10
_SHARED_MESSAGES = 4

_LOCALITIES = (pb.LOCALITY_LOCAL, pb.LOCALITY_REMOTE)

Filter = Callable[[Event], bool]


class EventService:
    """See events.proto."""

    def __init__(self, core: Core) -> None:
        self._batches = _Batches(core.events) if core.events is not None else None

    @streaming
    async def StreamKVEvents(  # noqa: N802
        self, request: pb.StreamKVEventsRequest, context: Context
    ) -> AsyncIterator[bytes]:
        batches = self._batches
        if batches is None:
            raise RequestError(
                Reason.NO_EVENT_LOG,
                "this server keeps no event log: start it with --event-log SIZE (for example "
                "256MiB)",
            )
        if request.progress_interval_ms and request.progress_interval_ms < _SHORTEST_PROGRESS_MS:
            raise invalid(
                f"progress_interval_ms {request.progress_interval_ms}: at least "
                f"{_SHORTEST_PROGRESS_MS}, 0 means {_DEFAULT_PROGRESS_MS}",
                "progress_interval_ms",
            )
        for locality in request.localities:
            if locality not in _LOCALITIES:
                raise invalid(f"locality {locality}: LOCAL (1) or REMOTE (2)", "localities")
        publisher = batches.publisher
        after = _start(publisher, request)
        if after is None:
            publisher.subscribers.compacted += 1
            yield wire.compacted(publisher.epoch, publisher.log.oldest, publisher.log.oldest)
            return
        snapshot = None
        if request.WhichOneof("start") == "snapshot":
            snapshot = publisher.snapshot(frozenset(request.namespaces))
        subscriber = publisher.subscribers.join(after, snapshot)
        try:
            async for message in _messages(batches, subscriber, request):
                yield message
        finally:
            publisher.subscribers.leave(subscriber)


def add_event_service(server: grpc.aio.Server, core: Core) -> None:
    """Serve EventService, whose methods answer with encoded responses."""
    method = grpc.unary_stream_rpc_method_handler(
        EventService(core).StreamKVEvents,
        request_deserializer=pb.StreamKVEventsRequest.FromString,
    )
    handler = grpc.method_handlers_generic_handler(SERVICE_NAME, {"StreamKVEvents": method})
    server.add_generic_rpc_handlers((handler,))


def _start(publisher: Publisher, request: pb.StreamKVEventsRequest) -> int | None:
    """The number of the event after which to begin; None if the reader's place is compacted."""
    log = publisher.log
    if request.WhichOneof("start") != "after":
        return log.last
    if request.after.epoch != publisher.epoch or request.after.sequence < log.oldest:
        return None
    if request.after.sequence > log.last:
        raise invalid(
            f"after event {request.after.sequence}: this server has given no number beyond "
            f"{log.last} yet",
            "sequence",
            log.last,
        )
    return request.after.sequence


class _Batches:
    """Makes messages of the log's events. Readers at the same place share one message."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        # The last few messages for readers that filter nothing, each with the place after it. The
        # keys are (place of the reader, end of what is shown).
        self._made: dict[tuple[int, int], tuple[int, bytes]] = {}

    def after(self, cursor: int, passes: Filter | None) -> tuple[int, bytes] | None:
        """The next message for a reader at ``cursor``, and the reader's place after it.

        The message is empty if the filter lets nothing through. None if the place is compacted.
        """
        shown = self.publisher.subscribers.shown
        place = cursor, shown
        if passes is None and place in self._made:
            return self._made[place]
        most = min(_MESSAGE_EVENTS, shown - cursor)
        events = self.publisher.log.read(cursor, most, _MESSAGE_BYTES)
        if events is None:
            return None
        end = events[-1].number
        wanted = events if passes is None else list(filter(passes, events))
        if not wanted:
            return end, b""
        message = end, wire.batch(self.publisher.epoch, end, wanted[-1].unix_ms, wanted)
        if passes is None:
            if len(self._made) == _SHARED_MESSAGES:
                del self._made[next(iter(self._made))]
            self._made[place] = message
        return message


async def _messages(
    batches: _Batches, subscriber: Subscriber, request: pb.StreamKVEventsRequest
) -> AsyncIterator[bytes]:
    publisher = batches.publisher
    epoch, subscribers = publisher.epoch, publisher.subscribers
    passes = _filter(request)
    if subscriber.snapshot is None:
        yield wire.progress(epoch, subscriber.cursor)
    else:
        async for piece in _pieces(epoch, subscriber, passes):
            yield piece
    interval = (request.progress_interval_ms or _DEFAULT_PROGRESS_MS) / 1000
    sent = time.monotonic()
    while True:
        quiet = sent + interval - time.monotonic()
        if quiet <= 0:
            yield wire.progress(epoch, subscriber.cursor)
            sent = time.monotonic()
            continue
        if not await subscribers.news(subscriber.cursor, quiet):
            if subscribers.closed:
                raise RequestError(
                    Reason.DRAINING, "the server is stopping: resume from the cursor at the next"
                )
            continue
        while subscriber.cursor < subscribers.shown:
            message = batches.after(subscriber.cursor, passes)
            if message is None:
                subscribers.compacted += 1
                yield wire.compacted(epoch, subscriber.cursor, publisher.log.oldest)
                return
            subscriber.cursor, encoded = message
            if encoded:
                yield encoded
                sent = time.monotonic()
            # Encoding must not keep other calls waiting.
            await asyncio.sleep(0)


async def _pieces(
    epoch: int, subscriber: Subscriber, passes: Filter | None
) -> AsyncIterator[bytes]:
    """The snapshot, parents first.

    It ends early if ``subscriber.snapshot`` was dropped. Then the reader's place in the log is
    compacted, as the reader is told next.
    """
    begin = 0
    while subscriber.snapshot is not None:
        piece, end = _piece(subscriber.snapshot, begin)
        is_last = end == len(subscriber.snapshot)
        if is_last:
            subscriber.snapshot = None
        wanted = piece if passes is None else list(filter(passes, piece))
        if wanted or is_last:
            yield wire.snapshot(epoch, subscriber.cursor, wanted, last=is_last)
        begin = end
        await asyncio.sleep(0)


def _piece(events: Sequence[Event], begin: int) -> tuple[Sequence[Event], int]:
    """The events from ``begin`` on that fit into a message, at least one, and where they end."""
    nbytes = 0
    end = begin
    for event in events[begin : begin + _MESSAGE_EVENTS]:
        nbytes += event.nbytes
        if nbytes > _MESSAGE_BYTES and end > begin:
            break
        end += 1
    return events[begin:end], end


def _filter(request: pb.StreamKVEventsRequest) -> Filter | None:
    """True for each event that the reader gets. None if the reader gets all."""
    namespaces = frozenset(request.namespaces)
    wanted_group = group_idx(request)
    by_group = request.HasField("group_idx")
    wanted_medium: int = request.medium
    # All parts of this server are LOCAL.
    is_elsewhere = bool(request.localities) and pb.LOCALITY_LOCAL not in request.localities
    if not (namespaces or by_group or wanted_medium or is_elsewhere):
        return None

    def passes(event: Event) -> bool:
        if namespaces and event.namespace not in namespaces:
            return False
        if event.group is None or event.medium is None:
            return True
        if is_elsewhere or (wanted_medium and event.medium != wanted_medium):
            return False
        return not by_group or event.group.group_idx == wanted_group

    return passes
