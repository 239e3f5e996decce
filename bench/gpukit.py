"""The parts of the GPU benchmarks: caches, a worker, an engine, and two paths to their bytes.

Each part runs in a process of its own, as in a deployment, and takes orders over a pipe.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import multiprocessing
import threading
import time
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
from copy_paths import SERVER, SHARED, CallPath, CopyPath, Pauseless, ServerCallPath, SharedCallPath
from geometries import LOAD, STORE, Case
from pinkit import WorkerPinning

if TYPE_CHECKING:
    from kvdock_vllm.engine.layout import GroupLayout

POOL_BYTES = 4 << 30

Result = TypeVar("Result")


class Orders(Protocol):
    """Gives an object orders by name, and has their results."""

    def __call__(self, order: str, *arguments: object) -> Any: ...


class Remote:
    """Orders for an object of ``kind`` in a process of its own."""

    def __init__(self, kind: Callable[[], object]) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_obey, args=(kind, other), daemon=True)
        self._process.start()
        other.close()

    def __call__(self, order: str, *arguments: object) -> Any:
        """Give an order and wait for its result."""
        self.begin(order, *arguments)
        return self.end()

    def begin(self, order: str, *arguments: object) -> None:
        """Give an order."""
        self._connection.send((order, arguments))

    def end(self) -> Any:
        """Wait for the result of the last order."""
        succeeded, result = self._connection.recv()
        if not succeeded:
            raise RuntimeError(result)
        return result

    def close(self) -> None:
        self._connection.close()
        self._process.join(20)


def _obey(kind: Callable[[], object], connection: Connection) -> None:
    obedient = kind()
    while True:
        try:
            order, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send((True, getattr(obedient, order)(*arguments)))
        except Exception as error:
            connection.send((False, f"{order}: {type(error).__name__}: {error}"))


class Engine:
    """Decodes: a graph of matrix products that read weights and compute little."""

    MATRICES = 16
    SIDE = 8192
    BATCH = 16

    def __init__(self) -> None:
        import torch

        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        weights = [torch.randn(self.SIDE, self.SIDE, **options) for _ in range(self.MATRICES)]
        tokens = torch.randn(self.BATCH, self.SIDE, **options)
        for weight in weights:
            tokens @ weight
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            for weight in weights:
                tokens @ weight

    def run(self, seconds: float) -> float:
        """Step for ``seconds``; the mean step in seconds."""
        import torch

        steps = 0
        started = time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds:
            for _ in range(8):
                self._graph.replay()
            torch.cuda.synchronize()
            steps += 8
        return elapsed / max(steps, 1)


class Worker:
    """Owns a KV cache."""

    def __init__(self, device: str = "cuda") -> None:
        self._device = device
        self._tensors: list[Any] = []
        self._case: Case | None = None
        self._paths: dict[str, CallPath] = {}
        self._pinning = WorkerPinning()
        self._busy: threading.Thread | None = None
        self._rest = threading.Event()

    @property
    def case(self) -> Case:
        assert self._case is not None
        return self._case

    def make(self, case: Case) -> None:
        """Make the cache, with random bytes."""
        import torch

        self._case = case
        self._tensors.clear()
        if self._device != "cpu":
            torch.cuda.empty_cache()
        geometry = case.geometry
        layers, blocks, page = geometry.layers, geometry.cache_blocks, geometry.page_bytes
        options: dict[str, Any] = {"dtype": torch.uint8, "device": self._device}
        if case.layout == "block-major":
            storage = torch.empty((blocks, layers, page), **options)
            self._tensors = [storage[:, layer] for layer in range(layers)]
        elif case.layout == "one pitch":
            self._tensors = list(torch.empty((layers, blocks, page), **options))
        else:
            self._tensors = [torch.empty((blocks, page), **options) for _ in range(layers)]
        for tensor in self._tensors:
            tensor.random_(0, 256)
        self._synchronize()

    def layout(self) -> GroupLayout:
        """Where the cache's blocks are."""
        from kvdock_vllm.engine.layout import GroupLayout, Region

        geometry = self.case.geometry
        regions = [Region(t.data_ptr(), t.stride(0), geometry.page_bytes) for t in self._tensors]
        return GroupLayout(geometry.cache_blocks, tuple(regions), ())

    def export(self) -> tuple[Any, Any]:
        """Allocations and groups, as the client library's."""
        import torch

        from kvdock_vllm.engine.device.memory import ExportedGroup, export_memory

        group = ExportedGroup(None, self.layout(), self.case.geometry.blocks_per_chunk)
        memory = export_memory([group], torch.cuda.current_device())
        return memory.allocations, memory.groups

    def poison(self) -> None:
        """Overwrite the whole cache."""
        for tensor in self._tensors:
            tensor.fill_(0xA5)
        self._synchronize()

    def sums(self, block_ids: list[int]) -> npt.NDArray[np.int64]:
        """For each layer and block a sum that depends on every byte and its position."""
        import torch

        index = torch.tensor(block_ids, device=self._device)
        weights = torch.arange(1, self.case.geometry.page_bytes // 4 + 1, device=self._device)
        rows = []
        for tensor in self._tensors:
            words = tensor.index_select(0, index).view(torch.int32).to(torch.int64)
            rows.append((words * weights).sum(dim=1).cpu().numpy())
        return np.stack(rows)

    def free_bytes(self) -> int:
        """Free memory of the device, counting this process's cache as free."""
        import torch

        return int(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved())

    def connect(self, address: str, mode: str) -> str:
        """Register the cache with a server and store it once; how it is copied, in words.

        ``mode`` is SERVER or SHARED; both can be open at once.
        """
        path: CallPath
        if mode == SHARED:
            self._pinning.again()
            device = self._tensors[0].device
            path = SharedCallPath(address, self.case, self.layout(), device, self._pinning)
        else:
            path = ServerCallPath(address, self.case, self.export())
        self._paths[mode] = path
        return path.how

    def disconnect(self, mode: str) -> None:
        """End the sessions, so that the server closes the cache."""
        self._paths.pop(mode).close()

    def once(self, mode: str, direction: str, chunks: int) -> float:
        """See CopyPath."""
        return self._paths[mode].once(direction, chunks)

    def start(self, mode: str, direction: str, callers: int) -> None:
        """See CopyPath."""
        self._paths[mode].start(direction, callers)

    def stop(self, mode: str, direction: str) -> float:
        """See CopyPath."""
        return self._paths[mode].stop(direction)

    def round_trip(self, mode: str) -> float:
        """See CallPath."""
        return self._paths[mode].round_trip()

    def be_busy(self, busy: bool) -> None:
        """Run Python without pause on a further thread, which takes the interpreter's lock.

        At worst an engine's own thread does that.
        """

        def run() -> None:
            while not self._rest.is_set():
                for _ in range(10_000):
                    pass

        if self._busy is not None:
            self._rest.set()
            self._busy.join()
            self._busy = None
        if busy:
            self._rest.clear()
            self._busy = threading.Thread(target=run)
            self._busy.start()

    def _synchronize(self) -> None:
        import torch

        if self._device != "cpu":
            torch.cuda.synchronize()


class WorkerPath(CopyPath):
    """The calls of a worker in its own process."""

    def __init__(self, worker: Remote, address: str, case: Case, mode: str = SERVER) -> None:
        super().__init__(case)
        self._worker = worker
        self._mode = mode
        self.how = worker("connect", address, mode)

    def once(self, direction: str, chunks: int) -> float:
        return float(self._worker("once", self._mode, direction, chunks))

    def start(self, direction: str, callers: int) -> None:
        self._worker("start", self._mode, direction, callers)

    def stop(self, direction: str) -> float:
        return float(self._worker("stop", self._mode, direction))

    def round_trip(self) -> float:
        """Seconds of a call that has nothing to do."""
        return float(self._worker("round_trip", self._mode))

    def close(self) -> None:
        self._worker("disconnect", self._mode)


class TransfersPath(CopyPath):
    """The server's transfers in this process, without a server, its calls and its index."""

    def __init__(self, loop: TransfersLoop, exported: tuple[Any, Any], case: Case) -> None:
        super().__init__(case)
        self._loop = loop
        self._registration = loop.register(exported)
        self.how = self._registration.description
        self._ids = np.array(case.block_ids)
        self._slots = np.arange(case.geometry.chunks) * case.geometry.chunk_bytes
        self.once(STORE, case.geometry.chunks)

    def once(self, direction: str, chunks: int) -> float:
        ids = self._ids[: chunks * self.case.geometry.blocks_per_chunk]
        slots = self._slots[:chunks]
        started = time.perf_counter()
        if direction == STORE:
            self._loop.wait(self._registration.store(None, ids, slots))
        else:
            self._loop.wait(self._registration.retrieve(None, ids, slots))
        return time.perf_counter() - started

    def close(self) -> None:
        self._loop.wait(self._registration.close())


class TransfersLoop:
    """An event loop on a thread with the server's transfers over a pool."""

    def __init__(self) -> None:
        from kvdock_server.transfer import GpuTransfers

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._map = mmap.mmap(-1, POOL_BYTES)
        np.frombuffer(self._map, dtype=np.uint8)[:] = 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.transfers = GpuTransfers(address, POOL_BYTES)
        self.transfers.faulted(0, POOL_BYTES)

    def register(self, exported: tuple[Any, Any]) -> Any:
        from kvdock_server.transfer import BlockRegion, DeviceAllocation, GroupMemory

        allocations, groups = exported
        registration = self.wait(
            self.transfers.register(
                [DeviceAllocation(a.ipc_handle, a.nbytes, a.device_uuid) for a in allocations],
                {
                    group.group_idx: GroupMemory(
                        group.num_blocks,
                        group.blocks_per_chunk,
                        tuple(
                            BlockRegion(r.allocation, r.offset, r.block_stride, r.page_bytes)
                            for r in group.regions
                        ),
                    )
                    for group in groups
                },
            )
        )
        while self.transfers.stats().pinned_bytes < POOL_BYTES:
            time.sleep(0.01)
        return registration

    def wait(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        self.wait(self.transfers.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


class Link:
    """Pinned memory and device memory of this process. Its large copies are the ceilings."""

    NBYTES = 1 << 30
    PIECE = 256 << 20

    def __init__(self) -> None:
        from kvdock_server.transfer.devices.driver import load_driver

        self._driver = load_driver()
        self._context = self._driver.retain_context(0)
        self._driver.set_current(self._context)
        self._host = self._driver.allocate_host(self.NBYTES)
        self._device = self._driver.allocate(self.NBYTES)
        self._streams = {way: self._driver.create_stream() for way in (STORE, LOAD)}
        self._running: dict[str, Pauseless] = {}
        self.name = self._driver.device_name(0)
        self.driver_version = self._driver.version

    def rate(self, direction: str) -> float:
        """Bytes a second of one copy of 1 GiB."""
        started = time.perf_counter()
        self._copy(direction, 0, self.NBYTES)
        return self.NBYTES / (time.perf_counter() - started)

    def start(self, direction: str) -> None:
        """Copy without pause until ``stop``."""
        # The two directions use different bytes.
        offset = 0 if direction == STORE else self.NBYTES // 2

        def copy() -> int:
            self._driver.set_current(self._context)
            self._copy(direction, offset, self.PIECE)
            return self.PIECE

        self._running[direction] = Pauseless(copy, 1)

    def stop(self, direction: str) -> float:
        """End what ``start`` began; bytes a second."""
        return self._running.pop(direction).stop()

    def _copy(self, direction: str, offset: int, nbytes: int) -> None:
        host, device = self._host + offset, self._device + offset
        stream = self._streams[direction]
        if direction == STORE:
            self._driver.copy_to_host(host, device, nbytes, stream)
        else:
            self._driver.copy_to_device(device, host, nbytes, stream)
        self._driver.synchronize_stream(stream)
