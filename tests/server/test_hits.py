"""The hit rule on chunks of any kind, without a server."""

from __future__ import annotations

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


@given(PROMPTS, st.integers(0, 14), st.sets(st.sampled_from(range(4)), min_size=1))
def test_the_hits_of_a_prompt_in_two_lookups_add_up(
    prompt: list[tuple[bool, ...]], cut: int, kinds: set[int]
) -> None:
    """docs/protocol.md: who gets all of the first keys asks for the rest as for another prompt."""
    namespace = Namespace("n", CHUNK_TOKENS, 1, tuple(GROUPS[kind] for kind in sorted(kinds)))
    prompt = [tuple(parts[kind] for kind in sorted(kinds)) for parts in prompt]
    cut, end = min(cut, len(prompt)), len(prompt)
    first = longest(namespace, prompt, 0, cut)
    if first == cut:
        assert first + longest(namespace, prompt, cut, end) == longest(namespace, prompt, 0, end)
