"""The worker's own copies, against a real server."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

import kvdock
from kvdock_vllm.layout import GroupLayout, GroupShape, Region
from kvdock_vllm.metadata import GroupLoad, GroupStore, Target
from kvdock_vllm.parallel import ParallelStrategy
from kvdock_vllm.transfers import HostTransfers

BLOCK_TOKENS = 16
CHUNKS = 300
"""More than the lock ranges that one FreeLocks may name."""


def test_a_chunk_that_is_not_to_be_had_costs_only_itself(
    start_server: Callable[..., Any],
) -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (CHUNKS, 64), np.uint8)
    layout = GroupLayout(CHUNKS, (Region(blocks.ctypes.data, 64, 64),), ("page",))
    shape = GroupShape(None, kvdock.GroupKind.FULL_ATTENTION, BLOCK_TOKENS, ("layer",))
    strategy = ParallelStrategy(use_mla=False, tensor_size=1, pipeline_size=1, worker_id=0)
    transfers = HostTransfers([layout], [shape], strategy)
    namespace = kvdock.Namespace("n", BLOCK_TOKENS, 1, (kvdock.Group((64,)),))
    keys = tuple(hashlib.sha256(bytes([n % 256, n // 256])).digest() for n in range(CHUNKS))
    ids = tuple(range(CHUNKS))
    with kvdock.Client(start_server().address) as client:
        client.register_namespace(namespace)
        with (
            client.session("e", role="worker") as session,
            client.session("e", role="scheduler") as scheduler,
        ):
            target = Target(session.epoch, "n", BLOCK_TOKENS)
            store = GroupStore(
                position=0, group_idx=None, first_chunk=0, parent=b"", keys=keys, block_ids=ids
            )
            stored = transfers.store(session, target, store, b"", lambda: False)
            assert set(stored) == {kvdock.ChunkStatus.STORED}
            before = blocks.copy()
            blocks[:] = 0
            hit = scheduler.lookup("n", keys)
            assert hit.lease is not None
            assert scheduler.free_locks(hit.lease, 5, 6) == 1
            load = GroupLoad(
                position=0,
                group_idx=None,
                first_chunk=0,
                end_chunk=CHUNKS,
                skip_blocks=0,
                block_ids=ids,
            )
            filled = transfers.load(session, target, hit.lease.id, load, b"", lambda: False)
        assert [chunk for chunk, ok in enumerate(filled) if not ok] == [5]
        before[5] = 0
        np.testing.assert_array_equal(blocks, before)
        assert client.status().index.locks == 0
