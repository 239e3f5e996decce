"""How vLLM finds the connector, and under which names."""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from modelkit import Llama, make_checkpoint
from simulator import kv_cache_config
from vllm import EngineArgs
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from kvdock_vllm import offloading_alias, plugin
from kvdock_vllm.connector import KVDockConnector
from kvdock_vllm.metrics import COUNTERS, PromMetrics, Stats, workers_gauge


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    before = dict(KVConnectorFactory._registry)
    yield
    KVConnectorFactory._registry.clear()
    KVConnectorFactory._registry.update(before)


def selected(name: str) -> type:
    found: Any = KVConnectorFactory.get_connector_class(
        KVTransferConfig(kv_connector=name, kv_role="kv_both")
    )
    return found


def test_vllm_finds_the_plugin_by_itself() -> None:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert [point.load() for point in points if point.name == "kvdock"] == [plugin.register]


def test_the_connector_is_known_by_its_name_and_by_its_module() -> None:
    for _ in range(2):
        plugin.register()
    assert selected("KVDockConnector") is KVDockConnector
    by_path: Any = KVConnectorFactory.get_connector_class(
        KVTransferConfig(
            kv_connector="KVDockConnector",
            kv_connector_module_path="kvdock_vllm.connector",
            kv_role="kv_both",
        )
    )
    assert by_path is KVDockConnector


def test_the_offloading_flag_selects_us_only_where_that_was_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(offloading_alias.ENVIRONMENT_VARIABLE, raising=False)
    before = KVConnectorFactory._registry["LMCacheMPConnector"]
    plugin.register()
    assert KVConnectorFactory._registry["LMCacheMPConnector"] is before
    monkeypatch.setenv(offloading_alias.ENVIRONMENT_VARIABLE, "1")
    for _ in range(2):
        plugin.register()
    assert selected("LMCacheMPConnector") is KVDockConnector


def test_a_value_that_is_neither_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(offloading_alias.ENVIRONMENT_VARIABLE, "yes")
    with pytest.raises(ValueError, match="must be 0 or 1"):
        plugin.register()


def test_vllms_flag_runs_us_and_says_that_its_size_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(offloading_alias.ENVIRONMENT_VARIABLE, "1")
    monkeypatch.setenv("KVDOCK_ADDRESS", f"unix://{tmp_path}/none.sock")
    plugin.register()
    config = EngineArgs(
        model=str(make_checkpoint(tmp_path / "tiny", Llama(layers=1))),
        skip_tokenizer_init=True,
        kv_offloading_size=7,
        kv_offloading_backend="lmcache",
    ).create_engine_config()
    monkeypatch.setattr(logging.getLogger("kvdock_vllm"), "parent", logging.getLogger())
    with caplog.at_level(logging.WARNING, "kvdock_vllm"):
        connector = KVConnectorFactory.create_connector(
            config, KVConnectorRole.SCHEDULER, kv_cache_config(16)
        )
    assert type(connector) is KVDockConnector
    (message,) = [r.getMessage() for r in caplog.records if "offloading" in r.getMessage()]
    assert "--kv-offloading-size 7" in message
    assert "is not used" in message
    connector.shutdown()


