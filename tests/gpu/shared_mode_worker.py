"""A `kv_worker` that moves its bytes with the connector's own transfers of GPU memory."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import kv_worker
import numpy as np
import torch

from kvdock import Client, Group, GroupKind, Namespace, SessionRole
from kvdock.types import ChunkStatus, Location, TransferMode
from kvdock_server.transfer.devices.driver import load_driver
from kvdock_vllm.engine.copier import CopyStoppedError
from kvdock_vllm.engine.device.transfers import DeviceTransfers
from kvdock_vllm.engine.groups import GroupShape
from kvdock_vllm.engine.layout import GroupLayout
from kvdock_vllm.engine.parallel import ParallelStrategy
from kvdock_vllm.engine.tensor_regions import layer_regions
from kvdock_vllm.engine.transfers.base import CopyRequest, Mark

STRATEGY = ParallelStrategy(use_mla=False, tensor_size=1, pipeline_size=1, worker_id=0)
BLOCK_TOKENS = 16
NAMESPACE = "model"


def never() -> bool:
    return False


class SharedModeWorker(kv_worker.Worker):
    """Every method is an order."""

    def connect_as(self, address: str, wanted: str, blocks_per_chunk: int) -> tuple[str, str]:
        """Open an engine's sessions; the mode in which bytes move, and why, as the server says."""
        self._open(address, wanted, blocks_per_chunk)
        self.transfers.expect(self.session, self.target)
        (status,) = (
            session
            for session in self.client.status().sessions
            if session.session_id == self.session.id
        )
        return TransferMode(status.mode).name, status.mode_reason

    def connect_refused(self, address: str, blocks_per_chunk: int) -> tuple[str, int]:
        """Shared mode with a pool that CUDA refuses to pin; why, and how much of it is pinned."""
        self._open(address, "SHARED", blocks_per_chunk)
        (segment,) = self.session.pool.segments
        end = Location(segment.segment_id, segment.nbytes - 4096, 4096)
        driver = load_driver()
        driver.set_current(driver.retain_context(torch.cuda.current_device()))
        # What is registered is not registered again, and neither is what it lies in.
        driver.register_host(self.session.pool.array(end).ctypes.data, 4096)
        self.transfers.expect(self.session, self.target)
        while self._pinned.refused is None:
            time.sleep(0.01)
        return self._pinned.refused, self._pinned.pinned_bytes

    def wait_until_pinned(self) -> int:
        """How many bytes there are."""
        nbytes = sum(segment.nbytes for segment in self.session.pool.segments)
        while self._pinned.pinned_bytes < nbytes:
            assert self._pinned.refused is None, self._pinned.refused
            time.sleep(0.01)
        return nbytes

    def disconnect(self) -> bool:
        """As a link does; whether the pool is unpinned then."""
        pinned = self._pinned
        self.transfers.wait_for_end(self.session)
        self.session.close()
        self.scheduler.close()
        self.client.close()
        pinned._thread.join(10)
        return not pinned._thread.is_alive() and pinned.pinned_bytes == 0

    def store(self, keys: list[bytes], ids: list[int]) -> list[str]:
        """The status of each chunk. All keys are a prompt's first."""
        return self._store(keys, ids, self.transfers.mark())

    def store_late(
        self, milliseconds: int, seed: int, keys: list[bytes], ids: list[int]
    ) -> list[str]:
        """The same while a long kernel is still to write new bytes everywhere."""
        self.write_late(milliseconds, seed)
        return self._store(keys, ids, self._mark_side())

    def store_until_stopped(
        self, milliseconds: int, keys: list[bytes], ids: list[int]
    ) -> tuple[float, bool]:
        """Stop a store while it waits for a long kernel: how long that took, whether it copied."""
        self.write_late(milliseconds, 1)
        began = time.monotonic()
        try:
            self._store(keys, ids, self._mark_side(), lambda: time.monotonic() > began + 0.1)
        except CopyStoppedError:
            return time.monotonic() - began, False
        return time.monotonic() - began, True

    def retrieve(self, keys: list[bytes], ids: list[int], skip_blocks: int) -> list[bool]:
        """For each chunk whether its blocks are filled."""
        return self._load(keys, ids, skip_blocks, self.transfers.mark())

    def retrieve_late(self, milliseconds: int, keys: list[bytes], ids: list[int]) -> list[bool]:
        """The same while a long kernel is still to copy what is there."""
        self.read_late(milliseconds)
        return self._load(keys, ids, 0, self._mark_side())

    def store_on_and_on(self, keys: int) -> None:
        """Store the first blocks again and again, in the background."""

        def store() -> None:
            while True:
                ids = list(range(keys * self.blocks_per_chunk))
                self._store([secrets.token_bytes(32) for _ in range(keys)], ids, Mark())

        threading.Thread(target=store, daemon=True).start()

    def rates(self, nbytes: int) -> dict[str, float]:
        """Best of some runs, in GB/s: plain pinned copies, stores and loads of so many bytes."""
        host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        chunk_bytes = self.blocks_per_chunk * self.layout.block_bytes
        ids = np.random.default_rng(0).permutation(self.num_blocks).tolist()
        ids = ids[: nbytes // chunk_bytes * self.blocks_per_chunk]
        keys: list[bytes] = []

        def new_store() -> None:
            keys[:] = [secrets.token_bytes(32) for _ in range(nbytes // chunk_bytes)]
            assert set(self.store(keys, ids)) == {"STORED"}

        def load() -> None:
            assert all(self.retrieve(keys, ids, 0))

        def plain(target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
            def copy() -> None:
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize()

            return copy

        return {
            "D2H": _best_rate(plain(host, device), nbytes),
            "store": _best_rate(new_store, nbytes),
            "H2D": _best_rate(plain(device, host), nbytes),
            "load": _best_rate(load, nbytes),
        }

    def _open(self, address: str, wanted: str, blocks_per_chunk: int) -> None:
        regions = [
            region for tensor in self.tensors for region in layer_regions(tensor, self.num_blocks)
        ]
        self.layout = GroupLayout(self.num_blocks, tuple(regions), ())
        self.blocks_per_chunk = blocks_per_chunk
        chunk_tokens = BLOCK_TOKENS * blocks_per_chunk
        chunk_bytes = blocks_per_chunk * self.layout.block_bytes
        self.transfers = DeviceTransfers(
            [self.layout],
            [GroupShape(None, GroupKind.FULL_ATTENTION, BLOCK_TOKENS, ())],
            self.tensors[0].device,
            STRATEGY,
            TransferMode[wanted],
            lambda mode, change: None,
        )
        self.client = Client(address)
        group = Group((chunk_bytes,))
        self.client.register_namespace(Namespace(NAMESPACE, chunk_tokens, 1, (group,)))
        self.session = self.client.session("engine", role=SessionRole.WORKER)
        self.scheduler = self.client.session("engine", role=SessionRole.SCHEDULER)
        self.transfers.prepare(self.session)
        self.target: Any = SimpleNamespace(
            epoch=self.session.epoch, namespace=NAMESPACE, chunk_tokens=chunk_tokens
        )

    @property
    def _pinned(self) -> Any:
        mover: Any = self.transfers._shared._mover
        return mover._pools[self.session].pinned

    def _mark_side(self) -> Mark:
        with torch.cuda.stream(self.side):
            return self.transfers.mark()

    def _store(
        self,
        keys: list[bytes],
        ids: list[int],
        ready: Mark,
        stop: Callable[[], bool] = never,
    ) -> list[str]:
        group: Any = SimpleNamespace(
            position=0,
            group_idx=None,
            first_chunk=0,
            parent=b"",
            keys=keys,
            block_ids=ids,
            event_data=(),
        )
        statuses = self.transfers.store(CopyRequest(self.session, self.target, group, ready, stop))
        return [ChunkStatus(status).name for status in statuses]

    def _load(self, keys: list[bytes], ids: list[int], skip_blocks: int, ready: Mark) -> list[bool]:
        hit = self.scheduler.lookup(NAMESPACE, keys)
        assert hit.lease is not None
        group: Any = SimpleNamespace(
            position=0,
            group_idx=None,
            first_chunk=0,
            end_chunk=hit.chunks,
            skip_blocks=skip_blocks,
            block_ids=ids,
            lease_id=hit.lease.id,
        )
        return self.transfers.load(CopyRequest(self.session, self.target, group, ready, never))


def _best_rate(run: Callable[[], None], nbytes: int) -> float:
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return nbytes / min(seconds) / 1e9


if __name__ == "__main__":
    kv_worker.main(SharedModeWorker)
