"""An engine whose model costs nothing, around vLLM's own scheduler and our own connector.

The scheduler, its KV-cache manager and both halves of the connector are real; only the forward pass
is not. In its place each step writes, for each token that it computes, bytes that are a function of
all tokens up to there, of the layer and of the rank. Before that it checks that every token which
the scheduler believes to be computed, and which the layer sees, has exactly those bytes in the
block where the scheduler believes them to be. So whatever puts a wrong byte anywhere, a load at the
wrong place, a store of blocks that were given away, a key that says too little, is found in the
next step that matters.

A model has one or several groups of layers, of full attention, of sliding windows or of recurrent
state, with blocks of one size or of several. As in vLLM the groups lie over one another in the same
memory. A state is smaller than its page. A step reads it from the block where the last step left
it, and leaves it in the block of the step's last token.

Messages between the halves are pickled, as they are between vLLM's processes.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm import EngineArgs, SamplingParams
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
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvdock_vllm.connector import KVDockConnector
from kvdock_vllm.engine.groups import NULL_BLOCK
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
        self.connector = KVDockConnector(config, KVConnectorRole.WORKER, kv_cache_config)
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
        mamba_cache_mode: str = "align",
        zeroes_first: bool = False,
        extra_config: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        """``zeroes_first``: new blocks are zeroed before the connector hears of the step, as by
        vLLM's V2 runner.
        """
        register()
        settings: dict[str, Any] = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "block_size": BLOCK_TOKENS,
            "max_model_len": 2048,
            "max_num_batched_tokens": 256,
            "max_num_seqs": 8,
            "dtype": "float32",
            "tensor_parallel_size": tensor_size,
            "kv_transfer_config": {
                "kv_connector": "KVDockConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "kvdock.address": address,
                    "kvdock.lookup_timeout_ms": 2000,
                    **(extra_config or {}),
                },
            },
            **arguments,
        }
        self.config = EngineArgs(**settings).create_engine_config()
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
        connector: Any = self.scheduler.connector
        self.connector: KVDockConnector = connector
        descriptions = [_pickled(rank.connector.get_handshake_metadata()) for rank in self.ranks]
        # vLLM passes on one connector's only, where there are several.
        known = descriptions if handshake else [KVConnectorHandshakeMetadata() for _ in self.ranks]
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): metadata for rank, metadata in enumerate(known)}
        )
        self._aggregator = KVOutputAggregator(tensor_size)
        init_none_hash(_sha256)
        self._hasher = get_request_block_hasher(hash_tokens, _sha256)
        self._histories: dict[str, _History] = {}
        self._running: dict[str, _Running] = {}
        self._pending: deque[tuple[Any, ModelRunnerOutput]] = deque()
        self.outcomes: dict[str, Outcome] = {}
        self.between_schedule_and_forward: Callable[[], None] = lambda: None
        """Runs in each step after scheduling."""
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
        reports = [self._run_rank(rank, output) for rank in self.ranks]
        result = self._sample(output)
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
        for core_outputs in self.scheduler.update_from_output(output, result).values():
            stats = core_outputs.scheduler_stats
            for counter, amount in ((stats and stats.kv_connector_stats) or {}).items():
                self.counted[counter] = self.counted.get(counter, 0) + amount
            for item in core_outputs.outputs:
                outcome = self.outcomes[item.request_id]
                outcome.tokens += item.new_token_ids
                if item.prefill_stats is not None:
                    outcome.num_cached_tokens = item.prefill_stats.num_cached_tokens
                if item.finish_reason is not None:
                    outcome.finish_reason = str(item.finish_reason)
                    outcome.kv_transfer_params = item.kv_transfer_params

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
        if self.connector.scheduler_half.holds._held:
            return False
        manager = self.scheduler.kv_cache_manager
        waiting = set(self.scheduler.requests.values()) - set(self.scheduler.running)
        if any(any(manager.get_block_ids(request.request_id)) for request in waiting):
            return False
        return self.scheduler.reset_prefix_cache(reset_running_requests=True)

    def close(self) -> None:
        self.connector.shutdown()
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
                tokens, [list(table) for table in new.block_ids], new.num_computed_tokens
            )
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            running = self._running[name]
            if name in cached.resumed_req_ids:
                running.tokens = list(self.scheduler.requests[name].all_token_ids)
                running.block_ids = [list(table) for table in blocks]
            elif blocks is not None:
                for table, more in zip(running.block_ids, blocks, strict=True):
                    table += more
            running.num_computed_tokens = computed

    def _run_rank(self, rank: _Rank, output: Any) -> KVConnectorOutput:
        """A model runner's step, in the order of vLLM's own."""
        connector = rank.connector
        metadata = _pickled(output.kv_connector_metadata)
        for spec in (*metadata.loads, *metadata.last_stores, *metadata.stores):
            assert all(NULL_BLOCK not in group.block_ids for group in spec.groups), spec
        self.overwritten += len(metadata.overwritten)
        if self._zeroes_first:
            rank.zero_and_copy(output)
        connector.handle_preemptions(metadata)
        connector.bind_connector_metadata(metadata)
        if not self._zeroes_first:
            rank.zero_and_copy(output)
        for name, count in output.num_scheduled_tokens.items():
            self._forward(rank, name, count)
        context: Any = None
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

    def _forward(self, rank: _Rank, name: str, count: int) -> None:
        """Checks the tokens before, writes those of this step."""
        running = self._running[name]
        start = running.num_computed_tokens
        end = start + count
        digests = self._histories[name].digests(running.tokens)
        for group, layers in enumerate(self.groups):
            if layers.state:
                self._forward_state(rank, name, group, start, digests[:end])
                continue
            size = layers.block_tokens
            table = np.array(running.block_ids[group])
            slots = np.repeat(table * size, size) + np.tile(np.arange(size), len(table))
            first = layers.first_seen(start)
            for index, view in enumerate(rank.views[group]):
                layer = group * _LAYERS_A_GROUP + index
                rows = rank.rows(digests[first:end], layer, layers.row_bytes)
                old = rows[: start - first]
                wrong = np.nonzero((view[slots[first:start]] != old).any(axis=1))[0]
                if len(wrong):
                    raise WrongBytesError(
                        f"{name}, layer {layer}, rank {rank.identity}: of {start} computed tokens, "
                        f"of which it sees {start - first}, {len(wrong)} are wrong, the first is "
                        f"{first + wrong[0]}"
                    )
                view[slots[start:end]] = rows[start - first :]

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
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            running = self._running[name]
            if running.num_computed_tokens + output.num_scheduled_tokens[name] == len(
                running.tokens
            ):
                running.tokens.append(self._histories[name].next_token(running.tokens))
                sampled.append([running.tokens[-1]])
            else:
                sampled.append([])
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


def _finished(connector: KVDockConnector, finished_req_ids: set[str]) -> dict[str, set[str]]:
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


def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _sha256(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value)).digest()
