"""The parts of the GPU benchmarks: caches, a worker, an engine, and two paths to their bytes.

Each part runs in a process of its own, as in a deployment, and takes orders over a pipe.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import multiprocessing
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
from serverkit import wait_for_pool

if TYPE_CHECKING:
    from kvdock import Client

CHUNK_TOKENS = 32
MOVED_BYTES = 1 << 30
POOL_BYTES = 4 << 30
RUN_OF_BLOCKS = 64

Result = TypeVar("Result")

STORE = "store"
LOAD = "load"


@dataclass(frozen=True)
class Geometry:
    """One model's cache."""

    name: str
    layers: int
    page_bytes: int
    block_tokens: int
    chunk_tokens: int = CHUNK_TOKENS
    """Rounded up to whole blocks."""

    @property
    def block_bytes(self) -> int:
        return self.layers * self.page_bytes

    @property
    def blocks_per_chunk(self) -> int:
        return -(-self.chunk_tokens // self.block_tokens)

    @property
    def chunk_bytes(self) -> int:
        return self.block_bytes * self.blocks_per_chunk

    @property
    def chunks(self) -> int:
        """How many chunks make about MOVED_BYTES."""
        return MOVED_BYTES // self.chunk_bytes

    @property
    def cache_blocks(self) -> int:
        """Twice the blocks that are moved, in whole runs."""
        return -(-2 * self.chunks * self.blocks_per_chunk // RUN_OF_BLOCKS) * RUN_OF_BLOCKS


@dataclass(frozen=True)
class Case:
    """A cache's layout and an order of block ids."""

    geometry: Geometry
    layout: str
    """"block-major", "one pitch" (all layers in one allocation) or "layers apart"."""
    order: str
    """"random" or "runs" (of RUN_OF_BLOCKS)."""

    @property
    def block_ids(self) -> list[int]:
        geometry = self.geometry
        count = geometry.chunks * geometry.blocks_per_chunk
        rng = np.random.default_rng(11)
        if self.order == "random":
            return [int(block) for block in rng.permutation(geometry.cache_blocks)[:count]]
        runs = rng.permutation(geometry.cache_blocks // RUN_OF_BLOCKS)
        ids = (runs[:, None] * RUN_OF_BLOCKS + np.arange(RUN_OF_BLOCKS)).ravel()
        return [int(block) for block in ids[:count]]


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

    def __init__(self) -> None:
        self._tensors: list[Any] = []
        self._case: Case | None = None
        self._path: CallPath | None = None

    @property
    def case(self) -> Case:
        assert self._case is not None
        return self._case

    def make(self, case: Case) -> None:
        """Make the cache, with random bytes."""
        import torch

        self._case = case
        self._tensors.clear()
        torch.cuda.empty_cache()
        geometry = case.geometry
        layers, blocks, page = geometry.layers, geometry.cache_blocks, geometry.page_bytes
        options: dict[str, Any] = {"dtype": torch.uint8, "device": "cuda"}
        if case.layout == "block-major":
            storage = torch.empty((blocks, layers, page), **options)
            self._tensors = [storage[:, layer] for layer in range(layers)]
        elif case.layout == "one pitch":
            self._tensors = list(torch.empty((layers, blocks, page), **options))
        else:
            self._tensors = [torch.empty((blocks, page), **options) for _ in range(layers)]
        for tensor in self._tensors:
            tensor.random_(0, 256)
        torch.cuda.synchronize()

    def export(self) -> tuple[Any, Any]:
        """Allocations and groups, as the client library's."""
        import torch

        from kvdock_vllm.engine.device.memory import ExportedGroup, export_memory
        from kvdock_vllm.engine.layout import GroupLayout, Region

        geometry = self.case.geometry
        regions = [Region(t.data_ptr(), t.stride(0), geometry.page_bytes) for t in self._tensors]
        layout = GroupLayout(geometry.cache_blocks, tuple(regions), ())
        group = ExportedGroup(None, layout, geometry.blocks_per_chunk)
        memory = export_memory([group], torch.cuda.current_device())
        return memory.allocations, memory.groups

    def poison(self) -> None:
        """Overwrite the whole cache."""
        import torch

        for tensor in self._tensors:
            tensor.fill_(0xA5)
        torch.cuda.synchronize()

    def sums(self, block_ids: list[int]) -> npt.NDArray[np.int64]:
        """For each layer and block a sum that depends on every byte and its position."""
        import torch

        index = torch.tensor(block_ids, device="cuda")
        weights = torch.arange(1, self.case.geometry.page_bytes // 4 + 1, device="cuda")
        rows = []
        for tensor in self._tensors:
            words = tensor.index_select(0, index).view(torch.int32).to(torch.int64)
            rows.append((words * weights).sum(dim=1).cpu().numpy())
        return np.stack(rows)

    def free_bytes(self) -> int:
        """Free memory of the device, counting this process's cache as free."""
        import torch

        return int(torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved())

    def connect(self, address: str) -> str:
        """Register the cache with a server and store it once; how it is copied, in words."""
        self._path = CallPath(address, self.case, self.export())
        return self._path.how

    def disconnect(self) -> None:
        """End the sessions, so that the server closes the cache."""
        self._connected.close()
        self._path = None

    def once(self, direction: str, chunks: int) -> float:
        """See CopyPath."""
        return self._connected.once(direction, chunks)

    def start(self, direction: str, callers: int) -> None:
        """See CopyPath."""
        self._connected.start(direction, callers)

    def stop(self, direction: str) -> float:
        """See CopyPath."""
        return self._connected.stop(direction)

    def round_trip(self) -> float:
        """See CallPath."""
        return self._connected.round_trip()

    @property
    def _connected(self) -> CallPath:
        assert self._path is not None
        return self._path


class CopyPath(ABC):
    """A way to the bytes of one case's cache. Seconds are from the call to its answer."""

    how: str
    """How the bytes go, in the server's words."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._running: dict[str, _Pauseless] = {}

    @abstractmethod
    def once(self, direction: str, chunks: int) -> float:
        """Copy the case's first chunks; the seconds it took. Loads bring the first stored bytes."""

    @abstractmethod
    def close(self) -> None:
        """Close the way to the cache."""

    def start(self, direction: str, callers: int) -> None:
        """Copy all chunks again and again, with ``callers`` calls under way, until ``stop``."""
        chunks = self.case.geometry.chunks
        nbytes = chunks * self.case.geometry.chunk_bytes

        def copy() -> int:
            self.once(direction, chunks)
            return nbytes

        self._running[direction] = _Pauseless(copy, callers)

    def stop(self, direction: str) -> float:
        """End what ``start`` began; bytes a second."""
        return self._running.pop(direction).stop()


class _Pauseless:
    """Calls of a function that says how many bytes it moved, on threads, without pause."""

    def __init__(self, copy: Callable[[], int], callers: int) -> None:
        self._copy = copy
        self._stop = threading.Event()
        self._moved = [0] * callers
        self._started = time.perf_counter()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(callers)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            self._moved[number] += self._copy()

    def stop(self) -> float:
        """End with the calls under way; bytes a second of all callers together."""
        self._stop.set()
        for thread in self._threads:
            thread.join()
        return sum(self._moved) / (time.perf_counter() - self._started)


class CallPath(CopyPath):
    """Store and Retrieve over a session, as a connector makes them; in the worker's process."""

    def __init__(self, address: str, case: Case, exported: tuple[Any, Any]) -> None:
        from kvdock import Client, Group, Namespace, SessionRole

        super().__init__(case)
        geometry = case.geometry
        self._client = Client(address, timeout=30)
        self._namespace = f"bench-{secrets.token_hex(4)}"
        group = Group((geometry.chunk_bytes,))
        self._client.register_namespace(Namespace(self._namespace, CHUNK_TOKENS, 1, (group,)))
        engine = secrets.token_hex(4)
        self._scheduler = self._client.session(engine, role=SessionRole.SCHEDULER)
        self._worker = self._client.session(engine, role=SessionRole.WORKER)
        registered = self._worker.register_memory(self._namespace, *exported)
        self.how = f"{registered.mode.name}: {registered.reason}"
        wait_until_pinned(self._client)
        self._ids = case.block_ids
        self._primed = self._fresh_keys(geometry.chunks)
        self._store(self._primed)
        # Locked to the end, so that later stores do not evict these chunks.
        self._held = self._scheduler.lookup(self._namespace, self._primed)

    def once(self, direction: str, chunks: int) -> float:
        ids = self._ids[: chunks * self.case.geometry.blocks_per_chunk]
        if direction == STORE:
            return self._store(self._fresh_keys(chunks))
        hit = self._scheduler.lookup(self._namespace, self._primed[:chunks])
        assert hit.lease is not None
        started = time.perf_counter()
        results = self._worker.retrieve(hit.lease, block_ids=ids)
        seconds = time.perf_counter() - started
        _all_are(results, "RETRIEVED", [result.status.name for result in results])
        return seconds

    def round_trip(self) -> float:
        """Seconds of a call that has nothing to do."""
        started = time.perf_counter()
        self._worker.free_locks(1)
        return time.perf_counter() - started

    def close(self) -> None:
        self._worker.close()
        self._scheduler.close()
        self._client.clear(self._namespace)
        self._client.close()

    def _store(self, keys: list[bytes]) -> float:
        ids = self._ids[: len(keys) * self.case.geometry.blocks_per_chunk]
        started = time.perf_counter()
        statuses = self._worker.store(self._namespace, keys, ids)
        seconds = time.perf_counter() - started
        _all_are(statuses, "STORED", [status.name for status in statuses])
        return seconds

    @staticmethod
    def _fresh_keys(count: int) -> list[bytes]:
        return [secrets.token_bytes(32) for _ in range(count)]


def _all_are(results: Sequence[object], wanted: str, names: list[str]) -> None:
    if set(names) != {wanted}:
        raise RuntimeError(f"{len(results)} chunks should be {wanted} and are {sorted(set(names))}")


def wait_until_pinned(client: Client) -> None:
    """Wait until the server has pinned its pool. It begins when the first worker registers."""
    wait_for_pool(client, lambda pool: pool.pinned_bytes)


class WorkerPath(CopyPath):
    """The calls of a worker in its own process."""

    def __init__(self, worker: Remote, address: str, case: Case) -> None:
        super().__init__(case)
        self._worker = worker
        self.how = worker("connect", address)

    def once(self, direction: str, chunks: int) -> float:
        return float(self._worker("once", direction, chunks))

    def start(self, direction: str, callers: int) -> None:
        self._worker("start", direction, callers)

    def stop(self, direction: str) -> float:
        return float(self._worker("stop", direction))

    def round_trip(self) -> float:
        """Seconds of a call that has nothing to do."""
        return float(self._worker("round_trip"))

    def close(self) -> None:
        self._worker("disconnect")


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
        self._running: dict[str, _Pauseless] = {}
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

        self._running[direction] = _Pauseless(copy, 1)

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
