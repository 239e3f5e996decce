"""The relay's bookkeeping with vLLM's own event types, and their msgpack."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvdock import ChunkEventData, GroupKind
from kvdock.events import Medium, Removed, Stored
from kvdock_vllm.engine.groups import GroupShape
from kvdock_vllm.events import EventDescriber
from kvdock_vllm.events.published import Published
from kvdock_vllm.events.vllm_events import Adapter, GroupLabel

SCHEME = "this engine's"
BLOCKS_OF_8 = GroupShape(None, GroupKind.FULL_ATTENTION, 8, ("layer",))
LABELS = {
    None: GroupLabel(0, "full_attention", None),
    0: GroupLabel(0, "full_attention", None),
    1: GroupLabel(1, "sliding_window", 128),
}
SOURCE: Any = object()
"""Who tells what the server has."""
FIRST, SECOND, THIRD = b"1" * 32, b"2" * 32, b"3" * 32


def data(
    *hashes: bytes, scheme: str = SCHEME, parent: bytes = b"", adapter: str = "adapter", **more: Any
) -> ChunkEventData:
    return ChunkEventData(hashes, parent, bytes(range(8)) * len(hashes), 2, adapter, scheme, **more)


def stored(
    key: bytes,
    told: ChunkEventData | None,
    group_idx: int | None = None,
    medium: Medium = Medium.CPU,
) -> Stored:
    kind = GroupKind.FULL_ATTENTION
    return Stored(0, "n", key, b"", told, medium, group_idx, kind, 0)


def removed(key: bytes, group_idx: int | None = None, medium: Medium = Medium.CPU) -> Removed:
    return Removed(0, "n", key, (), medium, group_idx)


@pytest.fixture
def published() -> Published:
    """Of an engine that has an adapter, to which it gave number 5."""
    published = Published(lambda: SCHEME, LABELS)
    published.begin(SOURCE)
    published.know_adapter("adapter", Adapter(5, SCHEME))
    return published


def note(published: Published, changes: Sequence[Stored | Removed]) -> None:
    published.note(changes, SOURCE)


def take(published: Published) -> list[Any]:
    return published.take()


def names(hashes: Sequence[bytes]) -> list[Any]:
    return [maybe_convert_block_hash(one) for one in hashes]  # type: ignore[arg-type]


def test_an_event_has_vllms_fields(published: Published) -> None:
    told = data(FIRST, SECOND, parent=THIRD, extra_keys=(("adapter", ("pic", -3), b"\xff"), ()))
    note(published, [stored(b"a", told, 1)])
    (event,) = take(published)
    assert event == BlockStored(
        block_hashes=names([FIRST, SECOND]),
        parent_block_hash=names([THIRD])[0],
        token_ids=[0x03020100, 0x07060504] * 2,
        block_size=2,
        lora_id=5,
        medium="CPU",
        lora_name="adapter",
        extra_keys=[("adapter", ("pic", -3), b"\xff"), None],
        group_idx=1,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=128,
        locality="LOCAL",
    )
    note(published, [removed(b"a", 1)])
    assert take(published) == [
        BlockRemoved(
            block_hashes=names([FIRST, SECOND]), medium="CPU", group_idx=1, locality="LOCAL"
        )
    ]
    assert take(published) == []


def test_blocks_without_extra_keys_are_told_as_vllm_tells_them(published: Published) -> None:
    note(published, [stored(b"a", data(FIRST, SECOND))])
    (event,) = take(published)
    assert event.extra_keys == [None, None]


@pytest.mark.parametrize("extra_keys", [((),), ((), (), ()), ((), (None,)), ((), (("a", None),))])
def test_what_was_told_in_a_way_that_is_not_known_is_left_out(
    published: Published, extra_keys: Any
) -> None:
    note(published, [stored(b"a", data(FIRST, SECOND, extra_keys=extra_keys))])
    assert take(published) == []
    note(published, [removed(b"a")])
    assert take(published) == []


@pytest.mark.parametrize("token_ids", [b"", bytes(7), bytes(9), bytes(16)])
def test_what_was_told_with_other_tokens_than_its_blocks_have_is_left_out(
    published: Published, token_ids: bytes
) -> None:
    odd = ChunkEventData((FIRST,), b"", token_ids, 2, hash_scheme=SCHEME)
    note(published, [stored(b"a", data(SECOND)), stored(b"b", odd)])
    assert [event.block_hashes for event in take(published)] == [names([SECOND])]


def test_what_has_an_adapter_waits_until_the_engine_has_it(published: Published) -> None:
    parent, child = data(FIRST, adapter="new"), data(SECOND, parent=FIRST, adapter="new")
    gone = data(THIRD, adapter="new")
    note(published, [stored(b"p", parent), stored(b"c", child), stored(b"g", gone)])
    note(published, [stored(b"o", data(THIRD, adapter="another"))])
    assert take(published) == []
    note(published, [removed(b"g")])
    published.know_adapter("new", Adapter(9, SCHEME))
    told = take(published)
    assert [(event.block_hashes, event.lora_id) for event in told] == [
        (names([FIRST]), 9),
        (names([SECOND]), 9),
    ]
    published.know_adapter("new", Adapter(9, SCHEME))
    assert take(published) == []


def test_what_has_other_weights_than_the_engines_adapter_is_left_out(published: Published) -> None:
    note(published, [stored(b"p", data(FIRST)), stored(b"c", data(SECOND, parent=FIRST))])
    assert len(take(published)) == 2
    published.know_adapter("adapter", Adapter(6, "other weights"))
    gone = take(published)
    assert [event.block_hashes for event in gone] == [names([SECOND]), names([FIRST])]
    published.know_adapter("adapter", None)
    assert take(published) == []
    published.know_adapter("adapter", Adapter(7, SCHEME))
    come = take(published)
    assert [event.block_hashes for event in come] == [names([FIRST]), names([SECOND])]
    assert {event.lora_id for event in come} == {7}


def test_each_medium_is_told_for_itself(published: Published) -> None:
    on_disk = {"medium": Medium.STORAGE}
    note(published, [stored(b"a", data(FIRST)), stored(b"a", data(FIRST), **on_disk)])
    note(published, [stored(b"b", data(FIRST), **on_disk)])
    assert [event.medium for event in take(published)] == ["CPU", "STORAGE"]
    note(published, [removed(b"a")])
    assert [event.medium for event in take(published)] == ["CPU"]
    note(published, [removed(b"a", **on_disk)])
    assert take(published) == []
    note(published, [removed(b"b", **on_disk)])
    (gone,) = take(published)
    assert (gone.medium, gone.block_hashes) == ("STORAGE", names([FIRST]))


def test_what_is_on_media_that_the_server_does_not_give_from_is_left_out(
    published: Published,
) -> None:
    media = (Medium.GPU, Medium.UNSPECIFIED)
    note(published, [stored(b"a", data(FIRST), medium=medium) for medium in media])
    assert take(published) == []
    note(published, [removed(b"a", medium=medium) for medium in media])
    assert take(published) == []


def test_the_only_group_is_vllms_group_0(published: Published) -> None:
    note(published, [stored(b"a", data(FIRST), None)])
    (come,) = take(published)
    note(published, [removed(b"a", None)])
    (gone,) = take(published)
    assert (come.group_idx, gone.group_idx) == (0, 0)


def test_groups_0_and_1_stay_apart_through_vllms_msgpack(published: Published) -> None:
    groups = (0, 1)
    note(published, [stored(b"a", data(FIRST), group_idx) for group_idx in groups])
    events = take(published)
    note(published, [removed(b"a", 0)])
    events += take(published)
    encoded = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=events))
    decoded = msgspec.msgpack.decode(encoded, type=KVEventBatch).events
    assert [event.group_idx for event in decoded] == [0, 1, 0]
    # As consumers index: by group and hash.
    index = {(event.group_idx, event.block_hashes[0]) for event in decoded[:2]}
    assert len(index) == 2
    index.discard((decoded[2].group_idx, decoded[2].block_hashes[0]))
    assert {group_idx for group_idx, _ in index} == {1}


def test_a_hash_of_two_parts_goes_with_the_last_of_them(published: Published) -> None:
    note(published, [stored(b"a", data(FIRST, SECOND)), stored(b"b", data(SECOND, THIRD))])
    assert len(take(published)) == 2
    note(published, [removed(b"a")])
    (event,) = take(published)
    assert event.block_hashes == names([FIRST])
    note(published, [removed(b"b")])
    (event,) = take(published)
    assert event.block_hashes == names([SECOND, THIRD])


def test_what_comes_and_goes_between_two_steps_is_not_mentioned(published: Published) -> None:
    note(published, [stored(b"a", data(FIRST))])
    note(published, [removed(b"a")])
    assert take(published) == []
    note(published, [stored(b"a", data(FIRST))])
    assert len(take(published)) == 1
    note(published, [removed(b"a"), stored(b"a", data(FIRST))])
    assert take(published) == []


def test_what_was_stored_anew_with_other_hashes_is_told_anew(published: Published) -> None:
    note(published, [stored(b"a", data(FIRST))])
    take(published)
    note(published, [removed(b"a"), stored(b"a", data(SECOND))])
    gone, come = take(published)
    assert (gone.block_hashes, come.block_hashes) == (names([FIRST]), names([SECOND]))


def test_hashes_of_another_kind_and_parts_without_any_are_left_out(published: Published) -> None:
    note(
        published,
        [
            stored(b"a", data(FIRST, scheme="another engine's")),
            stored(b"b", None),
            stored(b"c", data()),
        ],
    )
    assert take(published) == []
    note(published, [removed(b"a"), removed(b"b"), removed(b"c")])
    assert take(published) == []


def test_parents_come_first_and_go_last_also_when_they_come_again(published: Published) -> None:
    parent, child = data(FIRST), data(SECOND, parent=FIRST)
    note(published, [stored(b"p", parent), stored(b"c", child)])
    assert [event.block_hashes for event in take(published)] == [names([FIRST]), names([SECOND])]
    note(published, [removed(b"c"), removed(b"p")])
    assert [event.block_hashes for event in take(published)] == [names([SECOND]), names([FIRST])]
    note(published, [stored(b"p", parent), stored(b"c", child), removed(b"c"), removed(b"p")])
    note(published, [stored(b"p", parent), stored(b"c", child)])
    assert [event.block_hashes for event in take(published)] == [names([FIRST]), names([SECOND])]


def test_a_step_publishes_a_bounded_number(published: Published) -> None:
    keys = [number.to_bytes(4, "big") for number in range(250)]
    note(published, [stored(key, data(key * 8)) for key in keys])
    assert [len(take(published)) for _ in range(4)] == [100, 100, 50, 0]


def test_a_step_never_waits_for_the_follower(published: Published) -> None:
    note(published, [stored(b"a", data(FIRST))])
    with published._lock:
        assert take(published) == []
    assert len(take(published)) == 1


@pytest.fixture
def pool(published: Published) -> BlockPool:
    """The engine's own blocks."""
    pool = BlockPool(8, True, 16, enable_kv_cache_events=True)
    published.watch_pool(pool)
    return pool


