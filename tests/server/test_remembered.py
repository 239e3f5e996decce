"""The eviction policy that remembers what was evicted, over a server's core."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from workloads import Prompts, chats

from kvdock.replay import memory
from kvdock.replay.simulation import LRU, MEMORY
from kvdock.replay.simulation import POLICIES as SIMULATED
from kvdock.replay.trace import Trace
from kvdock_server.core import Core
from kvdock_server.index import remembered
from kvdock_server.index.chunk import Chunk, NamespaceIndex, Part
from kvdock_server.index.index import Slot
from kvdock_server.index.namespace import Group, GroupKind, Namespace
from kvdock_server.index.policies import POLICIES
from kvdock_server.index.remembered import EvictedParts
from kvdock_server.steps import at_once
from kvdock_server.tiers.host.slots import PAGE_BYTES, SlotAllocator

SLAB = 4 * PAGE_BYTES


class ServerPool:
    """A server's core, used as the policies of ``kvdock replay`` are."""

    def __init__(self, policy: str, chunks: int, *, shards: int = 1, other_pages: int = 0) -> None:
        """``other_pages``: the pages of a chunk of a second namespace, "other"."""
        slots = SlotAllocator(chunks * shards * PAGE_BYTES, SLAB)
        slots.add(0, slots.limit_bytes)
        assert slots.limit_bytes == chunks * shards * PAGE_BYTES
        self.core = Core(slots, policy=POLICIES[policy](slots.limit_bytes))
        self.shards = shards
        group = Group(None, GroupKind.FULL_ATTENTION, 0, (PAGE_BYTES,) * shards)
        self.core.index.register(Namespace("n", 16, shards, (group,)))
        if other_pages:
            group = Group(None, GroupKind.FULL_ATTENTION, 0, (other_pages * PAGE_BYTES,))
            self.core.index.register(Namespace("other", 16, 1, (group,)))

    def use(self, prompt: Sequence[int], name: str = "n") -> int:
        keys = [(block + 1).to_bytes(32, "little") for block in prompt]
        hit = self.core.lookup(None, name, keys)
        if hit.lease is not None:
            at_once(self.core.leases.release_in_steps(hit.lease))
        parent = keys[hit.chunks - 1] if hit.chunks else b""
        for shard in range(self.shards if hit.chunks < len(keys) else 0):
            rest = keys[hit.chunks :]
            steps = self.core.reserve_in_steps(None, name, None, shard, parent, rest)
            for slot in at_once(steps):
                if isinstance(slot, Slot):
                    self.core.seal(slot)
        return hit.chunks


def trace_of(prompts: Prompts) -> Trace:
    parents = {block: parent for p in prompts for parent, block in zip((-1, *p), p, strict=False)}
    return Trace(prompts, [parents[block] for block in range(len(parents))])


def total(pool: ServerPool, prompts: Prompts) -> int:
    return sum(map(pool.use, prompts))


@pytest.mark.parametrize("size", [64, 512])
def test_the_simulated_policies_find_what_the_servers_find(size: int) -> None:
    prompts = chats(4, 300)
    for policy in (LRU, MEMORY):
        simulated = SIMULATED[policy](size, trace_of(prompts))
        server = ServerPool(policy, size)
        differences = [abs(server.use(prompt) - simulated.use(prompt)) for prompt in prompts]
        # A lookup counts as a use of its own in the server, so with memory a tie may end otherwise.
        assert sum(differences) <= (0 if policy == LRU else 0.02 * sum(map(len, prompts)))


def test_both_give_the_same_start() -> None:
    assert memory.HEAD_START == remembered.HEAD_START


@pytest.mark.parametrize(
    ("size", "shards", "least"), [(128, 1, 1.2), (128, 2, 1.2), (512, 1, 0.99), (2_048, 1, 0.99)]
)
def test_a_small_pool_finds_more_with_memory_and_a_large_one_no_less(
    size: int, shards: int, least: float
) -> None:
    prompts = chats(5, 400, users=30)
    with_memory, lru = (
        total(ServerPool(policy, size, shards=shards), prompts) for policy in (MEMORY, LRU)
    )
    assert with_memory >= least * lru


@pytest.mark.parametrize(("size", "other_pages", "least"), [(192, 2, 1.5), (768, 3, 1.05)])
def test_chunks_of_two_sizes_compete_by_the_same_rank(
    size: int, other_pages: int, least: float
) -> None:
    found = {}
    for policy in (LRU, MEMORY):
        pool = ServerPool(policy, size, other_pages=other_pages)
        prompts = chats(7, 600, users=30)
        found[policy] = sum(pool.use(one, "other" if one[0] % 2 else "n") for one in prompts)
    assert found[MEMORY] >= least * found[LRU]


def test_what_comes_back_late_outlives_what_passes() -> None:
    late: Prompts = [(number,) for number in range(8)]
    passing = iter(range(100, 10_000))
    found = {}
    for policy in POLICIES:
        pool = ServerPool(policy, 16)
        found[policy] = 0
        for _ in range(20):
            assert total(pool, [(next(passing),) for _ in range(20)]) == 0
            found[policy] += total(pool, late)
    # The more of it stays, the shorter is the head start: it need not always be all.
    assert found[LRU] == 0
    assert found[MEMORY] > 0.7 * 20 * len(late)


def test_what_is_no_longer_used_leaves_in_the_end() -> None:
    old, new = chats(6, 200), [tuple(10**6 + b for b in p) for p in chats(7, 400)]
    pool = ServerPool(MEMORY, 64)
    total(pool, old)
    total(pool, new)
    space = pool.core.index.space("n")
    left = [key for key in space.chunks if int.from_bytes(key, "little") < 10**6]
    assert not left


def test_the_ends_of_prompts_go_first_also_when_they_were_used_again() -> None:
    pool = ServerPool(MEMORY, 16)
    for _ in range(4):
        total(pool, [tuple(range(8)), *((number,) for number in range(100, 130))])
    pool.use(tuple(range(8)))
    for number in range(200, 400):
        pool.use((number,))
        known = list(pool.core.index.space("n").chunks.values())
        assert all(chunk.parent is None or chunk.parent.parts[0] for chunk in known)


def test_cleared_parts_are_not_remembered() -> None:
    policy = remembered.LruWithMemory(1 << 20)
    group = Group(None, GroupKind.FULL_ATTENTION, 0, (PAGE_BYTES,))
    space = NamespaceIndex(Namespace("n", 16, 1, (group,)))
    part = Part(Chunk(space, bytes(32), None), 0, 1)
    space.clear()
    policy.evicted(part)
    assert part not in policy._evicted


def test_the_memory_of_what_was_evicted_has_one_size_and_forgets() -> None:
    evicted = EvictedParts(64)
    group = Group(None, GroupKind.FULL_ATTENTION, 0, (PAGE_BYTES,))
    space = NamespaceIndex(Namespace("n", 16, 1, (group,)))
    other = NamespaceIndex(Namespace("other", 16, 1, (group,)))

    def part(number: int, of: NamespaceIndex = space) -> Part:
        return Part(Chunk(of, number.to_bytes(32, "little"), None), 0, 1)

    first = part(0)
    assert first not in evicted
    assert not evicted.add(first)
    assert evicted.add(first)
    assert part(0) in evicted
    assert part(0, other) not in evicted
    for number in range(1, 10_000):
        evicted.add(part(number))
    remembered_parts = sum(part(number) in evicted for number in range(10_000))
    assert 0 < remembered_parts <= 64
    assert part(0) not in evicted
