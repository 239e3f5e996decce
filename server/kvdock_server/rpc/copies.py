"""The verbs that may take as long as a copy takes: RegisterMemory, Store and Retrieve.

In server mode the server copies between its pool and the worker's device memory. Until such a copy
is over its memory stays put: slots that are filled are given back only then, and parts that are
read are pinned besides the caller's locks.
"""

from __future__ import annotations

import logging

from kvdock.v1 import cache_pb2 as pb
from kvdock.v1 import session_pb2
from kvdock.v1 import types_pb2 as types
from kvdock_server.core import Core, check_session
from kvdock_server.index.index import Slot
from kvdock_server.rpc import fields, verbs
from kvdock_server.rpc.loads import Loads
from kvdock_server.rpc.memory import RegisteredMemory
from kvdock_server.rpc.turns import in_turns
from kvdock_server.sessions import Mode, Session
from kvdock_server.transfer import DeviceMemoryError, GpuTransfers, TransferFailedError

logger = logging.getLogger(__name__)


class Copies:
    """Copies made by the server, for all sessions."""

    def __init__(self, core: Core, transfers: GpuTransfers) -> None:
        self._core = core
        self._memory = RegisteredMemory(core, transfers)
        self._loads = Loads(core, self._memory)

    async def register_memory(
        self, session: Session | None, request: session_pb2.RegisterMemoryRequest
    ) -> session_pb2.RegisterMemoryResponse:
        """Open a worker's device memory, or agree on another way for its bytes."""
        return await self._memory.register(session, request)

    async def store(self, session: Session | None, request: pb.StoreRequest) -> pb.StoreResponse:
        """Copy chunks out of the session's device memory."""
        session = check_session(session, Mode.SERVER)
        registration, layout = self._memory.of(session, request.namespace, verbs.group_idx(request))
        blocks = fields.block_ids(request.block_ids, layout, len(request.keys), skip_blocks=0)
        event = fields.ready_event(request.ready_event)
        deadline = fields.deadline(request, self._core.clock())
        outcomes = await in_turns(
            self._core.reserve_in_steps(
                session,
                request.namespace,
                verbs.group_idx(request),
                session.kv_worker_id,
                request.parent_key,
                request.keys,
                verbs.event_data(self._core, request),
            )
        )
        slots = {i: outcome for i, outcome in enumerate(outcomes) if isinstance(outcome, Slot)}
        statuses = [
            types.CHUNK_STATUS_FAILED
            if isinstance(outcome, Slot)
            else verbs.RESERVE_STATUS[outcome]
            for outcome in outcomes
        ]
        try:
            if slots:
                await registration.store(
                    verbs.group_idx(request),
                    blocks[list(slots)].ravel(),
                    [slot.offset for slot in slots.values()],
                    event,
                    deadline - self._core.clock(),
                )
                # This process may have stood still meanwhile, and the worker not.
                if self._core.clock() >= deadline:
                    raise TransferFailedError("the copy ended after the deadline")
                self._core.counters.device_to_host_bytes += len(slots) * layout.chunk_bytes
            for index in await in_turns(self._core.seal_all(slots)):
                statuses[index] = types.CHUNK_STATUS_STORED
        except (TransferFailedError, DeviceMemoryError) as error:
            logger.warning("a store of %d chunks failed: %s", len(slots), error)
        finally:
            self._core.give_back_all(slots.values())
        return pb.StoreResponse(epoch=self._core.epoch, statuses=statuses)

    async def retrieve(
        self, session: Session | None, request: pb.RetrieveRequest
    ) -> pb.RetrieveResponse:
        """Deliver locked chunks in the way of the session's mode."""
        if session is not None and session.mode is Mode.SERVER:
            return await self._loads.retrieve(session, request)
        return await in_turns(verbs.retrieve_shared(self._core, session, request))

    async def release(self, session: Session) -> None:
        """End the session's copies and let go of its device memory."""
        await self._memory.release(session)