def consumed(published: Published, pool: BlockPool) -> list[Any]:
    """What a step publishes: vLLM takes the engine's own events first."""
    return [*pool.take_events(), *take(published)]


def test_what_is_there_is_told_again_after_the_engine_cleared_its_cache(
    published: Published, pool: BlockPool
) -> None:
    parent, child, gone = data(FIRST), data(SECOND, parent=FIRST), data(THIRD)
    note(published, [stored(b"p", parent), stored(b"c", child), stored(b"g", gone)])
    assert len(consumed(published, pool)) == 3
    note(published, [removed(b"g")])
    assert pool.reset_prefix_cache()
    cleared, *again = consumed(published, pool)
    assert isinstance(cleared, AllBlocksCleared)
    assert [event.block_hashes for event in again] == [names([FIRST]), names([SECOND])]
    # Once, and what goes later is removed once.
    assert consumed(published, pool) == []
    note(published, [removed(b"c"), removed(b"p")])
    assert [type(event) for event in consumed(published, pool)] == [BlockRemoved] * 2


def test_clearings_are_noticed_also_where_a_step_tells_nothing(
    published: Published, pool: BlockPool
) -> None:
    note(published, [stored(b"a", data(FIRST))])
    assert len(consumed(published, pool)) == 1
    assert pool.reset_prefix_cache()
    with published._lock:
        # The follower is at it, so only the engine is heard.
        assert [type(event) for event in consumed(published, pool)] == [AllBlocksCleared]
    assert [type(event) for event in consumed(published, pool)] == [BlockStored]


