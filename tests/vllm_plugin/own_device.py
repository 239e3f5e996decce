"""A device that is this process's own memory, for transfers that copy by themselves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "server" / "transfer"))
from host_driver import KERNELS, HostDriver

from kvdock_server.transfer.devices import kernels
from kvdock_vllm.engine.device import mover


class OwnMemoryDriver(HostDriver):
    """What is neither registered, as the pool is, nor allocated is one allocation at address 0."""

    def allocation(self, address: int) -> tuple[int, int]:
        return 0, 1 << 63

    def device_of(self, address: int) -> int | None:
        return None if self._registration(address) is not None else self.current - 1

    def _mapping(self, address: int) -> int | None:
        return super()._mapping(address) or 0


def use_own_device(monkeypatch: pytest.MonkeyPatch) -> OwnMemoryDriver:
    """Has device movers use such a device, with kernels."""
    driver = OwnMemoryDriver()
    monkeypatch.setattr(mover, "load_driver", lambda: driver)
    monkeypatch.setattr(kernels, "missing", lambda: None)
    monkeypatch.setattr(kernels, "compiled", lambda source, name, ordinal, unit: KERNELS[name])
    return driver
