"""Random lives of an engine: whatever comes in whatever order, answers are right and nothing stays.

The simulated engine checks every byte in every step. Here requests come, are aborted, preempted and
resumed; loads fail; another connector stores and loads beside KVDock; the engine forgets; the cache
is cleared; the server dies and comes back. After each life every request has the tokens that it
would have had alone and without cache, vLLM has all of its blocks back, and the server holds no
lock for anybody.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from modelkit import Llama, make_checkpoint, random_prompt
from other_connector import child
from servers import ServerProcess
from simulator import CHUNK_TOKENS, Layers, SimulatedEngine
from vllm.distributed.kv_transfer.kv_connector.v1.base import SupportsHMA

from kvdock import Client
from kvdock.v1 import cache_pb2
from kvdock_vllm.connector import KVDockConnector
from kvdock_vllm.vllm_groups import offers_states

C = CHUNK_TOKENS
ASK = {"num_kvdock_extra_cached_tokens": None}
# What requests say for themselves: mostly nothing.
SAYS: list[object] = [
    *[None] * 5,
    {"store": False},
    {"store_tokens": C + 7},
    {"pin": "one", "keep_seconds": 1},
    {"pin": "two", "priority": "low"},
    {"priority": "high"},
    {"store": "perhaps"},
]

# One group, and several: windows longer and shorter than a chunk, blocks of one size and of two,
# and local attention whose pieces are two chunks.
MODELS = [
    (Layers(),),
    (Layers(), Layers(32, window=150)),
    (Layers(16, window=24), Layers(), Layers(32, window=33)),
    (Layers(32), Layers(16, window=100)),
    (Layers(), Layers(piece=2 * C)),
]
if not issubclass(KVDockConnector, SupportsHMA):
    MODELS = MODELS[:1]

# Recurrent states, beside attention, beside attention and a window, and alone.
STATE = Layers(C, state=True)
if offers_states():
    MODELS += [(STATE, Layers(C)), (Layers(C), STATE, Layers(C, window=100)), (STATE,)]
    MODELS += [(Layers(C, state=True, checkpoints=True), Layers(C))]

# Prompts are beginnings of few stems, so that they share prefixes, also in part.
STEMS = [random_prompt(5 * C, seed=seed) for seed in (1, 2)]
STEMS.append(STEMS[0][: 2 * C + 24] + random_prompt(3 * C, seed=3))


def _few_blocks(groups: tuple[Layers, ...]) -> int:
    """The longest request fits with a little to spare, two of them do not."""
    longest = 5 * C + 90
    # Of states a request has the running one, that before it, and one more where it was offered.
    return 20 + sum(3 if one.state else -(-longest // one.block_tokens) for one in groups)


class EngineLife(RuleBasedStateMachine):
    """One engine, one server, from birth to the end of all requests."""

    model: ClassVar[Path]
    server: ClassVar[ServerProcess]
    lives: ClassVar[int] = 0
    waits: ClassVar[float] = 0
    """How many requests waited for another one's load."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: SimulatedEngine | None = None
        self.prompts: dict[str, tuple[list[int], int]] = {}

    @initialize(
        save_decode=st.booleans(),
        ranks=st.sampled_from([1, 1, 2]),
        mla=st.booleans(),
        async_scheduling=st.booleans(),
        drafts=st.sampled_from([0, 0, 3]),
        groups=st.sampled_from(MODELS),
        prefix_caching=st.sampled_from([True, True, False]),
        interval=st.sampled_from([None, 1, 2 * C]),
        match_unit=st.sampled_from([None, 16]),
        stem=st.sampled_from(STEMS),
        tokens=st.integers(C, 5 * C),
        count=st.integers(2, 4),
        order=st.sampled_from([None, "before", "behind"]),
        kind=st.sampled_from(["sync", "async", "none"]),
        hold_steps=st.sampled_from([0, 4]),
    )
    def begin(
        self,
        save_decode: bool,
        ranks: int,
        mla: bool,
        async_scheduling: bool,
        drafts: int,
        groups: tuple[Layers, ...],
        prefix_caching: bool,
        interval: int | None,
        match_unit: int | None,
        stem: list[int],
        tokens: int,
        count: int,
        order: str | None,
        kind: str,
        hold_steps: int,
    ) -> None:
        type(self).lives += 1
        beside: dict[str, Any] = {}
        if order is not None and len(groups) == 1 and not groups[0].state:
            name = f"life {self.lives}"
            beside[order] = [child(name, load=kind, load_steps=3, hold_steps=hold_steps)]
        self._start_server()
        settings: dict[str, Any] = {"enable_prefix_caching": prefix_caching}
        extra_config: dict[str, Any] = {"kvdock.save_decode": save_decode}
        if any(layers.state for layers in groups):
            settings["enable_prefix_caching"] = True  # else there are no states to store
            if interval is not None:
                extra_config["kvdock.state_interval_tokens"] = interval
            if match_unit is not None and len(groups) > 1:
                settings["prefix_match_unit"] = match_unit
        self.engine = SimulatedEngine(
            self.model,
            self.server.address,
            num_blocks=_few_blocks(groups),
            tensor_size=ranks,
            mla=mla and not any(layers.piece for layers in groups),
            groups=groups,
            async_scheduling=async_scheduling,
            # vLLM refuses pieces with a drafter.
            drafts=0 if any(layers.state or layers.piece for layers in groups) else drafts,
            max_num_seqs=4,
            extra_config=extra_config,
            **settings,
            **beside,
        )
        self.add_several_as_after_a_start(stem, tokens, count, more=20)

    @rule(
        stem=st.sampled_from(STEMS),
        tokens=st.integers(1, 5 * C),
        more=st.integers(1, 90),
        say=st.sampled_from(SAYS),
    )
    def add(self, stem: list[int], tokens: int, more: int, say: object) -> None:
        self._add(stem, tokens, more, say)

    @rule(
        stem=st.sampled_from(STEMS),
        tokens=st.integers(C, 5 * C),
        count=st.integers(2, 4),
        more=st.integers(1, 90),
    )
    def add_several_as_after_a_start(
        self, stem: list[int], tokens: int, count: int, more: int
    ) -> None:
        """The server has their prefix and the engine has not."""
        assert self.engine is not None
        self._start_server()
        deadline = time.monotonic() + 10
        while self.engine.connector.scheduler_half.link.usable is None:
            assert time.monotonic() < deadline, "not connected again in time"
            self.engine.step()
        self._add(stem, tokens, 1)
        self.engine.run(60)
        self.engine.scheduler.reset_prefix_cache()
        for _ in range(count):
            self._add(stem, tokens, more)

    def _add(self, stem: list[int], tokens: int, more: int, say: object = None) -> None:
        assert self.engine is not None
        name = f"r{len(self.prompts)}"
        self.prompts[name] = (stem[:tokens], more)
        params = {**ASK, "kvdock": say}
        self.engine.add(name, stem[:tokens], max_tokens=more, kv_transfer_params=params)

    @rule(steps=st.integers(1, 15))
    def step(self, steps: int) -> None:
        assert self.engine is not None
        for _ in range(steps):
            self.engine.step()

    @precondition(lambda self: self._unfinished())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        assert self.engine is not None
        self.engine.abort(data.draw(st.sampled_from(self._unfinished())))

    @rule()
    def forget(self) -> None:
        assert self.engine is not None
        # Refused while requests run, which is fine.
        self.engine.scheduler.reset_prefix_cache()

    @rule()
    def preempt_all(self) -> None:
        assert self.engine is not None
        self.engine.preempt_all()

    @rule()
    def clear(self) -> None:
        assert self.engine is not None
        self.engine.connector.reset_cache()

    @rule(chunk=st.integers(0, 4), group_idx=st.sampled_from([None, 0, 1]))
    def lose_a_lock(self, chunk: int, group_idx: int | None) -> None:
        assert self.engine is not None
        for load in self.engine.connector.scheduler_half.loads.under_way.values():
            if load.lookup is not None:
                session = load.lookup.live.session
                session.submit(
                    cache_pb2.FreeLocksRequest(
                        locks=[
                            cache_pb2.LockRange(
                                lease_id=load.lookup.lease_id,
                                first_chunk=chunk,
                                end_chunk=chunk + 1,
                                group_idx=group_idx,
                            )
                        ]
                    )
                )

    @rule()
    def kill_the_server(self) -> None:
        self.server.kill()

    @rule()
    def start_the_server(self) -> None:
        self._start_server()

    @invariant()
    def numbers_are_possible(self) -> None:
        if self.engine is None:
            return
        for name, outcome in self.engine.outcomes.items():
            if outcome.kv_transfer_params is not None:
                (extra,) = (outcome.kv_transfer_params[key] for key in ASK)
                assert 0 <= extra <= len(self.prompts[name][0])

    def teardown(self) -> None:
        if self.engine is None:
            return
        engine = self.engine
        try:
            engine.run(60)
            type(self).waits += engine.counted.get("load_waits", 0)
            for name, (prompt, count) in self.prompts.items():
                outcome = engine.outcomes[name]
                expected = engine.expected(prompt, count)
                if outcome.finish_reason == "length":
                    assert outcome.tokens == expected
                else:
                    assert outcome.finish_reason == "abort"
                    assert outcome.tokens == expected[: len(outcome.tokens)]
            pool = engine.scheduler.kv_cache_manager.block_pool
            assert pool.get_num_free_blocks() == engine.kv_cache_config.num_blocks - 1
            half = engine.connector.scheduler_half
            assert not half.records
            assert not half.loads.under_way
            self._start_server()
            self._nothing_held()
        finally:
            engine.close()

    def _start_server(self) -> None:
        if self.server.process.poll() is not None:
            self.server.start()

    def _unfinished(self) -> list[str]:
        if self.engine is None:
            return []
        outcomes = self.engine.outcomes
        return [name for name in self.prompts if outcomes[name].finish_reason is None]

    def _nothing_held(self) -> None:
        deadline = time.monotonic() + 5
        with Client(self.server.address) as client:
            while True:
                now = client.status()
                held = (now.index.leases, now.index.locks, now.pool.reserved_bytes)
                if not any(held):
                    return
                assert time.monotonic() < deadline, f"(leases, locks, reserved) = {held}"
                time.sleep(0.01)


@contextmanager
def _server() -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as folder:
        server = ServerProcess(
            Path(folder) / "s.sock", "--memory", "4MiB", "--chunk-tokens", str(C)
        )
        try:
            yield server
        finally:
            server.stop()


@pytest.mark.timeout(600)
def test_random_lives(tmp_path: Path) -> None:
    EngineLife.model = make_checkpoint(tmp_path / "tiny", Llama(layers=1))
    with _server() as server:
        EngineLife.server = server
        run_state_machine_as_test(
            EngineLife,
            settings=settings(
                max_examples=15,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=list(HealthCheck),
                print_blob=True,
            ),
        )
    assert EngineLife.lives >= 15
    assert EngineLife.waits, "no request waited for the load of another"
