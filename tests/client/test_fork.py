"""Forks of a process that uses gRPC: they work, or are told at once why not."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import ServerProcess

# Forks, and prints what the client of the child says, or that it hangs.
PROGRAM = """
import asyncio, os, signal, sys, time
from concurrent.futures import ThreadPoolExecutor
import grpc, kvdock
from kvdock import errors

address, before, within = sys.argv[1:]

async def ask():
    async with kvdock.aio.Client(address, timeout=5) as client:
        return await client.status()

def blocking():
    with kvdock.Client(address, timeout=5) as client:
        return client.status()

def coroutine():
    return asyncio.run(ask())

async def made_by_parent():
    client = kvdock.aio.Client(address)
    await client.status()
    return client

loop = asyncio.new_event_loop()
if before == "client":
    parents = kvdock.Client(address)
elif before == "aio client":
    parents = loop.run_until_complete(made_by_parent())
elif before == "another's channel":
    channel = grpc.insecure_channel("127.0.0.1:1")
    try:
        channel.unary_unary("/a/b")(b"", timeout=5)
    except grpc.RpcError:
        pass
elif before == "a server":
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        grpc.channel_ready_future(channel).result(5)

child = os.fork()
if child == 0:
    try:
        if within == "parents":
            asked = parents.status()
            if asyncio.iscoroutine(asked):
                asyncio.new_event_loop().run_until_complete(asked)
        else:
            {"blocking": blocking, "coroutine": coroutine}[within]()
        print("works", flush=True)
    except errors.Forked as refused:
        print(refused.message, flush=True)
    finally:
        os._exit(0)

deadline = time.monotonic() + 20
while os.waitpid(child, os.WNOHANG) == (0, 0):
    if time.monotonic() > deadline:
        os.kill(child, signal.SIGKILL)
        print("hangs", flush=True)
    time.sleep(0.02)
if before == "client":
    parents.status()
elif before == "aio client":
    loop.run_until_complete(parents.status())
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as folder:
        process = ServerProcess(Path(folder) / "s.sock", "--memory", "16MiB")
        yield process
        process.stop()


def fork(server: ServerProcess, before: str, within: str, support: str | None) -> str:
    environment = dict(os.environ)
    environment.pop("GRPC_ENABLE_FORK_SUPPORT", None)
    if support is not None:
        environment["GRPC_ENABLE_FORK_SUPPORT"] = support
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, server.address, before, within],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("before", "within"),
    [
        *(("client", "blocking"), ("client", "coroutine")),
        *(("another's channel", "blocking"), ("a server", "coroutine")),
    ],
)
def test_without_fork_support_a_new_client_is_refused(
    server: ServerProcess, before: str, within: str
) -> None:
    said = fork(server, before, within, "0")

    assert "GRPC_ENABLE_FORK_SUPPORT=0" in said
    assert "spawn" in said


@pytest.mark.parametrize(("before", "support"), [("client", "0"), ("aio client", None)])
def test_the_parents_client_is_refused(
    server: ServerProcess, before: str, support: str | None
) -> None:
    assert "make another here" in fork(server, before, "parents", support)


@pytest.mark.parametrize(
    ("before", "support"), [("nothing", "0"), ("client", None), ("client", "1")]
)
def test_where_grpc_works_in_a_fork_a_new_client_does(
    server: ServerProcess, before: str, support: str | None
) -> None:
    assert fork(server, before, "blocking", support) == "works"
