"""Status stays an answer of one message, however many sessions there are."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc

from kvdock.v1 import admin_pb2, admin_pb2_grpc, session_pb2, session_pb2_grpc

SHOWN = 1_000
SESSIONS = SHOWN + 30
LONGEST = "\N{GRINNING FACE}" * 256
"""Four bytes each in UTF-8."""

Opened = tuple[Any, int]


@contextlib.asynccontextmanager
async def channel_to(server: Any) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(server.address.replace("unix://", "unix:")) as channel:
        yield channel


async def open_sessions(channel: grpc.aio.Channel, name: str) -> tuple[list[Opened], list[Opened]]:
    """The oldest sessions, which are shown, and the others: stream and id of each."""
    sessions = session_pb2_grpc.SessionServiceStub(channel)
    opening = session_pb2.SessionRequest(
        open=session_pb2.OpenRequest(engine_id=name, client=name, role=1)
    )

    async def opened() -> Opened:
        stream = sessions.Session()
        await stream.write(opening)
        return stream, (await stream.read()).open.session_id

    oldest = await asyncio.gather(*(opened() for _ in range(SHOWN)))
    return oldest, await asyncio.gather(*(opened() for _ in range(SESSIONS - SHOWN)))


async def printed_status(server: Any) -> str:
    """What ``kvdock status`` prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvdock", "status", "--address", server.address,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


async def test_more_sessions_than_a_message_holds(server: Any) -> None:
    async with channel_to(server) as channel:
        oldest, _ = await open_sessions(channel, LONGEST)
        status = await admin_pb2_grpc.AdminServiceStub(channel).Status(admin_pb2.StatusRequest())
        assert status.sessions_total == SESSIONS
        assert len(status.sessions) == SHOWN
        assert {session.session_id for session in status.sessions} == {id_ for _, id_ in oldest}
        # With a reason of 1,000 characters for each it is below a message's 4 MiB as well.
        assert status.ByteSize() + SHOWN * 1_003 < 4 << 20


async def test_the_command_says_what_it_does_not_show(server: Any) -> None:
    async with channel_to(server) as channel:
        oldest, others = await open_sessions(channel, "a")
        line = f"The oldest {SHOWN:,} of {SESSIONS:,} sessions are shown."
        assert line in await printed_status(server)
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        for stream, _ in (*oldest[10:], *others):
            stream.cancel()
        while (  # noqa: ASYNC110  # over the wire there is no event to wait for
            status := await admin.Status(admin_pb2.StatusRequest())
        ).sessions_total > 10:
            await asyncio.sleep(0.05)
        assert len(status.sessions) == 10
        assert "are shown" not in await printed_status(server)
