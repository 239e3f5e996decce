"""How long a call about many chunks holds up the server's event loop.

    python bench/index_turns.py [--quick]

In this process run a server's index with a million parts, over memory that is not real, and its
verbs on an event loop. Beside each verb a task asks for its turn all the time. The longest time
that the task waited is the verb's hold-up. It is CPU time, which other processes do not lengthen.
The table also shows how much of a pool the second of two models gets (bench/displacement.py). Exit
status 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import inspect
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from control_plane import NAMESPACE, SHARD_BYTES, core_with_memory, fill
from displacement import PAIRS, share_of_fresh
from report import Row, milliseconds, print_report

from kvdock.v1 import admin_pb2, cache_pb2
from kvdock_server.core.sessions import Role
from kvdock_server.rpc import verbs
from kvdock_server.rpc.admin import AdminService
from kvdock_server.service.service import Service

PARTS: Final = 1_000_000
QUICK_PARTS: Final = 100_000
PROMPT_CHUNKS: Final = 1_024
MANY: Final = 16_384
"""As many keys as a call may have."""

HOLD_UP_BOUND_SECONDS: Final = 0.020
SHARE_BOUND: Final = 0.95


def main() -> int:
    parser = argparse.ArgumentParser(description="Benchmark of KVDock's index on its event loop.")
    parser.add_argument("--quick", action="store_true", help="with fewer parts")
    parts = QUICK_PARTS if parser.parse_args().quick else PARTS
    gc.set_threshold(10_000, 5, 10_000)  # as the server does
    rows = asyncio.run(Turns(parts).rows())
    shares = {pair.name: share_of_fresh(pair, 8) for pair in PAIRS}
    for name, share in shares.items():
        rows.append(
            Row(
                f"share of a fresh pool: {name}",
                f"{share:.3f}",
                bound=f">= {SHARE_BOUND}",
                holds=share >= SHARE_BOUND,
            )
        )
    return print_report(f"Index with {parts:,} parts", rows)


class Reader:
    """Counts the messages of a stream's answer."""

    def __init__(self) -> None:
        self.messages = 0

    async def write(self, message: object) -> None:
        self.messages += 1


