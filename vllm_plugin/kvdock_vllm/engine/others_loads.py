"""What the other connectors of an engine may load into its blocks.

Of a request that another connector loads for, this one is told the blocks and nothing of the load.
So of each request that gets blocks, and into which KVDock itself loads nothing, two things are
reckoned with:

* The other connector may write to all blocks behind those that the engine had computed, from the
  next step on. Stores that still read them must have ended by then.
* If the engine counts tokens as computed that were not, another connector fills their blocks within
  the step. Whether it could is known only with the step's outcome. The engine shares the blocks at
  once, so until then no request that has one of them is stored.

A load that takes several steps needs no more than the first: the engine counts its tokens when it
has ended, and tells then which blocks it could not fill.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvdock_vllm.engine.groups import NULL_BLOCK, GroupShape


@dataclass(frozen=True, slots=True)
class _Given:
    """The blocks of a request that were given to it since the last step."""

    first_token: int
    """How many tokens the engine had computed."""
    tables: list[list[int]]


class OthersLoads:
    """Used by the scheduler's thread."""

    def __init__(self, shapes: Sequence[GroupShape]) -> None:
        self._shapes = shapes
        self._given: dict[str, _Given] = {}
        """By request_id."""
        self._in_doubt: dict[int, set[int]] = {}
        """Blocks that others fill in a step, by the step's number."""
        self._num_steps = 0

    def note_given(
        self, request_id: str, first_token: int, tables: Sequence[Sequence[int]]
    ) -> None:
        """A request has these blocks. ``first_token`` tokens of it were computed before."""
        self._given[request_id] = _Given(first_token, [list(table) for table in tables])

    @property
    def have_begun(self) -> bool:
        """Whether requests got blocks since the last step."""
        return bool(self._given)

    def may_be_written(self) -> Iterator[int]:
        """Blocks to which other connectors may write from this step on."""
        for given in self._given.values():
            yield from self._blocks(given, None)

    def begin_step(self, computed: Mapping[str, int]) -> int:
        """Begins a step. ``computed`` has for the requests that it computes how many tokens the
        engine counts as computed before.

        Returns the step's number if other connectors fill blocks in it, else 0.
        """
        filled: set[int] = set()
        for request_id, given in self._given.items():
            num_tokens = computed.get(request_id, 0)
            if num_tokens > given.first_token:
                filled.update(self._blocks(given, num_tokens))
        self._given.clear()
        if not filled:
            return 0
        self._num_steps += 1
        self._in_doubt[self._num_steps] = filled
        return self._num_steps

    def end_step(self, number: int) -> None:
        """The outcome of a step is known, and of those before it."""
        for step in [step for step in self._in_doubt if step <= number]:
            del self._in_doubt[step]

    def are_in_doubt(self, tables: Iterable[Sequence[int]]) -> bool:
        """Whether a request with these blocks may have some that could not be filled."""
        return bool(self._in_doubt) and any(
            not filled.isdisjoint(table) for table in tables for filled in self._in_doubt.values()
        )

    def _blocks(self, given: _Given, end_token: int | None) -> Iterator[int]:
        """The blocks behind the computed tokens, up to ``end_token`` or all."""
        for shape, table in zip(self._shapes, given.tables, strict=True):
            size = shape.block_tokens
            end = len(table) if end_token is None else -(-end_token // size)
            for block in table[given.first_token // size : end]:
                if block != NULL_BLOCK:
                    yield block
