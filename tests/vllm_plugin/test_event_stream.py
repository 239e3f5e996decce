"""What an engine publishes of KVDock's cache beside what vLLM publishes of its own: the same blocks
in the same words, with vLLM's own scheduler, event types and msgpack.
"""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
import torch
from servers import ServerProcess
from simkit import ASK, C, StartEngine, prompt
from simulator import BLOCK_TOKENS, Layers, SimulatedEngine, _sha256
from tests.eventkit import Block, Consumer, assert_differ_in_place_only, decode, stored_blocks
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockStored, KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import hash_block_tokens, maybe_convert_block_hash
from vllm.v1.engine.core import EngineCore

from kvdock import Client
from kvdock_vllm.events.published import Published
from kvdock_vllm.vllm_groups import offers_states

TOKENS = 3 * C
PICTURES = [
    MultiModalFeatureSpec(None, "image", name * 64, PlaceholderRange(offset, length))
    # Within one block, with another behind it, and over the end of a chunk.
    for name, offset, length in [("a", 3, 7), ("b", 11, 20), ("c", C - 9, 30)]
]
KINDS = ["text", "salt", "adapter", "picture", "embeddings", "several"]


def kind_of_prompt(kind: str, tmp_path: Path) -> dict[str, Any]:
    """What a request of that kind has beside its tokens."""
    folder = tmp_path / "an adapter"
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_text("weights")
    kinds: dict[str, dict[str, Any]] = {
        "text": {},
        "salt": {"cache_salt": "a salt"},
        "adapter": {"lora": LoRARequest("an adapter", 7, str(folder))},
        "picture": {"mm_features": PICTURES},
        "embeddings": {"prompt_embeds": torch.arange(TOKENS * 4.0).reshape(TOKENS, 4)},
    }
    several = kinds["salt"] | kinds["adapter"] | kinds["picture"] | kinds["embeddings"]
    return kinds.get(kind, several)


