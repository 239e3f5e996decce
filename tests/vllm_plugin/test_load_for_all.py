"""Server mode under MLA: one rank loads for all, against the server's own verbs on host memory."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvdock import errors
from kvdock.v1 import cache_pb2, types_pb2
from kvdock_server.errors import RequestError
from kvdock_server.rpc import verbs
from kvdock_server.rpc.grpc_errors import to_proto
from kvdock_server.steps import at_once
from kvdock_server.transfer import gpu
from kvdock_vllm.engine.parallel import ParallelStrategy
from kvdock_vllm.engine.specs import GroupLoad, Target
from kvdock_vllm.engine.transfers.base import CopyRequest, Mark
from kvdock_vllm.engine.transfers.fence import Fence
from kvdock_vllm.engine.transfers.server import ServerChunkTransfers

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))
from one_engine import CHUNK, KEYS, READERS, TARGET, Engine


def is_await_fill(request: Any) -> bool:
    return isinstance(request, cache_pb2.AwaitFillRequest)


class Session:
    """A rank's session with the server's verbs, without the stream between them."""

    info = SimpleNamespace(segments=())

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: Engine, rank: int) -> None:
        self._loop = loop
        self._engine = engine
        self._rank = rank
        self.sent: list[Any] = []

    def submit(self, request: Any) -> Future[Any]:
        self.sent.append(request)
        return asyncio.run_coroutine_threadsafe(self._retrieve(request), self._loop)

    async def _retrieve(self, request: Any) -> Any:
        try:
            session = self._engine.workers[self._rank].session
            verb: Any = verbs.await_fill if is_await_fill(request) else verbs.retrieve
            return await verb(self._engine.service, session, request)
        except RequestError as error:
            message: types_pb2.Error = to_proto(error)
            raise errors.from_stream_error(message) from error


class Ranks:
    """A server, and the transfers of all ranks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.engine = self.run(self._start(monkeypatch))
        self.sessions = [Session(self._loop, self.engine, rank) for rank in range(READERS)]
        self.transfers = [self._transfers(rank) for rank in range(READERS)]

    def _transfers(self, rank: int) -> ServerChunkTransfers:
        fence = Fence()
        session: Any = self.sessions[rank]
        fence.registered(session)
        return ServerChunkTransfers(ParallelStrategy(True, READERS, 1, rank), fence)

    async def _start(self, monkeypatch: pytest.MonkeyPatch) -> Engine:
        engine = Engine()
        monkeypatch.setattr(gpu, "load_driver", lambda: engine.driver)
        await engine.start()
        return engine

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(20)

    def load(self, lease: int, ranks: list[int]) -> list[list[bool]]:
        """What these ranks report, all loading at once."""

        def one(rank: int) -> list[bool]:
            session: Any = self.sessions[rank]
            load = GroupLoad(0, None, 0, len(KEYS), 0, tuple(TARGET), lease)
            target = Target(1, "model", 16)
            return self.transfers[rank].load(
                CopyRequest(session, target, load, Mark(), lambda: False)
            )

        with ThreadPoolExecutor(READERS) as threads:
            return list(threads.map(one, ranks))

    def close(self) -> None:
        self.run(self.engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    ranks = Ranks(monkeypatch)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_one_rank_loads_for_all(ranks: Ranks, order: list[int]) -> None:
    lease = ranks.engine.lookup()
    assert ranks.load(lease, order) == [[True] * 4] * 3
    assert [ranks.engine.is_filled(rank) for rank in range(3)] == [True] * 3
    assert [len(session.sent) for session in ranks.sessions] == [1, 1, 1]
    assert [is_await_fill(session.sent[0]) for session in ranks.sessions] == [False, True, True]
    counters, nbytes = ranks.engine.core.counters, len(KEYS) * CHUNK
    assert (counters.host_to_device_bytes, counters.device_to_device_bytes) == (nbytes, 2 * nbytes)


def test_ranks_load_by_themselves_where_the_first_one_cannot(ranks: Ranks) -> None:
    lease = ranks.engine.lookup()
    ranks.run(ranks.engine.leave(0))
    assert ranks.load(lease, [1, 2]) == [[True] * 4] * 2
    assert [ranks.engine.is_filled(rank) for rank in range(3)] == [False, True, True]


def test_a_rank_in_another_mode_keeps_its_locks(ranks: Ranks) -> None:
    lease = ranks.engine.lookup()
    ranks.run(ranks.engine.service.memory.release(ranks.engine.workers[2].session))
    assert ranks.load(lease, [0, 1]) == [[True] * 4] * 2
    held = ranks.engine.core.leases.get(lease, "one")
    assert held is not None
    assert held.locks == len(KEYS)
    at_once(ranks.engine.core.leases.release_in_steps(held))
