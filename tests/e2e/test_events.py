"""Real vLLM engines and the ZMQ stream that consumers read: KVDock's cache beside the GPU's.

On the CPU the engine's own events carry the medium "GPU" all the same.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from enginekit import EngineProcess, Request
from modelkit import DeepseekV2, Gemma3, Llama, Shape, make_adapter, make_checkpoint, random_prompt
from servers import ServerProcess
from tests.e2e.engines import start_engine
from tests.eventkit import assert_differ_in_place_only, decode, stored_blocks

from kvdock import Client
from kvdock.keys import chunk_keys

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

CHUNK = 256
WAIT_SECONDS = 60.0
CLEARED = "AllBlocksCleared None"


@dataclass(frozen=True)
class Case:
    """An engine."""

    shape: Shape
    block: int
    ranks: int = 1
    as_bytes: bool = False
    """Hashes as bytes, not as integers."""
    kind: str = "full_attention"
    own_events: bool = True
    """vLLM caches no prefixes for MLA on CPUs, so such an engine has no events of its own."""


MLA = {"block": 16, "kind": "mla_attention", "own_events": False}
CASES = {
    "GQA": Case(Llama(), 32),
    "GQA, 2 ranks, bytes": Case(Llama(), 32, ranks=2, as_bytes=True),
    "MLA": Case(DeepseekV2(), as_bytes=True, **MLA),  # type: ignore[arg-type]
    "MLA, 2 ranks": Case(DeepseekV2(), ranks=2, **MLA),  # type: ignore[arg-type]
}


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[ServerProcess]:
    # Not pytest's folders: a socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as folder:
        server = ServerProcess(
            Path(folder) / "s.sock", "--memory", "64MiB", "--chunk-tokens", str(CHUNK), *arguments
        )
        try:
            yield server
        finally:
            server.stop()


@dataclass
class Heard:
    """What a consumer that knows blocks by their hashes makes of the stream."""

    stored: list[dict[str, Any]] = field(default_factory=list)
    removed: list[dict[str, Any]] = field(default_factory=list)
    there: Counter[tuple[str, Any, Any]] = field(default_factory=Counter)
    """How often each (medium, group, hash) was stored more than removed."""
    kinds: Counter[str] = field(default_factory=Counter)

    def of(self, medium: str) -> dict[Any, tuple[tuple[int, ...], Any]]:
        """For each block stored there, by hash: its tokens, and the hash before it."""
        blocks = {}
        for event in self.stored:
            if event["medium"] == medium:
                before = event["parent_block_hash"]
                for index, block in enumerate(event["block_hashes"]):
                    size = event["block_size"]
                    tokens = event["token_ids"][index * size : (index + 1) * size]
                    blocks[block] = tuple(tokens), before
                    before = block
        return blocks

    def on(self, medium: str) -> set[Any]:
        """Hashes that are there now."""
        return {block for (where, _, block), n in self.there.items() if where == medium and n}


class Subscriber:
    """Subscribes to an engine's events as llm-d and Dynamo do."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(f"tcp://127.0.0.1:{self.port}")
        self._socket.subscribe("")
        self._next: int | None = None
        self.heard = Heard()
        self.events: list[Any] = []
        """What came, in vLLM's own types."""

    @property
    def config(self) -> dict[str, Any]:
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.port}",
        }

    def read(self) -> None:
        """Take in everything that has come."""
        while self._socket.poll(200):
            _, sequence, payload = self._socket.recv_multipart()
            (number,) = struct.unpack(">q", sequence)
            assert self._next in (None, number)
            self._next = number + 1
            self.events += decode(payload)
            _, events, *_ = msgspec.msgpack.decode(payload)
            for event in events:
                self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        self.heard.kinds[f"{kind} {event.get('medium')}"] += 1
        if kind == "AllBlocksCleared":
            # Of this engine, on every medium.
            self.heard.there.clear()
            return
        step, events = (1, self.heard.stored) if kind == "BlockStored" else (-1, self.heard.removed)
        events.append(event)
        for block in event["block_hashes"]:
            name = event["medium"], event.get("group_idx"), block
            self.heard.there[name] += step
            assert self.heard.there[name] in (0, 1) or event["medium"] == "GPU"

    def close(self) -> None:
        self._socket.close(0)


