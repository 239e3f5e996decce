"""The hit rule: how many chunks of a prompt can be loaded, given which parts are visible.

The hit is the largest n such that every full-attention group has the parts [0, n), every window
group has the parts that its window before n needs, and every state group has part n - 1.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvdock_server.index.chunk import Chunk
from kvdock_server.index.namespace import GroupKind, Namespace


def longest_hit(namespace: Namespace, chunks: Sequence[Chunk]) -> int:
    """The hit in chunks. ``chunks`` are the prompt's chunks up to the first that is not known."""
    groups = namespace.groups
    hit = len(chunks)
    for position, group in enumerate(groups):
        if group.kind is GroupKind.FULL_ATTENTION:
            for index in range(hit):
                part = chunks[index].parts[position]
                if part is None or not part.visible:
                    hit = index
                    break
    other_groups = [
        (position, group)
        for position, group in enumerate(groups)
        if group.kind is not GroupKind.FULL_ATTENTION
    ]
    runs = [_visible_runs(chunks[:hit], position) for position, _ in other_groups]
    while hit > 0 and any(
        run[hit - 1] < group.needed_chunks(hit, namespace.chunk_tokens)
        for run, (_, group) in zip(runs, other_groups, strict=True)
    ):
        hit -= 1
    return hit


def _visible_runs(chunks: Sequence[Chunk], position: int) -> list[int]:
    """For each chunk, how many visible parts in a row end with its part."""
    runs = []
    run = 0
    for chunk in chunks:
        part = chunk.parts[position]
        run = run + 1 if part is not None and part.visible else 0
        runs.append(run)
    return runs