@pytest.mark.parametrize("of_vllm", [None, "fail", "recompute"])
@pytest.mark.parametrize(
    ("ours", "policy", "what"),
    [
        (None, "recompute", "what cannot be loaded is computed"),
        ("recompute", "recompute", "what cannot be loaded is computed"),
        ("fail", "fail", "ends with an error"),
    ],
)
def test_our_setting_decides_what_becomes_of_a_failed_load_and_the_log_says_so(
    ours: str | None,
    policy: str,
    what: str,
    of_vllm: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plugin.register()
    transfer: dict[str, Any] = {"kv_connector": "KVDockConnector", "kv_role": "kv_both"}
    if of_vllm is not None:
        transfer["kv_load_failure_policy"] = of_vllm
    if ours is not None:
        transfer["kv_connector_extra_config"] = {"kvdock.load_failure_policy": ours}
    config = EngineArgs(
        model=str(make_checkpoint(tmp_path / "tiny", Llama(layers=1))),
        skip_tokenizer_init=True,
        kv_transfer_config=transfer,
    ).create_engine_config()
    assert config.kv_transfer_config is not None
    monkeypatch.setattr(logging.getLogger("kvdock_vllm"), "parent", logging.getLogger())
    with caplog.at_level(logging.INFO, "kvdock_vllm"):
        connector = KVDockConnector(config, KVConnectorRole.SCHEDULER, kv_cache_config(16))
    assert config.kv_transfer_config.kv_load_failure_policy == policy
    (message,) = [r.getMessage() for r in caplog.records if "failure_policy" in r.getMessage()]
    assert message.startswith(f"kvdock.load_failure_policy is {policy}: ")
    assert what in message
    assert ("kv_load_failure_policy was" in message) is ((of_vllm or "fail") != policy)
    assert connector.requires_kv_delivery is False
    connector.shutdown()


def test_what_others_named_is_one_line_of_vllms_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("kvdock_vllm"), "handlers", [])
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    for _ in range(2):
        plugin.register()
    logging.getLogger("kvdock_vllm.any").warning("adapter %s", "a\nERROR forged\x1b[2J")
    logging.getLogger("vllm.any").warning("vLLM's own:\n%s", "as it is")

    shown = [record.getMessage() for record in caplog.records]
    assert r"adapter a\nERROR forged\x1b[2J" in shown
    assert "vLLM's own:\nas it is" in shown
    assert len(logging.getLogger("kvdock_vllm").handlers) == 1


def test_what_was_not_logged_before_the_start_is_logged_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = logging.getLogger("kvdock_vllm"), logging.getLogger("vllm")
    monkeypatch.setattr(ours, "parent", logging.Logger("silent", logging.WARNING))
    ours.setLevel(ours.level)  # forgets what other tests asked
    monkeypatch.setattr(theirs, "level", logging.INFO)
    early = logging.getLogger("kvdock_vllm.early")
    assert not early.isEnabledFor(logging.INFO)
    plugin.register()
    assert early.isEnabledFor(logging.INFO)


def test_counters_add_up_and_can_be_shown() -> None:
    one, other = Stats(), Stats()
    one.add("stored_chunks", 2)
    one.add("stored_bytes", 3e9)
    one.add("store_seconds", 1.5)
    one.add("failed_loads", 0)
    other.add("stored_chunks")
    assert "failed_loads" not in one.data
    taken = one.take()
    assert taken is not None
    assert one.take() is None
    again = KVDockConnector.build_kv_connector_stats(dict(taken.data))
    assert again is not None
    total = again.aggregate(other)
    assert total.reduce() == {"stored_chunks": 3, "store_GB_per_s": 2.0}


def test_prometheus_gets_each_counter_and_how_many_workers_are_in_which_mode() -> None:
    counted: dict[str, float] = {}

    class Counter:
        def __init__(self, name: str, documentation: str, labelnames: list[str]) -> None:
            self.name = name

        def labels(self, *labels: object) -> Counter:
            assert labels == ("model", 0)
            return self

        def inc(self, amount: float) -> None:
            counted[self.name] = counted.get(self.name, 0) + amount

    class Gauge:
        def __init__(self, name: str, labelnames: list[str], **_: str) -> None:
            assert (name, labelnames[-1]) == ("vllm:kvdock_workers", "mode")

        def labels(self, *labels: object) -> Gauge:
            self.mode = labels[-1]
            return self

        def set(self, amount: float) -> None:
            counted[f"workers/{self.mode}"] = amount

    import prometheus_client

    kinds: Any = {
        prometheus_client.Counter: Counter,
        prometheus_client.Gauge: Gauge,
        prometheus_client.Histogram: None,
    }
    config: Any = SimpleNamespace(kv_transfer_config=None)
    metrics = PromMetrics(config, kinds, ["model_name", "engine"], {0: ["model", 0]})
    metrics.observe({**dict.fromkeys(COUNTERS, 2), workers_gauge("shared"): 3})
    metrics.observe({workers_gauge("server"): 1, workers_gauge("shared"): -1})
    assert counted == {
        **{f"vllm:kvdock_{name}": 2 for name in COUNTERS},
        "workers/shared": 2,
        "workers/server": 1,
    }
