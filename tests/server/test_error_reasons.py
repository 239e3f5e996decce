"""What an error tells programs: its reason, what it is about, and when to try again."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from wire import DEADLINE, Wire, WireSession, key

from kvdock.v1 import admin_pb2, cache_pb2, session_pb2
from kvdock.v1 import types_pb2 as types
from kvdock_server.errors import Reason

TYPES_PROTO = Path(__file__).parents[2] / "proto/kvdock/v1/types.proto"
NO_LEASE = 12345


def documented() -> dict[str, tuple[str, int]]:
    """The protocol's reasons, each with the code that its comment begins with and its number."""
    text = TYPES_PROTO.read_text().split("enum ErrorReason {")[1].split("\n}")[0]
    found = re.findall(r"  // ([A-Z_]+)\. (?:.*\n  //)*.*\n  ERROR_REASON_([A-Z_]+) = (\d+);", text)
    return {name: (code, int(number)) for code, name, number in found}


def test_every_reason_is_the_protocols_with_its_code_and_number() -> None:
    ours = {reason.name: (reason.code.name, reason.value[1]) for reason in Reason}
    assert ours == documented()
    assert set(types.ErrorReason.values()) == {0, *(number for _, number in ours.values())}


def details(error: grpc.RpcError) -> tuple[dict[str, str], float]:
    """The metadata of a failed call's ErrorInfo, and the delay of its RetryInfo in seconds."""
    trailers = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert status.message == error.details()
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in status.details:
        assert detail.Unpack(info) or detail.Unpack(retry)
    assert info.domain == "kvdock"
    return dict(info.metadata), retry.retry_delay.ToTimedelta().total_seconds()


def keys(count: int) -> list[bytes]:
    return [key(1)] * count


ERRORS: list[tuple[str, Message, dict[str, str]]] = [
    ("lookup", cache_pb2.LookupRequest(namespace="?", keys=keys(1)), {"namespace": "?"}),
    ("lookup", cache_pb2.LookupRequest(namespace="n", keys=keys(16_385)),
     {"field": "keys", "limit": "16384"}),
    ("lookup", cache_pb2.LookupRequest(namespace="n", keys=keys(1), readers=257),
     {"field": "readers", "limit": "256"}),
    ("retrieve", cache_pb2.RetrieveRequest(lease_id=NO_LEASE), {"lease_id": str(NO_LEASE)}),
    ("register_namespace", cache_pb2.RegisterNamespaceRequest(
        namespace=types.Namespace(name="n", chunk_tokens=32, kv_world_size=1, groups=[
            types.Group(kind=types.GROUP_KIND_FULL_ATTENTION, shard_bytes=[1])])),
     {"namespace": "n"}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "request_", "metadata"), ERRORS)
def test_both_ways_tell_what_the_error_is_about(
    wire: Wire, kind: str, request_: Message, metadata: dict[str, str]
) -> None:
    method = getattr(wire.cache, "".join(map(str.title, kind.split("_"))))
    with pytest.raises(grpc.RpcError) as caught:
        method(request_, timeout=DEADLINE)
    assert details(caught.value) == (metadata, 0)
    session = WireSession(wire)
    error = session.error(**{kind: request_})
    assert (dict(error.metadata), error.retry_ms) == (metadata, 0)
    session.close()


def test_what_may_succeed_later_says_when(server: Any, wire: Wire) -> None:
    session = WireSession(wire)
    reserve = cache_pb2.ReserveRequest(namespace="n", keys=keys(1))
    assert session.ask(reserve=reserve).reserve.reservation_id  # keeps the server from its end
    late = session.error(
        lookup=cache_pb2.LookupRequest(namespace="n", keys=keys(1), timeout_ms=1), sent_ms=1
    )
    assert (late.reason, late.retry_ms, dict(late.metadata)) == ("TOO_LATE", 100, {"limit": "1"})
    server.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + DEADLINE
    while not wire.status().draining:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(grpc.RpcError) as caught:
        wire.lookup(keys(1))
    assert details(caught.value) == ({}, 1)
    assert session.error(reserve=reserve).retry_ms == 1_000
    session.close()


def test_reflection_knows_the_details(wire: Wire) -> None:
    """So that grpcurl and others can show them."""
    stub = reflection_pb2_grpc.ServerReflectionStub(wire.channel)
    for name in ("ErrorInfo", "RetryInfo", "Status"):
        asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=f"google.rpc.{name}")
        (answer,) = stub.ServerReflectionInfo(iter([asked]), timeout=DEADLINE)
        assert answer.HasField("file_descriptor_response"), answer


