"""The asyncio face against a real server: what differs from the blocking one."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import kvdock
import kvdock.aio
from kvdock import errors
from kvdock._outbox import LOOKUPS_UNDER_WAY
from kvdock.types import ChunkStatus
from kvdock.v1 import cache_pb2, session_pb2


@pytest.fixture
async def client(server: Any, namespace: kvdock.Namespace) -> AsyncIterator[kvdock.aio.Client]:
    async with kvdock.aio.Client(server.address) as client:
        await client.register_namespace(namespace)
        yield client


async def wait_until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 5
    while True:
        value = condition()
        if await value if inspect.isawaitable(value) else value:
            return
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("name", ["Client", "Session"])
def test_both_faces_have_the_same_names_and_arguments(name: str) -> None:
    blocking, coroutines = getattr(kvdock, name), getattr(kvdock.aio, name)
    public = {verb for verb in vars(blocking) if not verb.startswith("_")}

    assert public <= set(vars(coroutines))
    for verb in public:
        ours, theirs = vars(blocking)[verb], vars(coroutines)[verb]
        if callable(ours):
            assert inspect.signature(ours).parameters == inspect.signature(theirs).parameters


async def test_the_calls(client: kvdock.aio.Client, prompt: Any) -> None:
    moved: list[int] = []
    assert (
        await client.put("test", prompt.keys, prompt.shards, progress=moved.append)
        == [ChunkStatus.STORED] * 4
    )
    assert sum(moved) == sum(map(len, prompt.shards))
    assert await client.get("test", [*prompt.keys, bytes(32)]) == [*prompt.shards, None]
    buffers = [bytearray(len(shard)) for shard in prompt.shards]
    assert await client.get_into("test", prompt.keys, buffers) == 4
    assert buffers == prompt.shards
    hit = await client.lookup("test", prompt.keys, ttl=5)
    assert hit.lease is not None
    assert await client.free_locks(hit.lease) == 4
    assert [part.key async for part in client.chunks("test")] == prompt.keys
    assert [entry.parts for entry in await client.namespaces()] == [4]
    assert await client.health() == "SERVING"
    assert (await client.evict(1)).parts == 1
    assert await client.clear(all=True) == 3
    assert (await client.status()).index.chunks == 0


async def test_errors(client: kvdock.aio.Client, prompt: Any) -> None:
    with pytest.raises(errors.UnknownNamespace):
        await client.lookup("other", prompt.keys)
    with pytest.raises(errors.UnknownNamespace):
        await client.put("other", prompt.keys, prompt.shards)
    with pytest.raises(errors.UnknownNamespace):
        await client.get("other", prompt.keys)
    with pytest.raises(errors.UnknownNamespace):
        [part async for part in client.chunks("other")]
    with pytest.raises(errors.WrongLength):
        await client.put("test", prompt.keys, [b"short"] * 4)


async def test_the_session(client: kvdock.aio.Client, prompt: Any) -> None:
    async with await client.session("engine", role="tool") as session:
        reservation = await session.reserve("test", prompt.keys)
        for chunk, shard in zip(reservation.chunks, prompt.shards, strict=True):
            assert chunk.location is not None
            session.pool.view(chunk.location)[:] = shard
        assert await session.commit(reservation) == [ChunkStatus.STORED] * 4
        assert await session.abort(reservation) == 0
        hit = await session.lookup("test", prompt.keys)
        assert hit.lease is not None
        chunks = await session.retrieve(hit.lease)
        copies = [bytes(session.pool.view(chunk.location)) for chunk in chunks if chunk.location]
        assert await session.free_locks(hit.lease) == 4
        assert copies == prompt.shards
        many = [session.lookup("test", prompt.keys[:n], probe=True) for n in (1, 2, 3, 4) * 20]
        assert [hit.chunks for hit in await asyncio.gather(*many)] == [1, 2, 3, 4] * 20
    assert session.lost == "the session was closed"
    with pytest.raises(errors.SessionLost):
        await session.lookup("test", prompt.keys)


async def test_the_death_of_the_server(server: Any, client: kvdock.aio.Client, prompt: Any) -> None:
    lost: list[str] = []
    session = await client.session(on_lost=lost.append)
    os.kill(server.process.pid, signal.SIGSTOP)
    pending = session.submit(cache_pb2.LookupRequest(namespace="test", keys=prompt.keys))
    await asyncio.sleep(0.05)
    server.kill()

    with pytest.raises(errors.SessionLost):
        await asyncio.wait_for(pending, 5)
    assert lost == [session.lost]
    await session.close()


async def test_a_late_answer_is_undone(server: Any, client: kvdock.aio.Client, prompt: Any) -> None:
    await client.put("test", prompt.keys, prompt.shards)
    async with await client.session() as session:
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            lookup = cache_pb2.LookupRequest(namespace="test", keys=prompt.keys)
            looking_up = session.submit(lookup)
            await wait_until(lambda: not session._stream._protocol.has_next)
            looking_up.cancel()
            with pytest.raises(errors.DeadlineExceeded):
                await client.get("test", prompt.keys, timeout=0.1)
            with pytest.raises(errors.DeadlineExceeded):
                await client.put("test", prompt.keys, prompt.shards, timeout=0.1)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)

        await session.submit(session_pb2.HeartbeatRequest())

        async def no_locks() -> bool:
            status = await client.status()
            return status.counters.lookups == 1 and status.index.locks == 0

        await wait_until(no_locks)


async def test_what_is_late_or_given_up_is_not_carried_out(
    server: Any, client: kvdock.aio.Client, prompt: Any
) -> None:
    await client.put("test", prompt.keys, prompt.shards)
    async with await client.session() as session:
        protocol = session._stream._protocol
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            looking_up = [session.lookup("test", prompt.keys, timeout=0.3) for _ in range(200)]
            answers = await asyncio.gather(*looking_up, return_exceptions=True)
            assert {type(answer) for answer in answers} == {errors.DeadlineExceeded}
            assert len(protocol._outbox) == 0
            assert len(protocol._pending) == LOOKUPS_UNDER_WAY
            # Late by more than the client can be wrong about the server's clock.
            await asyncio.sleep(0.5)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)

        await session.submit(session_pb2.HeartbeatRequest())
        status = await client.status()
        assert (status.counters.lookups, status.index.leases) == (0, 0)
        assert (await session.lookup("test", prompt.keys, timeout=5)).chunks == len(prompt.keys)


async def test_heartbeats_and_a_server_that_stops_answering(
    server: Any, client: kvdock.aio.Client
) -> None:
    lost: list[str] = []
    async with await client.session(ttl=1, on_lost=lost.append) as session:
        await asyncio.sleep(1.5)
        assert session.alive
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            with pytest.raises(errors.SessionLost, match="did not answer for 1 s"):
                await asyncio.wait_for(session.submit(session_pb2.HeartbeatRequest()), 5)
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
    assert len(lost) == 1


async def test_a_dropped_session_ends(client: kvdock.aio.Client) -> None:
    session = await client.session()
    del session
    gc.collect()

    async def none_open() -> bool:
        return not (await client.status()).sessions

    await wait_until(none_open)


async def test_a_closed_client_says_so(server: Any, prompt: Any) -> None:
    client = kvdock.aio.Client(server.address)
    await client.status()
    await client.close()

    for call in (
        client.status,
        client.health,
        client.session,
        lambda: client.get("test", prompt.keys),
        lambda: client.put("test", prompt.keys, prompt.shards),
    ):
        with pytest.raises(errors.Unavailable, match="closed"):
            await call()


async def test_no_server(tmp_path: Any) -> None:
    async with kvdock.aio.Client(f"unix://{tmp_path}/none.sock") as client:
        for call in (client.status, client.session, client.health):
            with pytest.raises(errors.Unavailable, match="kvdock serve"):
                await call()


def test_a_loop_that_stops_with_an_open_session_leaves_no_task(server: Any) -> None:
    async def leave_it_open() -> None:
        client = kvdock.aio.Client(server.address)
        kept.append(await client.session())

    kept: list[kvdock.aio.Session] = []
    asyncio.run(leave_it_open())
    assert not kept[0].alive


async def test_an_answer_that_comes_as_its_caller_is_cancelled_is_undone(
    client: kvdock.aio.Client, prompt: Any
) -> None:
    await client.put("test", prompt.keys, prompt.shards)
    async with await client.session() as session:
        waiting = asyncio.create_task(session.lookup("test", prompt.keys))
        await asyncio.sleep(0)
        (pending,) = session._stream._protocol._pending.values()
        answer = pending.handle
        while not answer.done():  # noqa: ASYNC110, since not one turn may be missed
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

        assert answer.result().lease_id
        await session.lookup("test", prompt.keys, probe=True)  # answered after what was before
        assert (await client.status()).index.leases == 0


async def test_a_reader_of_the_listing_may_take_its_time(client: kvdock.aio.Client) -> None:
    tiny = kvdock.Namespace("tiny", 1, 1, (kvdock.Group((1,)),))
    await client.register_namespace(tiny)
    keys = [number.to_bytes(32) for number in range(1, 12_001)]
    await client.put("tiny", keys, [b"."] * len(keys))

    count = 0
    async for _ in client.chunks("tiny", timeout=0.2):
        if count == 0:
            await asyncio.sleep(0.6)
        count += 1
    assert count == len(keys)


async def test_a_call_under_way_learns_that_its_client_was_closed(server: Any, prompt: Any) -> None:
    client = kvdock.aio.Client(server.address)
    await client.status()
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        calls = [
            asyncio.create_task(call)
            for call in (
                client.status(),
                client.namespaces(),
                client.get("test", prompt.keys),
                client.put("test", prompt.keys, prompt.shards),
                client.session(),
            )
        ]
        await asyncio.sleep(0.3)
        await client.close()
        for call in calls:
            with pytest.raises(errors.Unavailable, match="closed"):
                await call
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


async def test_what_progress_raises_comes_to_the_caller(
    client: kvdock.aio.Client, prompt: Any
) -> None:
    def fail(nbytes: int) -> None:
        raise LookupError(nbytes)

    with pytest.raises(LookupError):
        await client.put("test", prompt.keys, prompt.shards, progress=fail)


async def test_closing_waits_for_no_server_that_takes_nothing(
    server: Any, client: kvdock.aio.Client, namespace: kvdock.Namespace
) -> None:
    program = f"""
