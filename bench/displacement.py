"""How much of a pool one model's chunks get when the pool is full of another model's chunks.

This is measured in one process, with a server's index over memory that is not real.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from kvdock_server.config import Config
from kvdock_server.core import Core
from kvdock_server.index.index import Slot
from kvdock_server.index.namespace import Group, GroupKind, Namespace
from kvdock_server.index.policies import POLICIES
from kvdock_server.steps import at_once
from kvdock_server.tiers.host.pool import slab_bytes
from kvdock_server.tiers.host.slots import SlotAllocator

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

CHUNK_TOKENS: Final = 256


def _attention(layers: int, heads: int, head_size: int) -> int:
    """Bytes of a chunk's keys and values of two bytes each."""
    return CHUNK_TOKENS * layers * 2 * heads * head_size * 2


LLAMA_8B = _attention(32, 8, 128)
LLAMA_70B = _attention(80, 8, 128)
LLAMA_70B_OF_4 = LLAMA_70B // 4
"""A shard of one of four ranks."""
QWEN3_14B = _attention(40, 8, 128)
QWEN3_30B_A3B = _attention(48, 4, 128)
QWEN25_14B = _attention(48, 8, 128)
GEMMA3_12B = _attention(8, 8, 256)
"""One of its groups. Each has the same number of layers."""
GEMMA3_27B = _attention(10, 16, 128)
DEEPSEEK_V3 = CHUNK_TOKENS * 61 * 576 * 2


class Pair(NamedTuple):
    """Bytes of a chunk's shard of two models, and of the pool in which the second follows."""

    name: str
    first: int
    second: int
    pool: int = 8 * GIB


PAIRS: Final = (
    Pair("Llama 8B, Qwen3 14B", LLAMA_8B, QWEN3_14B),
    Pair("Llama 8B, Qwen3 30B-A3B", LLAMA_8B, QWEN3_30B_A3B),
    Pair("Llama 8B, Qwen2.5 14B", LLAMA_8B, QWEN25_14B),
    Pair("Llama 8B, Llama 70B", LLAMA_8B, LLAMA_70B),
    Pair("Llama 8B, DeepSeek V3", LLAMA_8B, DEEPSEEK_V3),
    Pair("Llama 70B, Llama 8B", LLAMA_70B, LLAMA_8B),
    Pair("Llama 70B, Qwen3 14B", LLAMA_70B, QWEN3_14B),
    Pair("Llama 70B on 4, DeepSeek V3", LLAMA_70B_OF_4, DEEPSEEK_V3),
    Pair("Qwen3 14B, Llama 8B", QWEN3_14B, LLAMA_8B),
    Pair("Qwen3 30B-A3B, Qwen3 14B", QWEN3_30B_A3B, QWEN3_14B),
    Pair("Qwen2.5 14B, Qwen3 14B", QWEN25_14B, QWEN3_14B),
    Pair("Gemma 3 12B, Qwen3 30B-A3B", GEMMA3_12B, QWEN3_30B_A3B),
    Pair("Gemma 3 27B, Qwen2.5 14B", GEMMA3_27B, QWEN25_14B),
    Pair("DeepSeek V3, Llama 8B", DEEPSEEK_V3, LLAMA_8B),
    Pair("DeepSeek V3, Gemma 3 27B", DEEPSEEK_V3, GEMMA3_27B),
    Pair("16 KiB, 2 MiB + 4 KiB", 16 * KIB, 2 * MIB + 4 * KIB, 256 * MIB),
)


class Model:
    """A namespace of one size of shards in a core, and what was stored there."""

    def __init__(self, core: Core, name: str, shard_bytes: int, prompt_chunks: int) -> None:
        group = Group(None, GroupKind.FULL_ATTENTION, 0, (shard_bytes,))
        core.index.register(Namespace(name, CHUNK_TOKENS, 1, (group,)))
        self._core = core
        self._name = name
        self._shard_bytes = shard_bytes
        self._prompt_chunks = prompt_chunks
        self._stored = 0

    def store(self, nbytes: int) -> list[list[bytes]]:
        """Store new prompts of ``nbytes`` in all; the keys of each."""
        prompts = []
        for _ in range(0, nbytes, self._shard_bytes * self._prompt_chunks):
            first = self._stored
            self._stored += self._prompt_chunks
            name = self._name.encode().ljust(24)
            keys = [name + number.to_bytes(8, "big") for number in range(first, self._stored)]
            for outcome in at_once(
                self._core.reserve_in_steps(None, self._name, None, 0, b"", keys)
            ):
                if isinstance(outcome, Slot):
                    self._core.seal(outcome)
            prompts.append(keys)
        return prompts

    @property
    def bytes(self) -> int:
        """Bytes of the model's parts that a lookup can find."""
        return self._core.index.space(self._name).visible_parts * self._shard_bytes


def core_of(pool: int, *, slab: int = 0) -> Core:
    """A core over an empty pool of ``pool`` bytes. ``slab`` 0: slabs as large as the server's."""
    slots = SlotAllocator(pool, slab or slab_bytes(pool))
    slots.add(0, slots.limit_bytes)
    return Core(slots, policy=POLICIES[Config.eviction](slots.limit_bytes))


def share_of_fresh(pair: Pair, prompt_chunks: int) -> float:
    """The second model's bytes in a pool full of the first model's, over those in a fresh pool.

    It stores as much as fits into a fresh pool, and twice as much into the full one.
    """
    core = core_of(pair.pool)
    fresh = Model(core, "second", pair.second, prompt_chunks)
    fresh.store(pair.pool)
    core = core_of(pair.pool)
    Model(core, "first", pair.first, prompt_chunks).store(pair.pool + pair.pool // 4)
    second = Model(core, "second", pair.second, prompt_chunks)
    second.store(2 * pair.pool)
    return second.bytes / fresh.bytes
