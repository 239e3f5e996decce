"""The KV-cache groups of a model: what each needs of the past, and so keeps of a chunk.

A model with one kind of attention has one group. A hybrid has several, each with its own table of
blocks over the same tokens, perhaps with blocks of another size. A group of full attention needs
every token before the next one. A group with a sliding window needs the last few, and the engine
gives the blocks before them to others while the request runs: where they were, its table has the
null block. So the question here is always which blocks are worth anything.

A hit ends where a chunk ends. Of a chunk that is longer than its window a group is therefore only
ever asked for the end, and only that is stored: its *part*. This saves memory, and is what allows
to store what is generated token by token, whose first blocks are gone when a chunk is complete.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvdock.types import GroupKind

NULL_BLOCK = 0
"""The block that stands in a table where there is none. No token is ever kept there."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """A KV-cache group, as far as tokens and blocks are concerned."""

    group_idx: int | None
    """None if the model has only one group, which is then no group at all."""
    kind: GroupKind
    block_tokens: int
    """Tokens a block."""
    layer_names: tuple[str, ...]
    window_tokens: int = 0
    """Tokens that are held for the next one, which is counted: 0 for full attention, all."""

    def first_needed_block(self, num_tokens: int) -> int:
        """Index of the first block that is needed to go on after ``num_tokens`` tokens.

        Tables have the null block before it, or nothing worth anything.
        """
        if not self.window_tokens:
            return 0
        return max(0, num_tokens - self.window_tokens + 1) // self.block_tokens

    def left_behind_at(self, block: int) -> int:
        """With how many computed tokens the block of that index is not needed any more, where there
        is a window.
        """
        return (block + 1) * self.block_tokens + self.window_tokens - 1

    def needed_blocks(self, first_token: int, num_tokens: int) -> range:
        """The blocks that are needed after ``num_tokens``, less those before ``first_token``."""
        first = max(first_token // self.block_tokens, self.first_needed_block(num_tokens))
        return range(first, -(-num_tokens // self.block_tokens))

    def chunk_blocks(self, chunk_tokens: int) -> int:
        """How many blocks a chunk covers."""
        return chunk_tokens // self.block_tokens

    def part_blocks(self, chunk_tokens: int) -> int:
        """How many blocks of a chunk, the last ones, are stored."""
        in_chunk = self.chunk_blocks(chunk_tokens)
        if not self.window_tokens:
            return in_chunk
        return min(in_chunk, max(1, -(-(self.window_tokens - 1) // self.block_tokens)))

    def part(self, chunk: int, chunk_tokens: int) -> slice:
        """Which blocks of a request are the part of its chunk of that number."""
        end = (chunk + 1) * self.chunk_blocks(chunk_tokens)
        return slice(end - self.part_blocks(chunk_tokens), end)

    @property
    def lacks_a_block_for_the_last_token(self) -> bool:
        """Whether the last token of a prompt that was loaded whole is computed without all that it
        sees.

        vLLM makes room for the token after the prompt, whose window begins one token later; where
        that is in another block, the one before is missing.
        """
        return self.window_tokens > 1 and (self.window_tokens - 1) % self.block_tokens == 0


def loads_fail_whole(shapes: Sequence[GroupShape]) -> bool:
    """Whether of a load that failed in part nothing can be used.

    Else the engine computes from the first block on that failed. But with several groups a block id
    may stand for blocks of each, and a window's blocks before the failed one were never loaded.
    """
    return len(shapes) > 1 or any(shape.window_tokens for shape in shapes)


def fitting_chunk_tokens(wanted: int, shapes: Sequence[GroupShape]) -> int:
    """The smallest chunk of at least ``wanted`` tokens that consists of whole blocks."""
    unit = math.lcm(*(shape.block_tokens for shape in shapes))
    return -(-wanted // unit) * unit