class Publisher:
    """In place of an engine's publisher: keeps what consumers would have decoded."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.events: list[Any] = []
        self.consumer = Consumer()
        scheduler: Any = engine.scheduler
        scheduler.kv_event_publisher = self

    def publish(self, batch: KVEventBatch) -> None:
        for event in decode(msgspec.msgpack.encode(batch)):
            self.events.append(event)
            self.consumer.take(event)

    def shutdown(self) -> None:
        """Nothing is open."""


@dataclass
class Watched:
    """An engine and what it publishes."""

    engine: SimulatedEngine
    publisher: Publisher

    def blocks(self, medium: str) -> dict[Any, Block]:
        """What was told as stored there."""
        return stored_blocks(self.publisher.events, medium)

    def on(self, medium: str) -> int:
        """How many blocks a consumer takes to be there now."""
        return len(self.publisher.consumer.on(medium))

    def until(self, done: Callable[[], bool], what: str) -> None:
        """Has the engine take steps until that is so."""
        deadline = time.monotonic() + 20
        while not done():
            assert time.monotonic() < deadline, f"never {what}: {self.publisher.events}"
            self.engine.step()


@pytest.fixture(scope="module")
def event_server() -> Iterator[ServerProcess]:
    """A server that keeps a log."""
    # Not pytest's folders: a socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as folder:
        arguments = ("--memory", "64MiB", "--chunk-tokens", str(C), "--event-log", "16MiB")
        server = ServerProcess(Path(folder) / "s.sock", *arguments)
        yield server
        server.stop()


@pytest.fixture
def kvdock(event_server: ServerProcess) -> ServerProcess:
    """The same, which has nothing yet."""
    if event_server.process.poll() is not None:
        event_server.start()
    with Client(event_server.address) as client:
        client.clear(all=True)
    return event_server


@pytest.fixture
def watch(start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Watched]:
    # Else vLLM 0.26 makes the hashes of each engine in another way.
    monkeypatch.setenv("PYTHONHASHSEED", "0")

    def start(**arguments: Any) -> Watched:
        events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        engine = start_engine(kv_events_config=events, **arguments)
        return Watched(engine, Publisher(engine))

    return start


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_is_told_as_vllm_tells_it(
    watch: Callable[..., Watched], tmp_path: Path, kind: str
) -> None:
    beside = kind_of_prompt(kind, tmp_path)
    first = watch()
    request = first.engine.add("a", prompt(TOKENS), **beside)
    first.engine.run()
    blocks = TOKENS // BLOCK_TOKENS
    first.until(lambda: len(first.blocks("CPU")) == blocks, "all blocks on the CPU")

    assert_differ_in_place_only(first.blocks("CPU"), first.blocks("GPU"))

    # And as vLLM's own functions make it.
    published = getattr(kv_cache_utils, "to_event_extra_keys", list)
    before, picture, found_any = None, 0, False
    for block in range(blocks):
        begin, end = block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS
        keys, picture = kv_cache_utils.generate_block_hash_extra_keys(request, begin, end, picture)
        made = hash_block_tokens(_sha256, before, request.all_token_ids[begin:end], keys)
        ours = first.blocks("CPU")[maybe_convert_block_hash(made)]
        (said,) = published([keys])
        assert ours["extra_keys"] == through_msgpack(said)
        assert ours["parent_block_hash"] == (before and maybe_convert_block_hash(before))
        before, found_any = made, found_any or keys is not None
    assert found_any == (kind != "text")

    # Another engine tells it in the same way, though it has never computed it: once it has the
    # adapter, to which it gives a number of its own.
    other = watch()
    if "lora" in beside:
        beside["lora"].lora_int_id = 9
        for _ in range(10):
            other.engine.step()
        assert not other.blocks("CPU")
        other.engine.generate(prompt(8), lora=beside["lora"])
    other.until(lambda: len(other.blocks("CPU")) == blocks, "all blocks told by the other")
    for name, ours in other.blocks("CPU").items():
        assert ours == first.blocks("CPU")[name] | {"lora_id": 9 if "lora" in beside else None}


@pytest.mark.skipif(not offers_states(), reason="refused with this version of vLLM")
def test_a_state_is_told_under_the_name_that_vllm_gives_it(watch: Callable[..., Watched]) -> None:
    first = watch(groups=(Layers(C, state=True), Layers(C)))
    first.engine.generate(prompt(4 * C + 1))

    def told(medium: str, kind: str) -> list[BlockStored]:
        return [
            event
            for event in first.publisher.events
            if isinstance(event, BlockStored) and event.medium == medium
            if event.kv_cache_spec_kind == kind
        ]

    def tells_all() -> bool:
        return bool(told("CPU", "mamba")) and len(told("CPU", "full_attention")) == 4

    first.until(tells_all, "told all")
    (theirs,), (ours,) = told("GPU", "mamba"), told("CPU", "mamba")
    assert (ours.block_hashes, ours.group_idx) == (theirs.block_hashes, theirs.group_idx)
    # vLLM names all tokens since the last state as this block's, and no parent. Ours is told as any
    # block is, so that an index of prefixes can place it.
    assert theirs.token_ids == prompt(4 * C + 1)[: 4 * C]
    assert ours.token_ids == prompt(4 * C + 1)[3 * C : 4 * C]
    assert ours.block_size == C
    (block,) = [one for one in told("CPU", "full_attention") if one.token_ids == ours.token_ids]
    assert ours.parent_block_hash == block.parent_block_hash is not None


def through_msgpack(value: Any) -> Any:
    """As vLLM's event types decode it."""
    event_type = tuple[Any, ...] | None
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=event_type)


def test_what_another_adapter_of_that_name_has_stored_is_not_told(
    watch: Callable[..., Watched], tmp_path: Path
) -> None:
    beside = kind_of_prompt("adapter", tmp_path)
    first = watch()
    first.engine.generate(prompt(TOKENS), **beside)
    first.until(lambda: bool(first.blocks("CPU")), "blocks on the CPU")

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "adapter_model.safetensors").write_text("other weights")
    other = watch()
    lora = LoRARequest("an adapter", 7, str(tmp_path / "other"))
    other.engine.generate(prompt(C, seed=1), lora=lora)
    other.engine.generate(prompt(C, seed=1), cache_salt="to end with")
    blocks = C // BLOCK_TOKENS
    other.until(lambda: len(other.blocks("CPU")) == 2 * blocks, "what it has stored by itself")
    assert not first.blocks("CPU").keys() & other.blocks("CPU").keys()


