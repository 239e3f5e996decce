"""What SIGTERM promises: copies in flight finish, and everybody else is told why it ended."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable

import grpc
from wire import DEADLINE, Wire, key

from kvdock.v1 import cache_pb2, session_pb2

MIB = 1 << 20


def test_a_get_under_way_at_sigterm_ends_with_all_its_bytes(server, wire: Wire) -> None:  # type: ignore[no-untyped-def]
    wire.register("big", shard_bytes=32 * MIB)
    opened = cache_pb2.PutRequest(open=cache_pb2.PutOpen(namespace="big", keys=[key(1)]))
    data = cache_pb2.PutRequest(data=cache_pb2.PutData(chunk=0, data=bytes(MIB)))
    list(wire.cache.Put(iter([opened] + [data] * 32), timeout=DEADLINE))
    get = cache_pb2.GetRequest(namespace="big", keys=[key(1)], message_bytes=MIB)
    call = wire.cache.Get(get)
    received = len(next(call).data)
    server.process.send_signal(signal.SIGTERM)
    for response in call:
        received += len(response.data)
        time.sleep(0.05)  # 1.6 s in all; the server has 10 s to drain
    assert received == 32 * MIB


def test_a_session_that_ends_with_the_server_ends_with_unavailable_draining(
    start_server: Callable[..., object],
) -> None:
    server = start_server()
    wire = Wire(server.address)  # type: ignore[attr-defined]
    release = threading.Event()

    def requests():  # type: ignore[no-untyped-def]
        yield session_pb2.SessionRequest(open=session_pb2.OpenRequest(engine_id="e", role=3))
        release.wait(20)

    call = wire.sessions.Session(requests())
    next(call)
    try:
        assert server.stop() == 0  # type: ignore[attr-defined]
        try:
            next(call)
        except grpc.RpcError as error:
            # session.proto: "UNAVAILABLE (DRAINING) when the server stops".
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error  # type: ignore[attr-defined]
            details = dict(error.trailing_metadata() or ())  # type: ignore[attr-defined]
            assert b"DRAINING" in details.get("grpc-status-details-bin", b""), error
        else:
            raise AssertionError("the stream went on")
    finally:
        release.set()
