"""Ways to the bytes of a KV cache that the GPU benchmarks measure: server mode and shared mode."""

from __future__ import annotations

import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from geometries import STORE, Case
from serverkit import wait_for_pool

if TYPE_CHECKING:
    import torch
    from pinkit import WorkerPinning

    from kvdock import Client
    from kvdock.types import Lease
    from kvdock_vllm.engine.layout import GroupLayout
    from kvdock_vllm.engine.specs import Target
    from kvdock_vllm.engine.transfers.base import CopyRequest

SERVER, SHARED = "SERVER", "SHARED"


class CopyPath(ABC):
    """A way to the bytes of one case's cache. Seconds are from the call to its answer."""

    how: str
    """How the bytes go, in the server's words."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._running: dict[str, Pauseless] = {}

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

        self._running[direction] = Pauseless(copy, callers)

    def stop(self, direction: str) -> float:
        """End what ``start`` began; bytes a second."""
        return self._running.pop(direction).stop()


class Pauseless:
    """Calls of a function that says how many bytes it moved, on threads, without pause."""

    def __init__(self, copy: Callable[[], int], callers: int) -> None:
        self._copy = copy
        self._stop = threading.Event()
        self._moved = [0] * callers
        self._failures: list[Exception] = []
        self._started = time.perf_counter()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(callers)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        try:
            while not self._stop.is_set():
                self._moved[number] += self._copy()
        except Exception as error:
            self._failures.append(error)

    def stop(self) -> float:
        """End with the calls under way; bytes a second of all callers together.

        Raises what a call raised.
        """
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if self._failures:
            raise self._failures[0]
        return sum(self._moved) / (time.perf_counter() - self._started)


class CallPath(CopyPath):
    """Calls over sessions, as a connector makes them; in the worker's process."""

    def __init__(self, address: str, case: Case) -> None:
        from kvdock import Client, Group, Namespace, SessionRole

        super().__init__(case)
        geometry = case.geometry
        self._client = Client(address, timeout=30)
        self._namespace = f"bench-{secrets.token_hex(4)}"
        group = Group((geometry.chunk_bytes,))
        tokens = geometry.chunk_tokens
        self._client.register_namespace(Namespace(self._namespace, tokens, 1, (group,)))
        engine = secrets.token_hex(4)
        self._scheduler = self._client.session(engine, role=SessionRole.SCHEDULER)
        self._worker = self._client.session(engine, role=SessionRole.WORKER)
        self.how = self._register()
        self._ids = case.block_ids
        self._primed = self._fresh_keys(geometry.chunks)
        self._store(self._primed)
        # Locked to the end, so that later stores do not evict these chunks.
        self._held = self._scheduler.lookup(self._namespace, self._primed)

    @abstractmethod
    def _register(self) -> str:
        """Agree with the server on how bytes move, and wait until they move fast; in words."""

    @abstractmethod
    def _copy_in(self, keys: list[bytes], ids: list[int]) -> list[str]:
        """Store chunks; what became of each."""

    @abstractmethod
    def _copy_out(self, lease: Lease, ids: list[int]) -> list[str]:
        """Load all chunks of a hit; what became of each."""

    def once(self, direction: str, chunks: int) -> float:
        if direction == STORE:
            return self._store(self._fresh_keys(chunks))
        ids = self._ids[: chunks * self.case.geometry.blocks_per_chunk]
        hit = self._scheduler.lookup(self._namespace, self._primed[:chunks])
        assert hit.lease is not None
        started = time.perf_counter()
        outcomes = self._copy_out(hit.lease, ids)
        seconds = time.perf_counter() - started
        _all_are("RETRIEVED", chunks, outcomes)
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
        outcomes = self._copy_in(keys, ids)
        seconds = time.perf_counter() - started
        _all_are("STORED", len(keys), outcomes)
        return seconds

    @staticmethod
    def _fresh_keys(count: int) -> list[bytes]:
        return [secrets.token_bytes(32) for _ in range(count)]


class ServerCallPath(CallPath):
    """Server mode: Store and Retrieve."""

    def __init__(self, address: str, case: Case, exported: tuple[Any, Any]) -> None:
        self._exported = exported
        super().__init__(address, case)

    def _register(self) -> str:
        registered = self._worker.register_memory(self._namespace, *self._exported)
        wait_until_pinned(self._client)
        return f"{registered.mode.name}: {registered.reason}"

    def _copy_in(self, keys: list[bytes], ids: list[int]) -> list[str]:
        return [status.name for status in self._worker.store(self._namespace, keys, ids)]

    def _copy_out(self, lease: Lease, ids: list[int]) -> list[str]:
        return [result.status.name for result in self._worker.retrieve(lease, block_ids=ids)]


class SharedCallPath(CallPath):
    """Shared mode: the connector's own transfers of device memory, in this process."""

    def __init__(
        self,
        address: str,
        case: Case,
        layout: GroupLayout,
        device: torch.device,
        pinning: WorkerPinning,
    ) -> None:
        """``pinning`` listens already."""
        from kvdock import GroupKind
        from kvdock.types import TransferMode
        from kvdock_vllm.engine.device.transfers import DeviceTransfers
        from kvdock_vllm.engine.groups import GroupShape
        from kvdock_vllm.engine.parallel import ParallelStrategy

        self._pinning = pinning
        self._transfers = DeviceTransfers(
            [layout],
            [GroupShape(None, GroupKind.FULL_ATTENTION, case.geometry.block_tokens, ())],
            device,
            ParallelStrategy(use_mla=False, tensor_size=1, pipeline_size=1, worker_id=0),
            TransferMode.SHARED,
            lambda mode, change: None,
        )
        super().__init__(address, case)

    def _register(self) -> str:
        self._transfers.prepare(self._worker)
        self._transfers.expect(self._worker, self._target)
        wait_for_pool(self._client, lambda pool: pool.ready_bytes)
        return f"SHARED: {self._pinning.wait()}"

    def _copy_in(self, keys: list[bytes], ids: list[int]) -> list[str]:
        from kvdock_vllm.engine.specs import GroupStore

        group = GroupStore(0, None, 0, b"", tuple(keys), tuple(ids))
        return [status.name for status in self._transfers.store(self._request(group))]

    def _copy_out(self, lease: Lease, ids: list[int]) -> list[str]:
        from kvdock_vllm.engine.specs import GroupLoad

        chunks = len(ids) // self.case.geometry.blocks_per_chunk
        group = GroupLoad(0, None, 0, chunks, 0, tuple(ids), lease.id)
        loaded = self._transfers.load(self._request(group))
        return ["RETRIEVED" if filled else "LOST" for filled in loaded]

    def close(self) -> None:
        self._transfers.wait_for_end(self._worker)
        super().close()

    @property
    def _target(self) -> Target:
        from kvdock_vllm.engine.specs import Target

        return Target(self._worker.epoch, self._namespace, self.case.geometry.chunk_tokens)

    def _request(self, group: Any) -> CopyRequest[Any]:
        from kvdock_vllm.engine.transfers.base import CopyRequest, Mark

        return CopyRequest(self._worker, self._target, group, Mark(), lambda: False)


def _all_are(wanted: str, chunks: int, outcomes: list[str]) -> None:
    if outcomes != [wanted] * chunks:
        raise RuntimeError(f"{chunks} chunks should be {wanted} and are {sorted(set(outcomes))}")


def wait_until_pinned(client: Client) -> None:
    """Wait until the server has pinned its pool. It begins when the first worker registers."""
    wait_for_pool(client, lambda pool: pool.pinned_bytes)
