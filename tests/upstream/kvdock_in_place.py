"""A pytest plugin that puts KVDock into the schedulers of vLLM's own tests.

It is loaded by run.py in a process of its own, beside a copy of vLLM's tests.

* A scheduler without connector gets KVDock's. So does one with a connector that a test takes as an
  example of any (ExampleConnector, NixlConnector): KVDock stands in its place.
* A connector that a test made up (MockKVConnector) says what is loaded, and the test looks at it.
  KVDock stands behind it, under MultiConnector. The test sees the metadata of its own connector.
* A mock that a test puts in the place of the scheduler's connector answers what the test says. All
  other calls go on to KVDock.

What a test says of kv_load_failure_policy is said by KVDock's own setting. No worker describes its
KV cache, so KVDock knows no server and plans no stores: it takes part in every step, and must
disturb nothing.
"""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorMetadata
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvdock_vllm.metadata import StepMetadata
from kvdock_vllm.plugin import register

SKIPPED = Path(__file__).with_name("skipped.toml")

_TAKEN_AS_EXAMPLE = ("ExampleConnector", "NixlConnector", "TestExampleConnector")

_made: list[Any] = []
"""The connectors of all schedulers, the last one last."""
_counts = {"alone": 0, "behind": 0, "wrapped": 0}


def _in_place(transfer: Any) -> Any:
    """The config with KVDock in it."""
    policy = transfer.kv_load_failure_policy if transfer is not None else "recompute"
    kvdock = {
        "kv_connector": "KVDockConnector",
        "kv_role": "kv_both" if transfer is None else transfer.kv_role,
        "kv_connector_extra_config": {"kvdock.load_failure_policy": policy},
    }
    if transfer is None or transfer.kv_connector in _TAKEN_AS_EXAMPLE:
        _counts["alone"] += 1
        return KVTransferConfig(**kvdock)
    if transfer.kv_connector in ("KVDockConnector", "MultiConnector"):
        return transfer
    _counts["behind"] += 1
    theirs = {
        "kv_connector": transfer.kv_connector,
        "kv_connector_module_path": transfer.kv_connector_module_path,
        "kv_role": transfer.kv_role,
        "kv_connector_extra_config": transfer.kv_connector_extra_config,
    }
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role=transfer.kv_role,
        kv_connector_extra_config={"connectors": [theirs, kvdock]},
    )


def _patch_schedulers() -> None:
    real = Scheduler.__init__

    @functools.wraps(real)
    def init(self: Scheduler, vllm_config: Any, *arguments: Any, **kwargs: Any) -> None:
        vllm_config.kv_transfer_config = _in_place(vllm_config.kv_transfer_config)
        real(self, vllm_config, *arguments, **kwargs)
        _made.append(self.connector)

    real_schedule = Scheduler.schedule

    @functools.wraps(real_schedule)
    def schedule(self: Scheduler, *arguments: Any, **kwargs: Any) -> Any:
        output = real_schedule(self, *arguments, **kwargs)
        if isinstance(output.kv_connector_metadata, MultiKVConnectorMetadata):
            output.kv_connector_metadata = output.kv_connector_metadata.metadata[0]
        return output

    # A helper of vLLM's tests looks whether the connector asks the workers for anything.
    setattr(StepMetadata, "requests", ())  # noqa: B010
    setattr(Scheduler, "__init__", init)  # noqa: B010
    setattr(Scheduler, "schedule", schedule)  # noqa: B010


def _wrapping_mock() -> Mock:
    """In the place of vLLM's ``create_mock_connector``."""
    _counts["wrapped"] += 1
    connector = Mock(wraps=_made[-1])
    connector.get_external_cache_hit_sources.side_effect = lambda request, tokens: (
        {CacheHitSource.EXTERNAL_UNSPECIFIED: tokens} if tokens else {}
    )
    return connector


def pytest_configure(config: pytest.Config) -> None:
    for mark in ("cpu_test", "slow_test", "skip_global_cleanup"):
        config.addinivalue_line("markers", f"{mark}: vLLM's own")
    register()
    _patch_schedulers()
    from tests.v1.kv_connector.unit import utils  # type: ignore[import-not-found]

    utils.create_mock_connector = _wrapping_mock


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what is listed. A line that names no test is an error, so the list does not rot."""
    listed = tomllib.loads(SKIPPED.read_text())["skipped"]
    files = {item.nodeid.split("::")[0] for item in items}
    for entry in listed:
        for name in entry["tests"]:
            found = [item for item in items if _is_named(name, item.nodeid)]
            if not found and name.split("::")[0] in files:
                raise pytest.UsageError(f"{SKIPPED.name}: there is no test {name}")
            for item in found:
                item.add_marker(pytest.mark.skip(reason=entry["reason"]))


def _is_named(name: str, nodeid: str) -> bool:
    """Whether an entry names the test: itself, its function, or its file."""
    return nodeid == name or nodeid.startswith((f"{name}[", f"{name}::"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if not any(_counts.values()):
        return  # the workers of xdist have counted
    terminalreporter.write_line(
        f"schedulers with KVDock alone: {_counts['alone']}, behind another connector: "
        f"{_counts['behind']}; mocks in front of it: {_counts['wrapped']}"
    )
