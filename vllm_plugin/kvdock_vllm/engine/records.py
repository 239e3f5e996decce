"""What is known of a request that the engine has not finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvdock.keys import Extra, KeyChain, LoRA
from kvdock_vllm.engine.lookup import Lookup, State


class Request(Protocol):
    """What an engine knows of a request."""

    @property
    def request_id(self) -> str: ...
    @property
    def all_token_ids(self) -> Sequence[int]:
        """The prompt's and those that were generated."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    def is_finished(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class CacheScope:
    """How far a request may be cached, and the extras of its keys."""

    extras: tuple[Extra, ...]
    limit: int | None
    """Tokens from the first on that may be cached. None: all."""


ReadScope = Callable[[Any, int], CacheScope]
"""The scope of an engine's request, for chunks of that many tokens."""


class ExtraTokens:
    """What the answer to one prompt tells of: its tokens that came from here.

    All samples of a prompt share it: one may find in the engine what another had loaded.
    """

    def __init__(self) -> None:
        self.loaded = 0
        """The most that was loaded for one sample."""

    def note(self, tokens: int) -> None:
        """So many were loaded for a sample."""
        self.loaded = max(self.loaded, tokens)


@dataclass(slots=True)
class Record:
    """One request."""

    request: Request
    extra: ExtraTokens
    tables: list[list[int]]
    """For each group of the model the request's blocks, as they were told last. A block that its
    group does not need any more may have become another's since."""
    lookup: Lookup | None = None
    predates_reset: bool = False
    """Some of its KV was computed before the cache was reset: nothing of it is stored."""
    bypass: bool = False
    """A load failed: loads no more, so as not to fail again and again."""
    stored_chunks: int = 0
    """Chunks from the first on that the server has, or that were offered to it."""
    stored_epoch: int = 0
    """Of the server that this is true for."""
    retry_at: float = 0.0
    jobs: set[int] = field(default_factory=set)
    """Stores under way that read the request's blocks."""
    admitted: bool = False
    """The engine has decided how much of the request it loads: what became of that is counted."""
    chunk_tokens: int = 0
    """Of the keys; 0 before the first."""
    adapter: LoRA | None = None
    """What the keys say of the request's adapter. None before the first, and if it has none."""
    _chain: KeyChain | None = None
    _limit: int | None = None

    def keys(self, read_scope: ReadScope, num_tokens: int, chunk_tokens: int) -> list[bytes]:
        """Keys of the full chunks among the first ``num_tokens`` tokens that are cached."""
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
        """The request has these blocks and no others."""
        self.tables = [list(table) for table in tables]

    def extend_tables(self, tables: Sequence[Sequence[int]]) -> None:
        """The request has got more blocks."""
        for table, more in zip(self.tables, tables, strict=True):
            table.extend(more)

    def take_lookup(self) -> Lookup | None:
        """The lookup, whose lease is the caller's now. What it found need not be stored."""
        lookup, self.lookup = self.lookup, None
        if lookup is not None and lookup.state is State.ANSWERED:
            # Assigned, not added to: the scheduler may have asked many times.
            self.stored_chunks = lookup.hit_chunks
            self.stored_epoch = lookup.target.epoch
        return lookup

    def forget_lookup(self) -> None:
        """Gives back what is locked for the request, unless a load has it."""
        if self.lookup is not None:
            self.lookup.close()
            self.lookup = None
