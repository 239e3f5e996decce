"""Stores: what of a request is stored when, and which stores are under way.

A chunk is stored with the step that computes its last token: then every group still has the blocks
of its part, because what a window needs after the chunk it needs in this step as well. Later a part
may be gone, when a store is offered again that was refused; then the other groups' parts are stored
without it, and no hit ends there.

A store reads blocks for a while after the step. Blocks of a finished request the engine holds.
Those of a preempted one it gives to others, and those that a window has left behind as well. So
each step names the stores whose blocks are about to be written into, and the workers end them
before.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from kvdock.keys import LoRA
from kvdock.types import ChunkEventData, GroupKind
from kvdock_vllm.engine.groups import NULL_BLOCK, GroupShape
from kvdock_vllm.engine.records import ReadScope, Record
from kvdock_vllm.engine.specs import GroupStore, StoreOutcome, StoreSpec, Target

# What was refused (no memory, a parent that went) is not offered again sooner.
_RETRY_SECONDS = 1.0


Describe = Callable[[Any, LoRA | None, GroupShape, range, int], tuple[ChunkEventData, ...]]
"""What events are to tell of a request with that adapter: of one group's parts in a range of
chunks, for chunks of that many tokens."""


@dataclass(slots=True)
class _PendingStore:
    """A store under way."""

    record: Record
    block_ids: frozenset[int]
    of_windows: list[tuple[int, tuple[int, ...]]]
    """The blocks of each part of a window, behind the number of computed tokens with which the
    first of them is left behind, in that order."""
    workers: int
    """How many have not yet reported."""


class Stores:
    """The stores of one engine. Used by one thread."""

    def __init__(
        self,
        shapes: Sequence[GroupShape],
        read_scope: ReadScope,
        describe: Describe,
        *,
        workers: int,
    ) -> None:
        self._shapes = shapes
        # A window's part may only follow a chunk that the server knows, by whatever part of it.
        self._positions = sorted(
            range(len(shapes)), key=lambda n: shapes[n].kind is not GroupKind.FULL_ATTENTION
        )
        self._read_scope = read_scope
        self._describe = describe
        self._workers = workers
        self._jobs: dict[int, _PendingStore] = {}
        self._num_jobs = 0

    @property
    def under_way(self) -> Set[int]:
        """Their job ids."""
        return self._jobs.keys()

    def plan(
        self,
        record: Record,
        num_tokens: int,
        target: Target,
        *,
        held_from: int = 0,
        is_last: bool = False,
    ) -> StoreSpec | None:
        """The store of what is complete within a request's first ``num_tokens`` tokens and was not
        offered yet, if there is any.

        ``held_from`` is the number of tokens of which windows may have left behind what they do not
        need any more; 0: the record's tables say so themselves. ``is_last``: the request has ended,
        and what was refused cannot be offered later.
        """
        if record.stored_epoch != target.epoch:
            record.stored_epoch, record.stored_chunks = target.epoch, 0
        first, chunk_tokens = record.stored_chunks, target.chunk_tokens
        if num_tokens < (first + 1) * chunk_tokens:
            return None
        if time.monotonic() < record.retry_at and not is_last:
            return None
        keys = record.keys(self._read_scope, num_tokens, chunk_tokens)
        complete = (
            len(table) // shape.chunk_blocks(chunk_tokens)
            for shape, table in zip(self._shapes, record.tables, strict=True)
        )
        end = min(len(keys), *complete)
        if end <= first:
            return None
        record.stored_chunks = end
        groups = tuple(
            group
            for position in self._positions
            if (group := self._group_store(record, position, keys, first, end, target, held_from))
        )
        if not groups:
            return None
        self._num_jobs += 1
        job_id = self._num_jobs
        record.jobs.add(job_id)
        block_ids = frozenset(block for group in groups for block in group.block_ids)
        of_windows = sorted(self._of_windows(groups, chunk_tokens))
        self._jobs[job_id] = _PendingStore(record, block_ids, of_windows, self._workers)
        return StoreSpec(job_id, record.request.request_id, groups, target)

    def _group_store(
        self,
        record: Record,
        position: int,
        keys: Sequence[bytes],
        first: int,
        end: int,
        target: Target,
        held_from: int,
    ) -> GroupStore | None:
        """Of chunks [first, end) the parts of one group whose blocks are still the request's."""
        shape, table = self._shapes[position], record.tables[position]
        first_held = shape.first_needed_block(held_from)
        parts = [shape.part(chunk, target.chunk_tokens) for chunk in range(first, end)]
        # What is gone is gone from the beginning on.
        gone = 0
        for index, part in enumerate(parts):
            if part.start < first_held or NULL_BLOCK in table[part]:
                gone = index + 1
        if gone == len(parts):
            return None
        begin = first + gone
        return GroupStore(
            position=position,
            group_idx=shape.group_idx,
            first_chunk=begin,
            parent=keys[begin - 1] if begin else b"",
            keys=tuple(keys[begin:end]),
            block_ids=tuple(block for part in parts[gone:] for block in table[part]),
            event_data=self._describe(
                record.request, record.adapter, shape, range(begin, end), target.chunk_tokens
            )
            if target.event_log
            else (),
        )

    def _of_windows(
        self, groups: Iterable[GroupStore], chunk_tokens: int
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """As :class:`_PendingStore` has them, in any order."""
        for group in groups:
            shape = self._shapes[group.position]
            if not shape.window_tokens:
                continue
            in_part = shape.part_blocks(chunk_tokens)
            for index in range(len(group.keys)):
                part = shape.part(group.first_chunk + index, chunk_tokens)
                block_ids = group.block_ids[index * in_part : (index + 1) * in_part]
                yield shape.left_behind_at(part.start), block_ids

    def reading(self, block_ids: Iterable[int]) -> list[int]:
        """The stores that read any of these blocks."""
        written = set(block_ids)
        return [
            job_id for job_id, job in self._jobs.items() if not job.block_ids.isdisjoint(written)
        ]

    def leaving(self, num_scheduled: Mapping[str, int]) -> dict[int, list[int]]:
        """For each store the blocks of the parts that it reads and that the windows of its request
        begin to leave behind with the next step, or have left behind. ``num_scheduled`` are the
        tokens that this step computes, by request.
        """
        found: dict[int, list[int]] = {}
        for job_id, job in self._jobs.items():
            request = job.record.request
            # What a preempted request's stores read is not its own any more; and what a finished
            # one's read is kept for it.
            if not job.of_windows or job_id not in job.record.jobs or request.is_finished():
                continue
            computed = request.num_computed_tokens + num_scheduled.get(request.request_id, 0)
            count = bisect_right(job.of_windows, computed, key=itemgetter(0))
            if count:
                found[job_id] = [block for _, part in job.of_windows[:count] for block in part]
        return found

    def note(self, job_id: int, outcome: StoreOutcome) -> bool:
        """Some workers are done with a store. True if all are now."""
        job = self._jobs.get(job_id)
        if job is None:
            return False
        job.workers -= outcome.workers
        if outcome.refused_from is not None:
            # Offered again, together with what follows it.
            job.record.stored_chunks = min(job.record.stored_chunks, outcome.refused_from)
            job.record.retry_at = time.monotonic() + _RETRY_SECONDS
        if job.workers > 0:
            return False
        del self._jobs[job_id]
        job.record.jobs.discard(job_id)
        return True
