"""Which blocks a request has and which a step writes to, as vLLM's scheduler tells it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kvdock_vllm.engine.groups import GroupShape
from kvdock_vllm.engine.records import Record

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def follow_blocks(
    records: Mapping[str, Record], output: SchedulerOutput, loading: Collection[str]
) -> None:
    """Updates requests' tables by what a step gives and takes. ``loading`` are loading requests."""
    for request_id in output.preempted_req_ids or ():
        record = records.get(request_id)
        if record is not None:
            # The blocks that its stores read are not the request's any more.
            record.jobs.clear()
            if request_id not in loading:
                record.lose_blocks()
    for new in output.scheduled_new_reqs:
        record = records.get(new.req_id)
        if record is not None:
            # On some of vLLM's runners a preempted request that is resumed also comes here.
            record.set_tables(new.block_ids)
    cached = output.scheduled_cached_reqs
    for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
        record = records.get(request_id)
        if record is None or block_ids is None:
            continue
        if request_id in cached.resumed_req_ids:
            record.set_tables(block_ids)
        else:
            record.extend_tables(block_ids)


def blocks_written(shapes: Sequence[GroupShape], output: SchedulerOutput) -> Iterator[int]:
    """The blocks that a step gives out, except those whose tokens are computed."""
    for new in output.scheduled_new_reqs:
        yield from _from_token(shapes, new.num_computed_tokens, new.block_ids)
    cached = output.scheduled_cached_reqs
    for request_id, block_ids, num_computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if block_ids is not None:
            resumed = request_id in cached.resumed_req_ids
            yield from _from_token(shapes, num_computed if resumed else 0, block_ids)
    # A block that vLLM copies another one to need not be in any table.
    for copy in getattr(output, "kv_cache_block_copies", None) or ():
        yield copy.dst_block_id


def tokens_computed(output: SchedulerOutput) -> dict[str, int]:
    """How many tokens of each request that a step computes count as computed before, by its id."""
    computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return computed


def _from_token(
    shapes: Sequence[GroupShape], first_token: int, tables: Sequence[Sequence[int]]
) -> Iterator[int]:
    for shape, table in zip(shapes, tables, strict=True):
        yield from table[first_token // shape.block_tokens :]
