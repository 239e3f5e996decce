"""The hit rule on chunks of any kind, without a server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock_server.index.hits import longest_hit
from kvdock_server.index.namespace import Group, GroupKind, Namespace

CHUNK_TOKENS = 16
GROUPS = (
    Group(0, GroupKind.FULL_ATTENTION, 0, (1,)),
    Group(1, GroupKind.SLIDING_WINDOW, 50, (1,)),
    Group(2, GroupKind.SLIDING_WINDOW, 7, (1,)),
    Group(3, GroupKind.RECURRENT_STATE, 0, (1,)),
)
# Pieces of whole chunks, and one that ends within a chunk.
LOCAL = [Group(0, GroupKind.CHUNKED_LOCAL_ATTENTION, 0, (1,), size) for size in (64, 40)]

PART = st.sampled_from([True, True, True, False])
PROMPTS = st.lists(st.tuples(PART, PART, PART, PART), max_size=14)


def longest(namespace: Namespace, prompt: list[tuple[bool, ...]], first: int, end: int) -> int:
    """The hit of the prompt's chunks [first, end)."""
    keys = [bytes([number]) for number in range(len(prompt))]
    visible = [
        {key: key for key, parts in zip(keys, prompt, strict=True) if parts[position]}
        for position in range(len(namespace.groups))
    ]
    hit, needed = longest_hit(namespace, visible, keys[first:end])
    for parts, group in zip(needed, namespace.groups, strict=True):
        begin = first + hit - group.needed_chunks(hit, CHUNK_TOKENS)
        assert parts == keys[begin : first + hit]
    return hit


def of_kinds(*groups: Group) -> Namespace:
    return Namespace("n", CHUNK_TOKENS, 1, groups)


@pytest.mark.parametrize(
    ("group", "needed"),
    [(LOCAL[0], [0, 1, 2, 3, 0, 1, 2, 3, 0]), (LOCAL[1], [0, 1, 2, 1, 2, 0, 1, 2, 1])],
    ids=["64", "40"],
)
def test_of_local_attention_a_hit_needs_the_piece_that_it_ends_in(
    group: Group, needed: list[int]
) -> None:
    assert [group.needed_chunks(hit, CHUNK_TOKENS) for hit in range(9)] == needed
    for hit in range(1, 9):
        # By the tokens that the next one sees.
        end = hit * CHUNK_TOKENS
        size = group.attention_chunk_tokens
        seen = {t // CHUNK_TOKENS for t in range(end) if t // size == end // size}
        assert group.needed_chunks(hit, CHUNK_TOKENS) == len(seen)


def test_a_hit_that_ends_with_a_piece_needs_nothing_of_local_attention() -> None:
    space = of_kinds(GROUPS[0], LOCAL[0])
    assert longest(space, [(True, False)] * 5, 0, 5) == 4
    assert longest(space, [(True, False)] * 4 + [(True, True)] * 2, 0, 6) == 6
    assert longest(space, [(True, False)] * 3, 0, 3) == 0


def test_a_hit_locks_something() -> None:
    alone = of_kinds(LOCAL[0])
    assert longest(alone, [(False,)] * 5, 0, 5) == 0
    assert longest(alone, [(False,)] * 4 + [(True,)], 0, 5) == 5


@given(PROMPTS, st.integers(0, 14), st.sets(st.sampled_from(range(4)), min_size=1))
def test_the_hits_of_a_prompt_in_two_lookups_add_up(
    prompt: list[tuple[bool, ...]], cut: int, kinds: set[int]
) -> None:
    """docs/protocol.md: who gets all of the first keys asks for the rest as for another prompt."""
    namespace = Namespace("n", CHUNK_TOKENS, 1, tuple(GROUPS[kind] for kind in sorted(kinds)))
    prompt = [tuple(parts[kind] for kind in sorted(kinds)) for parts in prompt]
    cut, end = min(cut, len(prompt)), len(prompt)
    check_that_they_add_up(namespace, prompt, cut, end)


@given(st.lists(st.tuples(PART, PART), max_size=14), st.integers(0, 3))
def test_so_they_do_with_local_attention_where_a_piece_ends(
    prompt: list[tuple[bool, ...]], pieces: int
) -> None:
    chunks = LOCAL[0].attention_chunk_tokens // CHUNK_TOKENS
    cut, end = min(pieces * chunks, len(prompt)), len(prompt)
    check_that_they_add_up(of_kinds(GROUPS[0], LOCAL[0]), prompt, cut, end)


def check_that_they_add_up(
    namespace: Namespace, prompt: list[tuple[bool, ...]], cut: int, end: int
) -> None:
    first = longest(namespace, prompt, 0, cut)
    if first == cut:
        assert first + longest(namespace, prompt, cut, end) == longest(namespace, prompt, 0, end)
