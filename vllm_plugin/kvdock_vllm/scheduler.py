"""The half of the connector in vLLM's scheduler. It decides what is loaded and what is stored.

It never keeps a busy engine waiting for the server. Its state is one record per request
(engine/records.py), and one per load (engine/loads.py) and store (engine/stores.py) under way,
since these outlive the request. vLLM calls it in this order:

``on_new_request``
    sends the request's lookup. Later calls look for the answer.
``get_num_new_matched_tokens``
    returns the hit. vLLM may call it any number of times, or discard its result: no effects.
``update_state_after_alloc``
    says how much of the hit vLLM takes. Only now is the lease used or given back.
``build_connector_meta``
    sends loads, stores and news of requests to the workers.
``update_connector_output``
    brings what the workers finished.
``request_finished``
    ends the record.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvdock_vllm import ended_loads, says
from kvdock_vllm.beside import Beside
from kvdock_vllm.blocks import blocks_written, follow_blocks, tokens_computed
from kvdock_vllm.config import RECOMPUTE, Config
from kvdock_vllm.drafts import tokens_read_ahead
from kvdock_vllm.engine.groups import GroupShape, fitting_chunk_tokens
from kvdock_vllm.engine.load_waits import LoadWaits
from kvdock_vllm.engine.loads import Loads
from kvdock_vllm.engine.others_loads import OthersLoads
from kvdock_vllm.engine.records import Record
from kvdock_vllm.engine.specs import StoreSpec, Target
from kvdock_vllm.engine.stores import Stores
from kvdock_vllm.events import EventDescriber, Relay, publishes_events
from kvdock_vllm.holds import Holds
from kvdock_vllm.kernels import cannot_continue_prompts, hits_change_answers, warn_of_no_hits
from kvdock_vllm.keys import ScopeReader
from kvdock_vllm.lookups import Lookups
from kvdock_vllm.metadata import StepMetadata, WorkerDescription, WorkerReport
from kvdock_vllm.metrics import Stats
from kvdock_vllm.scheduler_link import SchedulerLink
from kvdock_vllm.vllm_parallel import parallel_strategy
from kvdock_vllm.vllm_records import Records
from kvdock_vllm.vllm_states import (
    StateBlocks,
    forget_taken_states,
    keep_loaded_state,
    keeps_no_states,
    warn_of_no_states,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_log = logging.getLogger(__name__)

# A request that has one of these keys in its kv_transfer_params gets, under that key of its
# response, the number of tokens that came from KVDock. Existing tools use the second key.
EXTRA_TOKENS_KEYS = ("num_kvdock_extra_cached_tokens", "num_lmcache_extra_cached_tokens")


class SchedulerHalf:
    """Used by the scheduler's thread."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        shapes: Sequence[GroupShape],
        config: Config,
        others: Beside | None = None,
    ) -> None:
        """Does not connect yet: see :meth:`describe_workers`. ``others`` are the engine's other
        connectors.

        Raises ValueError for what is not supported.
        """
        transfer: Any = vllm_config.kv_transfer_config
        engines = transfer if others is None else others.transfer
        _set_load_failure_policy(engines, config.load_failure_policy)
        self._has_others = others is not None
        self._shapes = shapes
        self._save_decode = config.save_decode
        # A load begins where whole blocks of every group are computed.
        self._block_tokens = fitting_chunk_tokens(1, shapes)
        strategy = parallel_strategy(vllm_config, kv_cache_config, is_worker=False)
        self._whole_prompts_only = cannot_continue_prompts(vllm_config, strategy)
        self._does_nothing = hits_change_answers(vllm_config, strategy, config)
        if self._does_nothing:
            warn_of_no_hits(vllm_config)
        if keeps_no_states(kv_cache_config):
            self._does_nothing = True
            warn_of_no_states(vllm_config)
        self._relay = (
            Relay(vllm_config, kv_cache_config, config.address)
            if config.events and publishes_events(vllm_config)
            else None
        )
        self._stats = Stats()
        self.records = Records(len(shapes))
        self.link = SchedulerLink(vllm_config, strategy, shapes, config, self._relay)
        read_scope = ScopeReader(vllm_config).scope
        read_ahead = tokens_read_ahead(vllm_config)
        # Of the last tokens a chain of draft layers computes all but the first layer's KV again.
        self._unsettled_tokens = max(0, read_ahead - 1)
        self.lookups = Lookups(
            self.link, strategy, shapes, read_scope, self._stats, config.lookup_timeout, read_ahead
        )
        self.loads = Loads(shapes, all_or_nothing=self._whole_prompts_only)
        has_prefix_cache = bool(vllm_config.cache_config.enable_prefix_caching)
        self.others_loads = OthersLoads(shapes)
        self.waits = LoadWaits(self.loads, shapes, has_prefix_cache=has_prefix_cache)
        describe = EventDescriber(vllm_config, kv_cache_config).describe
        self.stores = Stores(shapes, read_scope, describe, workers=strategy.world_size)
        alone = strategy.world_size == 1
        self._ended_loads = ended_loads.find(str(transfer.engine_id)) if alone else None
        self.holds = Holds()
        self.states = StateBlocks(shapes, config.state_interval_tokens)
        self._keeps_blocks = _zeroes_blocks_unasked(vllm_config, kv_cache_config)
        # For the next step's metadata.
        self._last_stores: list[StoreSpec] = []
        self._of_finished: list[int] = []

    def bind_block_pool(self, pool: BlockPool) -> None:
        self.holds.bind(pool)
        if self._relay is not None:
            self._relay.watch_pool(pool)

    def describe_workers(
        self, descriptions: Iterable[WorkerDescription], *, at_start: bool = True
    ) -> None:
        """Takes descriptions of workers, and begins to connect when all workers are described."""
        if not self._does_nothing:
            self.link.describe_workers(descriptions, at_start)

    @property
    def has_work_for_workers(self) -> bool:
        """Whether the workers have not heard of a new session, or are storing."""
        return self.link.has_news or bool(self.stores.under_way)

    # -- what is cached -------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Sends the lookup, so that its answer may be there when the scheduler asks for the hit."""
        record = self.records.of(request)
        if not (request.skip_reading_prefix_cache or self._is_for_others(request)):
            self.lookups.ask(record)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens can be loaded beyond the computed ones, and whether the load is
        asynchronous. The number is None while the lookup is not answered, and while the request
        waits for another one's load of the same prefix.
        """
        record = self.records.of(request)
        # vLLM asks only about requests of which nothing is computed (any more).
        record.predates_reset = False
        record.computed_when_asked = num_computed_tokens
        if (
            # A load has failed.
            record.bypass
            # The request must not read a cache. vLLM 0.26 asks all the same.
            or request.skip_reading_prefix_cache
            or self._is_for_others(request)
            # A block is computed in part. A load would overwrite it, and others may be using it.
            or num_computed_tokens % self._block_tokens
        ):
            return 0, False
        lookup = self.lookups.current(record)
        if lookup is None:
            return 0, False
        hit_tokens = self.lookups.hit_tokens(lookup, num_computed_tokens)
        if hit_tokens is None:
            return None, False
        if self._whole_prompts_only and request.num_tokens - hit_tokens > 1:
            return 0, False
        new_tokens = max(0, hit_tokens - num_computed_tokens)
        if new_tokens and self.waits.must_wait(lookup, request.num_tokens):
            return None, False
        return new_tokens, new_tokens > 0

    def _is_for_others(self, request: Request) -> bool:
        """Whether another engine has computed the prompt and holds its KV for another connector.

        vLLM's MultiConnector takes the first hit in its order. KVDock's might be a part of the
        prompt, and the rest would be computed again.
        """
        params = request.kv_transfer_params
        return (
            self._has_others
            and isinstance(params, Mapping)
            and bool(params.get("do_remote_prefill"))
        )

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Loads ``num_external_tokens``, the part of the hit that the scheduler takes. If another
        connector loads, it is 0.
        """
        record = self.records.of(request)
        record.set_tables(blocks.get_block_ids())
        computed, record.computed_when_asked = record.computed_when_asked, None
        if record.lookup is not None:
            self._stats.add("load_waits", self.waits.end(record.lookup))
        if num_external_tokens > 0:
            load = self.loads.begin(record, num_external_tokens, self.link.usable)
            if self.states:
                end = record.state_tokens = load.first_token + load.num_tokens
                load.is_shareable = keep_loaded_state(request, end)
            return
        record.admitted = True
        self.lookups.note_answer(record)
        if computed is not None:
            self.others_loads.note_given(request.request_id, computed, record.tables)

    # -- steps ----------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        has_forward = scheduler_output.total_num_scheduled_tokens > 0
        num_busy = len(scheduler_output.num_scheduled_tokens) + len(self.loads.under_way)
        self.lookups.end_step(has_forward)
        metadata = StepMetadata(
            news=self.link.take_news(),
            loads=self.loads.take_new(),
            last_stores=self._last_stores,
            of_finished=self._of_finished,
            has_forward=has_forward,
            has_waiting=len(self.records) > num_busy,
        )
        self._last_stores, self._of_finished = [], []
        # vLLM waits for the loads, so they reach the workers whatever fails here.
        try:
            written = {block for spec in metadata.loads for block in spec.block_ids}
            written.update(blocks_written(self._shapes, scheduler_output))
            written.update(self.others_loads.may_be_written())
            metadata.overwritten = self.stores.reading(written)
        except Exception:
            _log.exception("which blocks are given out is not known, so all stores end")
            metadata.overwritten = list(self.stores.under_way)
        try:
            follow_blocks(self.records, scheduler_output, self.loads.under_way)
            if self.others_loads.have_begun:
                computed = tokens_computed(scheduler_output)
                metadata.in_doubt = self.others_loads.begin_step(computed)
            self.states.follow(self.records, scheduler_output)
            metadata.stores = self._plan_stores(scheduler_output)
            self.holds.renew(self.stores.leaving(scheduler_output.num_scheduled_tokens))
        except Exception:
            _log.exception("planning what to store failed")
        return metadata

    def _plan_stores(self, scheduler_output: SchedulerOutput) -> list[StoreSpec]:
        """Stores of the chunks that become complete in this step."""
        specs: list[StoreSpec] = []
        live = self.link.usable
        for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            record = self.records.get(request_id)
            if record is None:
                continue
            self.lookups.note_answer(record)
            if live is None:
                continue
            request = record.request
            computed = request.num_computed_tokens
            # The scheduler counts draft tokens as computed before they are accepted.
            num_tokens = min(computed + num_scheduled, request.num_tokens)
            # It gives away by what is computed for certain.
            held_from = max(0, computed - request.num_in_flight_tokens)
            spec = self._plan_store(record, num_tokens, live.prepared, held_from=held_from)
            if spec is not None:
                specs.append(spec)
        return specs

    def _plan_store(
        self,
        record: Record,
        num_tokens: int,
        target: Target,
        *,
        held_from: int = 0,
        is_last: bool = False,
    ) -> StoreSpec | None:
        if record.predates_reset:
            return None
        # A request that has ended by itself had no block that could not be filled.
        if not is_last and self.others_loads.are_in_doubt(record.tables):
            return None
        num_tokens -= self._unsettled_tokens
        if not self._save_decode:
            num_tokens = min(num_tokens, record.request.num_prompt_tokens)
        if (awaited := record.lookup) is not None:
            # The lookup's answer will say which chunks the server has. So these are not stored
            # before it comes. The wait ends when the request has completed a chunk behind those
            # that were looked up: its blocks may be given out before an answer comes, because the
            # request ends or because a window leaves them behind.
            if num_tokens < awaited.most_tokens + target.chunk_tokens:
                return None
            record.forget_lookup()
        num_tokens = record.say.tokens_to_store(num_tokens)
        # Those of a request that has ended are held in any case.
        admit = self.holds.admit if self._keeps_blocks and not is_last else None
        return self.stores.plan(
            record, num_tokens, target, held_from=held_from, is_last=is_last, admit=admit
        )

    # -- ends -----------------------------------------------------------------------------------

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        if self._ended_loads is not None and (ended := self._ended_loads.take()):
            # vLLM reads it after this hook.
            output.finished_recving = ended.union(output.finished_recving or ())
        report = getattr(output, "kv_connector_worker_meta", None)
        if isinstance(report, WorkerReport):
            self.others_loads.end_step(report.in_doubt)
            if report.descriptions:
                self.describe_workers(report.descriptions, at_start=False)
            for job_id, outcome in report.stores.items():
                if self.stores.note(job_id, outcome):
                    self.holds.release(job_id)
                    self.link.note_end(job_id)
        self.loads.note_failures(
            output.invalid_block_ids, getattr(output, "failed_recving", ()), self._block_tokens
        )
        for request_id in output.finished_recving or ():
            self._end_load(request_id)

    def request_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> dict[str, Any] | None:
        """The kv_transfer_params of the response. ``block_ids`` has the request's blocks for each
        group. vLLM frees them afterwards, those that are held excepted.
        """
        record = self.records.pop(request.request_id, None)
        if record is None:
            return None
        answer = {**_extra_tokens_answer(request, record), **says.answer(record.say)} or None
        # vLLM itself keeps the blocks of a request that is loading.
        is_loading = self.loads.lose(request.request_id)
        self.lookups.note_answer(record)
        try:
            if not is_loading and _ended_by_itself(request):
                self._plan_last_store(record, block_ids)
        finally:
            record.forget_lookup()
        if record.jobs and not is_loading:
            record.set_tables(block_ids)
            self.holds.hold_finished(self.stores.reading_of(record))
            self._of_finished += record.jobs
        return answer

    def _plan_last_store(self, record: Record, block_ids: Sequence[Sequence[int]]) -> None:
        """Stores what the last step completed. The last token itself was never computed."""
        live = self.link.usable
        if live is None:
            return
        request = record.request
        num_tokens = max(request.num_prompt_tokens, request.num_tokens - 1)
        record.set_tables(block_ids)
        forget_taken_states(record, self._shapes, block_ids)
        spec = self._plan_store(record, num_tokens, live.prepared, is_last=True)
        if spec is not None:
            self._last_stores.append(spec)

    def _end_load(self, request_id: str) -> None:
        """Takes note that all workers have ended a request's load."""
        load = self.loads.end(request_id)
        if load is None:
            return
        self._stats.add("loaded_tokens", load.loaded_tokens)
        self._stats.add("failed_loads", load.has_failed)
        record = self.records.get(request_id)
        if record is None:
            return
        if not record.admitted:
            record.admitted = True
            record.extra.loaded = max(record.extra.loaded, load.loaded_tokens)
            if load.has_failed:
                _correct_vllms_count(record.request, load.loaded_tokens)
        if load.has_failed:
            record.bypass = True
            good_chunks = (load.first_token + load.loaded_tokens) // max(1, record.chunk_tokens)
            record.stored_chunks = min(record.stored_chunks, good_chunks)

    def reset_cache(self) -> bool:
        """Drops everything that is stored for this model, on the server as well. Earlier hits are
        void.

        Succeeds also if no server answers: the next session clears the namespace before it is used.
        vLLM resets the cache to sleep and to pause, which must not fail because a server is away.
        """
        if self._does_nothing:
            return True
        for record in self.records.values():
            record.forget_lookup()
            record.stored_chunks = 0
            record.predates_reset = any(record.tables)
        self.link.reset(self.stores.under_way)
        return True

    def take_events(self) -> list[KVCacheEvent]:
        """The events of the server's cache that are due."""
        return self._relay.take() if self._relay is not None else []

    def take_stats(self) -> Stats | None:
        return self._stats.take()

    def shutdown(self) -> None:
        self.link.close()
        if self._relay is not None:
            self._relay.close()


