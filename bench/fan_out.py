"""One load for all ranks of an engine whose ranks hold the same KV cache, on several GPUs.

    python bench/fan_out.py [--ranks N]

As many worker processes as GPUs, each with a cache on its own, and a server. 1 GiB of a DeepSeek-V3
cache at random blocks is loaded in three ways, in turns: into one rank; into all ranks by one
Retrieve that fills the other ranks, too; and into all ranks by one Retrieve of each, at once. A
load is timed from the moment all ranks start to the last rank's answer, since the ranks of an
engine wait for each other. The server's status tells what the server has copied.

Every rank's blocks are poisoned before, and compared in full after a load of each kind. Prints a
table; exit status 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from copy_paths import wait_until_pinned
from geometries import CHUNK_TOKENS, LOAD, Case, Geometry
from gpukit import Link, Remote, Worker
from report import Row, milliseconds, print_report
from serverkit import ServerProcess

from kvdock import Client, Group, Namespace, Session, SessionRole

ROUNDS = 15
MOST_OVER_ONE_RANK = 1.1
MOST_RANKS = 8
DEEPSEEK = Geometry(
    "DeepSeek-V3", layers=61, page_bytes=64 * 576 * 2, block_tokens=64, chunk_tokens=64
)
LAYOUTS = ("block-major", "one pitch", "layers apart")
# Time enough to tell all ranks when to start.
_START_SECONDS = 0.005

ONE, ALL, EACH = "one rank", "all ranks by one Retrieve", "all ranks by one Retrieve each"


class Rank(Worker):
    """One rank of the engine, with a device of its own. Takes orders."""

    def __init__(self, rank: int) -> None:
        import torch

        torch.cuda.set_device(rank)
        super().__init__()
        self._rank = rank
        self._session: Session | None = None

    def join(self, address: str, engine: str, namespace: str) -> str:
        """Register the cache with a server; how it is copied, in words."""
        client = Client(address, timeout=30)
        self._session = client.session(engine, role=SessionRole.WORKER, worker_id=self._rank)
        registered = self._session.register_memory(namespace, *self.export())
        return f"{registered.mode.name}: {registered.reason}"

    def leave(self) -> None:
        """End the session, so that the server closes the cache."""
        assert self._session is not None
        self._session.close()

    def store(self, namespace: str, keys: list[bytes]) -> None:
        """Store the case's blocks."""
        assert self._session is not None
        statuses = self._session.store(namespace, keys, self.case.block_ids)
        _all_are("STORED", statuses)

    def load(self, start: float, lease: int, others: list[int]) -> float:
        """Retrieve for this rank and ``others`` at the time ``start``; when it was answered."""
        _wait_until(start)
        results = self._opened().retrieve(
            lease, reader=self._rank, block_ids=self.case.block_ids, also_fill=others
        )
        ended = time.monotonic()
        _all_are("RETRIEVED", [result.status for result in results])
        return ended

    def ask(self, start: float, lease: int) -> float:
        """Ask at the time ``start`` what came of another rank's call; when it was answered."""
        _wait_until(start)
        statuses = self._opened().await_fill(
            lease, 0, self.case.geometry.chunks, filled_by=0, reader=self._rank
        )
        ended = time.monotonic()
        _all_are("RETRIEVED", statuses)
        return ended

    def _opened(self) -> Session:
        assert self._session is not None
        return self._session


def _wait_until(start: float) -> None:
    while time.monotonic() < start:
        pass


def _all_are(wanted: str, statuses: Sequence[Any]) -> None:
    names = {status.name for status in statuses}
    if names != {wanted}:
        raise RuntimeError(f"{len(statuses)} chunks should be {wanted} and are {sorted(names)}")


class Engine:
    """All ranks with one case's cache, registered with a server that has the blocks stored."""

    def __init__(self, address: str, client: Client, ranks: list[Remote], case: Case) -> None:
        self._client = client
        self._ranks = ranks
        self.case = case
        self._namespace = f"bench-{secrets.token_hex(4)}"
        group = Group((case.geometry.chunk_bytes,))
        client.register_namespace(Namespace(self._namespace, CHUNK_TOKENS, 1, (group,)))
        engine = secrets.token_hex(4)
        self._scheduler = client.session(engine, role=SessionRole.SCHEDULER)
        self._keys = [secrets.token_bytes(32) for _ in range(case.geometry.chunks)]
        for way in everybody(ranks, "join", address, engine, self._namespace):
            print(f"{case.layout}: {way}", file=sys.stderr)
        ranks[0]("store", self._namespace, self._keys)

    def close(self) -> None:
        everybody(self._ranks, "leave")
        self._scheduler.close()
        self._client.clear(self._namespace)

    def load(self, way: str) -> float:
        """Seconds of one load."""
        count = 1 if way == ONE else len(self._ranks)
        hit = self._scheduler.lookup(self._namespace, self._keys, readers=count)
        assert hit.lease is not None
        lease, others = hit.lease.id, list(range(1, count))
        start = time.monotonic() + _START_SECONDS

        def order(rank: int) -> tuple[Any, ...]:
            if way == ALL:
                return ("ask", start, lease) if rank else ("load", start, lease, others)
            return "load", start, lease, []

        return float(max(each(self._ranks[:count], order))) - start

    def copied(self) -> tuple[int, int]:
        """Bytes from host to device and from device to device, since the server's start."""
        counters = self._client.status().counters
        return counters.host_to_device_bytes, counters.device_to_device_bytes