def test_an_engine_that_could_not_clear_its_cache_repeats_nothing(
    published: Published, pool: BlockPool
) -> None:
    note(published, [stored(b"a", data(FIRST))])
    assert len(consumed(published, pool)) == 1
    (block,) = pool.get_new_blocks(1)
    assert not pool.reset_prefix_cache()
    assert consumed(published, pool) == []
    pool.free_blocks([block])


def test_what_one_source_had_is_void_when_another_begins(
    published: Published, pool: BlockPool
) -> None:
    parent, child = data(FIRST), data(SECOND, parent=FIRST)
    note(published, [stored(b"p", parent), stored(b"c", child)])
    assert len(consumed(published, pool)) == 2
    published.begin(None)
    note(published, [stored(b"a", data(THIRD))])
    gone = consumed(published, pool)
    assert [event.block_hashes for event in gone] == [names([SECOND]), names([FIRST])]
    other: Any = object()
    published.begin(other)
    published.note([stored(b"p", parent)], other)
    note(published, [removed(b"p")])
    assert [event.block_hashes for event in consumed(published, pool)] == [names([FIRST])]


class _Describer(EventDescriber):
    """With granularity and scheme given, which else come from an engine's configuration."""

    def __init__(self, hash_tokens: int) -> None:
        self._hash_tokens = hash_tokens
        self._scheme = SCHEME
        self._said_left_out = False


