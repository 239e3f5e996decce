"""Lookups of an engine: when the server is asked, and how long a step waits for the answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from kvdock_vllm.engine.answer_wait import AnswerWait
from kvdock_vllm.engine.groups import GroupShape
from kvdock_vllm.engine.parallel import ParallelStrategy
from kvdock_vllm.engine.records import ReadScope, Record
from kvdock_vllm.engine.request_lookup import Lookup, State
from kvdock_vllm.metrics import Stats
from kvdock_vllm.scheduler_link import SchedulerLink

_log = logging.getLogger(__name__)

# Most keys that one Lookup may name. Of a longer prompt only the beginning is looked up.
_MOST_KEYS = 16_384


class Lookups:
    """Used by the scheduler's thread."""

    def __init__(
        self,
        link: SchedulerLink,
        strategy: ParallelStrategy,
        shapes: Sequence[GroupShape],
        read_scope: ReadScope,
        stats: Stats,
        timeout: float,
        tokens_read_ahead: int = 0,
    ) -> None:
        """``timeout`` is in seconds. Counts go to ``stats``. ``tokens_read_ahead``: so many tokens
        before its end a hit is told to end, since draft layers hold of these what was made for the
        prompt that was stored.
        """
        self._link = link
        self._readers = strategy.world_size
        self._shapes = shapes
        self._read_scope = read_scope
        self._stats = stats
        self._timeout = timeout
        self._tokens_read_ahead = tokens_read_ahead
        self._wait = AnswerWait(idle_steps_wait=strategy.steps_alone)

    def end_step(self, has_forward: bool) -> None:
        """Ends a step's questions. ``has_forward`` is whether the engine computes in the step."""
        self._wait.begin_step(time.monotonic(), is_idle=not has_forward)

    def ask(self, record: Record) -> None:
        """Looks a request up, if it has whole chunks and there is a server to ask."""
        live = self._link.usable
        if live is None or self._link.breaker.is_open:
            return
        num_tokens = record.request.num_tokens
        if any(shape.lacks_a_block_for_the_last_token(num_tokens) for shape in self._shapes):
            # If the whole prompt were a hit, a block would be lacking to compute the last token.
            num_tokens -= 1
        keys = record.keys(self._read_scope, num_tokens, live.prepared.chunk_tokens)
        if self._link.relay is not None:
            self._link.relay.know_adapter(record.request, record.adapter)
        if keys:
            record.lookup = Lookup(
                live, keys[:_MOST_KEYS], readers=self._readers, timeout=self._timeout
            )
            self._let_it_be_sent()

    def _let_it_be_sent(self) -> None:
        """Gives the interpreter's lock to the session's thread, as part of the step's wait.

        Otherwise the thread gets the lock, and sends, only when this one waits for the answer.
        """
        if self._wait.seconds_left > 0:
            began = time.monotonic()
            time.sleep(0)
            self._wait.spend(time.monotonic() - began)

    def current(self, record: Record) -> Lookup | None:
        """The request's lookup. If the session has changed, the server is asked anew."""
        if record.lookup is None or record.lookup.live is not self._link.usable:
            record.forget_lookup()
            self.ask(record)
        return record.lookup

    def hit_tokens(self, lookup: Lookup, num_computed_tokens: int) -> int | None:
        """The length of the hit in tokens from the prompt's first on. None: not answered yet."""
        # If the engine has computed all that a lookup could find, the answer is not waited for.
        is_wanted = lookup.most_tokens > num_computed_tokens
        self._poll(lookup, self._wait.seconds_left if is_wanted else 0.0)
        if lookup.state is State.ASKED:
            return None if is_wanted else 0
        lookup.num_computed_tokens = num_computed_tokens
        return self._usable_tokens(lookup)

    def _usable_tokens(self, lookup: Lookup) -> int:
        """The tokens of a hit without the last ones that are computed again. All, if some group
        needs blocks for these that no hit of this length has.
        """
        chunk_tokens = lookup.target.chunk_tokens
        end = lookup.hit_chunks * chunk_tokens
        earlier = max(0, end - self._tokens_read_ahead)
        if all(
            shape.has_blocks_after(
                earlier, lookup.locked.get(shape.group_idx, range(0)).start, chunk_tokens
            )
            for shape in self._shapes
        ):
            return earlier
        return end

    def note_answer(self, record: Record) -> None:
        """Ends the lookup of a request that loads nothing, once it is answered."""
        lookup = record.lookup
        if lookup is None:
            return
        self._poll(lookup)
        if lookup.state is not State.ASKED:
            record.take_lookup()
            lookup.close()

    def _poll(self, lookup: Lookup, seconds: float = 0.0) -> None:
        """Looks for an answer. Waits for it at most ``seconds``."""
        began = time.monotonic()
        settled = lookup.poll(seconds)
        if seconds > 0:
            now = time.monotonic()
            self._wait.waited(now, now - began, in_vain=lookup.state is State.ASKED)
        if settled:
            self._count(lookup)

    def _count(self, lookup: Lookup) -> None:
        if lookup.state is State.ANSWERED:
            self._wait.heard(lookup.answer_seconds)
            self._stats.add("lookups")
            self._stats.add("hit_tokens", lookup.hit_chunks * lookup.target.chunk_tokens)
            if self._link.breaker.succeeded():
                _log.warning("the KVDock server answers again")
        elif lookup.state is State.TIMED_OUT:
            self._stats.add("lookup_timeouts")
            if self._link.breaker.failed(lookup.asked_at):
                _log.warning(
                    "the KVDock server did not answer a lookup within %g s: requests are served "
                    "without cache until it does (kvdock.lookup_timeout_ms)",
                    self._timeout,
                )
        else:
            self._stats.add("lookup_errors")
            level = logging.WARNING if lookup.live.session.alive else logging.DEBUG
            _log.log(level, "a lookup failed, so its request gets no cache: %s", lookup.error)
