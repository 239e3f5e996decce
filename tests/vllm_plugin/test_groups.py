"""What a group needs of the past: against vLLM's own manager and the server's hit rule."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    MambaManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvdock.types import GroupKind
from kvdock_server.index import namespace as server
from kvdock_vllm.engine.groups import GroupShape, chunk_tokens, fitting_chunk_tokens
from kvdock_vllm.vllm_groups import UnsupportedModelError, group_shapes, offers_states

SIZES: dict[str, Any] = {"num_kv_heads": 2, "head_size": 8, "dtype": torch.float16}
LATENT: dict[str, Any] = {"num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}


def full(block: int = 4, **more: Any) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, **SIZES, **more)


def knows(kind: type[Any], name: str) -> bool:
    """Whether this vLLM's dataclass has that field."""
    return name in {field.name for field in dataclasses.fields(kind)}


RETAINS = knows(SlidingWindowSpec, "extra_retained_tokens")


def window(tokens: int, block: int = 4, retained: int = 0) -> SlidingWindowSpec:
    more: dict[str, Any] = {"extra_retained_tokens": retained} if retained else {}
    return SlidingWindowSpec(block_size=block, sliding_window=tokens, **SIZES, **more)


def local(piece: int, block: int = 4) -> ChunkedLocalAttentionSpec:
    return ChunkedLocalAttentionSpec(block_size=block, attention_chunk_size=piece, **SIZES)


def shapes_of(*specs: KVCacheSpec) -> tuple[GroupShape, ...]:
    groups = [KVCacheGroupSpec([f"layer.{n}"], spec) for n, spec in enumerate(specs)]
    return group_shapes(KVCacheConfig(6, [], groups), "some/model")


# -- which models -----------------------------------------------------------------------------


def test_one_group_is_no_group_and_several_are_numbered() -> None:
    assert [shape.group_idx for shape in shapes_of(full())] == [None]
    assert [shape.group_idx for shape in shapes_of(window(8))] == [None]
    assert [shape.group_idx for shape in shapes_of(window(8), full(), window(8))] == [0, 1, 2]


@pytest.mark.parametrize(
    ("spec", "kind", "tokens"),
    [
        (full(), GroupKind.FULL_ATTENTION, 0),
        (full(sliding_window=64), GroupKind.FULL_ATTENTION, 0),
        (MLAAttentionSpec(block_size=16, **LATENT), GroupKind.FULL_ATTENTION, 0),
        # Llama 4 with EAGLE: vLLM keeps all blocks of all layers, in one group.
        (full(attention_chunk_size=64), GroupKind.FULL_ATTENTION, 0),
        (local(64), GroupKind.CHUNKED_LOCAL_ATTENTION, 64),
        (window(128), GroupKind.SLIDING_WINDOW, 128),
        # Kept below the window for speculative decoding, and so looked for in it.
        *([(window(128, retained=2), GroupKind.SLIDING_WINDOW, 130)] if RETAINS else []),
        (
            SlidingWindowMLASpec(block_size=16, sliding_window=128, **LATENT),
            GroupKind.SLIDING_WINDOW,
            128,
        ),
        (
            UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs={"a": window(9), "b": window(9)}),
            GroupKind.SLIDING_WINDOW,
            9,
        ),
    ],
)
def test_kinds_and_windows(spec: KVCacheSpec, kind: GroupKind, tokens: int) -> None:
    (shape,) = shapes_of(spec)
    assert (shape.kind, shape.window_tokens) == (kind, tokens)


def mamba(block: int = 4) -> KVCacheSpec:
    return MambaSpec(block_size=block, shapes=((2, 2),), dtypes=(torch.float32,))


needs_states = pytest.mark.skipif(not offers_states(), reason="refused with this vLLM")


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: SinkFullAttentionSpec(block_size=4, sink_len=4, **SIZES), "SinkFullAttentionSpec"),
        pytest.param(
            mamba,
            "recurrent state .MambaSpec.*vLLM 0.32",
            marks=pytest.mark.skipif(offers_states(), reason="not refused with this vLLM"),
        ),
        (lambda: full(non_causal=True), "non-causally"),
        pytest.param(
            lambda: SlidingWindowMLASpec(
                block_size=16, sliding_window=128, bounded_replay=True, **LATENT
            ),
            "SlidingWindowMLASpec",
            marks=pytest.mark.skipif(
                not knows(SlidingWindowMLASpec, "bounded_replay"), reason="not in this vLLM"
            ),
        ),
    ],
)
def test_caches_with_rules_of_their_own_are_refused_by_model_and_kind(
    make: Callable[[], KVCacheSpec], named: str
) -> None:
    for specs in ([make()], [full(), make()]):
        with pytest.raises(UnsupportedModelError, match=f"some/model.*{named}"):
            shapes_of(*specs)


