"""The hit rule: how many chunks of a prompt can be loaded, given which parts are visible.

The hit is the largest n such that every full-attention group has the parts [0, n), every window
group has the parts that its window before n needs, every state group has part n - 1, and every
group of chunked local attention has the parts that its piece before n needs, which are none where a
piece ends. But some group must need a part: a hit always locks something.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from kvdock_server.index.namespace import GroupKind, Namespace

Part = TypeVar("Part")


def longest_hit(
    namespace: Namespace, visible: Sequence[Mapping[bytes, Part]], keys: Sequence[bytes]
) -> tuple[int, list[list[Part]]]:
    """The hit of a prompt in chunks, and the parts that it needs of each group, up to its end.

    ``visible`` has the visible parts of each group by key.
    """
    groups = namespace.groups
    hit = len(keys)
    needed: list[list[Part]] = [[] for _ in groups]
    others = []
    for position, group in enumerate(groups):
        if group.kind is GroupKind.FULL_ATTENTION:
            needed[position] = _first_parts(visible[position], keys[:hit])
            hit = len(needed[position])
        else:
            others.append((position, group))
    runs = [_visible_runs(visible[position], keys[:hit]) for position, _ in others]
    while hit > 0:
        counts = [group.needed_chunks(hit, namespace.chunk_tokens) for _, group in others]
        has_all = all(run[hit - 1] >= count for run, count in zip(runs, counts, strict=True))
        if has_all and (any(counts) or len(others) < len(groups)):
            break
        hit -= 1
    for position, group in others:
        first = hit - group.needed_chunks(hit, namespace.chunk_tokens)
        needed[position] = [visible[position][key] for key in keys[first:hit]]
    return hit, [parts[:hit] for parts in needed]


def _first_parts(visible: Mapping[bytes, Part], keys: Iterable[bytes]) -> list[Part]:
    """The parts of the first keys, up to the first key that has none."""
    parts = []
    for part in map(visible.get, keys):
        if part is None:
            break
        parts.append(part)
    return parts


def _visible_runs(visible: Mapping[bytes, Part], keys: Iterable[bytes]) -> list[int]:
    """For each key, how many visible parts in a row end with its part."""
    runs = []
    run = 0
    for key in keys:
        run = run + 1 if key in visible else 0
        runs.append(run)
    return runs