def test_what_a_consumer_drops_with_the_engines_cache_is_told_again(
    watch: Callable[..., Watched],
) -> None:
    watched = watch()
    engine, blocks = watched.engine, TOKENS // BLOCK_TOKENS
    engine.generate(prompt(TOKENS))
    watched.until(lambda: watched.on("CPU") == blocks, "all blocks on the CPU")
    before = watched.publisher.consumer.on("CPU")

    for _ in range(3):
        assert engine.scheduler.reset_prefix_cache()
        watched.until(lambda: watched.on("GPU") == 0, "an empty GPU")
        assert watched.publisher.consumer.on("CPU") == before
    assert engine.generate(prompt(TOKENS + 1), kv_transfer_params=ASK).num_cached_tokens == TOKENS
    assert len([e for e in watched.publisher.events if isinstance(e, AllBlocksCleared)]) == 3


def test_nothing_is_told_again_that_was_cleared_with_the_engines_cache(
    watch: Callable[..., Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = watch()
    engine, blocks = watched.engine, TOKENS // BLOCK_TOKENS
    engine.generate(prompt(TOKENS))
    watched.until(lambda: watched.on("CPU") == blocks, "all blocks on the CPU")

    # What the server says of the clearing comes late.
    late = threading.Event()
    note = Published.note

    def noted_late(*arguments: Any) -> None:
        late.wait(20)
        note(*arguments)

    monkeypatch.setattr(Published, "note", noted_late)
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    for _ in range(5):
        engine.step()
        assert watched.on("CPU") == 0
    assert watched.on("GPU") == 0
    late.set()
    engine.generate(prompt(C, seed=1))
    watched.until(lambda: watched.on("CPU") == C // BLOCK_TOKENS, "what was stored since")
    assert "BlockRemoved" not in {type(event).__name__ for event in watched.publisher.events}


def test_nothing_is_told_again_that_is_to_be_cleared_once_there_is_a_server(
    watch: Callable[..., Watched], kvdock: ServerProcess
) -> None:
    watched = watch()
    engine, blocks = watched.engine, TOKENS // BLOCK_TOKENS
    engine.generate(prompt(TOKENS))
    watched.until(lambda: watched.on("CPU") == blocks, "all blocks on the CPU")
    kvdock.kill()
    link = engine.connector.scheduler_half.link
    watched.until(lambda: link.current is None, "without a server")
    assert watched.on("CPU") == blocks

    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    watched.until(lambda: watched.on("GPU") == 0, "an empty GPU")
    for _ in range(5):
        engine.step()
        assert watched.on("CPU") == 0


def blocks_of(client: Client) -> int:
    """How many blocks the server has."""
    names = [entry.namespace.name for entry in client.namespaces()]
    parts = sum(part.visible for name in names for part in client.chunks(name))
    return parts * C // BLOCK_TOKENS


@pytest.mark.parametrize("seed", range(3))
def test_a_consumer_knows_what_the_server_has_whatever_is_cleared(
    watch: Callable[..., Watched], kvdock: ServerProcess, seed: int
) -> None:
    watched, chance = watch(), random.Random(seed)
    engine, consumer = watched.engine, watched.publisher.consumer

    with Client(kvdock.address) as client:

        def reset(*, reset_connector: bool) -> None:
            # Blocks of a store under way are held, and then vLLM refuses.
            watched.until(lambda: not engine.scheduler.has_requests(), "idle")
            assert engine.scheduler.reset_prefix_cache(reset_connector=reset_connector)

        actions: list[Callable[[], object]] = [
            lambda: engine.generate(prompt(TOKENS, seed=chance.randrange(6))),
            lambda: engine.generate(prompt(TOKENS, seed=chance.randrange(6)), cache_salt="salt"),
            lambda: client.evict(1),
            lambda: client.clear(all=True),
            lambda: reset(reset_connector=False),
            lambda: reset(reset_connector=True),
            engine.step,
        ]
        for action in chance.choices(actions, [6, 3, 4, 1, 2, 1, 4], k=40):
            action()
            assert len(consumer.on("GPU")) <= engine.kv_cache_config.num_blocks
        watched.until(lambda: watched.on("CPU") == blocks_of(client), "what the server has")
        reset(reset_connector=False)
        watched.until(lambda: watched.on("GPU") == 0, "an empty GPU")
        watched.until(lambda: watched.on("CPU") == blocks_of(client), "what the server has, again")
        client.clear(all=True)
        watched.until(lambda: watched.on("CPU") == 0, "nothing")


class Sleeper(EngineCore):
    """vLLM's own core as far as it sleeps, around an engine's scheduler. Nothing is on a device."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.scheduler = engine.scheduler
        self.mm_receiver_cache = None
        self.model_executor = Mock(is_sleeping=False)
        # vLLM 0.33 asks the workers for it when it wakes up.
        self.model_executor.get_kv_connector_handshake_metadata.return_value = None


@pytest.mark.parametrize("connector_too", [False, True])
def test_what_the_server_has_is_told_again_after_sleep(
    watch: Callable[..., Watched],
    kvdock: ServerProcess,
    monkeypatch: pytest.MonkeyPatch,
    connector_too: bool,
) -> None:
    """Whether or not this version of vLLM has sleep reset its connector's cache."""
    watched, other = watch(), watch()
    engine, consumer, blocks = watched.engine, watched.publisher.consumer, TOKENS // BLOCK_TOKENS
    reset = engine.scheduler.reset_prefix_cache
    monkeypatch.setattr(
        engine.scheduler,
        "reset_prefix_cache",
        lambda running=False, connector=False: reset(running, reset_connector=connector_too),
    )
    core = Sleeper(engine)
    with Client(kvdock.address) as client:
        for new in (1, 2):
            engine.generate(prompt(TOKENS))
            watched.until(lambda: watched.on("CPU") == blocks_of(client) >= blocks, "all blocks")
            watched.until(lambda: not engine.scheduler.has_requests(), "idle")
            before = consumer.on("CPU")

            core.sleep(level=1)
            # Meanwhile the server gets more.
            other.engine.generate(prompt(TOKENS, seed=new))
            other.until(lambda: not other.engine.scheduler.has_requests(), "stored")
            core.wake_up()

            assert blocks_of(client) == (0 if connector_too else len(before)) + blocks
            watched.until(lambda: watched.on("GPU") == 0, "an empty GPU")
            watched.until(lambda: watched.on("CPU") == blocks_of(client), "what the server has")
            kept = consumer.on("CPU") & before
            assert kept == (set() if connector_too else before)


def test_an_engine_can_be_told_to_publish_its_own_blocks_only(
    watch: Callable[..., Watched],
) -> None:
    silent = watch(extra_config={"kvdock.events": False})
    silent.engine.generate(prompt(TOKENS))
    other = watch()
    other.until(lambda: other.on("CPU") == TOKENS // BLOCK_TOKENS, "what the silent one stored")
    for _ in range(5):
        silent.engine.step()
    assert silent.on("GPU") == TOKENS // BLOCK_TOKENS
    assert silent.on("CPU") == 0


def test_what_is_too_large_to_be_told_is_cached_all_the_same(watch: Callable[..., Watched]) -> None:
    watched = watch()
    salt = "x" * (1 << 20)
    watched.engine.generate(prompt(2 * C + 1), cache_salt=salt)
    watched.until(lambda: watched.on("CPU") == C // BLOCK_TOKENS, "the chunk without the salt")
    watched.engine.forget()
    again = watched.engine.generate(prompt(2 * C + 1), cache_salt=salt)
    assert again.num_cached_tokens == 2 * C
