"""Workers on several devices, and kernels for them."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from kvdock_server.transfer import gpu
from kvdock_server.transfer.devices import kernels as device_kernels
from kvdock_server.transfer.devices import pinning
from kvdock_server.transfer.fan_out import transfer
from kvdock_server.transfer.plans import planner
from kvdock_server.transfer.plans.cost_model import COST_MODEL

sys.path.insert(0, str(Path(__file__).parent))
from host_driver import KERNELS
from several_devices import Setting


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even little is pinned, and passed on, in many pieces."""
    monkeypatch.setattr(pinning, "SECTION_BYTES", 4096)
    monkeypatch.setattr(transfer, "PORTION_BYTES", 6000)
    monkeypatch.setattr(transfer, "LAST_PORTION_BYTES", 2000)


@pytest.fixture
async def setting(small_pieces: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setting]:
    setting = Setting()
    monkeypatch.setattr(gpu, "load_driver", lambda: setting.driver)
    yield setting
    await setting.close()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels can be made."""
    monkeypatch.setattr(device_kernels, "missing", lambda: None)
    monkeypatch.setattr(
        device_kernels, "compiled", lambda source, name, ordinal, unit: KERNELS[name]
    )


@pytest.fixture
def staged(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that can be staged is."""
    model = COST_MODEL._replace(stage_us=0.0, stage_rectangles_below=1.0)
    monkeypatch.setattr(planner, "COST_MODEL", model)
    monkeypatch.setattr(gpu, "SERVER_PACE", replace(gpu.SERVER_PACE, staged_bytes=5000))
