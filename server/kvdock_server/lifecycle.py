"""One server's life: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import signal

from kvdock.address import Address, is_loopback, parse
from kvdock_server.config import Config
from kvdock_server.core import Core
from kvdock_server.endpoint import claimed, private_files, refuse_taken
from kvdock_server.events.log import Limits
from kvdock_server.index.policies import POLICIES
from kvdock_server.metrics import MetricsEndpoint
from kvdock_server.rpc.server import Server
from kvdock_server.service.turns import in_turns
from kvdock_server.tiers.host.placement import wanted_topology
from kvdock_server.tiers.host.pool import Pool
from kvdock_server.tiers.host.segment import remove_stale_segments
from kvdock_server.transfer import GpuTransfers

logger = logging.getLogger(__name__)

_SWEEP_SECONDS = 1.0
_DRAIN_POLL_SECONDS = 0.02
# Calls that are still open after draining are ended after this time.
_GRACE_SECONDS = 0.2


async def run(config: Config) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises EndpointError, PoolError or RuntimeError if the server cannot start.
    """
    loop = asyncio.get_running_loop()
    stop = _stop_signal(loop)
    address = parse(config.address)
    with claimed(address):
        if config.metrics_listen:
            refuse_taken("metrics_listen", config.metrics_listen)
        for name in remove_stale_segments():
            logger.info("reclaimed shared memory that a killed server left behind: %s", name)
        topology = wanted_topology(config.numa)
        pool = Pool(config.memory, topology)
        try:
            transfers = GpuTransfers(
                pool.segment.address,
                pool.segment.nbytes,
                topology if len(topology.sockets) > 1 else None,
            )
            pool.start(loop, transfers.faulted)
            limits = Limits(config.event_log, config.event_log_count)
            core = Core(
                pool.slots,
                still_mapped=lambda session: pool.segment.is_guarded(session.guard),
                event_log=limits if config.event_log else None,
                policy=POLICIES[config.eviction](pool.slots.limit_bytes),
                pin_share=config.pin_share,
            )
            server = Server(core, pool, transfers, config.chunk_tokens)
            metrics = MetricsEndpoint(core, pool, loop, config.metrics_listen)
            with private_files():
                await server.start(address.target)
            logger.info(
                "serving at %s (pool %.2f GiB, chunks of %d tokens)",
                address,
                config.memory / 2**30,
                config.chunk_tokens,
            )
            _warn_of_others(address, config.metrics_listen)
            chores = [loop.create_task(_sweep(core)), loop.create_task(_tidy(core))]
            await stop.wait()
            await _drain(core, server, config.drain_seconds)
            for chore in chores:
                chore.cancel()
            if core.events is not None:
                core.events.subscribers.close()
            await server.stop(_GRACE_SECONDS)
            await transfers.close()
            await loop.run_in_executor(None, metrics.close)
        finally:
            pool.stop()


def _warn_of_others(address: Address, metrics_listen: str) -> None:
    """Say what other hosts can do where they may reach an address."""
    if not address.is_local:
        logger.warning(
            "whoever reaches %s can read, clear and evict every namespace: nothing is "
            "encrypted and nobody is asked who they are. Listen on a Unix socket or "
            "127.0.0.1, or let only trusted hosts reach it",
            address,
        )
    if metrics_listen and not is_loopback(metrics_listen.rpartition(":")[0]):
        logger.warning(
            "whoever reaches %s can read the metrics, and ask for them as often as they like: "
            "nobody is asked who they are. Serve them on 127.0.0.1, or let only trusted hosts "
            "reach it",
            metrics_listen,
        )


async def _sweep(core: Core) -> None:
    while True:
        before = core.clock()
        await asyncio.sleep(_SWEEP_SECONDS)
        late = core.clock() - before - _SWEEP_SECONDS
        try:
            if late > _SWEEP_SECONDS:
                core.excuse_silence(late)
            core.sweep()
        except Exception:
            logger.exception("a sweep failed; the next one follows")


async def _tidy(core: Core) -> None:
    """Carry out what calls leave to the backlog, as soon as they do."""
    something = asyncio.Event()
    core.backlog.has_come = something.set
    something.set()  # the backlog may have work already
    while True:
        await something.wait()
        something.clear()
        try:
            await in_turns(core.backlog.all_steps())
        except Exception:
            logger.exception("tidying up failed; the rest follows")
            something.set()


def _stop_signal(loop: asyncio.AbstractEventLoop) -> asyncio.Event:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _drain(core: Core, server: Server, seconds: float) -> None:
    """Take no new work, and wait until the copies under way are done."""
    core.draining = True
    await server.refuse_new_work()
    logger.info("draining: %d sessions, %d leases", len(core.sessions), len(core.leases))
    deadline = core.clock() + seconds
    # Polled: an event would have to be set from every place that frees a lock or a slot.
    while not core.is_idle and core.clock() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(_DRAIN_POLL_SECONDS)
    if not core.is_idle:
        logger.warning("stopping although some copies are not done after %g s", seconds)
