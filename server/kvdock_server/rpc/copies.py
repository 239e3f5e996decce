"""The verbs that may take as long as a copy takes: RegisterMemory, Store and Retrieve."""

from __future__ import annotations

from kvdock.v1 import cache_pb2 as pb
from kvdock.v1 import session_pb2
from kvdock.v1 import types_pb2 as types
from kvdock_server.core import Core
from kvdock_server.rpc import conversions
from kvdock_server.service.memory import RegisteredMemory
from kvdock_server.service.retrieve import Retrieves
from kvdock_server.service.store import DeviceStores
from kvdock_server.service.turns import in_turns
from kvdock_server.sessions import Mode, Session
from kvdock_server.transfer import GpuTransfers


class Copies:
    """These verbs as functions from message to message, for all sessions."""

    def __init__(self, core: Core, transfers: GpuTransfers) -> None:
        self._core = core
        self._memory = RegisteredMemory(core, transfers)
        self._stores = DeviceStores(core, self._memory)
        self._retrieves = Retrieves(core, self._memory)

    async def register_memory(
        self, session: Session | None, request: session_pb2.RegisterMemoryRequest
    ) -> session_pb2.RegisterMemoryResponse:
        """Open a worker's device memory, or agree on another way for its bytes."""
        wanted = conversions.wanted_mode(request)
        exported = None
        if wanted is Mode.SERVER or (wanted is None and request.allocations):
            exported = conversions.exported_memory(request)
        mode, reason = await self._memory.register(session, wanted, exported)
        return session_pb2.RegisterMemoryResponse(
            epoch=self._core.epoch, mode=types.TransferMode.ValueType(mode.value), reason=reason
        )

    async def store(self, session: Session | None, request: pb.StoreRequest) -> pb.StoreResponse:
        """Copy chunks out of the session's device memory."""
        call = conversions.store_call(self._core, request)
        statuses = conversions.statuses(await self._stores.store(session, call))
        return pb.StoreResponse(epoch=self._core.epoch, statuses=statuses)

    async def retrieve(
        self, session: Session | None, request: pb.RetrieveRequest
    ) -> pb.RetrieveResponse:
        """Deliver locked chunks in the way of the session's mode."""
        call = conversions.retrieve_call(request)
        chunks = await self._retrieves.retrieve(session, call)
        return await in_turns(conversions.retrieved(self._core, chunks))

    async def release(self, session: Session) -> None:
        """End the session's copies and let go of its device memory."""
        await self._memory.release(session)
