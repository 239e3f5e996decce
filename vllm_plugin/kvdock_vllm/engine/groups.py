"""The KV-cache groups of a model: how much of the past each group needs, and so keeps of a chunk.

A model with one kind of attention has one group. A hybrid has several. Each has its own table of
blocks over the same tokens, perhaps with blocks of another size. Full attention needs every earlier
token. A sliding window needs the last few tokens: the engine gives the blocks before them to others
while the request runs, and puts the null block in their place in the table. Chunked local attention
divides the prompt into pieces, and needs what is computed of the current piece. It is a window that
jumps: empty where a piece ends, and as long as a piece at most. A recurrent layer needs only its
state after the last token. A block of such a group holds one state, that after the block's last
token, and exists only where the engine kept it.

A hit ends where a chunk ends. So of a chunk that is longer than its window a group needs only the
end, and stores only the end: its *part*. This saves memory. It also allows to store tokens that are
generated one by one: when they complete a chunk, its first blocks are gone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvdock.types import GroupKind

NULL_BLOCK = 0
"""The block that stands in a table where there is none. It never holds a token."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The tokens and blocks of a KV-cache group."""

    group_idx: int | None
    """None if the model has only one group."""
    kind: GroupKind
    block_tokens: int
    """Tokens a block."""
    layer_names: tuple[str, ...]
    window_tokens: int = 0
    """Tokens that the next token sees at most, itself included: of a window its length, of chunked
    local attention the length of a piece. 0 for full attention and for states."""

    @property
    def is_state(self) -> bool:
        return self.kind is GroupKind.RECURRENT_STATE

    @property
    def is_in_pieces(self) -> bool:
        """Whether it is chunked local attention."""
        return self.kind is GroupKind.CHUNKED_LOCAL_ATTENTION

    @property
    def leaves_blocks_behind(self) -> bool:
        """Whether a request gives up blocks of the group while it runs."""
        return self.kind is not GroupKind.FULL_ATTENTION

    @property
    def _window(self) -> int:
        """A state needs the block of the last token, as a window of two tokens does: the next one
        and the one before it.
        """
        return 2 if self.is_state else self.window_tokens

    def first_needed_block(self, num_tokens: int) -> int:
        """Index of the first block that is needed to go on after ``num_tokens`` tokens. Earlier
        entries of a table are the null block, or stale.
        """
        if not self._window:
            return 0
        if self.is_in_pieces:
            return num_tokens // self.window_tokens * self.window_tokens // self.block_tokens
        return max(0, num_tokens - self._window + 1) // self.block_tokens

    def left_behind_at(self, block: int) -> int:
        """How many computed tokens make a request leave the block of this index behind."""
        end = (block + 1) * self.block_tokens
        if self.is_in_pieces:
            return -(-end // self.window_tokens) * self.window_tokens
        return end + self._window - 1

    def needed_blocks(self, first_token: int, num_tokens: int) -> range:
        """The blocks needed after ``num_tokens``, without those before ``first_token``."""
        first = max(first_token // self.block_tokens, self.first_needed_block(num_tokens))
        return range(first, -(-num_tokens // self.block_tokens))

    def chunk_blocks(self, chunk_tokens: int) -> int:
        """Blocks of a chunk."""
        return chunk_tokens // self.block_tokens

    def part_blocks(self, chunk_tokens: int) -> int:
        """Blocks of a part. They are the last ones of a chunk. At least one, also where no hit
        needs any.
        """
        in_chunk = self.chunk_blocks(chunk_tokens)
        if not self._window:
            return in_chunk
        return min(in_chunk, max(1, -(-(self._window - 1) // self.block_tokens)))

    def part(self, chunk: int, chunk_tokens: int) -> slice:
        """The blocks of a request that are the part of its chunk number ``chunk``."""
        end = (chunk + 1) * self.chunk_blocks(chunk_tokens)
        return slice(end - self.part_blocks(chunk_tokens), end)

    def lacks_a_block_for_the_last_token(self, num_tokens: int) -> bool:
        """Whether the last token of a prompt of ``num_tokens`` tokens that was loaded whole would
        miss a block that it sees.

        vLLM keeps the blocks for the token after the prompt, whose window begins one token later.
        If that token is in another block, the block before is missing. Of chunked local attention
        all are, if that token begins a piece. A state after the last token does not lead back to
        the one before it.
        """
        if self.is_state:
            return True
        if self.is_in_pieces:
            return num_tokens % self.window_tokens == 0
        return self.window_tokens > 1 and (self.window_tokens - 1) % self.block_tokens == 0

    def has_blocks_after(self, num_tokens: int, first_chunk: int, chunk_tokens: int) -> bool:
        """Whether the parts from ``first_chunk`` on have every block that is needed to go on after
        ``num_tokens`` tokens, which may end within a chunk.
        """
        if self.is_state:
            return False
        first: int = self.part(first_chunk, chunk_tokens).start
        return first <= self.first_needed_block(num_tokens)

    def needs_nothing_of(self, chunk_tokens: int) -> bool:
        """Whether no hit of chunks of that many tokens needs any part: a piece ends with each."""
        return self.is_in_pieces and chunk_tokens % self.window_tokens == 0


def loads_fail_whole(shapes: Sequence[GroupShape]) -> bool:
    """Whether a load that failed in part is of no use.

    With one group of full attention the engine computes from the first failed block on. With
    several groups a block id is ambiguous. And a window's blocks before the failed one were never
    loaded, nor was an earlier state.
    """
    return len(shapes) > 1 or any(shape.leaves_blocks_behind for shape in shapes)


def fitting_chunk_tokens(wanted: int, shapes: Sequence[GroupShape]) -> int:
    """The smallest chunk of at least ``wanted`` tokens that consists of whole blocks.

    The pieces of chunked local attention consist of whole chunks, or chunks of whole pieces. So a
    part is needed as a whole or not at all.
    """
    unit = math.lcm(*(shape.block_tokens for shape in shapes))
    pieces = {shape.window_tokens for shape in shapes if shape.is_in_pieces}
    chunk_tokens = -(-wanted // unit) * unit
    while any(piece % chunk_tokens and chunk_tokens % piece for piece in pieces):
        chunk_tokens += unit
    return chunk_tokens


def chunk_tokens(announced: int, chosen: int | None, shapes: Sequence[GroupShape]) -> int:
    """Tokens a chunk: what the user has ``chosen``, else what the server has ``announced``, rounded
    up to whole blocks.

    Of a model with states a chunk is as short as it can be unless the user chose. The engine keeps
    states where its blocks end, and one inside a chunk can be neither stored nor hit.
    """
    if chosen is None and any(shape.is_state for shape in shapes):
        return fitting_chunk_tokens(1, shapes)
    return fitting_chunk_tokens(chosen or announced, shapes)
