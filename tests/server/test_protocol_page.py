"""What docs/protocol.md promises to those who write a client, tried on a server."""

from __future__ import annotations

import re
from pathlib import Path

from wire import DEADLINE, SHARD, Wire, WireSession, key

from kvdock.v1 import admin_pb2, cache_pb2, session_pb2, types_pb2
from kvdock_server.errors import Reason

PAGE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
KEYS = [key(1), key(1, 2), key(1, 2, 3), key(1, 2, 3, 4)]


def reserve(keys: list[bytes] = KEYS) -> cache_pb2.ReserveRequest:
    return cache_pb2.ReserveRequest(namespace="n", keys=keys)


def test_every_reason_has_its_code_and_what_a_client_does() -> None:
    section = PAGE.split("## When something goes wrong")[1].split("\n## ")[0]
    told: dict[str, str] = {}
    for cell in re.findall(r"^\| [^|]+ \| ([A-Z_]+: .*) \|$", section, re.MULTILINE):
        for code, reasons in re.findall(r"([A-Z_]+): ([^;]*)", cell):
            told |= dict.fromkeys(re.findall(r"`([A-Z_]+)`", reasons), code)
    assert told == {reason.name: reason.code.name for reason in Reason}


def test_a_tool_reserves_without_registration_and_places_begin_at_pages(wire: Wire) -> None:
    wire.register("small", shard_bytes=1000)
    tool = WireSession(wire, "TOOL")
    memory = session_pb2.RegisterMemoryRequest(namespace="n", mode=types_pb2.TRANSFER_MODE_SHARED)
    assert "only a worker's session" in tool.error(register_memory=memory).message
    asked = cache_pb2.ReserveRequest(namespace="small", keys=[*KEYS, KEYS[0]])
    chunks = tool.ask(reserve=asked).reserve.chunks
    assert [chunk.status for chunk in chunks] == [types_pb2.CHUNK_STATUS_RESERVED] * 4 + [
        types_pb2.CHUNK_STATUS_EXISTS
    ]
    assert not chunks[-1].HasField("location")
    offsets = [chunk.location.offset for chunk in chunks[:-1]]
    assert len(set(offsets)) == 4
    assert not any(offset % 4096 for offset in offsets)
    tool.close()


def test_a_reserved_parent_counts_as_there(wire: Wire) -> None:
    session = WireSession(wire)
    first = session.ask(reserve=reserve(KEYS[:1])).reserve.chunks
    request = cache_pb2.ReserveRequest(namespace="n", keys=KEYS[1:], parent_key=KEYS[0])
    rest = session.ask(reserve=request).reserve.chunks
    assert {chunk.status for chunk in [*first, *rest]} == {types_pb2.CHUNK_STATUS_RESERVED}
    session.close()


def test_the_hits_of_a_prompt_in_two_lookups_add_up(wire: Wire) -> None:
    wire.put(KEYS[:3], [bytes(SHARD)] * 3)
    whole = wire.lookup(KEYS, probe=True).hit_chunks
    assert whole == 3
    assert wire.lookup(KEYS[:2], probe=True).hit_chunks == 2
    assert wire.lookup(KEYS[2:], probe=True).hit_chunks == whole - 2


def test_a_half_closed_session_answers_all_that_was_sent(wire: Wire) -> None:
    opening = session_pb2.OpenRequest(engine_id="e", role=session_pb2.SESSION_ROLE_SCHEDULER)
    lookup = cache_pb2.LookupRequest(namespace="n", keys=KEYS)
    requests = [
        session_pb2.SessionRequest(id=1, open=opening),
        *(session_pb2.SessionRequest(id=2 + n, lookup=lookup) for n in range(100)),
    ]
    # The stream ends with OK, or iterating raises.
    answers = list(wire.sessions.Session(iter(requests), timeout=DEADLINE))
    assert [answer.id for answer in answers] == list(range(1, 102))


def test_the_labels_of_the_first_registration_stay(wire: Wire) -> None:
    group = types_pb2.Group(kind=types_pb2.GROUP_KIND_FULL_ATTENTION, shard_bytes=[SHARD])
    for label in ("first", "second"):
        namespace = types_pb2.Namespace(
            name="labelled",
            chunk_tokens=16,
            kv_world_size=1,
            groups=[group],
            labels={"model": label},
        )
        wire.cache.RegisterNamespace(cache_pb2.RegisterNamespaceRequest(namespace=namespace))
    for label, found in (("first", 1), ("second", 0)):
        asked = {"model": label}
        assert len(list(wire.admin.ListNamespaces(list_request(asked)))) == found


def list_request(labels: dict[str, str]) -> admin_pb2.ListNamespacesRequest:
    return admin_pb2.ListNamespacesRequest(labels=labels)
