"""Bytes that are no message: INVALID_ARGUMENT and one line in the log, on every method."""

from __future__ import annotations

import socket
import struct
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from wire import DEADLINE, SHARD, Wire, key, raises

from kvdock.v1 import admin_pb2, cache_pb2, events_pb2, session_pb2

# A field that goes on beyond the end, and a tag that does.
NO_MESSAGES = [b"\x12\x7f", b"\xff\xff"]
NO_UTF8 = b"\x12\x01\xff"
"""As a namespace's name."""

OPEN = session_pb2.SessionRequest(id=1, open=session_pb2.OpenRequest(engine_id="e", role=3))
PUT = cache_pb2.PutRequest(open=cache_pb2.PutOpen(namespace="n", keys=[key(1)]))


def methods() -> dict[str, Any]:
    """Every method that the server has, by its path."""
    found = {}
    for module in (admin_pb2, cache_pb2, events_pb2, session_pb2, health_pb2, reflection_pb2):
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                found[f"/{service.full_name}/{method.name}"] = method
    path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    found[path.replace("v1alpha", "v1")] = found[path]
    return found


def call(wire: Wire, path: str, method: Any, *messages: bytes) -> None:
    """Sends raw bytes to a method, and reads to its end."""
    if method.client_streaming:
        list(wire.channel.stream_stream(path)(iter(messages), timeout=DEADLINE))
    else:
        list(wire.channel.unary_stream(path)(messages[0], timeout=DEADLINE))


def test_bytes_that_are_no_message(start_server: Callable[..., Any]) -> None:
    server = start_server("--event-log", "1MiB")
    wire = Wire(server.address)
    wire.register()
    found = methods()
    refused = [(path, message) for path in found for message in NO_MESSAGES]
    refused.append(("/kvdock.v1.CacheService/Lookup", NO_UTF8))
    assert len(refused) > 2 * 20
    for path, message in refused:
        with raises(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT_VALUE") as caught:
            call(wire, path, found[path], message)
        assert f"of {len(message)} bytes to {path} cannot be decoded" in caught.message
    wire.channel.close()
    server.stop()
    log = server.log
    assert log.count("cannot be decoded") == len(refused)
    assert "Traceback" not in log
    assert "report" not in log


def test_bytes_in_the_middle_of_a_stream(server: Any, wire: Wire) -> None:
    """What the stream holds ends with it."""
    found = methods()
    for path, first in (
        ("/kvdock.v1.SessionService/Session", OPEN),
        ("/kvdock.v1.CacheService/Put", PUT),
    ):
        with raises(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT_VALUE"):
            call(wire, path, found[path], first.SerializeToString(), NO_MESSAGES[0])
    status = wire.status()
    assert (len(status.sessions), status.pool.reserved_bytes) == (0, 0)
    assert wire.put([key(1)], [bytes(SHARD)])
    server.stop()
    log = server.log
    assert log.count("cannot be decoded") == 2
    assert "Traceback" not in log


def test_a_connection_to_the_metrics_that_is_reset(start_server: Callable[..., Any]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = start_server("--metrics-listen", f"127.0.0.1:{port}")
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port), DEADLINE) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(b"GET /met")
            time.sleep(0.1)  # until it is being read; else the reset is never noticed
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE) as answer:
        assert answer.status == 200
    server.stop()
    log = server.log
    assert "Traceback" not in log
    assert 1 <= log.count("to the metrics broke") <= 3
