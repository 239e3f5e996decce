"""A server without its gRPC, and one engine whose workers have devices of host memory."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvdock.v1 import cache_pb2 as pb
from kvdock.v1 import session_pb2
from kvdock.v1 import types_pb2 as types
from kvdock_server.core import Core
from kvdock_server.core.sessions import Role, Session
from kvdock_server.index.namespace import Group, GroupKind, Namespace
from kvdock_server.numa import Topology
from kvdock_server.rpc import verbs
from kvdock_server.service.service import Service
from kvdock_server.tiers.host.pool import Pool
from kvdock_server.transfer import GpuTransfers

sys.path.insert(0, str(Path(__file__).parent / "transfer"))
from host_driver import Bytes, HostDriver, uuid

PAGE, BLOCKS, PER_CHUNK = 64, 32, 2
CHUNK = PAGE * PER_CHUNK
READERS = 3
KEYS = [bytes([n + 1]) * 32 for n in range(4)]
TARGET = [9, 30, 4, 5, 20, 21, 11, 12]


@dataclass
class Worker:
    session: Session
    cache: Bytes


class Engine:
    """A server without its gRPC, and one engine's scheduler and workers, each on its own device."""

    def __init__(self, readers: int = READERS, topology: Topology | None = None) -> None:
        self.driver = HostDriver(devices=readers)
        self.pool = Pool(4 << 20, topology)
        segment = self.pool.segment
        has_sockets = topology is not None and len(topology.sockets) > 1
        sockets = topology if has_sockets else None
        self.transfers = GpuTransfers(segment.address, segment.nbytes, sockets)
        self.core = Core(self.pool.slots)
        self.service = Service(self.core, self.pool, self.transfers)
        group = Group(None, GroupKind.FULL_ATTENTION, 0, (CHUNK,))
        self.core.index.register(Namespace("model", 16, 1, (group,), {}))
        self.scheduler = self.core.open_session(engine_id="one", role=Role.SCHEDULER)
        self.workers: list[Worker] = []

    async def start(self) -> None:
        self.pool.start(asyncio.get_running_loop(), self.transfers.faulted)
        for _ in range(1000):
            if self.pool.slots.ready_bytes == self.pool.slots.limit_bytes:
                break
            await asyncio.sleep(0.001)
        for reader in range(self.driver.devices):
            self.workers.append(await self.worker(reader, reader))
        cache = self.workers[0].cache
        cache[: len(KEYS) * CHUNK] = np.random.default_rng(1).integers(0, 256, len(KEYS) * CHUNK)
        stored = await verbs.store(
            self.service,
            self.workers[0].session,
            pb.StoreRequest(namespace="model", keys=KEYS, block_ids=range(len(KEYS) * PER_CHUNK)),
        )
        assert {chunk.status for chunk in stored.chunks} == {types.CHUNK_STATUS_STORED}
        self.bytes = cache[: len(KEYS) * CHUNK].copy()
        cache[:] = 0

    async def worker(
        self,
        reader: int,
        device: int,
        engine: str = "one",
        per_chunk: int = PER_CHUNK,
        blocks: int = BLOCKS,
        session: Session | None = None,
    ) -> Worker:
        session = session or self.core.open_session(
            engine_id=engine, role=Role.WORKER, worker_id=reader
        )
        page = CHUNK // per_chunk
        handle, cache = self.driver.export(blocks * page, device)
        request = session_pb2.RegisterMemoryRequest(namespace="model")
        request.allocations.add(ipc_handle=handle, bytes=blocks * page, device_uuid=uuid(device))
        group = request.groups.add(num_blocks=blocks, blocks_per_chunk=per_chunk)
        group.regions.add(allocation=0, offset=0, block_stride=page, page_bytes=page)
        response = await verbs.register_memory(self.service, session, request)
        assert response.mode == types.TRANSFER_MODE_SERVER
        return Worker(session, cache)

    def lookup(self, readers: int = READERS) -> int:
        hit = self.core.lookup(self.scheduler, "model", KEYS, readers=readers)
        assert hit.lease is not None
        return hit.lease.lease_id

    async def lead(self, lease: int, **fields: Any) -> list[types.ChunkStatus.ValueType]:
        request = {"also_fill": [1, 2], "block_ids": TARGET, "timeout_ms": 5000} | fields
        return await self.send(0, pb.RetrieveRequest(lease_id=lease, **request))

    async def ask(self, asker: int, lease: int, **fields: Any) -> list[types.ChunkStatus.ValueType]:
        asked = {"filled_by": 0, "end_chunk": 4, "timeout_ms": 5000, "reader": asker} | fields
        request = pb.AwaitFillRequest(lease_id=lease, **asked)
        response = await verbs.await_fill(self.service, self.workers[asker].session, request)
        return [chunk.status for chunk in response.chunks]

    async def send(
        self, reader: int, request: pb.RetrieveRequest
    ) -> list[types.ChunkStatus.ValueType]:
        if not request.reader:
            request.reader = reader
        response = await verbs.retrieve(self.service, self.workers[reader].session, request)
        return [chunk.status for chunk in response.chunks]

    async def leave(self, reader: int) -> None:
        """As when a session's stream ends."""
        await self.service.memory.release(self.workers[reader].session)
        self.core.close_session(self.workers[reader].session)

    def is_filled(self, reader: int) -> bool:
        """All of it, or nothing."""
        blocks = self.workers[reader].cache.reshape(BLOCKS, PAGE)
        filled = [
            bool((blocks[block] == row).all())
            for block, row in zip(TARGET, self.bytes.reshape(-1, PAGE), strict=True)
        ]
        assert all(filled) or not blocks.any()
        return all(filled)

    async def close(self) -> None:
        for worker in self.workers:
            await self.service.memory.release(worker.session)
        await self.transfers.close()
        self.pool.stop()
        assert self.driver.opened == {}