def until(
    engine: EngineProcess, subscriber: Subscriber, done: Callable[[Heard], bool], what: str
) -> None:
    """Let the engine take steps, with prompts too short to be cached, until that is so."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not done(subscriber.heard):
        assert time.monotonic() < deadline, f"never {what}: {subscriber.heard.kinds}"
        engine.generate(Request(random_prompt(20, seed=999), max_tokens=4))
        subscriber.read()


def stored_keys(client: Client) -> set[bytes]:
    return {
        part.key
        for entry in client.namespaces()
        for part in client.chunks(entry.namespace.name)
        if part.visible
    }


def keys_of(prompts: Sequence[Sequence[int]]) -> set[bytes]:
    return {key for prompt in prompts for key in chunk_keys(prompt, CHUNK)}


def hashed(prompts: Sequence[Sequence[int]], case: Case) -> dict[Any, tuple[tuple[int, ...], Any]]:
    """What vLLM's own functions make of prompts: as Heard.of."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils.init_none_hash(sha256)
    blocks = {}
    for prompt in prompts:
        before = None
        for begin in range(0, len(prompt) - case.block + 1, case.block):
            tokens = tuple(prompt[begin : begin + case.block])
            made = kv_cache_utils.hash_block_tokens(sha256, before, tokens)
            blocks[external(made, case)] = tokens, external(before, case)
            before = made
    return blocks


def external(block: Any, case: Case) -> Any:
    if block is None or case.as_bytes:
        return block
    return int.from_bytes(block, "big") & ((1 << 64) - 1)


@contextlib.contextmanager
def watched(
    folder: Path, case: Case, prompts: Sequence[list[int]], **more: Any
) -> Iterator[tuple[Any, Client, Subscriber, EngineProcess]]:
    """A server, its client, who hears an engine's events, and the engine, asked these prompts."""
    arguments: dict[str, Any] = {"block_size": case.block, **more}
    environment = {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0" if case.as_bytes else "1"}
    if case.ranks > 1:
        arguments["tensor_parallel_size"] = case.ranks
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(case.ranks)))
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving("--event-log", "16MiB"))
        client = stack.enter_context(Client(server.address))
        subscriber = Subscriber()
        stack.callback(subscriber.close)
        engine = stack.enter_context(
            start_engine(
                make_checkpoint(folder, case.shape),
                log=folder / "engine.log",
                kv_connector={"kvdock.address": server.address, "kvdock.mla_on_cpu": True},
                kv_events_config=subscriber.config,
                environment=environment,
                **arguments,
            )
        )
        for prompt in prompts:
            engine.generate(Request(prompt, max_tokens=8))
        yield server, client, subscriber, engine


