"""The gRPC server: every service over one core."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from kvdock.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    events_pb2,
    session_pb2,
    session_pb2_grpc,
)
from kvdock_server.core import Core
from kvdock_server.rpc.admin import AdminService
from kvdock_server.rpc.cache import CacheService, add_cache_service
from kvdock_server.rpc.decoding import MAX_MESSAGE_BYTES, MOST_SEEN_BYTES, DecodingInterceptor
from kvdock_server.rpc.events import add_event_service
from kvdock_server.rpc.reflection import add_reflection
from kvdock_server.rpc.session import SessionService
from kvdock_server.service.service import Service
from kvdock_server.tiers.host.pool import Pool
from kvdock_server.transfer import GpuTransfers

SERVICE_NAMES = [
    descriptor.services_by_name[service].full_name
    for descriptor, service in (
        (cache_pb2.DESCRIPTOR, "CacheService"),
        (session_pb2.DESCRIPTOR, "SessionService"),
        (events_pb2.DESCRIPTOR, "EventService"),
        (admin_pb2.DESCRIPTOR, "AdminService"),
    )
]

_OPTIONS = [
    # More than the protocol allows, so that one message too large does not end a whole session.
    ("grpc.max_receive_message_length", MOST_SEEN_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Two servers on one TCP port would share its clients at random.
    ("grpc.so_reuseport", 0),
    # Go clients and proxies ping every 10 to 30 s, also while they have no call under way. The
    # library reads the interval under this name.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


class Server:
    """A gRPC server with all services. It listens from ``start`` on."""

    def __init__(self, core: Core, pool: Pool, transfers: GpuTransfers, chunk_tokens: int) -> None:
        service = Service(core, pool, transfers)
        self._grpc = grpc.aio.server(options=_OPTIONS, interceptors=[DecodingInterceptor()])
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._grpc)
        add_cache_service(self._grpc, CacheService(service))
        self._sessions = SessionService(service, pool, chunk_tokens)
        session_pb2_grpc.add_SessionServiceServicer_to_server(self._sessions, self._grpc)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminService(core, pool, transfers, chunk_tokens), self._grpc
        )
        add_event_service(self._grpc, core)
        add_reflection(self._grpc, [*SERVICE_NAMES, "grpc.health.v1.Health"])

    async def start(self, target: str) -> None:
        """Listen at ``target``. RuntimeError if the address is taken."""
        self._grpc.add_insecure_port(target)
        await self._grpc.start()
        for name in ("", *SERVICE_NAMES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def refuse_new_work(self) -> None:
        """Tell health checks that the server is going away."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace: float) -> None:
        """Stop listening, end the sessions, and after ``grace`` seconds the calls that are left."""
        self._sessions.end_all()
        await self._grpc.stop(grace)