@pytest.mark.skipif(not knows(KVCacheGroupSpec, "enable_kv_transfer"), reason="not in this vLLM")
def test_groups_that_vllm_keeps_for_itself_are_refused() -> None:
    group = KVCacheGroupSpec(["a"], full(), enable_kv_transfer=False)
    with pytest.raises(UnsupportedModelError, match="some/model"):
        group_shapes(KVCacheConfig(6, [], [group]), "some/model")


def test_a_stage_without_a_layer_of_some_group_is_refused() -> None:
    groups = [KVCacheGroupSpec(["a"], full()), KVCacheGroupSpec([], window(8))]
    with pytest.raises(UnsupportedModelError, match=r"some/model.*pipeline_parallel_size"):
        group_shapes(KVCacheConfig(6, [], groups), "some/model")


@needs_states
def test_a_recurrent_layer_has_a_state() -> None:
    ((alone,), hybrid) = shapes_of(mamba()), shapes_of(mamba(), full())
    assert (alone.kind, alone.window_tokens) == (GroupKind.RECURRENT_STATE, 0)
    assert [shape.is_state for shape in hybrid] == [True, False]
    assert [shape.leaves_blocks_behind for shape in hybrid] == [True, False]


# -- which blocks -----------------------------------------------------------------------------


@needs_states
@given(block=st.integers(1, 40), blocks=st.integers(1, 50), chunk_blocks=st.integers(1, 6))
def test_of_a_state_the_last_block_is_needed(block: int, blocks: int, chunk_blocks: int) -> None:
    (shape,) = shapes_of(mamba(block))
    end = block * blocks
    skipped = MambaManager.get_num_skipped_tokens(SimpleNamespace(), end)  # type: ignore[arg-type]
    assert shape.first_needed_block(end) == skipped // block
    assert shape.needed_blocks(0, end) == range(blocks - 1, blocks)
    assert shape.needed_blocks(end - block, end) == range(blocks - 1, blocks)
    # vLLM takes the block back when a token behind it is computed.
    assert shape.left_behind_at(blocks - 1) == end + 1
    assert shape.first_needed_block(end + 1) == blocks
    chunk = shape.part(2, chunk_blocks * block)
    assert (chunk.start, chunk.stop) == (3 * chunk_blocks - 1, 3 * chunk_blocks)
    assert shape.part_blocks(chunk_blocks * block) == 1
    assert shape.lacks_a_block_for_the_last_token


@needs_states
@pytest.mark.parametrize(
    ("announced", "chosen", "blocks", "tokens"),
    [
        (256, None, [16], 16),
        (32, None, [256, 256], 256),
        (512, None, [256, 128], 256),
        (32, 64, [16], 64),
        (32, 300, [256], 512),
    ],
)
def test_chunks_of_a_model_with_states_are_as_short_as_they_can_be(
    announced: int, chosen: int | None, blocks: list[int], tokens: int
) -> None:
    states = shapes_of(*(mamba(block) for block in blocks))
    assert chunk_tokens(announced, chosen, states) == tokens
    attention = shapes_of(*(full(block) for block in blocks))
    assert chunk_tokens(announced, None, attention) == fitting_chunk_tokens(announced, attention)


@given(
    block=st.integers(1, 40),
    tokens=st.integers(1, 200),
    extra=st.sampled_from([0, 0, 1, 3] if RETAINS else [0]),
    computed=st.integers(0, 1000),
)
def test_needed_are_the_blocks_that_vllm_holds(
    block: int, tokens: int, extra: int, computed: int
) -> None:
    spec = window(tokens, block, extra)
    manager = SimpleNamespace(sliding_window=tokens, extra_retained_tokens=extra)
    skipped = SlidingWindowManager.get_num_skipped_tokens(manager, computed)  # type: ignore[arg-type]
    (shape,) = shapes_of(spec)
    assert shape.first_needed_block(computed) == skipped // block
    assert shapes_of(full(block))[0].first_needed_block(computed) == 0


@given(block=st.integers(1, 40), piece=st.integers(1, 200), computed=st.integers(0, 1000))
def test_needed_of_a_piece_are_the_blocks_that_vllm_holds(
    block: int, piece: int, computed: int
) -> None:
    manager = SimpleNamespace(attention_chunk_size=piece)
    skipped = ChunkedLocalAttentionManager.get_num_skipped_tokens(manager, computed)  # type: ignore[arg-type]
    (shape,) = shapes_of(local(piece, block))
    assert shape.first_needed_block(computed) == skipped // block
    # A block is left behind by the first number of computed tokens after which it is not needed.
    first = shape.first_needed_block(computed)
    gone_at = shape.left_behind_at(first)
    assert shape.first_needed_block(gone_at) > first >= shape.first_needed_block(gone_at - 1)


