"""What of bench/gpu_data_path.py runs without a GPU: shared mode's bytes and its figures."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import geometries
import gpu_chunk_sizes
import gpu_modes
import numpy as np
import pytest
import torch
from copy_paths import SHARED, CopyPath
from geometries import LOAD, STORE, Case, Geometry
from gpukit import Worker
from own_device import use_own_device
from serverkit import ServerProcess

from kvdock.types import BlockRegion, DeviceAllocation, GroupMemory
from kvdock_vllm.engine.copier import CopyStoppedError

sys.path.insert(0, str(Path(__file__).parents[1] / "server" / "transfer"))
from host_driver import UUID

sys.path.insert(0, str(Path(__file__).parent))
from host_device_server import HANDLE

GEOMETRY = Geometry("small", layers=3, page_bytes=1024, block_tokens=16)
Open = Callable[[Case, str], CopyPath]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("server"), memory="64MiB") as server:
        yield server


@pytest.fixture(autouse=True)
def _little(monkeypatch: pytest.MonkeyPatch) -> None:
    use_own_device(monkeypatch)
    monkeypatch.setattr(geometries, "MOVED_BYTES", 4 << 20)
    for name, value in (("SECONDS", 0.05), ("ROUNDS", 2), ("SMALL_REPEATS", 3)):
        monkeypatch.setattr(gpu_modes, name, value)


class LocalWorker(Worker):
    """Takes orders in this process, and copies in shared mode whatever it is asked for."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__("cpu")
        self._server = server

    def __call__(self, order: str, *arguments: Any) -> Any:
        return getattr(self, order)(*arguments)

    def open(self, case: Case, mode: str) -> CopyPath:
        self.connect(self._server.address, SHARED)
        return self._paths.pop(SHARED)


@pytest.mark.parametrize(
    ("layout", "order"),
    [("block-major", "random"), ("one pitch", "random"), ("layers apart", "runs")],
)
def test_what_shared_mode_loads_is_what_it_stored(
    server: ServerProcess, layout: str, order: str
) -> None:
    worker = LocalWorker(server)
    rows = gpu_modes.compare(Case(GEOMETRY, layout, order), worker.open, worker, busy=False)
    assert [row.bound for row in rows] == [">= 0.9", ">= 0.9", ""]


def test_both_modes_are_measured_beside_python_that_runs(server: ServerProcess) -> None:
    worker = LocalWorker(server)
    case = Case(GEOMETRY, "one pitch", "random")
    rows = gpu_modes.compare(case, worker.open, worker, busy=True)
    assert sum("beside busy Python" in row.what for row in rows) == 3
    assert worker._busy is None


class HostDeviceWorker(LocalWorker):
    """Its cache is a file that the server takes for a device's memory, so both modes are real."""

    def __init__(self, address: str, device: Path, case: Case) -> None:
        Worker.__init__(self, "cpu")
        self._address = address
        geometry = case.geometry
        shape = (geometry.layers, geometry.cache_blocks, geometry.page_bytes)
        with device.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._tensors = list(torch.from_numpy(np.frombuffer(self._memory, np.uint8).reshape(shape)))

    def make(self, case: Case) -> None:
        self._case = case
        for tensor in self._tensors:
            tensor.random_(0, 256)

    def export(self) -> tuple[Any, Any]:
        geometry, base = self.case.geometry, self._tensors[0].data_ptr()
        regions = tuple(
            BlockRegion(0, tensor.data_ptr() - base, tensor.stride(0), geometry.page_bytes)
            for tensor in self._tensors
        )
        group = GroupMemory(None, geometry.cache_blocks, geometry.blocks_per_chunk, regions)
        return [DeviceAllocation(HANDLE, len(self._memory), UUID)], [group]

    def open(self, case: Case, mode: str) -> CopyPath:
        how = self.connect(self._address, mode)
        assert how.startswith(mode)
        return self._paths.pop(mode)


def test_both_modes_over_one_cache(start_server: Callable[..., Any], tmp_path: Path) -> None:
    case = Case(GEOMETRY, "one pitch", "random")
    device = tmp_path / "device"
    device.write_bytes(bytes(GEOMETRY.cache_blocks * GEOMETRY.block_bytes))
    program = [str(Path(__file__).parent / "host_device_server.py"), str(device)]
    server = start_server(program=program)
    worker = HostDeviceWorker(server.address, device, case)
    rows = gpu_modes.compare(case, worker.open, worker, busy=False)
    assert len(rows) == 3


def test_a_load_that_brings_nothing_is_found(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = LocalWorker(server)
    monkeypatch.setattr("copy_paths.SharedCallPath.once", lambda path, direction, chunks: 1.0)
    with pytest.raises(RuntimeError, match="what was loaded is not what was stored"):
        gpu_modes.compare(Case(GEOMETRY, "one pitch", "random"), worker.open, worker, busy=False)


def test_a_call_that_fails_is_no_slow_call(server: ServerProcess) -> None:
    worker = LocalWorker(server)
    worker.make(Case(GEOMETRY, "one pitch", "random"))
    path = worker.open(worker.case, SHARED)
    path.close()
    path.start(STORE, 2)
    with pytest.raises(CopyStoppedError):
        path.stop(STORE)


class FixedPath(CopyPath):
    """Has the rates it is given."""

    how = "fixed"

    def __init__(self, rates: dict[str, float]) -> None:
        self._rates = rates

    def once(self, direction: str, chunks: int) -> float:
        return 1e-3

    def start(self, direction: str, callers: int) -> None:
        pass

    def stop(self, direction: str) -> float:
        return self._rates[direction]

    def close(self) -> None:
        pass


def test_each_direction_has_its_bound() -> None:
    paths = {
        "SERVER": FixedPath({STORE: 50e9, LOAD: 50e9}),
        "SHARED": FixedPath({STORE: 45e9, LOAD: 44e9}),
    }
    rows = gpu_modes.rates(Case(GEOMETRY, "one pitch", "random"), paths, "", 0.9)
    assert [row.holds for row in rows] == [True, False, True]


@pytest.mark.parametrize("size", [16, 256])
def test_caches_in_chunks_of_each_size(
    server: ServerProcess, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_chunk_sizes, "SECONDS", 0.02)
    geometry = gpu_chunk_sizes.in_chunks_of(Geometry("large", 3, 64 * 128, 64), size)
    assert geometry.chunk_bytes == size * 128 * 3
    worker = LocalWorker(server)
    link: Any = FixedPath({})
    link.rate = lambda direction: 1e9
    case = Case(geometry, "layers apart", "random")
    found = gpu_chunk_sizes.measure(case, worker.open, worker, link)
    assert found.rates.keys() == {STORE, LOAD}
    assert min(found.rates.values()) > 0