def request(tokens: int, hash_tokens: int, **more: Any) -> Any:
    hashes = [number.to_bytes(32, "big") for number in range(1, tokens // hash_tokens + 1)]
    nothing = {"lora_request": None, "mm_features": [], "cache_salt": None, "prompt_embeds": None}
    return SimpleNamespace(
        block_hashes=hashes, all_token_ids=list(range(tokens)), **(nothing | more)
    )


def test_what_is_told_of_chunks() -> None:
    asked = request(70, hash_tokens=8)
    second, third = _Describer(8).describe(asked, None, BLOCKS_OF_8, range(1, 3), 16)
    assert second.block_hashes == tuple(asked.block_hashes[2:4])
    assert second.parent_block_hash == asked.block_hashes[1]
    assert third.block_hashes == tuple(asked.block_hashes[4:6])
    assert third.token_ids == b"".join(n.to_bytes(4, "little") for n in range(32, 48))
    assert (third.block_size, third.lora_name, third.hash_scheme) == (8, "", SCHEME)
    (first,) = _Describer(8).describe(asked, None, BLOCKS_OF_8, range(0, 1), 16)
    assert first.parent_block_hash == b""


def test_of_a_window_only_what_is_stored_is_told() -> None:
    asked = request(70, hash_tokens=4)
    shape = GroupShape(1, GroupKind.SLIDING_WINDOW, 8, ("layer",), window_tokens=10)
    first, second = _Describer(4).describe(asked, None, shape, range(0, 2), 32)
    # The last two of each chunk's four blocks.
    assert first.block_hashes == (asked.block_hashes[5], asked.block_hashes[7])
    assert first.parent_block_hash == asked.block_hashes[3]
    assert second.block_hashes == (asked.block_hashes[13], asked.block_hashes[15])
    assert second.token_ids == b"".join(n.to_bytes(4, "little") for n in range(48, 64))


def test_a_larger_block_has_the_hash_of_its_end() -> None:
    asked = request(70, hash_tokens=4)
    (second,) = _Describer(4).describe(asked, None, BLOCKS_OF_8, range(1, 2), 16)
    assert second.block_hashes == (asked.block_hashes[5], asked.block_hashes[7])
    assert second.parent_block_hash == asked.block_hashes[3]


def test_nothing_is_told_of_what_is_not_hashed() -> None:
    asked = request(31, hash_tokens=8)
    assert len(_Describer(8).describe(asked, None, BLOCKS_OF_8, range(0, 1), 16)) == 1
    assert _Describer(8).describe(asked, None, BLOCKS_OF_8, range(0, 2), 16) == ()
    assert _Describer(16).describe(asked, None, BLOCKS_OF_8, range(0, 1), 16) == ()


def test_what_is_told_beside_the_tokens_is_of_the_whole_block() -> None:
    asked = request(70, hash_tokens=4, cache_salt="salt")
    first, second = _Describer(4).describe(asked, None, BLOCKS_OF_8, range(0, 2), 16)
    assert first.extra_keys == (("salt",), ())
    assert second.extra_keys == ()


@pytest.mark.parametrize("salt", ["x" * (1 << 20), "\ud800", 1.5])
def test_a_chunk_that_cannot_be_told_exactly_is_stored_untold(
    salt: object, caplog: pytest.LogCaptureFixture
) -> None:
    asked = request(70, hash_tokens=8, cache_salt=salt)
    first, second = _Describer(8).describe(asked, None, BLOCKS_OF_8, range(0, 2), 16)
    assert first == ChunkEventData()
    assert second.block_hashes == tuple(asked.block_hashes[2:4])
    assert "leave out" in caplog.text


def test_what_one_store_tells_leaves_room_in_its_message() -> None:
    chunks, chunk_tokens = 1_000, 1_024
    asked = request(chunks * chunk_tokens, hash_tokens=8)
    told = _Describer(8).describe(asked, None, BLOCKS_OF_8, range(0, chunks), chunk_tokens)
    assert len(told) == chunks
    assert 2 << 20 < sum(one.to_proto().ByteSize() for one in told) < 4 << 20
