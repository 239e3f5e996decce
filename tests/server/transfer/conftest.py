"""Workers on several devices, and kernels for them."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvdock_server.transfer import gpu
from kvdock_server.transfer.devices import pinning, staging
from kvdock_server.transfer.fan_out import peer_kernel, peer_path
from kvdock_server.transfer.plans import planner
from kvdock_server.transfer.plans.cost_model import COPY_PRICES

sys.path.insert(0, str(Path(__file__).parent))
from host_driver import KERNELS
from several_devices import Setting


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even little is pinned, and passed on, in many pieces."""
    monkeypatch.setattr(pinning, "PIECE_BYTES", 4096)
    monkeypatch.setattr(peer_path, "WINDOW_BYTES", 6000)
    monkeypatch.setattr(peer_path, "LAST_WINDOW_BYTES", 2000)


@pytest.fixture
async def setting(small_pieces: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Setting]:
    setting = Setting()
    monkeypatch.setattr(gpu, "load_driver", lambda: setting.driver)
    yield setting
    await setting.close()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels can be made."""
    monkeypatch.setattr(staging, "missing", lambda: None)
    for module in (staging, peer_kernel):
        monkeypatch.setattr(module, "compiled", lambda source, name, ordinal, unit: KERNELS[name])


@pytest.fixture
def staged(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that can be staged is."""
    for module in (planner, peer_path):
        prices = COPY_PRICES._replace(stage_us=0.0, stage_rectangles_below=1.0)
        monkeypatch.setattr(module, "COPY_PRICES", prices)
    for module in (planner, staging):
        monkeypatch.setattr(module, "STAGED_PIECE_BYTES", 5000)
