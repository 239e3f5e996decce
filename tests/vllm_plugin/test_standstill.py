"""Server mode and a server that stands still: what it was asked before, it may do when it goes on.
And one whose device fails.

The engine's memory is a file that the real server copies from and to by itself.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simulator
import torch
from modelkit import Llama, make_checkpoint, random_prompt
from own_device import use_own_device
from simkit import status
from simulator import CHUNK_TOKENS, SimulatedEngine

from kvdock.types import BlockRegion, DeviceAllocation, GroupMemory
from kvdock_vllm import worker as worker_module
from kvdock_vllm.engine.device.memory import ExportedMemory
from kvdock_vllm.engine.device.transfers import DeviceTransfers
from kvdock_vllm.engine.transfers import server as server_transfers
from kvdock_vllm.scheduler import EXTRA_TOKENS_KEYS

sys.path.insert(0, str(Path(__file__).parents[1] / "server" / "transfer"))
from host_driver import UUID

sys.path.insert(0, str(Path(__file__).parent))
from host_device_server import HANDLE

C = CHUNK_TOKENS
BLOCKS = 24
"""So few that those of one request are the next one's."""
DEVICE_BYTES = 3 * BLOCKS * 2048


class Host:
    """A server in server mode, and an engine whose blocks it copies."""

    def __init__(self, server: Any, engine: SimulatedEngine) -> None:
        self.server = server
        self.engine = engine

    def stop_when(self, is_time: Callable[[], bool]) -> None:
        """The server stands still from the step on in which ``is_time()``."""

        def stop() -> None:
            if is_time():
                self.engine.between_schedule_and_forward = lambda: None
                self.server.process.send_signal(signal.SIGSTOP)

        self.engine.between_schedule_and_forward = stop

    def go_on(self) -> None:
        self.server.process.send_signal(signal.SIGCONT)

    def ask(self, prompt: list[int], count: int = 1) -> None:
        """A prompt is answered as it must be; the simulator checks all bytes."""
        assert self.engine.generate(prompt, max_tokens=count).tokens == self.engine.expected(
            prompt, count
        )


@pytest.fixture
def host(
    start_server: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Host]:
    device = tmp_path / "device"
    device.write_bytes(bytes(DEVICE_BYTES))
    server = start_server(
        *("--chunk-tokens", str(C)),
        program=[str(Path(__file__).parent / "host_device_server.py"), str(device)],
    )
    with device.open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), DEVICE_BYTES), dtype=np.uint8)

    def zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
        assert count * dtype.itemsize == len(memory)
        return torch.from_numpy(memory.view(np.float32))

    def choose(layouts: Any, shapes: Any, kv_caches: Any, *arguments: Any) -> DeviceTransfers:
        transfers = DeviceTransfers(layouts, shapes, torch.device("cpu"), *arguments)

        def export(target: Any) -> tuple[ExportedMemory, str]:
            groups = [
                GroupMemory(
                    shape.group_idx,
                    layout.num_blocks,
                    shape.part_blocks(target.chunk_tokens),
                    tuple(
                        BlockRegion(
                            0,
                            region.address - memory.ctypes.data,
                            region.block_stride,
                            region.page_bytes,
                        )
                        for region in layout.regions
                    ),
                )
                for shape, layout in zip(shapes, layouts, strict=True)
            ]
            allocation = DeviceAllocation(HANDLE, len(memory), UUID)
            return ExportedMemory([allocation], groups), ""

        monkeypatch.setattr(transfers, "_export", export)
        return transfers

    monkeypatch.setattr(worker_module, "_choose_transfers", choose)
    monkeypatch.setattr(server_transfers, "_LOAD_SECONDS", 0.4)
    monkeypatch.setattr(server_transfers, "_STORE_SECONDS", 0.4)
    monkeypatch.setattr(server_transfers, "_PIECE_SECONDS", 0.1)
    model = make_checkpoint(tmp_path / "tiny", Llama(layers=1))
    with monkeypatch.context() as patch:
        patch.setattr(simulator.torch, "zeros", zeros)
        engine = SimulatedEngine(
            model,
            server.address,
            num_blocks=BLOCKS,
            extra_config={"kvdock.lookup_timeout_ms": 100},
        )
    engine.generate(random_prompt(2 * C, seed=9))
    assert engine.counted["server_mode_workers"] == 1
    engine.forget()
    yield Host(server, engine)
    if server.process.poll() is None:
        os.kill(server.process.pid, signal.SIGCONT)
    engine.close()


