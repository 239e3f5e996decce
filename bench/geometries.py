"""Caches of models, for the GPU benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CHUNK_TOKENS = 32
MOVED_BYTES = 1 << 30
RUN_OF_BLOCKS = 64

STORE = "store"
LOAD = "load"


@dataclass(frozen=True)
class Geometry:
    """One model's cache."""

    name: str
    layers: int
    page_bytes: int
    block_tokens: int
    chunk_tokens: int = CHUNK_TOKENS

    @property
    def block_bytes(self) -> int:
        return self.layers * self.page_bytes

    @property
    def blocks_per_chunk(self) -> int:
        return self.chunk_tokens // self.block_tokens

    @property
    def chunk_bytes(self) -> int:
        return self.block_bytes * self.blocks_per_chunk

    @property
    def chunks(self) -> int:
        """How many chunks make about MOVED_BYTES."""
        return MOVED_BYTES // self.chunk_bytes

    @property
    def cache_blocks(self) -> int:
        """Twice the blocks that are moved, in whole runs."""
        return -(-2 * self.chunks * self.blocks_per_chunk // RUN_OF_BLOCKS) * RUN_OF_BLOCKS


@dataclass(frozen=True)
class Case:
    """A cache's layout and an order of block ids."""

    geometry: Geometry
    layout: str
    """"block-major", "one pitch" (all layers in one allocation) or "layers apart"."""
    order: str
    """"random" or "runs" (of RUN_OF_BLOCKS)."""

    @property
    def label(self) -> str:
        return f"{self.geometry.name}, {self.layout}, {self.order}"

    @property
    def block_ids(self) -> list[int]:
        geometry = self.geometry
        count = geometry.chunks * geometry.blocks_per_chunk
        rng = np.random.default_rng(11)
        if self.order == "random":
            return [int(block) for block in rng.permutation(geometry.cache_blocks)[:count]]
        runs = rng.permutation(geometry.cache_blocks // RUN_OF_BLOCKS)
        ids = (runs[:, None] * RUN_OF_BLOCKS + np.arange(RUN_OF_BLOCKS)).ravel()
        return [int(block) for block in ids[:count]]
