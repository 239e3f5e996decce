"""AdminService: shows operators and tools what a server holds."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import AsyncIterator, Iterator
from itertools import islice

from kvdock.v1 import admin_pb2 as pb
from kvdock.v1 import admin_pb2_grpc, session_pb2
from kvdock.v1 import types_pb2 as types
from kvdock_server import __version__
from kvdock_server.core import Core, ListedPart, Pin, Session, list_parts, pin_name
from kvdock_server.errors import invalid
from kvdock_server.rpc.conversions import namespace_to_proto
from kvdock_server.rpc.features import features
from kvdock_server.rpc.grpc_errors import Context, streaming, unary
from kvdock_server.service.turns import in_turns
from kvdock_server.tiers.host.pool import Pool
from kvdock_server.transfer import GpuStats, GpuTransfers

_PARTS_A_MESSAGE = 250

# With the longest names and reasons, so many sessions take 3 MiB. A message has 4 MiB at most.
_MOST_SESSIONS = 1_000
_MOST_REASON_CHARACTERS = 1_000


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """See admin.proto."""

    def __init__(self, core: Core, pool: Pool, transfers: GpuTransfers, chunk_tokens: int) -> None:
        self._core = core
        self._pool = pool
        self._transfers = transfers
        self._chunk_tokens = chunk_tokens
        self._started = core.clock()

    @unary
    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:  # noqa: N802
        core, segment = self._core, self._pool.segment
        gpu = self._transfers.stats()
        keeping = core.index.keeping
        return pb.StatusResponse(
            epoch=core.epoch,
            version=__version__,
            pid=os.getpid(),
            uptime_ms=round((core.clock() - self._started) * 1000),
            pool=pb.PoolStatus(
                total_bytes=self._pool.slots.limit_bytes,
                ready_bytes=self._pool.slots.ready_bytes,
                used_bytes=core.index.sealed_bytes,
                reserved_bytes=core.index.reserved_bytes,
                pinned_bytes=gpu.pinned_bytes,
                pin_refused=gpu.pin_refused,
                sockets=_sockets(self._pool, gpu),
                place_refused=self._pool.placement.refused,
            ),
            index=pb.IndexStatus(
                namespaces=len(core.index.spaces),
                chunks=sum(len(space.chunks) for space in core.index.spaces),
                parts=sum(space.visible_parts for space in core.index.spaces),
                locked_parts=core.index.pinned_parts,
                leases=len(core.leases),
                locks=core.leases.locks,
                pending_parts=core.index.pending_parts,
            ),
            sessions=[
                _session_status(session, len(core.leases.of_owner(session.session_id)))
                for session in islice(core.sessions, _MOST_SESSIONS)
            ],
            sessions_total=len(core.sessions),
            # Both have the protocol's names.
            counters=pb.Counters(**vars(core.counters), **vars(core.index.totals)),
            chunk_tokens=self._chunk_tokens,
            segments=[types.Segment(shm_name=segment.shm_name, bytes=segment.nbytes)],
            pins=pb.PinTotals(
                pins=len(keeping.pins),
                parts=keeping.parts,
                bytes=keeping.nbytes,
                limit_bytes=keeping.limit_bytes,
            ),
            draining=core.draining,
            features=features(core),
        )

    @streaming
    async def ListNamespaces(  # noqa: N802
        self, request: pb.ListNamespacesRequest, context: Context
    ) -> AsyncIterator[pb.ListNamespacesResponse]:
        wanted = request.labels.items()
        for space in self._core.index.spaces:
            namespace = space.namespace
            if not namespace.name.startswith(request.name_prefix):
                continue
            if not wanted <= namespace.labels.items():
                continue
            yield pb.ListNamespacesResponse(
                namespace=pb.NamespaceStatus(
                    namespace=namespace_to_proto(namespace),
                    parts=space.visible_parts,
                    bytes=space.sealed_bytes,
                )
            )

    @streaming
    async def ListChunks(  # noqa: N802
        self, request: pb.ListChunksRequest, context: Context
    ) -> AsyncIterator[pb.ListChunksResponse]:
        response = pb.ListChunksResponse()
        space = self._core.index.space(request.namespace)
        only = None
        if request.HasField("group_idx"):
            only = space.namespace.position(request.group_idx)
        with contextlib.closing(list_parts(space, only)) as chunks:
            for seen, parts in enumerate(chunks, 1):
                if parts is None:
                    return
                for part in parts:
                    response.parts.append(_part_status(part))
                    if len(response.parts) == _PARTS_A_MESSAGE:
                        yield response
                        response = pb.ListChunksResponse()
                if seen % _PARTS_A_MESSAGE == 0:
                    await asyncio.sleep(0)
        if response.parts:
            yield response

    @unary
    async def Clear(self, request: pb.ClearRequest, context: Context) -> pb.ClearResponse:  # noqa: N802
        if request.WhichOneof("scope") == "namespace":
            return pb.ClearResponse(parts=self._core.clear(request.namespace))
        if request.all:
            return pb.ClearResponse(parts=self._core.clear_all())
        raise invalid("the request does not say what to clear: set namespace, or all to true")

    @unary
    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:  # noqa: N802
        keep = self._core.pins.wish(request.keep.pin, request.keep.ttl_ms)
        self._core.refuse_when_draining()
        await in_turns(self._core.pins.pin_in_steps(request.namespace, request.keys, keep))
        return pb.PinResponse(epoch=self._core.epoch, kept_chunks=keep.kept)

    @unary
    async def Unpin(self, request: pb.UnpinRequest, context: Context) -> pb.UnpinResponse:  # noqa: N802
        namespace = request.namespace or None
        if request.WhichOneof("scope") == "pin":
            pins = self._core.pins.named(namespace, pin_name(request.pin))
        elif request.all:
            pins = self._core.pins.named(namespace)
        else:
            raise invalid("the request does not say what to unpin: set pin, or all to true")
        parts, nbytes = await in_turns(self._core.pins.unpin_in_steps(pins))
        return pb.UnpinResponse(pins=len(pins), parts=parts, bytes=nbytes)

    @streaming
    async def ListPins(  # noqa: N802
        self, request: pb.ListPinsRequest, context: Context
    ) -> AsyncIterator[pb.ListPinsResponse]:
        for pin in self._core.pins.named(request.namespace or None):
            if pin.until:
                yield pb.ListPinsResponse(pin=_pin_status(pin, self._core.clock()))

    @unary
    async def Evict(self, request: pb.EvictRequest, context: Context) -> pb.EvictResponse:  # noqa: N802
        if request.WhichOneof("amount") == "bytes":
            evicting = self._core.evict_in_steps(request.bytes)
        elif request.all:
            evicting = self._core.evict_all_in_steps()
        else:
            raise invalid("the request does not say how much to evict: set bytes, or all to true")
        parts, nbytes = await in_turns(evicting)
        return pb.EvictResponse(parts=parts, bytes=nbytes)


def _sockets(pool: Pool, gpu: GpuStats) -> Iterator[pb.SocketStatus]:
    sockets = pool.placement.topology.sockets
    if not sockets:
        return
    for index, (ready, free) in enumerate(pool.slots.ready_and_free()):
        is_here = (index, None) if len(sockets) == 1 else (index,)
        devices = sorted(uuid for uuid, socket in gpu.sockets.items() if socket in is_here)
        yield pb.SocketStatus(
            nodes=sockets[index].nodes, ready_bytes=ready, free_bytes=free, devices=devices
        )


def _session_status(session: Session, leases: int) -> pb.SessionStatus:
    return pb.SessionStatus(
        session_id=session.session_id,
        engine_id=session.engine_id,
        role=session_pb2.SessionRole.ValueType(session.role.value),
        worker_id=session.worker_id,
        kv_worker_id=session.kv_worker_id,
        client=session.client,
        leases=leases,
        reserved_chunks=session.reserved_chunks,
        mode=types.TransferMode.ValueType(session.mode.value),
        mode_reason=session.mode_reason[:_MOST_REASON_CHARACTERS],
        expired=session.expired,
    )


def _part_status(part: ListedPart) -> pb.PartStatus:
    return pb.PartStatus(
        key=part.key,
        parent_key=part.parent_key,
        group_idx=part.group_idx,
        sealed_shards=part.sealed_shards,
        bytes=part.nbytes,
        locks=part.locks,
        visible=part.visible,
        pins=part.pins,
    )


def _pin_status(pin: Pin, now: float) -> pb.PinStatus:
    ends = [_end_ms(end, now) for end in (min(pin.due), max(pin.due))]
    return pb.PinStatus(
        namespace=pin.space.namespace.name,
        pin=pin.name,
        parts=len(pin.until),
        bytes=pin.nbytes,
        first_end_ms=ends[0],
        last_end_ms=ends[1],
    )


def _end_ms(end: float, now: float) -> int:
    return 0 if math.isinf(end) else max(1, round((end - now) * 1000))
