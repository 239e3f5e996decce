"""Status stays an answer of one message, however many sessions there are."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import grpc

from kvdock.v1 import admin_pb2, admin_pb2_grpc, session_pb2, session_pb2_grpc

SESSIONS = 2_300
LONGEST = "\N{GRINNING FACE}" * 256
"""Four bytes each in UTF-8."""


async def run_status(address: str, *arguments: str) -> str:
    """What ``kvdock status`` prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvdock", "status", "--address", address, *arguments,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode == 0
    return output.decode()


async def test_more_sessions_than_a_message_holds(server: Any) -> None:
    async with grpc.aio.insecure_channel(server.address.replace("unix://", "unix:")) as channel:
        admin = admin_pb2_grpc.AdminServiceStub(channel)
        opening = session_pb2.SessionRequest(
            open=session_pb2.OpenRequest(engine_id=LONGEST, client=LONGEST, role=1)
        )
        streams, ids = [], []
        for _ in range(SESSIONS):
            stream = session_pb2_grpc.SessionServiceStub(channel).Session()
            await stream.write(opening)
            ids.append((await stream.read()).open.session_id)
            streams.append(stream)

        status = await admin.Status(admin_pb2.StatusRequest())
        assert status.sessions_total == SESSIONS
        assert [session.session_id for session in status.sessions] == ids[:1_000]
        # With a reason of 1,000 characters for each it is below a message's 4 MiB as well.
        assert status.ByteSize() + 1_000 * 1_003 < 4 << 20

        assert f"The oldest 1,000 of {SESSIONS:,} sessions are shown." in await run_status(
            server.address
        )
        answer = json.loads(await run_status(server.address, "--json"))
        assert (len(answer["sessions"]), answer["sessions_total"]) == (1_000, SESSIONS)

        for stream in streams[10:]:
            stream.cancel()
        while (  # noqa: ASYNC110  # over the wire there is no event to wait for
            status := await admin.Status(admin_pb2.StatusRequest())
        ).sessions_total > 10:
            await asyncio.sleep(0.05)
        assert len(status.sessions) == 10
        assert "are shown" not in await run_status(server.address)
