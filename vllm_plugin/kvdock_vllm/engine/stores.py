"""Stores: which chunks of a request are stored when, and which stores are under way.

A chunk is stored with the step that computes its last token. Every group still has its part then:
what a window needs after the chunk it also needs in this step. Later a part may be gone, when a
refused store is offered again. The other groups' parts are stored without it, and no hit ends
there. Only without windows do chunks of generated tokens wait for others, or for the request's end.

Of a recurrent state most chunks have no part. Those that have one are noted in the record, and are
stored with the next plan.

A store reads blocks for a while after the step. Those of a finished request are held meanwhile
(holds.py). But the engine gives away the blocks of a preempted one, and those that a window has
left behind. So each step names the stores whose blocks others will write to, and the workers end
these stores before.
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

# A refused chunk (no memory, or its parent is gone) is not offered again sooner.
_RETRY_SECONDS = 1.0

# Each store costs the engine a call, however small it is. So many generated tokens share one.
_GENERATED_TOKENS = 256

# Most keys that one Store may name. What is more follows with the next step.
_MOST_CHUNKS = 16_384

Describe = Callable[[Any, LoRA | None, GroupShape, range, int], tuple[ChunkEventData, ...]]
"""Describes for events one group's parts in a range of chunks of a request with that adapter. The
last argument is the number of tokens a chunk."""

Admit = Callable[[int, frozenset[int]], bool]
"""Whether a store of that job_id may read these blocks."""


@dataclass(slots=True)
class _PendingStore:
    """A store under way."""

    record: Record
    block_ids: frozenset[int]
    of_windows: list[tuple[int, tuple[int, ...]]]
    """For each part of a window or state: the number of computed tokens at which its first block is
    left behind, and its blocks. Sorted by that number."""
    workers: int
    """How many workers have not reported yet."""


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
        # Full attention first: the server must know a chunk before a window's part may follow it.
        self._positions = sorted(
            range(len(shapes)), key=lambda n: shapes[n].kind is not GroupKind.FULL_ATTENTION
        )
        self._has_windows = any(shape.window_tokens for shape in shapes)
        # A state stands for its whole prefix. Alone it has no parts before it to follow.
        self._has_only_states = all(shape.is_state for shape in shapes)
        self._read_scope = read_scope
        self._describe = describe
        self._workers = workers
        self._jobs: dict[int, _PendingStore] = {}
        self._num_jobs = 0

    @property
    def under_way(self) -> Set[int]:
        """The job_ids of stores under way."""
        return self._jobs.keys()

    def plan(
        self,
        record: Record,
        num_tokens: int,
        target: Target,
        *,
        held_from: int = 0,
        is_last: bool = False,
        admit: Admit | None = None,
    ) -> StoreSpec | None:
        """The store of what is complete within a request's first ``num_tokens`` tokens and was not
        offered yet, or None.

        ``held_from`` is a number of computed tokens: blocks that windows no longer need after them
        may be gone. 0: the record's tables tell what is gone. ``is_last``: the request has ended,
        so a refused chunk cannot be offered later. A store that ``admit`` refuses is not planned.
        """
        if record.stored_epoch != target.epoch:
            record.stored_epoch, record.stored_chunks = target.epoch, 0
        first, chunk_tokens = record.stored_chunks, target.chunk_tokens
        if num_tokens < (first + 1) * chunk_tokens:
            return None
        if not is_last and (
            time.monotonic() < record.retry_at
            or self._waits_for_more(record, num_tokens, first * chunk_tokens, chunk_tokens)
        ):
            return None
        keys = record.keys(self._read_scope, num_tokens, chunk_tokens)
        complete = (
            len(table) // shape.chunk_blocks(chunk_tokens)
            for shape, table in zip(self._shapes, record.tables, strict=True)
        )
        end = min(len(keys), first + _MOST_CHUNKS, *complete)
        if end <= first:
            return None
        groups: list[GroupStore] = []
        for position in self._positions:
            if self._shapes[position].is_state:
                groups += self._state_stores(record, position, keys, first, end, target)
            else:
                group = self._group_store(record, position, keys, first, end, target, held_from)
                groups += [group] if group is not None else []
        block_ids = frozenset(block for group in groups for block in group.block_ids)
        if groups and admit is not None and not admit(self._num_jobs + 1, block_ids):
            record.retry_at = time.monotonic() + _RETRY_SECONDS
            return None
        record.stored_chunks = end
        record.forget_states(end * chunk_tokens)
        if not groups:
            return None
        self._num_jobs += 1
        job_id = self._num_jobs
        record.jobs.add(job_id)
        of_windows = sorted(self._of_windows(groups, chunk_tokens))
        self._jobs[job_id] = _PendingStore(record, block_ids, of_windows, self._workers)
        return StoreSpec(job_id, record.request.request_id, tuple(groups), target)

    def _waits_for_more(
        self, record: Record, num_tokens: int, first_token: int, chunk_tokens: int
    ) -> bool:
        """Whether what is complete from ``first_token`` on was generated, and is too little."""
        return (
            not self._has_windows
            and not record.states
            and first_token + chunk_tokens > record.request.num_prompt_tokens
            and num_tokens - first_token < _GENERATED_TOKENS
        )

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
        """One group's parts of chunks [first, end) whose blocks are still the request's."""
        shape, table = self._shapes[position], record.tables[position]
        if shape.needs_nothing_of(target.chunk_tokens):
            return None
        first_held = shape.first_needed_block(held_from)
        parts = [shape.part(chunk, target.chunk_tokens) for chunk in range(first, end)]
        # If a part is gone, all parts before it are.
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
            keep=record.say.keep,
            priority=record.say.priority,
        )

    def _state_stores(
        self,
        record: Record,
        position: int,
        keys: Sequence[bytes],
        first: int,
        end: int,
        target: Target,
    ) -> Iterator[GroupStore]:
        """One for each state of a group that is noted at the end of one of chunks [first, end)."""
        shape = self._shapes[position]
        for chunk in range(first, end):
            block = record.states.get((position, (chunk + 1) * target.chunk_tokens))
            if block is None:
                continue
            chunks = range(chunk, chunk + 1)
            yield GroupStore(
                position=position,
                group_idx=shape.group_idx,
                first_chunk=chunk,
                parent=keys[chunk - 1] if chunk and not self._has_only_states else b"",
                keys=(keys[chunk],),
                block_ids=(block,),
                event_data=self._describe(
                    record.request, record.adapter, shape, chunks, target.chunk_tokens
                )
                if target.event_log
                else (),
                keep=record.say.keep,
                priority=record.say.priority,
            )

    def _of_windows(
        self, groups: Iterable[GroupStore], chunk_tokens: int
    ) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Unsorted entries for ``_PendingStore.of_windows``."""
        for group in groups:
            shape = self._shapes[group.position]
            if not shape.leaves_blocks_behind:
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

    def reading_of(self, record: Record) -> dict[int, list[int]]:
        """Which blocks of a request its stores read, in the order of its tables, by job_id."""
        blocks = [block for table in record.tables for block in table]
        return {
            job_id: [block for block in blocks if block in self._jobs[job_id].block_ids]
            for job_id in record.jobs
        }

    def leaving(self, num_scheduled: Mapping[str, int]) -> dict[int, list[int]]:
        """For each store the blocks of its parts that are left behind with the next step, or were
        before. ``num_scheduled`` has the tokens that this step computes, by request.
        """
        found: dict[int, list[int]] = {}
        for job_id, job in self._jobs.items():
            request = job.record.request
            # A preempted request's blocks are given away, a finished one's are held until stored.
            if not job.of_windows or job_id not in job.record.jobs or request.is_finished():
                continue
            computed = request.num_computed_tokens + num_scheduled.get(request.request_id, 0)
            count = bisect_right(job.of_windows, computed, key=itemgetter(0))
            if count:
                found[job_id] = [block for _, part in job.of_windows[:count] for block in part]
        return found

    def note(self, job_id: int, outcome: StoreOutcome) -> bool:
        """Notes what some workers did with a store. True if all workers are done now."""
        job = self._jobs.get(job_id)
        if job is None:
            return False
        job.workers -= outcome.workers
        if outcome.refused_from is not None:
            # The chunk is offered again, with all that follow.
            job.record.stored_chunks = min(job.record.stored_chunks, outcome.refused_from)
            job.record.retry_at = time.monotonic() + _RETRY_SECONDS
        if job.workers > 0:
            return False
        del self._jobs[job_id]
        job.record.jobs.discard(job_id)
        return True