class Turns:
    """Measures one verb after another, all on one core."""

    def __init__(self, parts: int) -> None:
        self._parts = -(-parts // MANY) * MANY
        self._core: Any = core_with_memory(self._parts)
        self._admin: Any = AdminService(self._core, None, None, 256)  # type: ignore[arg-type]
        self._next_key = 0
        for _ in range(self._parts // PROMPT_CHUNKS):
            fill(self._core, self._new_keys(PROMPT_CHUNKS))
        self._newest = [self._known_key(n) for n in range(self._next_key - 1024, self._next_key)]

    async def rows(self) -> list[Row]:
        """All hold-ups, as a table."""
        core = self._core
        worker = core.open_session(engine_id="bench", role=Role.WORKER)
        scheduler = core.open_session(engine_id="bench", role=Role.SCHEDULER)
        found: dict[str, float] = {}

        async def measure(what: str, call: Callable[[], Any]) -> Any:
            seconds, answer = await _longest_turn(self._carry_out(call))
            found[what] = max(found.get(what, 0.0), seconds)
            return answer

        reader = Reader()
        listing = admin_pb2.ListChunksRequest(namespace=NAMESPACE.name)
        await measure("ListChunks", lambda: self._admin.ListChunks(listing, reader))
        if reader.messages < self._parts // 1_000:
            raise RuntimeError("not all chunks were listed")

        evict = admin_pb2.EvictRequest(bytes=MANY * SHARD_BYTES)
        answer = await measure(f"Evict of {MANY:,} parts", lambda: self._admin.Evict(evict, None))
        if answer.parts != MANY:
            raise RuntimeError(f"{answer.parts} parts were evicted")
        for _ in range(MANY // PROMPT_CHUNKS):
            fill(core, self._new_keys(PROMPT_CHUNKS))

        what = f"Reserve of {MANY:,} chunks, each with an eviction"
        reserved = await measure(what, lambda: self._reserve(worker))
        commit = cache_pb2.CommitRequest(reservation_id=reserved.reservation_id)
        await measure("Commit of all of them", lambda: verbs.commit(core, worker, commit))
        reserved = await measure(what, lambda: self._reserve(worker))
        abort = cache_pb2.AbortRequest(reservation_id=reserved.reservation_id)
        await measure("Abort of all of them", lambda: verbs.abort(core, worker, abort))

        prompt = self._new_keys(MANY)
        fill(core, prompt)
        known = cache_pb2.ReserveRequest(namespace=NAMESPACE.name, keys=prompt)
        await measure(
            f"Reserve of {MANY:,} chunks that exist", lambda: verbs.reserve(core, worker, known)
        )
        lookup = cache_pb2.LookupRequest(namespace=NAMESPACE.name, keys=prompt)
        for _ in range(8):
            hit = await measure(
                f"Lookup of {MANY:,} chunks", lambda: verbs.lookup(core, scheduler, lookup)
            )
            if hit.hit_chunks != MANY:
                raise RuntimeError("a lookup of cached chunks missed")
        service: Any = Service(core, None, None)  # type: ignore[arg-type]
        retrieve = cache_pb2.RetrieveRequest(lease_id=hit.lease_id)
        await measure(
            f"Retrieve of {MANY:,} chunks, shared",
            lambda: verbs.retrieve(service, scheduler, retrieve),
        )
        await measure(
            f"end of a session with 8 leases on {MANY:,} chunks",
            lambda: core.close_session(scheduler),
        )
        await measure(what, lambda: self._reserve(worker))
        await measure(
            f"end of a session that writes {MANY:,} chunks", lambda: core.close_session(worker)
        )
        clear = admin_pb2.ClearRequest(namespace=NAMESPACE.name)
        began = time.thread_time()
        cleared = await measure("Clear", lambda: self._admin.Clear(clear, None))
        took = time.thread_time() - began
        if cleared.parts < self._parts - 2 * MANY or core.index.sealed_bytes:
            raise RuntimeError("not all was cleared")
        return [
            *(_row(f"hold-up by {what}", seconds) for what, seconds in found.items()),
            Row("until all that Clear made invisible is free (CPU)", f"{took:.2f} s"),
        ]

    def _reserve(self, session: Any) -> Any:
        keys = self._new_keys(MANY)
        request = cache_pb2.ReserveRequest(namespace=NAMESPACE.name, keys=keys)
        return verbs.reserve(self._core, session, request)

    async def _carry_out(self, call: Callable[[], Any]) -> Any:
        """Carry out a verb, and all that it leaves to the backlog; the verb's answer."""
        answer = call()
        if inspect.isawaitable(answer):
            answer = await answer
        if inspect.isgenerator(answer):
            answer = await _in_turns(answer)
        if hasattr(self._core, "backlog"):
            await _in_turns(self._core.backlog.all_steps())
        return answer

    def _known_key(self, number: int) -> bytes:
        return (number + 1).to_bytes(32, "little")

    def _new_keys(self, count: int) -> list[bytes]:
        first = self._next_key
        self._next_key += count
        return [self._known_key(number) for number in range(first, self._next_key)]


async def _in_turns(steps: Any) -> Any:
    from kvdock_server.service.turns import in_turns

    return await in_turns(steps)


async def _longest_turn(work: Awaitable[Any]) -> tuple[float, Any]:
    """The longest time that others waited for their turn, and the work's answer."""
    longest = 0.0
    task = asyncio.ensure_future(work)
    before = time.thread_time()
    while not task.done():
        await asyncio.sleep(0)
        now = time.thread_time()
        longest = max(longest, now - before)
        before = now
    return longest, await task


def _row(what: str, seconds: float) -> Row:
    return Row(
        what,
        milliseconds(seconds),
        bound=f"<= {milliseconds(HOLD_UP_BOUND_SECONDS)}",
        holds=seconds <= HOLD_UP_BOUND_SECONDS,
    )


if __name__ == "__main__":
    sys.exit(main())
