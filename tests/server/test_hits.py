"""The hit rule on chunks of any kind, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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


def chunks(prompt: list[tuple[bool, ...]]) -> Any:
    return [
        SimpleNamespace(parts=[SimpleNamespace(visible=visible) for visible in parts])
        for parts in prompt
    ]


@given(PROMPTS, st.integers(0, 14), st.sets(st.sampled_from(range(4)), min_size=1))
def test_the_hits_of_a_prompt_in_two_lookups_add_up(
    prompt: list[tuple[bool, ...]], cut: int, kinds: set[int]
) -> None:
    """docs/protocol.md: who gets all of the first keys asks for the rest as for another prompt."""
    namespace = Namespace("n", CHUNK_TOKENS, 1, tuple(GROUPS[kind] for kind in sorted(kinds)))
    prompt = [tuple(parts[kind] for kind in sorted(kinds)) for parts in prompt]
    first = longest_hit(namespace, chunks(prompt[:cut]))
    if first == len(prompt[:cut]):
        rest = longest_hit(namespace, chunks(prompt[cut:]))
        assert first + rest == longest_hit(namespace, chunks(prompt))
