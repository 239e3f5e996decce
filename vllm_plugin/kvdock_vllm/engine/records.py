"""What the scheduler knows of each request that the engine has not finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvdock.keys import Extra, KeyChain, LoRA
from kvdock_vllm.engine.request_lookup import Lookup, State
from kvdock_vllm.engine.say import NOTHING_SAID, Say


class Request(Protocol):
    """What an engine knows of a request."""

    @property
    def request_id(self) -> str: ...
    @property
    def all_token_ids(self) -> Sequence[int]:
        """Those of the prompt and those generated."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_in_flight_tokens(self) -> int:
        """Those of the computed tokens that are scheduled, and whose results are not known yet."""

    def is_finished(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class CacheScope:
    """How far a request may be cached, and the extras of its keys."""

    extras: tuple[Extra, ...]
    limit: int | None
    """How many tokens from the first on may be cached. None: all."""


ReadScope = Callable[[Any, int], CacheScope]
"""Returns the scope of an engine's request for chunks of the given number of tokens."""


class ExtraTokens:
    """How many tokens of a prompt came from KVDock, for the response. All samples of the prompt
    share it, since a sample may find in the engine what another one loaded.
    """

    def __init__(self) -> None:
        self.loaded = 0
        """The most tokens that were loaded for one sample."""


@dataclass(slots=True)
class Record:
    """One request."""

    request: Request
    extra: ExtraTokens
    tables: list[list[int]]
    """The request's blocks for each group, as last told. A block that its group does not need any
    more may be another request's by now."""
    lookup: Lookup | None = None
    predates_reset: bool = False
    """Part of its KV was computed before the cache was reset, so it is not stored."""
    bypass: bool = False
    """A load failed. The request loads no more, lest it fail again and again."""
    stored_chunks: int = 0
    """Chunks from the first on that the server has or was offered."""
    stored_epoch: int = 0
    """Epoch of the server for which ``stored_chunks`` holds."""
    retry_at: float = 0.0
    say: Say = NOTHING_SAID
    states: dict[tuple[int, int], int] = field(default_factory=dict)
    """Blocks that hold a recurrent state and are not stored yet, by the group's position and the
    number of tokens that the state has seen."""
    state_tokens: int = 0
    """Tokens that the last state noted, or loaded, has seen."""
    jobs: set[int] = field(default_factory=set)
    """job_ids of stores under way that read the request's blocks."""
    admitted: bool = False
    """The engine has decided how much of the request it loads, and the load's result is counted."""
    computed_when_asked: int | None = None
    """Tokens that the engine had computed when it last asked for the hit. None: it has got its
    blocks since."""
    chunk_tokens: int = 0
    """Tokens a chunk of the keys; 0 before the first key."""
    adapter: LoRA | None = None
    """What the keys say of the request's adapter. None before the first key or without adapter."""
    _chain: KeyChain | None = None
    _limit: int | None = None

    def keys(self, read_scope: ReadScope, num_tokens: int, chunk_tokens: int) -> list[bytes]:
        """Keys of the full chunks in the first ``num_tokens`` tokens that may be cached."""
        if self._chain is None or self.chunk_tokens != chunk_tokens:
            scope = read_scope(self.request, chunk_tokens)
            self._limit = scope.limit
            self.adapter = next((one for one in scope.extras if isinstance(one, LoRA)), None)
            self._chain = KeyChain(chunk_tokens, scope.extras)
            self.chunk_tokens = chunk_tokens
        if self._limit is not None:
            num_tokens = min(num_tokens, self._limit)
        known = self._chain.num_tokens
        if known < num_tokens:
            self._chain.extend(self.request.all_token_ids[known:num_tokens])
        return list(self._chain.keys[: num_tokens // chunk_tokens])

    def set_tables(self, tables: Sequence[Sequence[int]]) -> None:
        self.tables = [list(table) for table in tables]

    def lose_blocks(self) -> None:
        """The engine has taken all blocks from the request."""
        self.set_tables([[] for _ in self.tables])
        self.states.clear()
        self.state_tokens = 0

    def forget_states(self, num_tokens: int) -> None:
        """Forgets the noted states that have seen no more than ``num_tokens`` tokens."""
        if self.states:
            self.states = {key: block for key, block in self.states.items() if key[1] > num_tokens}

    def extend_tables(self, tables: Sequence[Sequence[int]]) -> None:
        for table, more in zip(self.tables, tables, strict=True):
            table.extend(more)

    def take_lookup(self) -> Lookup | None:
        """Hands the lookup and its lease to the caller. Notes that its hit need not be stored."""
        lookup, self.lookup = self.lookup, None
        if lookup is not None and lookup.state is State.ANSWERED:
            # The scheduler may ask many times, so this assigns and does not add.
            self.stored_chunks = 0 if self.say.names_what_is_there else lookup.hit_chunks
            self.stored_epoch = lookup.target.epoch
        return lookup

    def forget_lookup(self) -> None:
        """Closes the lookup, unless a load has taken it."""
        if self.lookup is not None:
            self.lookup.close()
            self.lookup = None