@pytest.mark.parametrize("name", CASES)
def test_consumers_see_what_the_server_has_beside_what_the_engine_has(
    tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    prompts = [random_prompt(3 * CHUNK + 40, seed=1), random_prompt(2 * CHUNK + 7, seed=2)]
    per_chunk = CHUNK // case.block
    with watched(tmp_path, case, prompts) as (server, client, subscriber, engine):
        until(
            engine,
            subscriber,
            lambda heard: len(heard.on("CPU")) == 5 * per_chunk,
            "5 chunks of blocks on the CPU",
        )

        heard = subscriber.heard
        assert heard.kinds["BlockStored CPU"] == 5  # one a chunk
        ours, theirs = heard.of("CPU"), hashed(prompts, case)
        assert all(theirs[block] == what for block, what in ours.items())
        if case.own_events:
            theirs = heard.of("GPU")
            assert all(theirs[block] == what for block, what in ours.items())
        assert stored_keys(client) == keys_of(prompts)
        tokens = [event["token_ids"] for event in heard.stored if event["medium"] == "CPU"]
        known = {tuple(prompt[n : n + CHUNK]) for prompt in prompts for n in range(0, 768, CHUNK)}
        assert all(tuple(some) in known for some in tokens)
        for event in heard.stored:
            if event["medium"] == "CPU":
                assert event["kv_cache_spec_kind"] == case.kind
                assert event.get("group_idx") == 0

        # Evicted by the server, in part and in whole.
        client.evict(1)
        until(
            engine,
            subscriber,
            lambda heard: len(heard.on("CPU")) == 4 * per_chunk,
            "one chunk less",
        )
        client.evict(all=True)
        until(engine, subscriber, lambda heard: not heard.on("CPU"), "nothing on the CPU")
        assert sum(len(event["block_hashes"]) for event in heard.removed) >= 5 * per_chunk

        # A server that is killed and started again has nothing.
        again = [random_prompt(2 * CHUNK + 5, seed=3)]
        engine.generate(Request(again[0], max_tokens=8))
        until(
            engine,
            subscriber,
            lambda heard: len(heard.on("CPU")) == 2 * per_chunk,
            "2 chunks of blocks on the CPU",
        )
        server.restart()
        until(engine, subscriber, lambda heard: not heard.on("CPU"), "nothing after a restart")
        engine.generate(Request(random_prompt(CHUNK + 5, seed=4), max_tokens=8))
        until(
            engine,
            subscriber,
            lambda heard: len(heard.on("CPU")) == per_chunk,
            "a chunk in the new server",
        )
        assert "ERROR" not in engine.log_text


@pytest.mark.parametrize("window", [512, 128])
def test_consumers_see_each_group_of_a_hybrid_model(tmp_path: Path, window: int) -> None:
    block = 32
    case = Case(Gemma3(window=window), block, as_bytes=True)
    prompts = [random_prompt(5 * CHUNK + 40, seed=1), random_prompt(2 * CHUNK + 7, seed=2)]
    with watched(tmp_path, case, prompts) as (_, client, subscriber, engine):
        until(
            engine,
            subscriber,
            lambda heard: heard.kinds["BlockStored CPU"] == 3 * 7,
            "7 chunks of 3 groups on the CPU",
        )

        # The engine's own events say which group is what.
        heard = subscriber.heard
        by_engine = {
            event["group_idx"]: (
                event["kv_cache_spec_kind"],
                event.get("kv_cache_spec_sliding_window"),
            )
            for event in heard.stored
            if event["medium"] == "GPU"
        }
        assert sorted(by_engine) == [0, 1, 2]
        assert sorted(kind for kind, _ in by_engine.values()) == [
            "full_attention",
            "sliding_window",
            "sliding_window",
        ]
        ours = heard.of("CPU")
        for theirs in (hashed(prompts, case), heard.of("GPU")):
            assert all(theirs[name] == what for name, what in ours.items())
        chunks = [
            tuple(prompt[n : n + CHUNK])
            for prompt in prompts
            for n in range(0, len(prompt) - CHUNK, CHUNK)
        ]
        for group_idx, label in by_engine.items():
            events = [
                event
                for event in heard.stored
                if event["medium"] == "CPU" and event["group_idx"] == group_idx
            ]
            for event in events:
                said = event["kv_cache_spec_kind"], event.get("kv_cache_spec_sliding_window")
                assert said == label
            # Each chunk once, of a short window only the end that is stored.
            kept = CHUNK if label[1] is None else min(label[1], CHUNK)
            told = sorted(tuple(event["token_ids"]) for event in events)
            assert told == sorted(chunk[-kept:] for chunk in chunks)
            assert all(len(event["block_hashes"]) == kept // block for event in events)
            of_engine = {
                name
                for event in heard.stored
                if event["medium"] == "GPU" and event["group_idx"] == group_idx
                for name in event["block_hashes"]
            }
            of_ours = {name for event in events for name in event["block_hashes"]}
            # Of windows the engine itself keeps what the prompts' ends need, and no more.
            assert of_engine & of_ours if label[1] else of_engine >= of_ours

        client.evict(all=True)
        until(engine, subscriber, lambda heard: not heard.on("CPU"), "nothing on the CPU")
        assert {event["group_idx"] for event in heard.removed if event["medium"] == "CPU"} == {
            0,
            1,
            2,
        }
        assert "ERROR" not in engine.log_text


def test_a_block_is_told_as_the_engine_tells_it(tmp_path: Path) -> None:
    shape = Llama()
    adapter = make_adapter(tmp_path / "an adapter", shape, seed=1)
    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}
    prompt = random_prompt(2 * CHUNK + 40, seed=1)
    requests = [
        Request(prompt, max_tokens=8),
        Request(prompt, max_tokens=8, cache_salt="a salt"),
        Request(prompt, max_tokens=8, lora=str(adapter)),
    ]
    with watched(tmp_path, Case(shape, 32), (), **lora) as (_, _, subscriber, engine):
        for request in requests:
            engine.generate(request)
        blocks = 3 * 2 * CHUNK // 32
        until(engine, subscriber, lambda heard: len(heard.on("CPU")) == blocks, "all on the CPU")
        ours = stored_blocks(subscriber.events, "CPU")
        assert_differ_in_place_only(ours, stored_blocks(subscriber.events, "GPU"))
        told = Counter(block["extra_keys"] for block in ours.values())
        a_third = blocks // 3
        assert told == {None: 2 * a_third - 1, ("a salt",): 1, ("an adapter",): a_third}
        assert {block["lora_id"] for block in ours.values()} == {None, 1}

        # When the engine clears its cache, consumers drop what it has on every medium.
        there = subscriber.heard.on("CPU")
        assert engine.reset_prefix_cache()
        until(engine, subscriber, lambda heard: heard.kinds[CLEARED] == 1, "cleared")
        assert subscriber.heard.on("CPU") == there == ours.keys()
        assert not subscriber.heard.on("GPU") & ours.keys()
        (again,) = engine.generate(requests[0])
        assert again.num_cached_tokens == 2 * CHUNK
        assert engine.reset_prefix_cache(reset_connector=True)
        until(engine, subscriber, lambda heard: heard.kinds[CLEARED] == 2, "cleared again")
        assert not subscriber.heard.on("CPU")
        engine.generate(Request(random_prompt(CHUNK + 1, seed=2), max_tokens=8))
        until(engine, subscriber, lambda heard: len(heard.on("CPU")) == CHUNK // 32, "one chunk")
        assert "ERROR" not in engine.log_text
