"""KVDock beside another connector, under vLLM's MultiConnector, in either order."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from modelkit import Llama, make_checkpoint
from other_connector import FAILING, SHELVES, OtherConnector, child
from simkit import ASK, C, StartEngine, assert_nothing_held, extra, prompt, slow_copies, status
from simulator import Layers, kv_cache_config
from vllm import EngineArgs
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvdock_vllm import connector as connector_module
from kvdock_vllm import plugin
from kvdock_vllm.metrics import Stats

ORDERS = pytest.mark.parametrize("order", ["before", "behind"])
KINDS = pytest.mark.parametrize("kind", ["sync", "async"])


@pytest.fixture(autouse=True)
def empty_shelves() -> Iterator[None]:
    yield
    clear_shelves()
    FAILING.clear()


def clear_shelves() -> None:
    """The other connectors lose all."""
    for shelf in SHELVES.values():
        shelf.clear()


def other(name: str = "a", order: str = "before", **settings: Any) -> dict[str, Any]:
    """Arguments of an engine with the other connector before or behind KVDock."""
    return {order: [child(name, **settings)]}


def _of_others(connector: Any) -> list[Any]:
    """The other connectors in a worker."""
    return [one for one in connector._connectors if isinstance(one, OtherConnector)]


# -- who loads, and that all is right ------------------------------------------------------------


@ORDERS
@KINDS
def test_both_store_and_either_loads(start_engine: StartEngine, order: str, kind: str) -> None:
    engine = start_engine(**other(order=order, load=kind))
    cold = engine.generate(prompt(6 * C + 5), max_tokens=8, kv_transfer_params=ASK)
    assert cold.tokens == engine.expected(prompt(6 * C + 5), 8)
    # The other's shelf alone, then KVDock's server alone.
    assert SHELVES["a"]
    engine.connector.reset_cache()
    engine.forget()
    by_other = engine.generate(prompt(6 * C + 5), max_tokens=8, kv_transfer_params=ASK)
    assert engine.others[0].loaded_tokens == 6 * C
    assert extra(by_other) == 0
    clear_shelves()
    engine.forget()
    by_kvdock = engine.generate(prompt(6 * C + 5), max_tokens=8, kv_transfer_params=ASK)
    # What the other loaded, KVDock has stored.
    assert extra(by_kvdock) == 6 * C
    assert engine.others[0].loaded_tokens == 6 * C
    assert by_other.tokens == by_kvdock.tokens == cold.tokens


@ORDERS
def test_the_first_with_a_hit_loads_and_the_other_drops_its_lease(
    start_engine: StartEngine, kvdock: Any, order: str
) -> None:
    engine = start_engine(**other(order=order, load_steps=1000))
    engine.generate(prompt(6 * C))
    engine.forget()
    engine.add("r", prompt(6 * C), kv_transfer_params=ASK)
    if order == "before":
        while not engine.others[0].loading:
            engine.step()
        # It loads for long, and KVDock's lease is gone all the while.
        assert_nothing_held(kvdock)
        assert engine.others[0].loading
    engine.run()
    loaded = engine.others[0].loaded_tokens, extra(engine.outcomes["r"])
    assert loaded == ((6 * C - 16, 0) if order == "before" else (0, 6 * C))


@ORDERS
def test_a_prompt_that_another_engine_has_computed_is_the_others_to_load(
    start_engine: StartEngine, kvdock: Any, order: str
) -> None:
    engine = start_engine(**other(order=order))
    cold = engine.generate(prompt(6 * C), max_tokens=4)
    engine.forget()
    before = status(kvdock).counters.lookups
    asked = {**ASK, "do_remote_prefill": True}
    warm = engine.generate(prompt(6 * C), max_tokens=4, kv_transfer_params=asked)
    assert warm.tokens == cold.tokens
    assert extra(warm) == 0
    assert engine.others[0].loaded_tokens == 6 * C - 16
    assert status(kvdock).counters.lookups == before


def test_alone_kvdock_loads_such_a_prompt_too(start_engine: StartEngine) -> None:
    engine = start_engine()
    engine.generate(prompt(6 * C))
    engine.forget()
    asked = {**ASK, "do_remote_prefill": True}
    assert extra(engine.generate(prompt(6 * C), kv_transfer_params=asked)) == 6 * C


@ORDERS
@pytest.mark.parametrize(
    ("kind", "ranks", "async_scheduling"),
    [("sync", 1, False), ("async", 1, True), ("async", 2, False)],
)
def test_preemption_aborts_and_few_blocks(
    start_engine: StartEngine, order: str, kind: str, ranks: int, async_scheduling: bool
) -> None:
    engine = start_engine(
        **other(order=order, load=kind, load_steps=2, hold_steps=3 if kind == "async" else 0),
        tensor_size=ranks,
        async_scheduling=async_scheduling,
        num_blocks=70,
    )
    prompts = [[*prompt(4 * C + 7, seed=n // 2), 5 + n] for n in range(6)]
    for turn in range(3):
        for index, one in enumerate(prompts):
            engine.add(f"{turn}-{index}", one, max_tokens=30)
        for _ in range(6 + turn):
            engine.step()
        engine.abort(f"{turn}-1")
        engine.preempt_all()
        engine.step()
        engine.abort(f"{turn}-2")
        engine.run()
        for index, one in enumerate(prompts):
            outcome = engine.outcomes[f"{turn}-{index}"]
            expected = engine.expected(one, 30)
            assert outcome.tokens == expected[: len(outcome.tokens)]
            if index not in (1, 2):
                assert outcome.tokens == expected
        engine.scheduler.reset_prefix_cache()
    assert engine.others[0].loaded_tokens or order == "behind"


@ORDERS
def test_a_model_with_windows(start_engine: StartEngine, order: str) -> None:
    if not connector_module._MAY_FAIL_WHOLE:
        pytest.skip("this version cannot tell of a load that failed as a whole")
    engine = start_engine(
        groups=(Layers(), Layers(32, window=150)), **other(order=order, load="none")
    )
    cold = engine.generate(prompt(6 * C + 5), max_tokens=70)
    engine.forget()
    warm = engine.generate(prompt(6 * C + 5), max_tokens=70, kv_transfer_params=ASK)
    assert warm.tokens == cold.tokens
    assert extra(warm) == 6 * C


# -- blocks that are read or filled ----------------------------------------------------------------


@KINDS
def test_a_store_ends_before_another_connector_loads_into_its_blocks(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    engine = start_engine(**other(load=kind, load_steps=30), num_blocks=40)
    # The other connector has this prompt, KVDock does not.
    engine.generate(prompt(8 * C, seed=1))
    engine.connector.reset_cache()
    engine.forget()
    slow_copies(monkeypatch, 0.05)
    half = engine.connector.scheduler_half
    engine.add("first", prompt(8 * C), max_tokens=60)
    while not half.stores.under_way:
        engine.step()
    # A store reads its blocks, which are given to the other's load.
    engine.preempt_all()
    engine.abort("first")
    engine.add("second", prompt(8 * C, seed=1), max_tokens=2)
    assert half.stores.under_way
    while not engine.others[0].loaded_tokens:
        engine.step()
    assert engine.overwritten
    monkeypatch.undo()
    engine.run()
    clear_shelves()
    engine.forget()
    # Whatever KVDock has of the first prompt is right: the simulated engine checks every byte.
    again = engine.generate(prompt(8 * C), max_tokens=60)
    assert again.tokens == engine.expected(prompt(8 * C), 60)


@ORDERS
def test_a_finished_requests_blocks_stay_until_both_have_read_them(
    start_engine: StartEngine, order: str
) -> None:
    engine = start_engine(**other(order=order, hold_steps=300))
    engine.add("r", prompt(6 * C))
    pool = engine.scheduler.kv_cache_manager.block_pool
    everything = engine.kv_cache_config.num_blocks - 1
    half = engine.connector.scheduler_half
    while engine.outcomes["r"].finish_reason is None:
        engine.step()
    assert pool.get_num_free_blocks() < everything
    while half.stores.under_way:
        engine.step()
    for _ in range(3):
        engine.step()
    # KVDock has reported, the other has not.
    assert "r" in engine.scheduler.requests
    engine.run()
    assert pool.get_num_free_blocks() == everything
    assert SHELVES["a"]


@ORDERS
def test_kvdock_holds_blocks_that_the_other_has_read(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    slow_copies(monkeypatch, 0.2)
    engine = start_engine(**other(order=order, hold_steps=1))
    engine.add("r", prompt(6 * C))
    while engine.outcomes["r"].finish_reason is None:
        engine.step()
    for _ in range(3):
        engine.step()
    assert SHELVES["a"], "the other has read"
    stores = engine.connector.scheduler_half.stores
    read = {block for job in stores._jobs.values() for block in job.block_ids}
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert read
    assert all(pool.blocks[block].ref_cnt for block in read)
    monkeypatch.undo()
    engine.run()


# -- failures ------------------------------------------------------------------------------------


@ORDERS
@pytest.mark.parametrize(
    ("kind", "async_scheduling"), [("sync", False), ("async", False), ("async", True)]
)
def test_what_the_other_could_not_load_is_not_stored(
    start_engine: StartEngine, order: str, kind: str, async_scheduling: bool
) -> None:
    engine = start_engine(**other(order=order, load=kind), async_scheduling=async_scheduling)
    engine.known_to_be_wrong = lambda rank: _of_others(rank)[0].failed_blocks
    engine.generate(prompt(6 * C))
    engine.connector.reset_cache()
    engine.forget()
    FAILING.add("r")
    engine.add("r", prompt(6 * C), max_tokens=20)
    # It takes the first one's blocks from the engine's prefix cache in the same step.
    engine.add("s", prompt(6 * C), max_tokens=20)
    engine.run()
    for name in "rs":
        assert engine.outcomes[name].tokens == engine.expected(prompt(6 * C), 20)
    clear_shelves()
    engine.forget()
    # Now KVDock loads what it stored, and the simulated engine checks every byte.
    last = engine.generate(prompt(6 * C), max_tokens=20, kv_transfer_params=ASK)
    assert last.tokens == engine.expected(prompt(6 * C), 20)
    assert extra(last) == 6 * C


@ORDERS
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_failed_load_of_ours_ends_as_our_setting_says(
    start_engine: StartEngine, order: str, policy: str
) -> None:
    engine = start_engine(
        **other(order=order, load="none"), extra_config={"kvdock.load_failure_policy": policy}
    )
    cold = engine.generate(prompt(6 * C), max_tokens=4)
    engine.forget()
    engine.add("r", prompt(6 * C), max_tokens=4)

    def lose_chunk_four() -> None:
        for load in engine.connector.scheduler_half.loads.under_way.values():
            engine.between_schedule_and_forward = lambda: None
            assert load.lookup is not None
            load.lookup.live.session.free_locks(load.lookup.lease_id, 4, 5)

    engine.between_schedule_and_forward = lose_chunk_four
    engine.run()
    assert engine.config.kv_transfer_config is not None
    assert engine.config.kv_transfer_config.kv_load_failure_policy == policy
    outcome = engine.outcomes["r"]
    assert outcome.finish_reason == ("length" if policy == "recompute" else "error")
    assert outcome.tokens == (cold.tokens if policy == "recompute" else [])


@ORDERS
def test_an_abort_while_either_loads(start_engine: StartEngine, order: str) -> None:
    engine = start_engine(**other(order=order, load_steps=6))
    engine.generate(prompt(6 * C))
    for steps in range(1, 6):
        engine.forget()
        engine.add(f"r{steps}", prompt(6 * C), max_tokens=4)
        for _ in range(steps):
            engine.step()
        engine.abort(f"r{steps}")
        engine.run()
    # start_engine sees that no block and no lock is left.


# -- waits for another request's load --------------------------------------------------------------


@ORDERS
def test_a_request_that_waits_for_our_load_gets_its_blocks(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    engine = start_engine(**other(order=order))
    engine.generate(prompt(6 * C))
    clear_shelves()
    engine.forget()
    # The first load lasts until all have asked.
    slow_copies(monkeypatch, 0.2)
    for name in "abc":
        engine.add(name, [*prompt(6 * C), 7, ord(name)], max_tokens=3, kv_transfer_params=ASK)
    engine.run()
    assert engine.counted["load_waits"] == 2
    assert engine.counted["loaded_tokens"] == 6 * C
    for name in "abc":
        assert engine.outcomes[name].tokens == engine.expected([*prompt(6 * C), 7, ord(name)], 3)


@ORDERS
def test_a_lone_worker_tells_of_ended_loads_and_the_other_hears_of_them(
    start_engine: StartEngine, order: str
) -> None:
    engine = start_engine(**other(order=order, load="none"))
    assert engine.ranks[0].connector is not engine.outer
    engine.generate(prompt(6 * C))
    engine.forget()
    warm = engine.generate(prompt(6 * C), "r", kv_transfer_params=ASK)
    assert extra(warm) == 6 * C
    # Only one that stands behind us: what we add comes before it is called.
    assert ("r" in engine.others[0].seen_finished) is (order == "behind")


# -- the start -------------------------------------------------------------------------------------


def config_of(tmp_path: Path, *connectors: dict[str, Any], **outer: Any) -> Any:
    plugin.register()
    return EngineArgs(
        model=str(make_checkpoint(tmp_path / "tiny", Llama(layers=1))),
        skip_tokenizer_init=True,
        kv_transfer_config={
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": list(connectors)},
            **outer,
        },
    ).create_engine_config()


def ours_of(config: Any) -> Any:
    """Our form of MultiConnector."""
    return KVConnectorFactory.get_connector_class(config.kv_transfer_config)


OURS = {"kv_connector": "KVDockConnector", "kv_role": "kv_both"}


@ORDERS
def test_two_wishes_for_a_layout_do_not_stop_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    monkeypatch.setattr(connector_module, "_on_cuda", lambda: True)
    theirs = child("a", layout="LBHNC")
    config = config_of(tmp_path, *([theirs, OURS] if order == "before" else [OURS, theirs]))
    made = ours_of(config)
    assert issubclass(made, MultiConnector)
    assert made.get_required_kvcache_layout(config) == "LBHNC"
    # vLLM's own form raises where KVDock wishes as if it were alone.
    if connector_module.KVDockConnector.get_required_kvcache_layout(config) is not None:
        with pytest.raises(ValueError, match="layout mismatch"):
            MultiConnector.get_required_kvcache_layout(config)


@ORDERS
@pytest.mark.parametrize("ranks", [1, 2])
def test_each_connector_gets_the_handshake_of_its_own_workers(
    start_engine: StartEngine, order: str, ranks: int
) -> None:
    engine = start_engine(**other(order=order), tensor_size=ranks)
    assert [one.rank for one in engine.others[0].handshakes.values()] == list(range(ranks))
    # KVDock has connected before the first step.
    assert engine.connector.scheduler_half.link.usable is not None


def test_without_kvdock_vllms_connector_does_as_ever(tmp_path: Path) -> None:
    config = config_of(tmp_path, child("a"), child("b"))
    made: Any = KVConnectorFactory.create_connector(
        config, KVConnectorRole.WORKER, kv_cache_config(16)
    )
    assert made.get_handshake_metadata().rank == 0
    heard: list[Any] = []
    for one in made._connectors:
        one.set_xfer_handshake_metadata = heard.append
    made.set_xfer_handshake_metadata({0: "as it is"})
    assert heard == [{0: "as it is"}] * 2
    assert config.kv_transfer_config.kv_load_failure_policy == "fail"


@pytest.mark.parametrize(
    ("connectors", "message"),
    [
        ([OURS, OURS], "2 KVDockConnectors"),
        ([OURS, {**child("a"), "engine_id": "mine"}], "engine_id 'mine' stands in an entry"),
    ],
)
def test_what_cannot_work_is_refused_in_plain_words(
    tmp_path: Path, connectors: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        config = config_of(tmp_path, *connectors)
        KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, kv_cache_config(16))


def test_the_log_names_what_kvdock_has_not_run_beside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("kvdock_vllm"), "parent", logging.getLogger())
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    for connectors, named in (([OURS, child("a"), example], True), ([example, OURS], False)):
        caplog.clear()
        config = config_of(tmp_path, *connectors)
        config.scheduler_config.disable_hybrid_kv_cache_manager = True
        made = KVConnectorFactory.create_connector(
            config, KVConnectorRole.SCHEDULER, kv_cache_config(16)
        )
        warnings = [one for one in caplog.messages if "has not been run beside" in one]
        assert len(warnings) == named
        assert all("OtherConnector" in one and "Example" not in one for one in warnings)
        made.shutdown()


def test_a_worker_warns_where_vllm_did_not_load_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("kvdock_vllm"), "parent", logging.getLogger())
    config = config_of(tmp_path, OURS, child("a"))
    for form, warned in ((MultiConnector, True), (ours_of(config), False)):
        caplog.clear()
        # As vLLM does it in a worker.
        with set_current_vllm_config(config):
            made: Any = form(config, KVConnectorRole.WORKER, kv_cache_config(16))
        warnings = [one for one in caplog.messages if "has not loaded KVDock's plugin" in one]
        assert len(warnings) == warned
        made.shutdown()


# -- counters and events ---------------------------------------------------------------------------


def test_counters_are_rebuilt_by_the_connectors_name() -> None:
    plugin.register()
    sent: dict[str, Any] = {"lookups": 3}
    if not hasattr(Stats, "to_dict"):
        sent = {"data": sent}  # up to 0.26
    found: Any = MultiConnector.build_kv_connector_stats({"KVDockConnector": sent})
    assert isinstance(found.data["KVDockConnector"], Stats)
    assert found.reduce() == {"KVDockConnector": {"lookups": 3}}


def test_counters_come_through(start_engine: StartEngine) -> None:
    engine = start_engine(**other(load="none"))
    engine.generate(prompt(6 * C))
    engine.forget()
    engine.generate(prompt(6 * C))
    assert engine.counted["loaded_tokens"] == 6 * C
    assert engine.counted["stored_chunks"] == 6


def test_events_come_through(start_engine: StartEngine) -> None:
    engine = start_engine(**other(load="none"))
    engine.connector.scheduler_half.take_events = lambda: ["an event"]  # type: ignore[method-assign]
    assert list(engine.outer.take_events()) == ["an event"]


def test_an_idle_engine_goes_on_until_our_stores_have_ended(
    start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_copies(monkeypatch, 0.1)
    engine = start_engine(**other(load="none"))
    engine.add("r", prompt(6 * C))
    while not engine.connector.scheduler_half.stores.under_way:
        engine.step()
    assert engine.outer.has_pending_push_work()
    monkeypatch.undo()
    engine.run()
    assert not engine.outer.has_pending_push_work()


@ORDERS
def test_what_vllm_asks_all_of_them(start_engine: StartEngine, order: str) -> None:
    outer = start_engine(**other(order=order)).outer
    # None: vLLM counts the reports of all workers.
    assert outer.get_finished_count() is None
    # True, because the other connector says so as vLLM's base class does; KVDock does not.
    assert getattr(outer, "requires_kv_delivery", True)
