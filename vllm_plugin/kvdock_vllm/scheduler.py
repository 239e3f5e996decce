"""The half of the connector in vLLM's scheduler: decides what is loaded and what is stored.

It never keeps a busy engine waiting for the server, and the server's absence costs a request
nothing. Its state is one record a request (records.py), and one for each load (loads.py) and each
store (stores.py) that is under way, because those outlive the request. What vLLM does to it, in
order:

``on_new_request``
    asks the server (once; the answer is awaited by being polled).
``get_num_new_matched_tokens``
    tells the answer. May come any number of times, or the answer be thrown away: no effects.
``update_state_after_alloc``
    says what becomes of the answer. Only now is the lease used, or given back.
``build_connector_meta``
    sends loads, stores and news of requests to the workers.
``update_connector_output``
    brings what the workers finished.
``request_finished``
    ends the record.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from kvdock import Client, Session
from kvdock.errors import ServerError
from kvdock.types import Namespace, SessionRole
from kvdock_vllm.autostart import Autostart
from kvdock_vllm.breaker import Breaker
from kvdock_vllm.config import Config
from kvdock_vllm.events import Relay, Teller, publishes_events
from kvdock_vllm.groups import GroupShape, fitting_chunk_tokens
from kvdock_vllm.holds import Holds
from kvdock_vllm.kernels import cannot_continue_prompts, hits_change_answers, warn_of_no_hits
from kvdock_vllm.keys import ScopeReader
from kvdock_vllm.link import Link, Live
from kvdock_vllm.loads import Load, plan_load
from kvdock_vllm.lookup import Lookup, State
from kvdock_vllm.metadata import (
    LoadSpec,
    StepMetadata,
    StoreSpec,
    Target,
    WorkerDescription,
    WorkerReport,
)
from kvdock_vllm.metrics import Stats
from kvdock_vllm.namespace import derive_namespace, model_facts
from kvdock_vllm.parallel import ParallelStrategy
from kvdock_vllm.records import ExtraTokens, Record, prompt_id
from kvdock_vllm.stores import Stores

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

# Under these keys of its kv_transfer_params a request asks for the number of tokens that came from
# here, and gets it in its response. The second is what existing tools send.
EXTRA_TOKENS_KEYS = ("num_kvdock_extra_cached_tokens", "num_lmcache_extra_cached_tokens")

# Most keys that one Lookup may name; a longer prompt is looked up as far as that.
_MOST_KEYS = 16_384

# An engine that computes nothing may wait so long for answers in one step: that is less than the
# empty step after which it would ask again. But not where others wait for its steps.
_IDLE_WAIT_SECONDS = 0.002

# How long the engine's start and a reset may wait for the server.
_START_SECONDS = 3.0
_RESET_SECONDS = 5.0


class SchedulerHalf:
    """Used by the scheduler's thread only, except for preparing a session."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        shapes: Sequence[GroupShape],
        config: Config,
    ) -> None:
        """Connects to nothing yet: see :meth:`describe_workers`.

        Raises ValueError for what is not supported.
        """
        transfer: Any = vllm_config.kv_transfer_config
        _compute_what_cannot_be_loaded(transfer)
        self._vllm_config = vllm_config
        self._config = config
        self._strategy = ParallelStrategy.from_vllm(vllm_config, kv_cache_config, is_worker=False)
        self._shapes = shapes
        # What is computed of a request when a load begins must be whole blocks of every group.
        self._block_tokens = fitting_chunk_tokens(1, self._shapes)
        self._whole_prompts_only = cannot_continue_prompts(vllm_config, self._strategy)
        self._does_nothing = hits_change_answers(vllm_config, self._strategy, config)
        if self._does_nothing:
            warn_of_no_hits(vllm_config)
        self._scopes = ScopeReader(vllm_config)
        self._relay = (
            Relay.of_engine(vllm_config, kv_cache_config, config.address)
            if config.events and publishes_events(vllm_config)
            else None
        )
        self._workers: dict[int, WorkerDescription] = {}
        self._is_connecting = False
        # The model's files as they are now, which is soon after they were loaded.
        self._model_facts = model_facts(vllm_config)
        self._namespaces: dict[int, Namespace] = {}
        self._engine_id = str(transfer.engine_id)
        self._link: Link[Target] = Link(
            "scheduler",
            config.address,
            self._open_session,
            self._prepare_session,
            autostart=Autostart(config.address) if config.autostart else None,
        )
        self._told: Live[Target] | None = None
        """The session that the workers know of."""
        self._breaker = Breaker(self._link, config.lookup_timeout)
        self._stats = Stats()
        self._records: dict[str, Record] = {}
        # Each as long as the records of its samples.
        self._extras: WeakValueDictionary[str, ExtraTokens] = WeakValueDictionary()
        self._loads: dict[str, Load] = {}
        self._stores = Stores(
            self._shapes,
            self._scopes,
            Teller(vllm_config, kv_cache_config),
            workers=self._strategy.world_size,
        )
        self._holds = Holds()
        self._stores_at_the_end = _zeroes_blocks_unasked(vllm_config, kv_cache_config)
        self._idle_wait = _IDLE_WAIT_SECONDS if self._strategy.steps_alone else 0.0
        self._idle_seconds = self._idle_wait
        """What is left of that in this step."""
        # For the next step's metadata.
        self._new_loads: list[LoadSpec] = []
        self._new_stores: list[StoreSpec] = []
        self._new_finished: list[str] = []
        self._overwritten_blocks: set[int] = set()
        # How often the namespace was to be cleared, and how often that was done; not a flag, since
        # two threads write here. While stores of before are under way nothing is looked up.
        self._clears_wanted = 0
        self._clears_done = 0
        self._stale_jobs: set[int] = set()

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Takes vLLM's pool of blocks."""
        self._holds.bind(pool)
        if self._relay is not None:
            self._relay.watch_pool(pool)

    # -- connection -----------------------------------------------------------------------------

    def describe_workers(
        self, descriptions: Iterable[WorkerDescription], *, at_start: bool = True
    ) -> None:
        """Takes workers' descriptions, and connects when all are there.

        ``at_start`` waits a moment for that, so that the first request finds the cache if there is
        one.
        """
        if self._is_connecting or self._does_nothing:
            return
        self._workers.update((worker.worker_id, worker) for worker in descriptions)
        if len(self._workers) < self._strategy.world_size:
            _log.info(
                "%d of %d workers have described their KV cache; the others will with their first "
                "step",
                len(self._workers),
                self._strategy.world_size,
            )
            return
        self._is_connecting = True
        self._link.start(_START_SECONDS if at_start else 0)

    def _open_session(self, client: Client, on_lost: Any) -> Session:
        return client.session(self._engine_id, role=SessionRole.SCHEDULER, on_lost=on_lost)

    def _prepare_session(self, client: Client, session: Session) -> Target:
        """Registers the namespace. Runs on the link's thread."""
        announced = self._config.chunk_tokens or session.chunk_tokens
        if announced < 1:
            raise ServerError("the server announced chunks of 0 tokens; set kvdock.chunk_tokens")
        chunk_tokens = fitting_chunk_tokens(announced, self._shapes)
        if chunk_tokens not in self._namespaces:
            self._namespaces[chunk_tokens] = derive_namespace(
                self._vllm_config,
                self._model_facts,
                self._strategy.as_workers_say(worker.use_mla for worker in self._workers.values()),
                self._shapes,
                self._workers,
                chunk_tokens,
            )
        namespace = self._namespaces[chunk_tokens]
        session.register_namespace(namespace)
        if (wanted := self._clears_wanted) != self._clears_done:
            client.clear(namespace.name)
            self._clears_done = wanted
        _log.info("namespace %s, chunks of %d tokens", namespace.name, chunk_tokens)
        if self._relay is not None:
            self._relay.follow(namespace.name, has_log=session.info.event_log)
        return Target(session.epoch, namespace.name, chunk_tokens, session.info.event_log)

    def _live(self) -> Live[Target] | None:
        """The session, if the server may be used now."""
        return None if self._stale_jobs else self._link.current

    @property
    def has_work_for_workers(self) -> bool:
        """The workers do not know yet which namespace they will need, or are storing."""
        return self._link.current not in (None, self._told) or bool(self._stores.under_way)

    def _news(self) -> Target | None:
        live = self._link.current
        if live is None or live is self._told:
            return None
        self._told = live
        return live.prepared

    # -- what is cached -------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        """Asks the server, so that the answer may be there when the scheduler wants it."""
        record = self._record(request)
        if not request.skip_reading_prefix_cache:
            record.lookup = self._ask(record)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond those computed, None if not known yet; and whether a
        load is asynchronous.
        """
        record = self._record(request)
        # Only requests that have computed nothing yet, or nothing any more, are asked about.
        record.is_of_before = False
        # vLLM 0.26 asks even where it may not read a cache. A partly computed block would be
        # overwritten by a load, and others may be using it.
        if (
            record.bypass
            or request.skip_reading_prefix_cache
            or num_computed_tokens % self._block_tokens
        ):
            return 0, False
        live = self._live()
        if record.lookup is None or record.lookup.live is not live:
            record.forget_lookup()
            record.lookup = self._ask(record)
            if record.lookup is None:
                return 0, False
        lookup = record.lookup
        # An engine that has all that could be cached does not wait to hear of it.
        is_wanted = lookup.most_tokens > num_computed_tokens
        self._poll(lookup, self._idle_seconds if is_wanted else 0.0)
        if lookup.state is State.ASKED:
            return (None if is_wanted else 0), False
        lookup.num_computed_tokens = num_computed_tokens
        hit_tokens = lookup.hit_chunks * lookup.target.chunk_tokens
        if self._whole_prompts_only and request.num_tokens - hit_tokens > 1:
            return 0, False
        new_tokens = max(0, hit_tokens - num_computed_tokens)
        return new_tokens, new_tokens > 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Loads ``num_external_tokens``, which is what the scheduler made of the answer."""
        record = self._record(request)
        record.set_tables(blocks.get_block_ids())
        if num_external_tokens > 0:
            self._load(record, record.take_lookup(), num_external_tokens)
            return
        record.admitted = True
        self._note_answer(record)

    def _record(self, request: Request) -> Record:
        record = self._records.get(request.request_id)
        if record is None:
            tables: list[list[int]] = [[] for _ in self._shapes]
            extra = self._extras.setdefault(prompt_id(request.request_id), ExtraTokens())
            record = self._records[request.request_id] = Record(request, extra, tables)
        return record

    def _ask(self, record: Record) -> Lookup | None:
        """Looks a request up. None if there is nothing to ask, or nobody."""
        live = self._live()
        if live is None or self._breaker.is_open:
            return None
        num_tokens = record.request.num_tokens
        if any(shape.lacks_a_block_for_the_last_token for shape in self._shapes):
            num_tokens -= 1
        keys = record.keys(self._scopes, num_tokens, live.prepared.chunk_tokens)
        if self._relay is not None:
            self._relay.know_adapter(record.request, record.adapter)
        if not keys:
            return None
        return Lookup(
            live,
            keys[:_MOST_KEYS],
            readers=self._strategy.world_size,
            timeout=self._config.lookup_timeout,
        )

    def _poll(self, lookup: Lookup, seconds: float = 0.0) -> None:
        """Looks for an answer, and waits so long for it, at the cost of this step's idle time."""
        began = time.monotonic()
        if lookup.poll(seconds):
            self._count(lookup)
        if seconds > 0:
            self._idle_seconds -= time.monotonic() - began

    def _note_answer(self, record: Record) -> None:
        """Ends the lookup of a request that loads nothing, once it is answered."""
        lookup = record.lookup
        if lookup is None:
            return
        self._poll(lookup)
        if lookup.state is not State.ASKED:
            record.take_lookup()
            lookup.close()

    def _count(self, lookup: Lookup) -> None:
        """Notes how a lookup ended."""
        if lookup.state is State.ANSWERED:
            self._stats.add("lookups")
            self._stats.add("hit_tokens", lookup.hit_chunks * lookup.target.chunk_tokens)
            if self._breaker.succeeded():
                _log.warning("the KVDock server answers again")
        elif lookup.state is State.TIMED_OUT:
            self._stats.add("lookup_timeouts")
            if self._breaker.failed(lookup.asked_at):
                _log.warning(
                    "the KVDock server did not answer a lookup within %g s: requests are served "
                    "without cache until it does (kvdock.lookup_timeout_ms)",
                    self._config.lookup_timeout,
                )
        else:
            self._stats.add("lookup_errors")
            level = logging.WARNING if lookup.live.session.alive else logging.DEBUG
            _log.log(level, "a lookup failed, so its request gets no cache: %s", lookup.error)

    # -- loads ----------------------------------------------------------------------------------

    def _load(self, record: Record, lookup: Lookup | None, num_tokens: int) -> None:
        """Begins the load of a hit."""
        load = plan_load(
            record.request.request_id,
            self._shapes,
            record.tables,
            lookup,
            num_tokens,
            is_usable=lookup is not None and lookup.live is self._live(),
            all_or_nothing=self._whole_prompts_only,
        )
        self._loads[load.spec.request_id] = load
        self._new_loads.append(load.spec)
        self._overwritten_blocks |= load.spec.block_ids

    def _end_load(self, request_id: str) -> None:
        """All workers are done with the load of a request."""
        load = self._loads.pop(request_id, None)
        if load is None:
            return
        if load.lookup is not None:
            # The workers freed their own locks; this is for those that could not.
            load.lookup.close()
        self._stats.add("loaded_tokens", load.loaded_tokens)
        self._stats.add("failed_loads", load.has_failed)
        record = self._records.get(request_id)
        if record is None:
            return
        if not record.admitted:
            record.admitted = True
            record.extra.note(load.loaded_tokens)
            if load.has_failed:
                _correct_vllms_count(record.request, load.loaded_tokens)
        if load.has_failed:
            record.bypass = True
            good_chunks = (load.first_token + load.loaded_tokens) // max(1, record.chunk_tokens)
            record.stored_chunks = min(record.stored_chunks, good_chunks)

    # -- stores ---------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """What the workers have to know for this step."""
        has_forward = scheduler_output.total_num_scheduled_tokens > 0
        num_busy = len(scheduler_output.num_scheduled_tokens) + len(self._loads)
        self._idle_seconds = 0.0 if has_forward else self._idle_wait
        metadata = StepMetadata(
            news=self._news(),
            loads=self._new_loads,
            stores=self._new_stores,
            finished=self._new_finished,
            has_forward=has_forward,
            has_waiting=len(self._records) > num_busy,
        )
        self._new_loads, self._new_stores, self._new_finished = [], [], []
        written, self._overwritten_blocks = self._overwritten_blocks, set()
        # The loads have to reach the workers whatever fails here: vLLM waits for them.
        try:
            written.update(self._blocks_written(scheduler_output))
            metadata.overwritten = self._stores.reading(written)
        except Exception:
            _log.exception("which blocks are given out is not known, so all stores end")
            metadata.overwritten = list(self._stores.under_way)
        try:
            self._track_blocks(scheduler_output)
            metadata.stores += self._plan_stores(scheduler_output)
            self._holds.renew(self._stores.leaving(scheduler_output.num_scheduled_tokens))
        except Exception:
            _log.exception("planning what to store failed")
        return metadata

    def _plan_stores(self, scheduler_output: SchedulerOutput) -> list[StoreSpec]:
        """What becomes complete in this step."""
        specs: list[StoreSpec] = []
        live = self._live()
        for request_id, num_scheduled in scheduler_output.num_scheduled_tokens.items():
            record = self._records.get(request_id)
            if record is None:
                continue
            self._note_answer(record)
            if live is None or self._stores_at_the_end:
                continue
            request = record.request
            computed = request.num_computed_tokens
            # The scheduler counts drafts as computed before they are accepted.
            num_tokens = min(computed + num_scheduled, request.num_tokens)
            spec = self._plan_store(record, num_tokens, live.prepared, held_from=computed)
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
        if record.is_of_before:
            return None
        if not self._config.save_decode:
            num_tokens = min(num_tokens, record.request.num_prompt_tokens)
        if (awaited := record.lookup) is not None:
            # The answer says what need not be stored; but nothing of a chunk that was not asked
            # for, which may be gone when it comes: from a window, or with its request.
            if num_tokens < awaited.most_tokens + target.chunk_tokens:
                return None
            record.forget_lookup()
        return self._stores.plan(record, num_tokens, target, held_from=held_from, is_last=is_last)

    def _track_blocks(self, scheduler_output: SchedulerOutput) -> None:
        """Follows which blocks each request has."""
        for request_id in scheduler_output.preempted_req_ids or ():
            record = self._records.get(request_id)
            if record is not None:
                # What they read is not the request's any more.
                record.jobs.clear()
                if request_id not in self._loads:
                    record.set_tables([[] for _ in self._shapes])
        for new in scheduler_output.scheduled_new_reqs:
            record = self._records.get(new.req_id)
            if record is not None:
                # Also a preempted request that is resumed, on some of vLLM's runners.
                record.set_tables(new.block_ids)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            record = self._records.get(request_id)
            if record is None or block_ids is None:
                continue
            if request_id in cached.resumed_req_ids:
                record.set_tables(block_ids)
            else:
                record.extend_tables(block_ids)

    def _blocks_written(self, scheduler_output: SchedulerOutput) -> Iterator[int]:
        """The blocks that a step has given out, without those that have been computed."""
        for new in scheduler_output.scheduled_new_reqs:
            yield from self._from_token(new.num_computed_tokens, new.block_ids)
        cached = scheduler_output.scheduled_cached_reqs
        for request_id, block_ids, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if block_ids is not None:
                resumed = request_id in cached.resumed_req_ids
                yield from self._from_token(num_computed if resumed else 0, block_ids)

    def _from_token(self, first_token: int, tables: Sequence[Sequence[int]]) -> Iterator[int]:
        for shape, table in zip(self._shapes, tables, strict=True):
            yield from table[first_token // shape.block_tokens :]

    # -- ends -----------------------------------------------------------------------------------

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """Takes what the workers finished."""
        report = getattr(output, "kv_connector_worker_meta", None)
        if isinstance(report, WorkerReport):
            if report.descriptions:
                self.describe_workers(report.descriptions, at_start=False)
            for job_id, outcome in report.stores.items():
                if self._stores.note(job_id, outcome):
                    self._holds.release(job_id)
                    self._note_stale(job_id)
        if output.invalid_block_ids:
            for load in self._loads.values():
                load.note_failed_blocks(output.invalid_block_ids, self._block_tokens)
        for request_id in getattr(output, "failed_recving", ()):
            if (failed := self._loads.get(request_id)) is not None:
                failed.note_failure()
        for request_id in output.finished_recving or ():
            self._end_load(request_id)

    def request_finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks must stay until the workers report the request, and what its response
        carries. ``block_ids`` are its blocks, for each group.
        """
        record = self._records.pop(request.request_id, None)
        if record is None:
            return False, None
        answer = _extra_tokens_answer(request, record)
        # vLLM waits for the end of a load by itself.
        is_loading = request.request_id in self._loads
        self._note_answer(record)
        try:
            if not is_loading and _ended_by_itself(request):
                self._plan_last_store(record, block_ids)
        finally:
            record.forget_lookup()
        if is_loading or not record.jobs:
            return False, answer
        self._new_finished.append(request.request_id)
        return True, answer

    def _plan_last_store(self, record: Record, block_ids: Sequence[Sequence[int]]) -> None:
        """Of a request that has ended: the last chunk may have become known only with the last
        step's tokens. The last token itself was never computed.
        """
        live = self._live()
        if live is None:
            return
        request = record.request
        num_tokens = max(request.num_prompt_tokens, request.num_tokens - 1)
        record.set_tables(block_ids)
        spec = self._plan_store(record, num_tokens, live.prepared, is_last=True)
        if spec is not None:
            self._new_stores.append(spec)

    def reset_cache(self) -> bool:
        """Drops everything that is stored for this model, on the server as well.

        What was promised before is void. While stores of before are under way nothing is looked up,
        and the namespace is cleared once more when they are done. Where no server answers this
        succeeds as well, since the next one is asked for nothing before it is cleared: vLLM, which
        sleeps and pauses with a reset, must not fail for a cache that is away.
        """
        if self._does_nothing:
            return True
        for record in self._records.values():
            record.forget_lookup()
            record.stored_chunks = 0
            record.is_of_before = any(record.tables)
        self._stale_jobs = set(self._stores.under_way)
        self._clears_wanted += 1
        if self._relay is not None:
            self._relay.forget()
        if not self._link.renew(_RESET_SECONDS):
            _log.warning(
                "KVDock's cache could not be reset now (%s); it will be before it is used again",
                self._link.failure or f"no session within {_RESET_SECONDS:g} s",
            )
        return True

    def _note_stale(self, job_id: int) -> None:
        """A store ended. If it was the last from before a reset, what it stored is cleared too."""
        if job_id in self._stale_jobs:
            self._stale_jobs.discard(job_id)
            if not self._stale_jobs:
                self._clears_wanted += 1
                self._link.renew(0)

    def take_events(self) -> list[KVCacheEvent]:
        """What is to be published of the server's cache."""
        return self._relay.take() if self._relay is not None else []

    def take_stats(self) -> Stats | None:
        """Counters since the last call."""
        return self._stats.take()

    def shutdown(self) -> None:
        """Ends the session, and with it every lease."""
        self._link.close()
        if self._relay is not None:
            self._relay.close()


def _compute_what_cannot_be_loaded(transfer: Any) -> None:
    """Sets vLLM's policy, which its scheduler reads after our constructor, and says so.

    "fail", vLLM's default, ends a request with an error; but a cache may fail without anybody
    noticing. vLLM's config does not tell a "fail" that was chosen from one that was not.
    """
    given = transfer.kv_load_failure_policy
    transfer.kv_load_failure_policy = "recompute"
    if given == "recompute":
        _log.info("kv_load_failure_policy is recompute, as it was set: KVDock knows no other")
    else:
        _log.info(
            "kv_load_failure_policy is recompute: KVDock sets it in place of %s, which is vLLM's "
            "default and is not honoured where it was chosen either. What cannot be loaded is "
            "computed, and no request ends with an error for it",
            given,
        )


def _zeroes_blocks_unasked(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Whether blocks given out anew are zeroed before a connector can end the stores that read
    them, so that only blocks may be stored that are held: those of requests that have ended.

    vLLM's V2 runner (of 0.32 and 0.33) does so with caches of several precisions: in
    ``update_requests``, before ``handle_preemptions``.
    """
    zeroes = getattr(kv_cache_config, "needs_kv_cache_zeroing", False)
    return bool(zeroes and getattr(vllm_config, "use_v2_model_runner", True))


def _ended_by_itself(request: Request) -> bool:
    """Not aborted: then the scheduler's count of computed tokens might be ahead of the truth."""
    return request.status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


def _extra_tokens_answer(request: Request, record: Record) -> dict[str, Any] | None:
    """The number of tokens that came from here, under the keys under which it was asked for."""
    asked = request.kv_transfer_params
    if not isinstance(asked, Mapping):
        return None
    return {key: record.extra.loaded for key in EXTRA_TOKENS_KEYS if key in asked} or None


def _correct_vllms_count(request: Request, loaded_tokens: int) -> None:
    """vLLM counts as cached what it was promised, also where it was not to be had."""
    stats = request.prefill_stats
    if stats is not None:
        stats.set(stats.num_prompt_tokens, stats.num_local_cached_tokens, loaded_tokens)
