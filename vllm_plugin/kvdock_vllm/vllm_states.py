"""Recurrent states in vLLM's cache: which blocks hold a state that may be stored.

A block of a state group holds the state after its last token, if a step ended exactly there. vLLM
lets steps end at blocks' ends while it computes a prompt, but takes most of these blocks back two
steps later. So a request's table is not append-only, and a position in it says nothing of what the
block holds. vLLM itself says which blocks hold a state that it keeps: it offers them, in the step
that computes them. By default these are the last one before a prompt's end, and those where
prompts were seen to part.

``kvdock.state_interval_tokens`` notes more of them: a step that ends at a block's end leaves the
state in the request's last block, whether vLLM keeps it or not.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvdock_vllm.engine.groups import NULL_BLOCK, GroupShape
from kvdock_vllm.engine.records import Record
from kvdock_vllm.vllm_groups import group_specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)


def keeps_no_states(kv_cache_config: KVCacheConfig) -> bool:
    """Whether the model has states of which the engine keeps only the running one. It changes with
    every token, so nothing can be stored of it, and nothing can be continued from.
    """
    return any(
        getattr(spec, "mamba_cache_mode", "align") != "align"
        for group in kv_cache_config.kv_cache_groups
        for spec in group_specs(group)
    )


def warn_of_no_states(vllm_config: VllmConfig) -> None:
    """Says why the engine is served without cache."""
    cache: Any = vllm_config.cache_config
    _log.warning(
        "KVDock does nothing for this engine of %s: the model has recurrent state, of which vLLM "
        "keeps only the running one (mamba_cache_mode is %s). With --enable-prefix-caching vLLM "
        "keeps states that can be stored, if it supports that for the model",
        vllm_config.model_config.model,
        getattr(cache, "mamba_cache_mode", "none"),
    )


def keep_loaded_state(request: Request, num_tokens: int) -> bool:
    """Has vLLM's own cache keep the state after ``num_tokens`` tokens, which a load brings.

    Otherwise vLLM forgets it unless it is the prompt's last, and the next request with that prefix
    must load it all again. vLLM keeps the state where prompts were seen to part, and a hit is such
    a place. False if vLLM has seen another place further on, and so forgets this one.
    """
    anything: Any = request
    parting = getattr(anything, "shared_prefix_boundary", None)
    if parting is None or parting > num_tokens:
        return False
    anything.shared_prefix_boundary = num_tokens
    return True


class StateBlocks:
    """Notes in the records which blocks hold states. Used by the scheduler's thread."""

    def __init__(self, shapes: Sequence[GroupShape], interval_tokens: int | None) -> None:
        """``interval_tokens``: where vLLM offers no state, the distance from the last one noted
        after which another one is taken from the request's table. None: only what vLLM offers.
        """
        self._shapes = shapes
        self._positions = [index for index, shape in enumerate(shapes) if shape.is_state]
        self._interval = interval_tokens

    def __bool__(self) -> bool:
        """Whether the model has states."""
        return bool(self._positions)

    def follow(self, records: Mapping[str, Record], output: SchedulerOutput) -> None:
        """Notes the states that a step computes, and forgets those whose blocks were taken back.

        The step writes them, so they may be read when it has been computed.
        """
        states = getattr(output, "kv_connector_block_state", None)
        if not self._positions or states is None:
            return
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            record = records.get(request_id)
            if record is None:
                continue
            end = record.request.num_computed_tokens + num_scheduled
            # Of drafts it is not known yet how many the step keeps.
            has_drafts = bool(output.scheduled_spec_decode_tokens.get(request_id))
            found = {} if has_drafts else dict(self._offered(states, request_id))
            wants_more = not has_drafts and self._wants_more(record, end)
            if record.states or wants_more:
                tables = states.get_block_ids(request_id) or ()
                forget_taken_states(record, self._shapes, tables)
                if wants_more:
                    found |= self._last_states(tables, end)
            if found:
                record.states |= found
                record.state_tokens = max(tokens for _, tokens in found)

    def _offered(
        self, states: KVConnectorBlockState, request_id: str
    ) -> Iterator[tuple[tuple[int, int], int]]:
        """What vLLM offers, except states inside a block, behind which no chunk ends."""
        for position, block, tokens in states.boundary_state_offloads.get(request_id, ()):
            if block != NULL_BLOCK and tokens % self._shapes[position].block_tokens == 0:
                yield (position, tokens), block

    def _wants_more(self, record: Record, end: int) -> bool:
        return (
            self._interval is not None
            and end - record.state_tokens >= self._interval
            and all(end % self._shapes[position].block_tokens == 0 for position in self._positions)
        )

    def _last_states(self, tables: Sequence[Sequence[int]], end: int) -> dict[tuple[int, int], int]:
        """The states of a request after its first ``end`` tokens, where the step ends."""
        found = {}
        for position in self._positions:
            table, index = tables[position], end // self._shapes[position].block_tokens - 1
            if index >= len(table) or table[index] == NULL_BLOCK:
                return {}
            found[position, end] = table[index]
        return found


def forget_taken_states(
    record: Record, shapes: Sequence[GroupShape], tables: Sequence[Sequence[int]]
) -> None:
    """Forgets the noted states whose blocks are not in the request's tables any more. While a block
    is in its place there, vLLM does not write to it again.
    """
    record.states = {
        (position, tokens): block
        for (position, tokens), block in record.states.items()
        if position < len(tables)
        and (index := tokens // shapes[position].block_tokens - 1) < len(tables[position])
        and tables[position][index] == block
    }