@st.composite
def sizes(draw: st.DrawFn) -> tuple[GroupShape, int]:
    """A window or pieces, and a chunk that fits."""
    block, tokens = draw(st.integers(1, 24)), draw(st.integers(2, 150))
    spec = draw(st.sampled_from([window(tokens, block), local(tokens, block)]))
    shapes = shapes_of(spec)
    return shapes[0], fitting_chunk_tokens(block * draw(st.integers(1, 12)), shapes)


@given(sizes(), st.integers(1, 20))
def test_the_parts_that_a_hit_locks_hold_every_block_that_it_needs(
    drawn: tuple[GroupShape, int], hit: int
) -> None:
    shape, chunk_tokens = drawn
    group = server.Group(
        group_idx=None,
        kind=server.GroupKind(shape.kind),
        window_tokens=0 if shape.is_in_pieces else shape.window_tokens,
        shard_bytes=(1,),
        attention_chunk_tokens=shape.window_tokens if shape.is_in_pieces else 0,
    )
    locked = range(hit - group.needed_chunks(hit, chunk_tokens), hit)
    had = {
        block
        for chunk in locked
        for block in range(*shape.part(chunk, chunk_tokens).indices(1 << 30))
    }
    end = hit * chunk_tokens
    assert had >= set(shape.needed_blocks(0, end))
    # And with them every token that the next one sees.
    first_seen = end - shape.window_tokens + 1
    if shape.is_in_pieces:
        first_seen = end - end % shape.window_tokens
    seen = range(max(0, first_seen), end)
    assert had >= {token // shape.block_tokens for token in seen}


@given(sizes(), st.integers(0, 600), st.integers(1, 300))
def test_what_a_step_completes_it_still_holds(
    drawn: tuple[GroupShape, int], computed: int, scheduled: int
) -> None:
    shape, chunk_tokens = drawn
    held = shape.first_needed_block(computed)
    # One step later too, which is when an asynchronous scheduler knows the last token.
    before = max(0, computed - 1)
    for chunk in range(before // chunk_tokens, (computed + scheduled) // chunk_tokens):
        is_needed = not shape.is_in_pieces or (chunk + 1) * chunk_tokens % shape.window_tokens
        assert shape.part(chunk, chunk_tokens).start >= held or not is_needed


def test_a_window_keeps_no_more_of_a_chunk_than_a_hit_can_ask_for() -> None:
    gpt_oss, gemma, all_of_it = shapes_of(window(128, 16), window(1024, 16), full(16))
    assert [shape.part_blocks(256) for shape in (gpt_oss, gemma, all_of_it)] == [8, 16, 16]
    assert gpt_oss.part(2, 256) == slice(40, 48)
    assert gemma.part(2, 256) == slice(32, 48)


@pytest.mark.parametrize(
    ("wanted", "blocks", "chunk"),
    [
        (256, [16], 256),
        (256, [128], 256),
        (256, [96], 288),
        (1, [32], 32),
        (256, [16, 32], 256),
        (256, [48, 32], 288),
    ],
)
def test_chunks_consist_of_whole_blocks_of_every_group(
    wanted: int, blocks: list[int], chunk: int
) -> None:
    shapes = shapes_of(*(full(block) for block in blocks))
    assert fitting_chunk_tokens(wanted, shapes) == chunk
    assert all(math.gcd(chunk, block) == block for block in blocks)


@pytest.mark.parametrize(
    ("wanted", "block", "piece", "chunk"),
    [
        (32, 16, 8192, 32),
        (300, 16, 8192, 512),
        (10_000, 16, 8192, 16_384),
        (48, 16, 64, 64),
        # No chunk of whole blocks divides the piece.
        (32, 16, 40, 80),
    ],
)
def test_pieces_consist_of_whole_chunks_or_chunks_of_whole_pieces(
    wanted: int, block: int, piece: int, chunk: int
) -> None:
    shapes = shapes_of(full(block), local(piece, block))
    assert fitting_chunk_tokens(wanted, shapes) == chunk
    nothing = [shape.needs_nothing_of(chunk) for shape in shapes]
    assert nothing == [False, chunk % piece == 0]


def test_a_prompt_of_whole_pieces_lacks_the_last_piece_for_its_last_token() -> None:
    shape, all_of_it = shapes_of(local(64, 16), full(16))
    lacking = [tokens for tokens in range(1, 300) if shape.lacks_a_block_for_the_last_token(tokens)]
    assert lacking == [64, 128, 192, 256]
    assert not all_of_it.lacks_a_block_for_the_last_token(64)