def each(ranks: list[Remote], order: Callable[[int], tuple[Any, ...]]) -> list[Any]:
    """Give each rank an order, all at once; the results."""
    for number, rank in enumerate(ranks):
        rank.begin(*order(number))
    return [rank.end() for rank in ranks]


def everybody(ranks: list[Remote], *order: Any) -> list[Any]:
    """Give all ranks the same order, at once; the results."""
    return each(ranks, lambda rank: order)


def main() -> int:
    from kvdock_server.transfer.devices.driver import load_driver

    devices = len(load_driver().device_uuids())
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=min(devices, MOST_RANKS))
    count = parser.parse_args().ranks
    if not 2 <= count <= devices:
        parser.error(f"--ranks {count}: from 2 to the {devices} devices that there are")
    began = time.monotonic()
    link = Link()
    ranks = [Remote(partial(Rank, number)) for number in range(count)]
    rows: list[Row] = []
    try:
        with (
            tempfile.TemporaryDirectory(prefix="kvdock-bench-") as folder,
            ServerProcess(Path(folder), memory="4GiB") as server,
            Client(server.address, timeout=30) as client,
        ):
            for layout in LAYOUTS:
                case = Case(DEEPSEEK, layout, "random")
                everybody(ranks, "make", case)
                engine = Engine(server.address, client, ranks, case)
                try:
                    wait_until_pinned(client)
                    compare(engine, ranks)
                    rows += measure(engine, link, count)
                finally:
                    engine.close()
            for line in server.log_text.splitlines():
                if "goes on to" in line or "own copy" in line or "WARNING" in line:
                    print(line, file=sys.stderr)
    finally:
        for rank in ranks:
            rank.close()
    print(f"{time.monotonic() - began:.0f} s in all", file=sys.stderr)
    title = f"{count} x {link.name}, driver for CUDA {link.driver_version}"
    return print_report(title, rows)


def compare(engine: Engine, ranks: list[Remote]) -> None:
    """Load in every way, into poisoned memory, and compare all bytes."""
    ids = engine.case.block_ids
    wanted = ranks[0]("sums", ids)
    for way in (ONE, ALL, EACH):
        everybody(ranks, "poison")
        engine.load(way)
        sums = everybody(ranks, "sums", ids)
        for number, found in enumerate(sums[:1] if way == ONE else sums):
            if not np.array_equal(found, wanted):
                raise RuntimeError(
                    f"{engine.case.layout}, {way}: rank {number} has not what was stored"
                )


def measure(engine: Engine, link: Link, count: int) -> list[Row]:
    """The rows of one layout."""
    layout, geometry = engine.case.layout, engine.case.geometry
    nbytes = geometry.chunks * geometry.chunk_bytes
    ceilings: list[float] = []
    seconds: dict[str, list[float]] = {ONE: [], ALL: [], EACH: []}
    copied: dict[str, tuple[int, int]] = {}
    for _ in range(ROUNDS):
        ceilings.append(nbytes / link.rate(LOAD))
        for way, times in seconds.items():
            before = engine.copied()
            times.append(engine.load(way))
            after = engine.copied()
            copied[way] = (after[0] - before[0], after[1] - before[1])
    one = median(seconds[ONE])
    ceiling = median(ceilings)
    all_over_one = median(seconds[ALL]) / one
    once = copied[ALL] == (nbytes, nbytes * (count - 1))
    return [
        Row(
            f"{layout}: one rank",
            milliseconds(one),
            milliseconds(ceiling),
            f"{one / ceiling:.3f}",
        ),
        Row(
            f"{layout}: {count} ranks by one Retrieve, over one rank",
            milliseconds(median(seconds[ALL])),
            milliseconds(one),
            f"{all_over_one:.3f}",
            f"<= {MOST_OVER_ONE_RANK}",
            all_over_one <= MOST_OVER_ONE_RANK,
        ),
        Row(
            f"{layout}: {count} ranks by one Retrieve each, over one rank",
            milliseconds(median(seconds[EACH])),
            milliseconds(one),
            f"{median(seconds[EACH]) / one:.3f}",
        ),
        Row(
            f"{layout}: from the host, by one Retrieve / by one each",
            f"{copied[ALL][0] / nbytes:.2f} / {copied[EACH][0] / nbytes:.2f} x 1 GiB",
            bound="1 x",
            holds=once,
        ),
        Row(
            f"{layout}: from device to device, by one Retrieve",
            f"{copied[ALL][1] / nbytes:.2f} x 1 GiB",
            bound=f"{count - 1} x",
            holds=once,
        ),
    ]


if __name__ == "__main__":
    sys.exit(main())