def _set_load_failure_policy(transfer: Any, policy: str) -> None:
    """Sets and logs vLLM's policy for failed loads. vLLM's scheduler reads it after our
    constructor.

    With "fail", vLLM's default, the request ends with an error, which no failure of a cache should
    cause unasked. vLLM's config does not tell whether the user chose "fail", so we have a setting.
    """
    given = transfer.kv_load_failure_policy
    transfer.kv_load_failure_policy = policy
    what = (
        "what cannot be loaded is computed, and no request ends with an error for it"
        if policy == RECOMPUTE
        else "a request of which something cannot be loaded ends with an error"
    )
    _log.info(
        "kvdock.load_failure_policy is %s: %s%s",
        policy,
        what,
        ""
        if given == policy
        else f". vLLM's kv_load_failure_policy was {given} and is now the same",
    )


def _zeroes_blocks_unasked(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Whether vLLM zeroes blocks that it gives out before a connector can end the stores that read
    them. Then a store keeps its blocks until it has ended, so that they are not given out.

    The V2 runner of vLLM 0.32 and 0.33 does so with caches of several precisions and with recurrent
    states: in ``update_requests``, before ``handle_preemptions``.
    """
    zeroes = getattr(kv_cache_config, "needs_kv_cache_zeroing", False)
    return bool(zeroes and getattr(vllm_config, "use_v2_model_runner", True))


def _ended_by_itself(request: Request) -> bool:
    """Whether a request was not aborted. For aborted ones vLLM may count too many tokens."""
    return request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


def _extra_tokens_answer(request: Request, record: Record) -> dict[str, Any]:
    """The number of tokens that came from KVDock, under the keys that asked for it."""
    asked = request.kv_transfer_params
    if not isinstance(asked, Mapping):
        return {}
    return {key: record.extra.loaded for key in EXTRA_TOKENS_KEYS if key in asked}


def _correct_vllms_count(request: Any, loaded_tokens: int) -> None:
    """Corrects vLLM's count of cached tokens, which includes tokens that failed to load."""
    stats = request.prefill_stats
    if stats is not None:
        stats.set(stats.num_prompt_tokens, stats.num_local_cached_tokens, loaded_tokens)
