"""The simulated engine with the transfers of GPU memory, on a CPU: every byte is checked."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from modelkit import random_prompt
from own_device import use_own_device
from simkit import C, StartEngine

from kvdock_vllm import worker as worker_module
from kvdock_vllm.engine.device.transfers import DeviceTransfers

ASK = {"num_kvdock_extra_cached_tokens": None}


@pytest.fixture(autouse=True)
def _device_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_device(monkeypatch)

    def choose(layouts: Any, shapes: Any, kv_caches: Any, *arguments: Any) -> DeviceTransfers:
        return DeviceTransfers(layouts, shapes, torch.device("cpu"), *arguments)

    monkeypatch.setattr(worker_module, "_choose_transfers", choose)


def test_what_one_engine_stores_another_loads(
    start_engine: StartEngine,
) -> None:
    prompt = random_prompt(4 * C + 9, seed=1)
    cold = start_engine(tensor_size=2)
    tokens = cold.generate(prompt, max_tokens=5).tokens
    assert tokens == cold.expected(prompt, 5)
    warm = start_engine(tensor_size=2)
    outcome = warm.generate(prompt, max_tokens=5, kv_transfer_params=dict(ASK))
    assert outcome.tokens == tokens
    assert outcome.kv_transfer_params == {"num_kvdock_extra_cached_tokens": 4 * C}
    assert warm.counted["shared_mode_workers"] == 2
    assert warm.counted["loaded_chunks"] == 8


def test_a_server_that_comes_back_is_used_again(start_engine: StartEngine, kvdock: Any) -> None:
    engine = start_engine()
    prompt = random_prompt(2 * C + 9, seed=2)
    for life in (1, 2):
        deadline = time.monotonic() + 20
        while engine.counted.get("stored_chunks", 0) < 2 * life:
            assert time.monotonic() < deadline
            assert engine.generate(prompt).tokens == engine.expected(prompt, 1)
            engine.forget()
        kvdock.restart()
    assert engine.counted["shared_mode_workers"] == 1
