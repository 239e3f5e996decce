"""Loads under way: which blocks of a request a hit fills, and what became of it.

The engine waits for every load that it was promised. So a load that has become impossible is
planned all the same, without target, and fails.

With full attention alone the engine is told which blocks failed, and computes from the first of
them on. With windows, or several groups, a load fails as a whole (``groups.loads_fail_whole``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvdock_vllm.engine.groups import NULL_BLOCK, GroupShape
from kvdock_vllm.engine.link import Live
from kvdock_vllm.engine.records import Record
from kvdock_vllm.engine.request_lookup import Lookup
from kvdock_vllm.engine.specs import GroupLoad, LoadSpec, Target

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class PendingLoad:
    """The load of one request. It outlives the request if that is aborted."""

    lookup: Lookup | None
    spec: LoadSpec
    first_token: int
    num_tokens: int
    loaded_tokens: int
    """Tokens from the first on that no worker reported as failed."""
    is_lost: bool = False
    """The engine will not keep what the load brings."""
    is_shareable: bool = True
    """When the load has ended, other requests find what it brought in the engine's own cache."""

    @property
    def has_failed(self) -> bool:
        return self.loaded_tokens < self.num_tokens


def _group_load(
    position: int, shape: GroupShape, table: Sequence[int], blocks: range, hit: Lookup | None
) -> GroupLoad:
    first_chunk = end_chunk = skip_blocks = lease_id = 0
    if hit is not None:
        lease_id = hit.lease_id
        chunk_tokens = hit.target.chunk_tokens
        in_chunk = shape.chunk_blocks(chunk_tokens)
        first_chunk, end_chunk = blocks.start // in_chunk, -(-blocks.stop // in_chunk)
        skip_blocks = blocks.start - shape.part(first_chunk, chunk_tokens).start
    block_ids = tuple(table[blocks.start : blocks.stop])
    return GroupLoad(
        position, shape.group_idx, first_chunk, end_chunk, skip_blocks, block_ids, lease_id
    )


def _described(group: GroupLoad, wanted: int, locked: range) -> str:
    """Describes what does not fit by counts, in a few words however many blocks it has."""
    name = "" if group.group_idx is None else f"group {group.group_idx}: "
    nulls = group.block_ids.count(NULL_BLOCK)
    return (
        f"{name}{len(group.block_ids)} of {wanted} blocks, {nulls} of them null, for chunks "
        f"[{group.first_chunk}, {group.end_chunk}) without their first {group.skip_blocks} blocks, "
        f"and chunks [{locked.start}, {locked.stop}) are locked"
    )


class Loads:
    """The loads of one engine that are under way. Used by one thread."""

    def __init__(self, shapes: Sequence[GroupShape], *, all_or_nothing: bool) -> None:
        """``all_or_nothing``: if one block of a load fails, all do."""
        self._shapes = shapes
        self._all_or_nothing = all_or_nothing
        self.under_way: dict[str, PendingLoad] = {}
        """By request_id."""
        self._new: list[LoadSpec] = []
        self._just_ended: list[PendingLoad] = []

    @property
    def uncached(self) -> list[PendingLoad]:
        """Loads whose blocks may not be in the engine's prefix cache yet: those under way, and
        those that ended since the last step. The engine caches their blocks in this one, some
        versions after they have asked for the hits of other requests.
        """
        return [*self.under_way.values(), *self._just_ended]

    def begin(self, record: Record, num_tokens: int, usable: Live[Target] | None) -> PendingLoad:
        """Begins to load ``num_tokens`` tokens behind those computed when the hit was told.

        The hit is void unless its session is ``usable``. Frees locks that the load does not need.
        """
        request_id = record.request.request_id
        lookup = record.take_lookup()
        hit = lookup if lookup is not None and lookup.live is usable else None
        first_token = lookup.num_computed_tokens if lookup is not None else 0
        end_token = first_token + num_tokens
        groups = []
        misfits = []
        for position, (shape, table) in enumerate(zip(self._shapes, record.tables, strict=True)):
            blocks = shape.needed_blocks(first_token, end_token)
            if not blocks:
                continue
            group = _group_load(position, shape, table, blocks, hit)
            groups.append(group)
            locked = hit.locked.get(shape.group_idx, range(0)) if hit is not None else range(0)
            if (
                len(group.block_ids) < len(blocks)
                or NULL_BLOCK in group.block_ids
                or group.skip_blocks < 0
                or not locked.start <= group.first_chunk < group.end_chunk <= locked.stop
            ):
                misfits.append(_described(group, len(blocks), locked))
        if hit is not None and misfits:
            _log.error(
                "request %s: the engine asks for tokens [%d, %d) of a hit of %d chunks, which does "
                "not fit: %s. The tokens are computed instead",
                request_id,
                first_token,
                end_token,
                hit.hit_chunks,
                "; ".join(misfits),
            )
            hit = None
        if hit is not None:
            hit.keep(groups)
        target = hit.target if hit is not None else None
        spec = LoadSpec(request_id, tuple(groups), self._all_or_nothing, target)
        load = self.under_way[request_id] = PendingLoad(
            lookup, spec, first_token, num_tokens, num_tokens, is_lost=target is None
        )
        self._new.append(spec)
        return load

    def take_new(self) -> list[LoadSpec]:
        """The loads that the workers were not told of yet. Called once in each step."""
        self._just_ended.clear()
        new, self._new = self._new, []
        return new

    def lose(self, request_id: str) -> bool:
        """Notes that a request is aborted, and with it what is loaded for it. True if it loads."""
        load = self.under_way.get(request_id)
        if load is None:
            return False
        load.is_lost = True
        return True

    def note_failures(
        self, block_ids: set[int], request_ids: Iterable[str], block_tokens: int
    ) -> None:
        """Some worker could not fill these blocks, or could not load for these requests."""
        for load in self.under_way.values() if block_ids else ():
            # Workers name blocks only where loads do not fail as a whole, which have one group.
            for index, block_id in enumerate(load.spec.groups[0].block_ids):
                if block_id in block_ids:
                    load.loaded_tokens = min(load.loaded_tokens, index * block_tokens)
                    break
        for request_id in request_ids:
            if (failed := self.under_way.get(request_id)) is not None:
                failed.loaded_tokens = 0

    def end(self, request_id: str) -> PendingLoad | None:
        """Ends the load of a request and returns it. None if there is none."""
        load = self.under_way.pop(request_id, None)
        if load is None:
            return None
        self._just_ended.append(load)
        if load.lookup is not None:
            # The workers freed their own locks. This frees those of workers that could not.
            load.lookup.close()
        return load
