"""Prometheus metrics over HTTP, on a port that is off by default.

Nothing is counted for metrics alone: a scrape reads what the server keeps anyway. The scrape comes
on a thread of the HTTP server. The state belongs to the event loop, so it is read there.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvdock_server import __version__
from kvdock_server.core import Core
from kvdock_server.tiers.host.pool import Pool

logger = logging.getLogger(__name__)

# A scrape fails if the event loop does not answer in this time.
_READ_SECONDS: Final = 5.0


class MetricsEndpoint:
    """The HTTP server, or nothing if ``listen`` is empty.

    Raises RuntimeError if the address, HOST:PORT, cannot be listened at.
    """

    def __init__(
        self, core: Core, pool: Pool, loop: asyncio.AbstractEventLoop, listen: str
    ) -> None:
        self._server = None
        if not listen:
            return
        registry = CollectorRegistry()
        registry.register(_Collector(core, pool, loop))
        ProcessCollector(registry=registry)
        host, _, port = listen.rpartition(":")
        try:
            self._server, self._thread = start_http_server(
                int(port), addr=host.strip("[]"), registry=registry
            )
        except OSError as error:
            raise RuntimeError(f"metrics_listen {listen}: {error.strerror or error}") from None
        self._server.handle_error = _connection_broke  # type: ignore[method-assign]

    def close(self) -> None:
        """Stop listening. Waits for a scrape under way, so not on the event loop."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()


def _connection_broke(request: object, client_address: object) -> None:
    """Log a line instead of a traceback on stderr: mostly the client has closed or reset it."""
    logger.info("a connection from %s to the metrics broke: %r", client_address, sys.exception())


class _Collector(Collector):
    def __init__(self, core: Core, pool: Pool, loop: asyncio.AbstractEventLoop) -> None:
        self._core = core
        self._pool = pool
        self._loop = loop

    def describe(self) -> Sequence[Metric]:
        # Without this method the registry would collect at registration, on the event loop itself.
        return []

    def collect(self) -> Sequence[Metric]:
        async def read() -> list[Metric]:
            return [*_server_metrics(self._core, self._pool), *_event_metrics(self._core)]

        return asyncio.run_coroutine_threadsafe(read(), self._loop).result(_READ_SECONDS)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"kvdock_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvdock_{name}", text, value=value)


def _server_metrics(core: Core, pool: Pool) -> Iterator[Metric]:
    info = GaugeMetricFamily("kvdock_info", "Version of the server", labels=["version"])
    info.add_metric([__version__], 1)
    yield info

    index, counters, totals = core.index, core.counters, core.index.totals
    yield _gauge("pool_bytes", "Host memory for KV cache", pool.slots.limit_bytes)
    yield _gauge("pool_ready_bytes", "Backed by memory so far", pool.slots.ready_bytes)
    yield _gauge("pool_used_bytes", "In slots that hold a sealed shard", index.sealed_bytes)
    yield _gauge("pool_reserved_bytes", "In slots being written", index.reserved_bytes)

    spaces = index.spaces
    yield _gauge("namespaces", "Registered namespaces", len(spaces))
    yield _gauge("chunks", "Known chunks", sum(len(space.chunks) for space in spaces))
    yield _gauge("parts", "Visible parts", sum(space.visible_parts for space in spaces))
    yield _gauge("locked_parts", "Parts that somebody holds a lock on", index.pinned_parts)
    yield _gauge("pending_parts", "Parts of which some shards are missing", index.pending_parts)
    yield _gauge("leases", "Leases", len(core.leases))
    yield _gauge("sessions", "Open sessions", len(core.sessions))

    keeping = index.keeping
    yield _gauge("pins", "Pins", len(keeping.pins))
    yield _gauge("kept_parts", "Parts that pins keep", keeping.parts)
    yield _gauge("kept_bytes", "Memory that pins keep", keeping.nbytes)
    yield _gauge("keep_limit_bytes", "What pins may keep", keeping.limit_bytes)

    yield _counter("lookups", "Lookups answered", counters.lookups)
    yield _counter("lookup_chunks", "Chunks asked for by lookups", counters.lookup_chunks)
    yield _counter("hit_chunks", "Chunks hit by lookups", counters.hit_chunks)
    yield _counter("stored_shards", "Shards sealed", counters.stored_shards)
    yield _counter("stored_bytes", "Bytes of sealed shards", counters.stored_bytes)
    yield _counter("retrieved_shards", "Shards delivered", counters.retrieved_shards)
    yield _counter("retrieved_bytes", "Bytes of delivered shards", counters.retrieved_bytes)
    yield _counter("evicted_parts", "Parts evicted to make room", totals.evicted_parts)
    yield _counter("no_space", "Chunks that found no memory", totals.no_space)
    yield _counter(
        "refused_keeps", "Chunks not kept as asked: pins are at their limit", totals.refused_keeps
    )
    yield _counter("abandoned_parts", "Parts given up: shards did not come", totals.abandoned_parts)
    copied = CounterMetricFamily(
        "kvdock_device_copied_bytes",
        "Copied by the server to devices, from them, and between them",
        labels=["to"],
    )
    copied.add_metric(["device"], counters.host_to_device_bytes)
    copied.add_metric(["peer"], counters.device_to_device_bytes)
    copied.add_metric(["host"], counters.device_to_host_bytes)
    yield copied


def _event_metrics(core: Core) -> Iterator[Metric]:
    """Nothing while there is no log."""
    if core.events is None:
        return
    log, subscribers = core.events.log, core.events.subscribers
    yield _counter("events_published", "Events appended to the log", log.last)
    yield _counter("events_dropped", "Events that left the log for its limits", log.oldest)
    yield _counter(
        "events_compacted", "Readers told that their place is gone", subscribers.compacted
    )
    yield _gauge("event_log_events", "Events in the log", len(log))
    yield _gauge("event_log_bytes", "What the log takes of its limit", log.nbytes)
    yield _gauge("event_subscribers", "Readers of the event stream", len(subscribers))
    yield _gauge("event_lag", "Events that the slowest reader is behind", subscribers.lag)