def test_a_store_that_was_given_up_never_becomes_visible(host: Host) -> None:
    first, second = random_prompt(4 * C, seed=1), random_prompt(4 * C, seed=2)
    engine = host.engine
    host.stop_when(lambda: bool(engine.connector.scheduler_half.stores.under_way))
    host.ask(first)
    engine.forget()
    host.ask(second)  # in the same blocks
    stored = int(engine.counted["stored_chunks"])
    host.go_on()
    time.sleep(0.5)
    assert status(host.server).counters.stored_shards == stored
    engine.forget()
    host.ask(first)


@pytest.mark.parametrize("end", ["goes on", "is killed"])
def test_a_load_keeps_its_blocks_until_the_server_cannot_write_to_them(
    host: Host, end: str
) -> None:
    prompt, other = random_prompt(3 * C, seed=1), random_prompt(C, seed=2)
    engine = host.engine
    host.ask(prompt)
    engine.forget()
    host.stop_when(lambda: bool(engine.connector.scheduler_half.loads.under_way))
    engine.add("loading", prompt, max_tokens=3)
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        engine.step()
    assert engine.outcomes["loading"].tokens == []
    engine.add("other", other, max_tokens=3)  # is served meanwhile
    while engine.outcomes["other"].finish_reason is None:
        engine.step()
    assert engine.outcomes["loading"].tokens == []
    if end == "goes on":
        host.go_on()
    else:
        host.server.kill()
    engine.run(10)
    assert engine.outcomes["loading"].tokens == engine.expected(prompt, 3)
    if end == "goes on":
        assert status(host.server).counters.retrieved_shards == 0


def test_a_load_ends_with_the_next_session_of_its_worker(host: Host) -> None:
    prompt = random_prompt(3 * C, seed=1)
    engine = host.engine
    host.ask(prompt)
    engine.forget()
    host.stop_when(lambda: bool(engine.connector.scheduler_half.loads.under_way))
    engine.add("loading", prompt, max_tokens=3)
    (worker,) = (rank.connector.worker_half for rank in engine.ranks)
    live = worker.link.current
    assert live is not None
    while not any(job.ended and not job.is_over for job in worker.loads.under_way):
        engine.step()
    # As when the server has been silent for too long: nobody can tell it that it is over.
    live.session._stream._call.cancel()
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        engine.step()
    assert engine.outcomes["loading"].tokens == []
    host.go_on()
    engine.run(20)
    assert engine.outcomes["loading"].tokens == engine.expected(prompt, 3)
    host.ask(random_prompt(3 * C, seed=3), 20)


def test_when_the_servers_device_fails_the_engine_copies_by_itself(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_own_device(monkeypatch)
    first, second = random_prompt(3 * C, seed=1), random_prompt(3 * C, seed=2)
    engine = host.engine
    host.ask(first)
    engine.forget()
    host.server.process.send_signal(signal.SIGUSR1)
    host.ask(first)  # the load fails
    engine.forget()
    host.ask(second)
    engine.forget()
    assert (engine.counted["server_mode_workers"], engine.counted["shared_mode_workers"]) == (0, 1)
    for prompt in (first, second):
        outcome = engine.generate(prompt, kv_transfer_params={EXTRA_TOKENS_KEYS[0]: None})
        assert outcome.tokens == engine.expected(prompt, 1)
        assert outcome.kv_transfer_params == {EXTRA_TOKENS_KEYS[0]: 3 * C}
        engine.forget()
