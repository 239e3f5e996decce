"""What wire-level tests share: raw stubs, and namespaces and keys to try them with."""

from __future__ import annotations

import hashlib
import queue
from typing import Any

import grpc

from kvdock.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    cache_pb2_grpc,
    session_pb2,
    session_pb2_grpc,
    types_pb2,
)

SHARD = 8192
DEADLINE = 10.0


def key(*path: int) -> bytes:
    return hashlib.sha256(bytes(path)).digest()


class Wire:
    """Raw stubs of every service on one channel."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(
            address.replace("unix://", "unix:"), options=[("grpc.enable_http_proxy", 0)]
        )
        self.cache = cache_pb2_grpc.CacheServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)
        self.sessions = session_pb2_grpc.SessionServiceStub(self.channel)

    def register(self, name: str = "n", shard_bytes: int = SHARD, world: int = 1) -> None:
        group = types_pb2.Group(kind=types_pb2.GROUP_KIND_FULL_ATTENTION, shard_bytes=[shard_bytes])
        self.cache.RegisterNamespace(
            cache_pb2.RegisterNamespaceRequest(
                namespace=types_pb2.Namespace(
                    name=name, chunk_tokens=16, kv_world_size=world, groups=[group]
                )
            ),
            timeout=DEADLINE,
        )

    def put(
        self, keys: list[bytes], data: list[bytes], name: str = "n", **opened: Any
    ) -> list[cache_pb2.PutResponse]:
        requests = [
            cache_pb2.PutRequest(open=cache_pb2.PutOpen(namespace=name, keys=keys, **opened))
        ]
        requests += [
            cache_pb2.PutRequest(data=cache_pb2.PutData(chunk=index, data=piece))
            for index, piece in enumerate(data)
        ]
        return list(self.cache.Put(iter(requests), timeout=DEADLINE))

    def lookup(self, keys: list[bytes], name: str = "n", **more: Any) -> cache_pb2.LookupResponse:
        return self.cache.Lookup(
            cache_pb2.LookupRequest(namespace=name, keys=keys, **more), timeout=DEADLINE
        )

    def status(self) -> admin_pb2.StatusResponse:
        return self.admin.Status(admin_pb2.StatusRequest(), timeout=DEADLINE)


class WireSession:
    """A session stream, one request at a time."""

    def __init__(self, wire: Wire, role: str = "WORKER", engine: str = "e", **opened: Any) -> None:
        self._requests: queue.SimpleQueue[session_pb2.SessionRequest | None] = queue.SimpleQueue()
        self._responses = wire.sessions.Session(iter(self._requests.get, None))
        self.opened = self.ask(
            open=session_pb2.OpenRequest(
                engine_id=engine,
                role=session_pb2.SessionRole.Value(f"SESSION_ROLE_{role}"),
                **opened,
            )
        ).open

    def ask(self, **request: Any) -> session_pb2.SessionResponse:
        self._requests.put(session_pb2.SessionRequest(id=7, **request))
        response = next(self._responses)
        assert response.id == 7
        return response

    def error(self, **request: Any) -> types_pb2.Error:
        response = self.ask(**request)
        assert response.WhichOneof("response") == "error", response
        return response.error

    def close(self) -> None:
        self._requests.put(None)
        for _ in self._responses:
            pass


def raises(code: grpc.StatusCode, reason: str | None = None) -> Any:
    """Expects a gRPC error with that code and, if given, that reason in its details."""
    return _Raises(code, reason)


class _Raises:
    def __init__(self, code: grpc.StatusCode, reason: str | None) -> None:
        self.code = code
        self.reason = reason
        self.message = ""

    def __enter__(self) -> _Raises:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        assert isinstance(error, grpc.RpcError), f"no gRPC error but {error!r}"
        assert error.code() is self.code, error
        self.message = error.details() or ""
        if self.reason is not None:
            details = dict(error.trailing_metadata() or ())["grpc-status-details-bin"]
            assert self.reason.encode() in details
            assert b"kvdock" in details
        return True
