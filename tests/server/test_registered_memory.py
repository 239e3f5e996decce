"""Registered memory, and sessions that end, come again and change their mode meanwhile."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvdock.v1 import cache_pb2 as pb
from kvdock.v1 import session_pb2
from kvdock.v1 import types_pb2 as types
from kvdock_server.core import LockRange
from kvdock_server.core.sessions import Role, Session
from kvdock_server.errors import Reason, RequestError
from kvdock_server.rpc import session as session_rpc
from kvdock_server.rpc import verbs
from kvdock_server.rpc.session import _SessionStream
from kvdock_server.steps import at_once

sys.path.insert(0, str(Path(__file__).parent))
from one_engine import BLOCKS, KEYS, PAGE, PER_CHUNK, TARGET, Engine

EVENT = b"e" * 64


class Answers:
    """What a session's stream writes."""

    def __init__(self) -> None:
        self.sent: list[session_pb2.SessionResponse] = []
        self.third = asyncio.get_running_loop().create_future()

    async def write(self, response: session_pb2.SessionResponse) -> None:
        self.sent.append(response)
        if len(self.sent) == 3:
            self.third.set_result(None)


def stream_of(engine: Engine, session: Session) -> tuple[_SessionStream, Answers]:
    answers: Any = Answers()
    return _SessionStream(engine.service, session, answers), answers


async def requests(*messages: session_pb2.SessionRequest) -> AsyncIterator[Any]:
    for message in messages:
        yield message


async def eternal_requests(*messages: session_pb2.SessionRequest) -> AsyncIterator[Any]:
    for message in messages:
        yield message
    await asyncio.Event().wait()


async def test_a_shard_that_does_not_exist_is_refused_by_name(engine: Engine) -> None:
    session = engine.core.open_session(
        engine_id="two", role=Role.WORKER, worker_id=3, kv_worker_id=3
    )
    with pytest.raises(RequestError, match=r"kv_worker_id 3: .* has 1 shards"):
        await engine.worker(3, 0, session=session)


async def test_a_group_that_is_described_twice_is_refused(engine: Engine) -> None:
    request = session_pb2.RegisterMemoryRequest(namespace="model")
    for _ in range(2):
        group = request.groups.add(num_blocks=BLOCKS, blocks_per_chunk=PER_CHUNK)
        group.regions.add(allocation=0, offset=0, block_stride=PAGE, page_bytes=PAGE)
    request.mode = types.TRANSFER_MODE_SERVER
    with pytest.raises(RequestError, match="the group without group_idx is described twice"):
        await verbs.register_memory(engine.service, engine.workers[0].session, request)


@pytest.mark.parametrize(
    "fields",
    [{"block_ids": TARGET}, {"skip_blocks": 1}, {"ready_event": EVENT}, {"also_fill": [1]}],
)  # fmt: skip
async def test_nothing_is_called_retrieved_that_nobody_copies(
    engine: Engine, fields: dict[str, Any]
) -> None:
    session = engine.workers[0].session
    await verbs.register_memory(
        engine.service, session, session_pb2.RegisterMemoryRequest(namespace="model")
    )
    lease = engine.lookup()
    request = pb.RetrieveRequest(lease_id=lease, end_chunk=4, **fields)
    await_fill = pb.AwaitFillRequest(lease_id=lease, end_chunk=4, filled_by=1)
    stream, answers = stream_of(engine, session)
    await stream.serve(
        requests(
            session_pb2.SessionRequest(id=1, retrieve=request),
            session_pb2.SessionRequest(id=2, await_fill=await_fill),
        )
    )
    assert [answer.error.reason for answer in answers.sent] == ["WRONG_MODE"] * 2
    with pytest.raises(RequestError) as caught:
        await verbs.retrieve(engine.service, None, request)
    assert caught.value.reason in (Reason.SESSION_REQUIRED, Reason.WRONG_MODE)
    at_once(engine.core.free_locks_in_steps(engine.scheduler, [LockRange(lease)]))


async def test_a_stream_that_is_cancelled_while_it_ends_lets_go_of_memory(engine: Engine) -> None:
    session = engine.workers[2].session
    stream, _ = stream_of(engine, session)
    store = pb.StoreRequest(namespace="model", keys=[b"k" * 32], block_ids=range(PER_CHUNK))
    engine.driver.before_copy = lambda *_: time.sleep(0.3)
    await stream.serve(requests(session_pb2.SessionRequest(id=1, store=store)))
    await asyncio.sleep(0.05)
    closing = asyncio.create_task(stream.close())
    await asyncio.sleep(0.05)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    engine.driver.before_copy = lambda *_: None
    assert engine.driver.opened_for(2) == []
    assert engine.core.index.reserved_bytes == 0


async def test_two_registrations_of_a_session_at_once_leave_one(engine: Engine) -> None:
    session = engine.workers[2].session
    await asyncio.gather(*(engine.worker(2, 2, session=session) for _ in range(3)))
    assert len(engine.driver.opened_for(2)) == 1
    await engine.leave(2)
    assert engine.driver.opened_for(2) == []


async def test_a_registration_waits_for_memory_that_is_being_let_go(engine: Engine) -> None:
    writes = threading.Event()

    def slow(target: int, source: int, nbytes: int) -> None:
        writes.set()
        time.sleep(0.02)

    engine.driver.before_copy = slow
    leading = asyncio.create_task(engine.lead(engine.lookup()))
    assert await asyncio.to_thread(writes.wait, 5)
    leaving = asyncio.create_task(engine.leave(1))  # its stream broke
    await asyncio.sleep(0.01)
    assert not leaving.done()
    engine.workers[1] = await engine.worker(1, 1)
    assert leaving.done()
    await asyncio.gather(leading, leaving)


async def test_who_waits_for_room_is_not_silent(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_rpc, "_COPIES_AT_ONCE", 2)
    session = engine.core.open_session(engine_id="one", role=Role.WORKER, worker_id=1, ttl_ms=1000)
    engine.workers.append(await engine.worker(1, 1, session=session))
    stream, answers = stream_of(engine, session)
    store = [
        pb.StoreRequest(
            namespace="model", keys=[bytes([50 + n]) * 32], block_ids=range(PER_CHUNK),
            ready_event=EVENT,
        )
        for n in range(3)
    ]  # fmt: skip
    messages = [session_pb2.SessionRequest(id=n, store=each) for n, each in enumerate(store)]
    serving = asyncio.create_task(stream.serve(eternal_requests(*messages)))
    await asyncio.sleep(0.05)
    session.last_seen -= 5
    engine.core.sweep()
    assert not session.expired
    engine.driver.ready_events.add(EVENT)
    async with asyncio.timeout(5):
        await answers.third
    session.last_seen -= 5
    engine.core.sweep()
    assert session.expired
    serving.cancel()
    await stream.close()


async def test_a_reader_without_locks_is_not_copying(engine: Engine) -> None:
    lease = engine.lookup()
    at_once(engine.core.free_locks_in_steps(engine.scheduler, [LockRange(lease, reader=1)]))
    request = pb.RetrieveRequest(lease_id=lease, reader=1)
    answer = await verbs.retrieve(engine.service, engine.scheduler, request)
    assert len(answer.chunks) == len(KEYS)
    assert engine.core.is_idle
    at_once(engine.core.free_locks_in_steps(engine.scheduler, [LockRange(lease)]))