def test_googles_files_are_what_the_server_sends(tmp_path: Path) -> None:
    """For clients that generate their own code from proto/."""
    image = tmp_path / "image.binpb"
    buf = Path(sys.executable).with_name("buf")
    subprocess.run(
        [buf, "build", "--path", "proto/google", "-o", image],
        cwd=TYPES_PROTO.parents[3],
        check=True,
    )
    files = descriptor_pb2.FileDescriptorSet.FromString(image.read_bytes()).file
    found = {message.name: message for file in files for message in file.message_type}
    for kind in (error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo, status_pb2.Status):
        ours = descriptor_pb2.DescriptorProto()
        kind.DESCRIPTOR.CopyToProto(ours)
        theirs = found[ours.name]
        assert [(field.name, field.number, field.type) for field in ours.field] == [
            (field.name, field.number, field.type) for field in theirs.field
        ]
    for name in ("error_details", "status"):
        text = (TYPES_PROTO.parents[2] / f"google/rpc/{name}.proto").read_text()
        assert "Apache License, Version 2.0" in text


def group(idx: int | None, **more: Any) -> types.Group:
    given = {"kind": types.GROUP_KIND_FULL_ATTENTION, "shard_bytes": [64], **more}
    return types.Group(group_idx=idx, **given)


def namespace(*groups: types.Group, name: str = "wrong") -> cache_pb2.RegisterNamespaceRequest:
    return cache_pb2.RegisterNamespaceRequest(
        namespace=types.Namespace(name=name, chunk_tokens=16, kv_world_size=2, groups=groups)
    )


def memory(**more: Any) -> session_pb2.RegisterMemoryRequest:
    return session_pb2.RegisterMemoryRequest(
        namespace="n", mode=types.TRANSFER_MODE_SERVER, groups=[session_pb2.GroupMemory()], **more
    )


def test_no_message_speaks_python(wire: Wire) -> None:
    """What a client reads has no None, list, bytes or enum as Python writes them."""
    call = wire.cache
    call.RegisterNamespace(namespace(group(0), group(3, shard_bytes=[0]), name="two"))
    session = WireSession(wire)
    reserve = cache_pb2.ReserveRequest(namespace="n", keys=keys(1))
    reservation = session.ask(reserve=reserve).reserve.reservation_id
    lease = wire.lookup(keys(1)).lease_id
    assert not lease
    twice = session_pb2.RegisterMemoryRequest(
        namespace="n", mode=1, groups=[session_pb2.GroupMemory()] * 2
    )
    long = session_pb2.GroupMemory(blocks_per_chunk=1 << 20)
    asked: list[Callable[[], Any]] = [
        lambda: call.RegisterNamespace(namespace(group(None), group(None))),
        lambda: call.RegisterNamespace(namespace(group(None), group(1))),
        lambda: call.RegisterNamespace(namespace(group(1), group(1))),
        lambda: call.RegisterNamespace(namespace(group(None, kind=0))),
        lambda: call.RegisterNamespace(namespace(group(None, kind=77))),
        lambda: call.RegisterNamespace(namespace(group(None, window_tokens=4))),
        lambda: call.RegisterNamespace(namespace(group(None, shard_bytes=[1, 2, 3]))),
        lambda: call.RegisterNamespace(namespace(group(0), group(3, kind=3), name="two")),
        lambda: call.RegisterNamespace(namespace(group(None), name="two")),
        lambda: wire.put(keys(1), [], name="two"),
        lambda: wire.put(keys(1), [], name="n", group_idx=0),
        lambda: wire.put(keys(1), [], name="two", group_idx=3),
        lambda: wire.put(keys(1), [], name="two", group_idx=4),
        lambda: wire.put([b"short"], []),
        lambda: list(call.Get(cache_pb2.GetRequest(namespace="two", keys=keys(1)))),
        lambda: list(wire.admin.ListChunks(admin_pb2.ListChunksRequest(namespace="'?\n"))),
        lambda: list(wire.sessions.Session(iter([session_pb2.SessionRequest()]))),
        lambda: list(
            wire.sessions.Session(
                iter([session_pb2.SessionRequest(open=session_pb2.OpenRequest(engine_id="e"))])
            )
        ),
    ]
    told = []
    for each in asked:
        with pytest.raises(grpc.RpcError) as caught:
            each()
        told.append(caught.value.details() or "")
    for request in (
        {"register_memory": twice},
        {"register_memory": memory()},
        {"register_memory": session_pb2.RegisterMemoryRequest(namespace="n", mode=99)},
        {
            "register_memory": session_pb2.RegisterMemoryRequest(
                namespace="n", mode=1, groups=[long]
            )
        },
        {"commit": cache_pb2.CommitRequest(reservation_id=reservation, chunks=[3, 4])},
        {"commit": cache_pb2.CommitRequest(reservation_id=reservation, chunks=[0, 0])},
        {"store": cache_pb2.StoreRequest(namespace="n", keys=keys(1))},
        {},
    ):
        error = session.error(**request)
        told.append(error.message)
    session.close()
    python = re.compile(r"\bNone\b|\[[\d,' ]*\]|\bb['\"]|<\w|\w\.[A-Z]{2}|\w\(\)")
    assert [message for message in told if python.search(message)] == []
    assert [message for message in told if "fault of the server" in message] == []
