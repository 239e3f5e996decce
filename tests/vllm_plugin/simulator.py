"""An engine whose model costs nothing, around vLLM's own scheduler and our own connector.

The scheduler, its KV-cache manager and both halves of the connector are real; only the forward pass
is not. In its place each step writes, for each token that it computes, bytes that are a function of
all tokens up to there, of the layer and of the rank. Before that it checks that every token which
the scheduler believes to be computed, and which the layer sees, has exactly those bytes in the
block where the scheduler believes them to be. So whatever puts a wrong byte anywhere, a load at the
wrong place, a store of blocks that were given away, a key that says too little, is found in the
next step that matters.

A model has one or several groups of layers, of full attention, of sliding windows, of chunked local
attention or of recurrent state, with blocks of one size or of several. As in vLLM the groups lie
over one another in the same memory. A state is smaller than its page. A step reads it from the
block where the last step left it, and leaves it in the block of the step's last token.

With speculative decoding some of each step's drafts are right. The model writes what it computes of
all of them. A layer of the drafter holds bytes that depend on the next token too, as of EAGLE.

Messages between the halves are pickled, as they are between vLLM's processes.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import shutil
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import EngineArgs, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvdock_vllm.connector import KVDockConnector
from kvdock_vllm.engine.groups import NULL_BLOCK
from kvdock_vllm.metadata import StepMetadata
from kvdock_vllm.plugin import register

BLOCK_TOKENS = 16
CHUNK_TOKENS = 64
_LAYERS_A_GROUP = 3
_PAGE_BYTES = 2048
_STATE_BYTES = 1040
_PICTURE_TOKENS = 4096


@dataclass(frozen=True)
class Layers:
    """One KV-cache group of a simulated model: three layers."""

    block_tokens: int = BLOCK_TOKENS
    window: int = 0
    """Tokens that a token sees, itself included. 0: all."""
    piece: int = 0
    """Chunked local attention: a token sees only the piece of so many tokens that it is in."""
    state: bool = False
    """A block holds no tokens but the state after its last one."""
    checkpoints: bool = False
    """The kernel also leaves a state from inside a prompt's last step, as those of GPUs do."""

    @property
    def row_bytes(self) -> int:
        """Bytes a token, or state, and layer. Pages are of one size in all groups."""
        return _STATE_BYTES if self.state else _PAGE_BYTES // self.block_tokens

    def first_seen(self, token: int) -> int:
        """The first token that a token sees."""
        if self.piece:
            return token // self.piece * self.piece
        return max(0, token - self.window + 1) if self.window else 0

    def _checkpoint_plan(self) -> dict[str, Any]:
        if not self.checkpoints:
            return {}
        return {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}

    def spec(self, *, mla: bool, mamba_cache_mode: str) -> KVCacheSpec:
        if self.state:
            return MambaSpec(
                block_size=self.block_tokens,
                shapes=((3, 4), (_STATE_BYTES // 4 - 12,)),
                dtypes=(torch.float32, torch.float32),
                page_size_padded=_PAGE_BYTES,
                mamba_cache_mode=mamba_cache_mode,
                **self._checkpoint_plan(),
            )
        sizes: dict[str, Any] = {"num_kv_heads": 1, "dtype": torch.float32}
        sizes |= {"block_size": self.block_tokens, "head_size": self.row_bytes // (4 if mla else 8)}
        if self.window:
            of_window = SlidingWindowMLASpec if mla else SlidingWindowSpec
            return of_window(sliding_window=self.window, **sizes)
        if self.piece:
            assert not mla
            return ChunkedLocalAttentionSpec(attention_chunk_size=self.piece, **sizes)
        return (MLAAttentionSpec if mla else FullAttentionSpec)(**sizes)


class WrongBytesError(AssertionError):
    """The KV cache does not hold what the scheduler believes."""


@dataclass
class Outcome:
    """What became of a request."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    num_cached_tokens: int | None = None


class _History:
    """Digests of all prefixes of one request, extended as it grows."""

    def __init__(self, identity: bytes) -> None:
        self._tip = hashlib.sha256(identity).digest()
        self._digests: list[bytes] = []

    def digests(self, tokens: Sequence[int]) -> list[bytes]:
        for token in tokens[len(self._digests) :]:
            self._tip = hashlib.sha256(self._tip + struct.pack("<I", token)).digest()
            self._digests.append(self._tip[:16])
        return self._digests

    def next_token(self, tokens: Sequence[int]) -> int:
        return 3 + int.from_bytes(self.digests(tokens)[len(tokens) - 1][:2], "little") % 2000

    def proposal(self, tokens: Sequence[int], count: int) -> list[int]:
        """Drafts of the next tokens, most of them right."""
        self.digests(tokens)
        tip, proposed = self._tip, []
        for _ in range(count):
            token = 3 + int.from_bytes(tip[:2], "little") % 2000
            proposed.append(token + (tip[2] % 4 == 0))
            tip = hashlib.sha256(tip + struct.pack("<I", token)).digest()
        return proposed


class _Rank:
    """A worker: tensors and the connector's half."""

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: KVCacheConfig,
        groups: Sequence[Layers],
        rank: int,
        mla: bool,
    ) -> None:
        config = copy.deepcopy(vllm_config)
        config.parallel_config.rank = rank
        self.identity = 0 if mla else rank
        blocks = kv_cache_config.num_blocks
        # One allocation for all layers, as vLLM makes it.
        memory = torch.zeros(_LAYERS_A_GROUP * blocks * _PAGE_BYTES // 4, dtype=torch.float32)
        caches: dict[str, torch.Tensor] = {}
        self._pages = memory.numpy().view(np.uint8).reshape(_LAYERS_A_GROUP, blocks, _PAGE_BYTES)
        self.views: list[list[Any]] = []
        """For each group and layer the bytes of all tokens, or of all states."""
        for layers, group in zip(groups, kv_cache_config.kv_cache_groups, strict=True):
            parts = memory.chunk(_LAYERS_A_GROUP)
            if layers.state:
                pages = [part.view(torch.int8).view(blocks, 1, 1, _PAGE_BYTES) for part in parts]
                states = [page[..., :_STATE_BYTES] for page in pages]
                caches |= dict(zip(group.layer_names, states, strict=True))
                self.views.append([layer[:, :_STATE_BYTES] for layer in self._pages])
                continue
            shape = blocks, 1, layers.block_tokens, layers.row_bytes // 4
            caches |= {
                name: part.view(shape) for name, part in zip(group.layer_names, parts, strict=True)
            }
            self.views.append(
                [part.numpy().view(np.uint8).reshape(-1, layers.row_bytes) for part in parts]
            )
        made: Any = KVConnectorFactory.create_connector(
            config, KVConnectorRole.WORKER, kv_cache_config
        )
        self.connector = made
        """The engine's one connector: KVDock's, or vLLM's MultiConnector around several."""
        self.connector.register_kv_caches(caches)

    def zero_and_copy(self, output: Any) -> None:
        """What a step does to blocks before it computes."""
        self._pages[:, output.new_block_ids_to_zero or []] = 0
        for pair in getattr(output, "kv_cache_block_copies", None) or ():
            self._pages[:, pair.dst_block_id] = self._pages[:, pair.src_block_id]

    def rows(self, digests: Sequence[bytes], layer: int, row_bytes: int) -> Any:
        """What this rank's layer holds for tokens with these histories."""
        seeds = np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), 16).copy()
        seeds[:, 0] ^= layer + 1
        seeds[:, 1] ^= self.identity + 1
        return np.tile(seeds, (1, row_bytes // 16))


@dataclass
class _Running:
    """A request as the model runner knows it."""

    tokens: list[int]
    block_ids: list[list[int]]
    num_computed_tokens: int
    found_tokens: int
    """Found in a cache when the request was last given blocks."""
    drafts: list[int] = field(default_factory=list)
    """Proposed for the next step."""


@dataclass
class _Input:
    """What a step computes of one request: the tokens from ``start`` on."""

    start: int
    end: int
    digests: list[bytes]
    """Of all tokens up to ``end``. Those of rejected drafts are of no prompt."""
    settled: list[bytes]
    """Of all tokens that are known when the step's drafts are verified."""


class SimulatedEngine:
    """Steps when told to. Close it, or use it as a context manager."""

    def __init__(
        self,
        model: Path,
        address: str,
        *,
        num_blocks: int = 256,
        groups: Sequence[Layers] = (Layers(),),
        mla: bool = False,
        tensor_size: int = 1,
        async_scheduling: bool = False,
        handshake: bool = True,
        drafts: int = 0,
        chained: bool = False,
        mamba_cache_mode: str = "align",
        zeroes_first: bool = False,
        extra_config: dict[str, Any] | None = None,
        before: Sequence[dict[str, Any]] = (),
        behind: Sequence[dict[str, Any]] = (),
        **arguments: Any,
    ) -> None:
        """``before`` and ``behind`` are other connectors, by their place beside KVDock's.

        ``drafts``: how many tokens EAGLE proposes in each step. 0: there is no drafter.
        ``chained``: a chain of as many MTP modules does, each of which reads one token further.
        ``zeroes_first``: new blocks are zeroed before the connector hears of the step, as by vLLM's
        V2 runner.
        """
        register()
        kvdock = {
            "kv_connector": "KVDockConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "kvdock.address": address,
                "kvdock.lookup_timeout_ms": 2000,
                **(extra_config or {}),
            },
        }
        several = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [*before, kvdock, *behind]},
        }
        if drafts:
            arguments["speculative_config"] = {
                "method": "eagle",
                "model": str(_draft_model(model)),
                "num_speculative_tokens": drafts,
            }
        settings: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "block_size": BLOCK_TOKENS,
            "max_model_len": 2048,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 8,
            "dtype": "float32",
            "tensor_parallel_size": tensor_size,
            "kv_transfer_config": several if before or behind else kvdock,
            **arguments,
        }
        self.config = EngineArgs(**settings).create_engine_config()
        if chained:
            setattr(self.config.speculative_config, "use_multi_module_mtp", lambda: True)  # noqa: B010
        # The CPU platform turns it off, for reasons that are not the scheduler's.
        self.config.scheduler_config.async_scheduling = async_scheduling
        self.config.cache_config.block_size = BLOCK_TOKENS
        self.config.cache_config.num_gpu_blocks = num_blocks
        if states := [layers for layers in groups if layers.state]:
            # With states vLLM has blocks of one size.
            self.config.cache_config.block_size = states[0].block_tokens
            self.config.cache_config.mamba_block_size = states[0].block_tokens
            self.config.cache_config.mamba_cache_mode = mamba_cache_mode  # type: ignore[assignment]
        self.groups = groups
        self._zeroes_first = zeroes_first
        self.kv_cache_config = kv_cache_config(
            num_blocks, groups, mla=mla, mamba_cache_mode=mamba_cache_mode
        )
        if hasattr(self.kv_cache_config, "prefix_cache_retention_interval"):
            # Of what windows leave behind vLLM then caches no more than it does by default.
            self.kv_cache_config.prefix_cache_retention_interval = (
                self.config.cache_config.prefix_cache_retention_interval
            )
        block_tokens, hash_tokens = resolve_kv_cache_block_sizes(self.kv_cache_config, self.config)
        self.ranks = [
            _Rank(self.config, self.kv_cache_config, groups, rank, mla)
            for rank in range(tensor_size)
        ]
        self._overlap = async_scheduling
        self._drafts = drafts
        self._read_ahead = drafts if chained else min(1, drafts)
        self.scheduler = (AsyncScheduler if async_scheduling else Scheduler)(
            vllm_config=self.config,
            kv_cache_config=self.kv_cache_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=block_tokens,
            hash_block_size=hash_tokens,
            log_stats=True,
        )
        # Pictures cost no more than tokens here, whatever the model is.
        self.scheduler.max_num_encoder_input_tokens = _PICTURE_TOKENS
        self.scheduler.encoder_cache_manager = EncoderCacheManager(_PICTURE_TOKENS)
        outer: Any = self.scheduler.connector
        self.outer = outer
        """The engine's one connector, as in the ranks."""
        self.others = [one for one in _children(outer) if not isinstance(one, KVDockConnector)]
        (ours,) = (one for one in _children(outer) if isinstance(one, KVDockConnector))
        self.connector: KVDockConnector = ours
        descriptions = [_pickled(rank.connector.get_handshake_metadata()) for rank in self.ranks]
        # vLLM passes on one connector's only, where there are several.
        known = descriptions if handshake else [KVConnectorHandshakeMetadata() for _ in self.ranks]
        self.outer.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): metadata for rank, metadata in enumerate(known)}
        )
        self._aggregator = KVOutputAggregator(tensor_size)
        init_none_hash(_sha256)
        self._hasher = get_request_block_hasher(hash_tokens, _sha256)
        self._histories: dict[str, _History] = {}
        self._running: dict[str, _Running] = {}
        self._pending: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self._wrong: deque[set[int]] = deque()
        """For each step whose results are not processed the blocks that it left wrong."""
        self._inputs: dict[str, _Input] = {}
        self.accepted_drafts = 0
        self.rejected_drafts = 0
        self.outcomes: dict[str, Outcome] = {}
        self.between_schedule_and_forward: Callable[[], None] = lambda: None
        """Runs in each step after scheduling."""
        self.known_to_be_wrong: Callable[[Any], set[int]] = lambda connector: set()
        """Blocks of which another connector is about to say, in this step, that it could not fill
        them. What is computed from them is wrong too, and vLLM throws it away."""
        self.counted: dict[str, float] = {}
        """Totals of what the connector told vLLM's metrics."""
        self.overwritten = 0
        """How many stores the workers were told to end, because their blocks were given away."""

    def add(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 1,
        kv_transfer_params: dict[str, Any] | None = None,
        cache_salt: str | None = None,
        lora: LoRARequest | None = None,
        mm_features: list[MultiModalFeatureSpec] | None = None,
        prompt_embeds: torch.Tensor | None = None,
        **sampling: Any,
    ) -> Request:
        """Gives the scheduler a request. Embeddings stand for as many of the prompt's tokens."""
        extra = None if kv_transfer_params is None else {"kv_transfer_params": kv_transfer_params}
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt) if prompt_embeds is None else None,
            prompt_embeds=prompt_embeds,
            mm_features=mm_features,
            sampling_params=SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, extra_args=extra, **sampling
            ),
            pooling_params=None,
            cache_salt=cache_salt,
            lora_request=lora,
            block_hasher=self._hasher,
        )
        self._histories[name] = _History(repr((cache_salt, lora and lora.lora_name)).encode())
        self.outcomes[name] = Outcome()
        self.scheduler.add_request(request)
        return request

    def abort(self, name: str) -> None:
        """As a client that goes away does."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.outcomes[name].finish_reason = "abort"

    def step(self) -> None:
        """One engine step. With async scheduling its results are processed in the next one."""
        output = self.scheduler.schedule()
        self.between_schedule_and_forward()
        self._batch(output)
        self._wrong.append(set())
        result = self._sample(output)
        reports = [self._run_rank(rank, output) for rank in self.ranks]
        busy = output.total_num_scheduled_tokens > 0
        outputs = [copy.copy(result) for _ in reports]
        for one, report in zip(outputs, reports, strict=True):
            # Where nothing is computed, vLLM passes on only what says something.
            one.kv_connector_output = report if busy or not report.is_empty() else None
        alone = len(outputs) == 1
        aggregated = outputs[0] if alone else self._aggregator.aggregate(outputs)
        assert aggregated is not None
        self._pending.append((output, aggregated))
        goes_on = busy or self.scheduler.has_requests()
        while len(self._pending) > (1 if self._overlap and goes_on else 0):
            self._process(*self._pending.popleft())
        if not busy:
            time.sleep(0.001)

    def _process(self, output: Any, result: ModelRunnerOutput) -> None:
        """Hands a step's results to the scheduler."""
        self._wrong.popleft()
        for core_outputs in self.scheduler.update_from_output(output, result).values():
            stats = core_outputs.scheduler_stats
            for counter, amount in _our_counts((stats and stats.kv_connector_stats) or {}):
                self.counted[counter] = self.counted.get(counter, 0) + amount
            for item in core_outputs.outputs:
                outcome = self.outcomes[item.request_id]
                outcome.tokens += item.new_token_ids
                if item.prefill_stats is not None:
                    outcome.num_cached_tokens = item.prefill_stats.num_cached_tokens
                if item.finish_reason is not None:
                    outcome.finish_reason = str(item.finish_reason)
                    outcome.kv_transfer_params = item.kv_transfer_params
        if self._drafts and not self._overlap:
            # An asynchronous scheduler knows only how many there are.
            proposed = [list(self._running[name].drafts) for name in result.req_ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(result.req_ids, proposed))

    def run(self, seconds: float = 30.0) -> None:
        """Steps until there is nothing left to do. AssertionError if that takes too long."""
        deadline = time.monotonic() + seconds
        while self.scheduler.has_requests():
            assert time.monotonic() < deadline, f"still busy: {list(self.scheduler.requests)}"
            self.step()

    def generate(self, prompt: Sequence[int], name: str = "", **arguments: Any) -> Outcome:
        """Runs one request to its end, stores included."""
        name = name or f"request-{len(self.outcomes)}"
        self.add(name, prompt, **arguments)
        self.run()
        return self.outcomes[name]

    def expected(self, prompt: Sequence[int], count: int) -> list[int]:
        """The tokens that a plain prompt is answered with."""
        history = _History(repr((None, None)).encode())
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(history.next_token(tokens))
        return tokens[len(prompt) :]

    def forget(self) -> None:
        """Empties the engine's own prefix cache."""
        assert self.scheduler.reset_prefix_cache()

    def preempt_all(self) -> bool:
        """Preempts all running requests, which may be resumed in the next step; false if vLLM
        would refuse, because a load or a store holds blocks.
        """
        while self._pending:
            self._process(*self._pending.popleft())
        if self.connector.scheduler_half.holds:
            return False
        manager = self.scheduler.kv_cache_manager
        waiting = set(self.scheduler.requests.values()) - set(self.scheduler.running)
        if any(any(manager.get_block_ids(request.request_id)) for request in waiting):
            return False
        return self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def close(self) -> None:
        self.outer.shutdown()
        for rank in self.ranks:
            rank.connector.shutdown()

    def __enter__(self) -> SimulatedEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _batch(self, output: Any) -> None:
        """Follows requests by what the scheduler sends, as a model runner does."""
        for name in output.finished_req_ids:
            self._running.pop(name, None)
        for new in output.scheduled_new_reqs:
            tokens = list(self.scheduler.requests[new.req_id].all_token_ids)
            self._running[new.req_id] = _Running(
                tokens,
                [list(table) for table in new.block_ids],
                new.num_computed_tokens,
                new.num_computed_tokens,
            )
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            running = self._running[name]
            if name in cached.resumed_req_ids:
                running.tokens = list(self.scheduler.requests[name].all_token_ids)
                running.block_ids = [list(table) for table in blocks]
                running.found_tokens = computed
            elif blocks is not None:
                for table, more in zip(running.block_ids, blocks, strict=True):
                    table += more
            if not self._overlap:
                # If another connector could not fill blocks, vLLM throws the step's answer away.
                running.tokens = list(self.scheduler.requests[name].all_token_ids)
            running.num_computed_tokens = computed

    def _run_rank(self, rank: _Rank, output: Any) -> KVConnectorOutput:
        """A model runner's step, in the order of vLLM's own."""
        connector = rank.connector
        metadata = _pickled(output.kv_connector_metadata)
        (step,) = (
            one
            for one in getattr(metadata, "metadata", (metadata,))
            if isinstance(one, StepMetadata)
        )
        for spec in (*step.loads, *step.last_stores, *step.stores):
            assert all(NULL_BLOCK not in group.block_ids for group in spec.groups), spec
        self.overwritten += len(step.overwritten)
        if self._zeroes_first:
            rank.zero_and_copy(output)
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        if not self._zeroes_first:
            rank.zero_and_copy(output)
        context: Any = None
        # As vLLM from 0.32 on.
        loads_first = getattr(output, "has_sync_kv_loads", bool(self.others))
        if loads_first:
            connector.start_load_kv(context)
        for name in output.num_scheduled_tokens:
            self._forward(rank, name)
        if not loads_first:
            connector.start_load_kv(context)
        connector.wait_for_save()
        report = KVConnectorOutput(
            **_finished(connector, output.finished_req_ids),
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_connector_worker_meta=_pickled(connector.build_connector_worker_meta()),
        )
        connector.clear_connector_metadata()
        return report

    def _forward(self, rank: _Rank, name: str) -> None:
        """Checks the tokens before, writes those of this step."""
        excused = self.known_to_be_wrong(rank.connector).union(*self._wrong)
        running, step = self._running[name], self._inputs[name]
        start, end = step.start, step.end
        for group, layers in enumerate(self.groups):
            if layers.state:
                self._forward_state(rank, name, group, start, step.digests[:end])
                continue
            size = layers.block_tokens
            table = np.array(running.block_ids[group])
            slots = np.repeat(table * size, size) + np.tile(np.arange(size), len(table))
            first = layers.first_seen(start)
            for index, view in enumerate(rank.views[group]):
                layer = group * _LAYERS_A_GROUP + index
                digests = step.digests
                if self._drafts and index == _LAYERS_A_GROUP - 1:
                    # The drafter's layer.
                    digests = [*step.settled[self._read_ahead :], *[bytes(16)] * len(digests)]
                rows = rank.rows(digests[first:end], layer, layers.row_bytes)
                old = rows[: start - first]
                if self._read_ahead > 1 and index == _LAYERS_A_GROUP - 1:
                    # A chain computes the last tokens again, now that more tokens follow them.
                    again = min(len(old), self._read_ahead - 1)
                    view[slots[start - again : start]] = old[len(old) - again :]
                wrong = np.nonzero((view[slots[first:start]] != old).any(axis=1))[0]
                if self._drafts and index == _LAYERS_A_GROUP - 1:
                    wrong = self._not_made_for_others(wrong, first, running.found_tokens, size)
                if len(wrong) and excused.issuperset((slots[first + wrong] // size).tolist()):
                    view[slots[start:end]] = ~rows[start - first :]
                    self._wrong[-1].update((slots[first + wrong] // size).tolist())
                    self._wrong[-1].update((slots[start:end] // size).tolist())
                    continue
                if len(wrong):
                    raise WrongBytesError(
                        f"{name}, layer {layer}, rank {rank.identity}: of {start} computed tokens, "
                        f"of which it sees {start - first}, {len(wrong)} are wrong, the first is "
                        f"{first + wrong[0]}"
                    )
                view[slots[start:end]] = rows[start - first :]

    def _not_made_for_others(self, wrong: Any, first: int, found: int, block_tokens: int) -> Any:
        """Without tokens of the drafter's layer that vLLM's own cache may have for another prompt,
        too: those at a block's end within what was found, since no block's key tells what follows.
        """
        tokens = first + wrong
        at_end = tokens % block_tokens >= block_tokens - self._read_ahead
        return wrong[~(at_end & (tokens + self._read_ahead < found))]

    def _forward_state(
        self, rank: _Rank, name: str, group: int, start: int, digests: Sequence[bytes]
    ) -> None:
        """Checks the state before the step, and writes the one after it."""
        size, table = self.groups[group].block_tokens, self._running[name].block_ids[group]
        inside = self._checkpoint(group, start, len(digests))
        after = table[(len(digests) - 1) // size]
        assert after != NULL_BLOCK, f"{name}: no block for the state of group {group}"
        for index, view in enumerate(rank.views[group]):
            layer = group * _LAYERS_A_GROUP + index
            if start:
                before = table[(start - 1) // size]
                expected = rank.rows(digests[start - 1 : start], layer, _STATE_BYTES)
                if before == NULL_BLOCK or (view[before] != expected).any():
                    raise WrongBytesError(
                        f"{name}, layer {layer}, rank {rank.identity}: block {before} does not "
                        f"hold the state after {start} tokens"
                    )
            view[after] = rank.rows(digests[-1:], layer, _STATE_BYTES)
            if inside is not None and table[inside[1]] != NULL_BLOCK:
                state = digests[inside[0] - 1 : inside[0]]
                view[table[inside[1]]] = rank.rows(state, layer, _STATE_BYTES)

    def _checkpoint(self, group: int, start: int, end: int) -> tuple[int, int] | None:
        """The tokens of a state from inside a step, and its place in the table."""
        if not self.groups[group].checkpoints:
            return None
        from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints

        manager = self.scheduler.kv_cache_manager.coordinator.single_type_managers[group]
        ((offset,), (column,)) = compute_mamba_prefill_checkpoints(
            [end],
            [end - start],
            hash_block_size=self.scheduler.hash_block_size,
            mamba_block_size=self.groups[group].block_tokens,
            checkpoint_alignment=1,
            drop_eagle_block=False,
            cache_hit_alignment_tokens=manager.cache_hit_alignment_tokens,
        )
        return (start + offset, column) if offset else None

    def _sample(self, output: Any) -> ModelRunnerOutput:
        """Verifies the step's drafts, and proposes those of the next one."""
        names = list(output.num_scheduled_tokens)
        sampled = []
        self._inputs = {}
        for name, count in output.num_scheduled_tokens.items():
            running, history = self._running[name], self._histories[name]
            scheduled = output.scheduled_spec_decode_tokens.get(name, ())
            drafts = running.drafts[: len(scheduled)]
            if self._overlap or -1 in scheduled:
                # The scheduler knows only how many there are, or pads a request's first step.
                drafts += [-1] * (len(scheduled) - len(drafts))
            else:
                assert drafts == list(scheduled)
            # An asynchronous scheduler counts drafts as computed that were rejected meanwhile.
            start = min(running.num_computed_tokens, len(running.tokens) - 1)
            end = start + count
            right = len(running.tokens)
            new: list[int] = []
            if end - len(drafts) == right:
                for draft in [*drafts, None]:
                    new.append(history.next_token(running.tokens))
                    running.tokens.append(new[-1])
                    if draft != new[-1]:
                        break
                self.accepted_drafts += len(new) - 1
                self.rejected_drafts += len(drafts) - len(new) + 1
                right += len(new) - 1
                running.drafts = history.proposal(running.tokens, self._drafts)
            settled = history.digests(running.tokens)
            rejected = [hashlib.sha256(b"%d" % n).digest()[:16] for n in range(right, end)]
            self._inputs[name] = _Input(start, end, [*settled[:right], *rejected], settled)
            sampled.append(new)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )


def kv_cache_config(
    num_blocks: int,
    groups: Sequence[Layers] = (Layers(),),
    *,
    mla: bool = False,
    mamba_cache_mode: str = "align",
) -> KVCacheConfig:
    """Three layers a group."""
    return KVCacheConfig(
        num_blocks,
        [],
        [
            KVCacheGroupSpec(
                [f"layer.{index * _LAYERS_A_GROUP + layer}" for layer in range(_LAYERS_A_GROUP)],
                layers.spec(mla=mla, mamba_cache_mode=mamba_cache_mode),
            )
            for index, layers in enumerate(groups)
        ],
    )


def _children(connector: Any) -> list[Any]:
    """The connectors of an engine: one, or those of vLLM's MultiConnector."""
    return list(getattr(connector, "_connectors", [connector]))


def _our_counts(stats: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """KVDock's counters. Beside others they stand under its name."""
    if not stats or all(isinstance(amount, (int, float)) for amount in stats.values()):
        return stats.items()
    ours = stats.get("KVDockConnector", {})
    return getattr(ours, "data", ours).items()


def _finished(connector: Any, finished_req_ids: set[str]) -> dict[str, set[str]]:
    """The requests whose transfers ended, as a version of vLLM asks for them."""
    if not hasattr(KVConnectorOutput(), "failed_recving"):
        stored, loaded = connector.get_finished(finished_req_ids)
        return {"finished_sending": stored or set(), "finished_recving": loaded or set()}
    results = connector.get_transfer_results(finished_req_ids)
    return {
        "finished_sending": results.finished_sending,
        "finished_recving": results.finished_recving,
        "failed_recving": results.failed_recving,
    }


def _draft_model(model: Path) -> Path:
    """A drafter beside ``model``. Its files are the model's: they are read, and never run."""
    return Path(shutil.copytree(model, model.with_name("drafter"), dirs_exist_ok=True))


def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _sha256(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value)).digest()
