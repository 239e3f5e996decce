"""Calls of the driver that fail, each in its turn, and devices that do: what is left behind."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvdock_server.transfer import DeviceMemoryError, TransferFailedError, gpu
from kvdock_server.transfer.devices.driver import CudaError

sys.path.insert(0, str(Path(__file__).parent))
from several_devices import PER_CHUNK, Setting

ILLEGAL_ADDRESS = 700


class Failure:
    """Fails call ``number`` of the driver, and all that follow if the device has failed."""

    def __init__(self, setting: Setting, number: int, *, of_device: bool) -> None:
        self._number = number
        self._of_device = of_device
        self.calls = 0
        self._driver = setting.driver
        self._driver.before_call = self._before

    @property
    def has_come(self) -> bool:
        return self.calls > self._number

    def _before(self, name: str) -> None:
        self.calls += 1
        if self.has_come and self._of_device:
            self._driver.discard_queued()
        if self.calls == self._number + 1 or (self.has_come and self._of_device):
            raise CudaError(name, ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "injected")


@contextmanager
def answered(setting: Setting) -> Iterator[None]:
    """Whatever the answer, nothing is copied after it."""
    try:
        yield
    finally:
        assert not setting.driver.is_copying


async def a_life(setting: Setting, name: str) -> None:
    """Two workers register, one stores, and loads for both. Nobody is told what is not true."""
    try:
        one, other = [await setting.worker(device, name, pad=3 * device) for device in (0, 1)]
        with answered(setting):
            await one.registration.store(None, range(4 * PER_CHUNK), setting.slots(one))
        with answered(setting):
            _, followers = await setting.load(one, [other])
        assert setting.is_filled(one)
        assert followers[0].failure is not None or setting.is_filled(other)
    except (DeviceMemoryError, TransferFailedError):
        pass
    await setting.close()


@pytest.mark.usefixtures("small_pieces", "staged")
@pytest.mark.parametrize("name", ["block-major", "block first, layers apart"])
@pytest.mark.parametrize("of_device", [False, True])
@pytest.mark.parametrize("others_first", [False, True])
async def test_whichever_call_fails_all_is_given_back(
    name: str, of_device: bool, others_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = 0
    while True:
        setting = Setting()
        setting.driver.others_first = others_first
        monkeypatch.setattr(gpu, "load_driver", lambda: setting.driver)  # noqa: B023
        failure = Failure(setting, number, of_device=of_device)
        async with asyncio.timeout(10):
            await a_life(setting, name)
        if not failure.has_come:
            break
        number += 1
    assert number > 50


@pytest.mark.parametrize("event", [b"", b"e" * 64])
async def test_a_device_that_failed_is_refused_and_the_others_go_on(
    setting: Setting, event: bytes
) -> None:
    one, other = [await setting.worker(device) for device in (0, 1)]

    def fail(name: str) -> None:
        if name != "set_current" and setting.driver.current == 1:
            setting.driver.discard_queued()
            raise CudaError(name, ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "injected")

    setting.driver.before_call = fail
    with pytest.raises(TransferFailedError, match="ILLEGAL_ADDRESS"):
        await one.registration.store(None, range(PER_CHUNK), [0], event)
    assert "ILLEGAL_ADDRESS" in (one.registration.failure or "")
    await one.registration.close()
    with pytest.raises(DeviceMemoryError, match=r"host 0 GPU-00.* failed.*restart the server"):
        await setting.worker(0)
    await other.registration.store(None, range(PER_CHUNK), [0])
    assert other.registration.failure is None
    await setting.worker(1)


async def test_a_copy_that_was_refused_is_no_failure_of_the_device(setting: Setting) -> None:
    worker = await setting.worker(0)

    def refuse(name: str) -> None:
        if name.startswith("copy"):
            raise CudaError(name, 1, "CUDA_ERROR_INVALID_VALUE", "injected")

    setting.driver.before_call = refuse
    with pytest.raises(TransferFailedError, match="injected"):
        await worker.registration.store(None, range(PER_CHUNK), [0])
    assert worker.registration.failure is None
    setting.driver.before_call = lambda name: None
    await worker.registration.store(None, range(PER_CHUNK), [0])