import asyncio, os, signal, kvdock
async def main():
    async with kvdock.aio.Client({server.address!r}, timeout=0.5) as client:
        def stop(nbytes):
            os.kill({server.process.pid}, signal.SIGSTOP)
        try:
            await client.put("test", KEYS, SHARDS, progress=stop)
        except kvdock.errors.DeadlineExceeded:
            print("gave up")
SHARDS = [bytes({namespace.groups[0].shard_bytes[0]})] * 30
KEYS = [bytes([number + 1]) * 32 for number in range(30)]
asyncio.run(main())
print("ended")
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(20):
            output, _ = await process.communicate()
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    assert output.split(b"\n") == [b"gave up", b"ended", b""]


async def test_sessions_that_failed_or_were_lost_leave_nothing(
    server: Any, client: kvdock.aio.Client
) -> None:
    async def lose_one() -> None:
        with pytest.raises(errors.InvalidArgument):
            await client.session("x" * 300)
        session = await client.session()
        os.kill(server.process.pid, signal.SIGSTOP)
        pending = asyncio.create_task(session.lookup("test", [b"k" * 32]))
        await asyncio.sleep(0.05)
        server.kill()
        with pytest.raises(errors.SessionLost):
            await pending

    await lose_one()
    await asyncio.sleep(0.05)
    gc.collect()
    assert not any(type(each) is kvdock.aio.Session for each in gc.get_objects())
