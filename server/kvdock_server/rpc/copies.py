"""Store and Retrieve: the verbs that may take as long as a copy takes."""

from __future__ import annotations

from kvdock.v1 import cache_pb2 as pb
from kvdock_server.core import Core, check_session
from kvdock_server.rpc import verbs
from kvdock_server.sessions import Mode, Session


async def store(core: Core, session: Session | None, request: pb.StoreRequest) -> pb.StoreResponse:
    """Copy chunks out of the session's device memory."""
    check_session(session, Mode.SERVER)
    raise NotImplementedError


async def retrieve(
    core: Core, session: Session | None, request: pb.RetrieveRequest
) -> pb.RetrieveResponse:
    """Deliver locked chunks in the way of the session's mode."""
    if session is None or session.mode is not Mode.SERVER:
        return verbs.retrieve_shared(core, session, request)
    raise NotImplementedError
