"""What the tests with simulated engines share: servers, engines, prompts, and what must end."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from modelkit import Llama, make_checkpoint
from simulator import CHUNK_TOKENS, Outcome, SimulatedEngine

from kvdock import Client
from kvdock.v1 import admin_pb2
from kvdock_vllm.engine.copier import Copier

C = CHUNK_TOKENS
ASK = {"num_kvdock_extra_cached_tokens": None, "num_lmcache_extra_cached_tokens": None}

StartServer = Callable[..., Any]
StartEngine = Callable[..., SimulatedEngine]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "tiny", Llama(layers=1))


@pytest.fixture
def kvdock(start_server: StartServer) -> Any:
    """A server with chunks of 64 tokens."""
    return start_server("--chunk-tokens", str(C))


@pytest.fixture
def start_engine(model: Path, kvdock: Any) -> Iterator[StartEngine]:
    engines: list[SimulatedEngine] = []

    def start(**arguments: Any) -> SimulatedEngine:
        address = arguments.pop("address", kvdock.address)
        engines.append(SimulatedEngine(model, address, **arguments))
        return engines[-1]

    yield start
    for engine in engines:
        free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free == engine.kv_cache_config.num_blocks - 1, "vLLM's blocks were leaked"
    if kvdock.process.poll() is None and engines:
        assert_nothing_held(kvdock)
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(start_engine: StartEngine) -> SimulatedEngine:
    return start_engine()


def status(server: Any) -> admin_pb2.StatusResponse:
    with Client(server.address) as client:
        return client.status()


def assert_nothing_held(server: Any) -> None:
    """No lock, lease, reservation or half-stored part, at the latest in a moment."""
    deadline = time.monotonic() + 3
    while True:
        now = status(server)
        held = (
            now.index.leases,
            now.index.locks,
            now.index.pending_parts,
            now.pool.reserved_bytes,
        )
        if not any(held):
            return
        assert time.monotonic() < deadline, f"(leases, locks, pending, reserved) = {held}"
        time.sleep(0.01)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 2000) for _ in range(tokens)]


def extra(outcome: Outcome) -> int:
    """Extra cached tokens, the same under both names."""
    assert outcome.kv_transfer_params is not None
    (number,) = set(outcome.kv_transfer_params.values())
    assert outcome.kv_transfer_params.keys() == ASK.keys()
    return int(number)


def kill_before_a_load(server: Any, engine: SimulatedEngine) -> None:
    """The server dies when the engine has been promised a hit, before its workers hear of it."""

    def kill() -> None:
        if engine.connector.scheduler_half.loads.under_way:
            engine.between_schedule_and_forward = lambda: None
            server.kill()

    engine.between_schedule_and_forward = kill


def slow_copies(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Each piece of a copy takes so much longer, after it was decided to copy it."""
    real = Copier._pieces

    def slow(self: Copier, *arguments: Any) -> Iterator[Any]:
        for piece in real(self, *arguments):
            time.sleep(seconds)
            yield piece

    monkeypatch.setattr(Copier, "_pieces", slow)
