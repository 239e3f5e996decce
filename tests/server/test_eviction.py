"""Several slot sizes fighting for one pool: how much goes to make room for one chunk."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from wire import DEADLINE, Wire, key

from kvdock.v1 import cache_pb2, types_pb2

PROMPTS = [key(index >> 8, index & 255) for index in range(2048)]


@pytest.fixture
def full(start_server: Callable[..., object]) -> Iterator[Wire]:
    """A pool of 16 MiB full of 2,048 one-chunk prompts in slots of 8 KiB."""
    server = start_server(memory="16MiB")
    wire = Wire(server.address)  # type: ignore[attr-defined]
    wire.register("small", shard_bytes=8192)
    wire.register("other", shard_bytes=12_288)
    for prompt in PROMPTS:
        wire.put([prompt], [bytes(8192)], name="small")
    assert wire.status().index.parts == len(PROMPTS)
    yield wire
    wire.channel.close()


def test_room_for_one_chunk_of_another_size_costs_about_one_slab(full: Wire) -> None:
    order = PROMPTS[:]
    random.Random(1).shuffle(order)
    for prompt in order:  # uses in an order of their own, as real prompts have
        lease = full.lookup([prompt], name="small").lease_id
        lock = cache_pb2.LockRange(lease_id=lease)
        full.cache.FreeLocks(cache_pb2.FreeLocksRequest(locks=[lock]), timeout=DEADLINE)
    result = full.put([key(9)], [bytes(12_288)], name="other")[-1].result
    assert result.status == types_pb2.CHUNK_STATUS_STORED
    # A slab (1 MiB) has 128 of these slots. Half the cache for 12 KiB would be far too much.
    assert full.status().counters.evicted_parts < len(PROMPTS) // 2


def test_a_store_that_finds_no_space_has_not_emptied_the_cache(full: Wire) -> None:
    for prompt in PROMPTS[::128]:
        assert full.lookup([prompt], name="small").lease_id
    assert full.status().index.locked_parts == 16
    result = full.put([key(9)], [bytes(12_288)], name="other")[-1].result
    # No run of slots is free of locks, so nothing would be gained by evicting: nothing is evicted.
    assert result.status == types_pb2.CHUNK_STATUS_NO_SPACE
    assert full.status().index.parts == len(PROMPTS)
