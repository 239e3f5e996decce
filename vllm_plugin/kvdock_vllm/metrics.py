"""What the connector counts, for vLLM's log and its Prometheus endpoint."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

COUNTERS: Final = {
    "lookups": "Lookups answered in time.",
    "lookup_timeouts": "Lookups not answered in time; the requests went on without cache.",
    "lookup_errors": "Lookups that failed.",
    "hit_tokens": "Prompt tokens found by lookups.",
    "loaded_tokens": "Tokens loaded in place of being computed, counted once however many workers.",
    "failed_loads": "Requests of which not everything could be loaded.",
    "load_waits": "Requests that waited for another one's load of the same prefix.",
    "loaded_chunks": "Chunk shards loaded.",
    "loaded_bytes": "Bytes loaded.",
    "load_seconds": "Time that loads took, from the request to the last byte.",
    "stored_chunks": "Chunk shards stored.",
    "stored_bytes": "Bytes stored.",
    "store_seconds": "Time that stores took, from the reservation to the commit.",
    "existing_chunks": "Chunk shards that needed no storing, because the server had them.",
    "refused_chunks": "Chunk shards that were not stored: no memory, no parent, or no server.",
}
"""Name and description of each counter. Counts of chunks and bytes are sums over all workers."""


def workers_gauge(mode: str) -> str:
    """The name of the gauge that counts workers in a mode. It is told changes: 1 or -1."""
    return f"{mode}_mode_workers"


GAUGES: Final = {workers_gauge(mode): mode for mode in ("server", "shared")}


class Stats(KVConnectorStats):
    """Counters of one interval. ``data`` has only those that are not zero."""

    def add(self, counter: str, amount: float = 1) -> None:
        assert counter in COUNTERS or counter in GAUGES, counter
        if amount:
            self.data[counter] = self.data.get(counter, 0) + amount

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> Stats:
        for counter, amount in other.data.items():
            self.data[counter] = self.data.get(counter, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """What vLLM logs: counts, and rates of loads and stores."""
        shown: dict[str, int | float] = {
            counter: amount
            for counter, amount in self.data.items()
            if counter in COUNTERS and not counter.endswith(("_seconds", "_bytes"))
        }
        for verb, name in (("load", "loaded"), ("store", "stored")):
            seconds = self.data.get(f"{verb}_seconds", 0)
            nbytes = self.data.get(f"{name}_bytes", 0)
            if seconds:
                shown[f"{verb}_GB_per_s"] = round(nbytes / seconds / 1e9, 2)
        return shown

    def is_empty(self) -> bool:
        return not self.data

    def take(self) -> Stats | None:
        """The counts since the last call, or None if there are none."""
        if self.is_empty():
            return None
        taken = Stats(data=self.data)
        self.data = {}
        return taken


class PromMetrics(KVConnectorPromMetrics):
    """For each counter a Prometheus counter ``vllm:kvdock_<name>`` per engine, and a gauge
    ``vllm:kvdock_workers``: how many workers of an engine copy in which mode.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters: dict[str, Any] = {
            name: self._counter_cls(
                name=f"vllm:kvdock_{name}",
                documentation=f"KVDock: {description}",
                labelnames=labelnames,
            )
            for name, description in COUNTERS.items()
        }
        make_gauge: Any = self._gauge_cls
        self._workers = make_gauge(
            name="vllm:kvdock_workers",
            documentation="KVDock: workers with a session, by the mode in which their bytes move.",
            labelnames=[*labelnames, "mode"],
            multiprocess_mode="sum",
        )
        self._num_workers: Counter[tuple[int, str]] = Counter()

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            labels = self.per_engine_labelvalues[engine_idx]
            if name in GAUGES:
                # The sum is kept here, because gauges of Ray can only be set.
                now = self._num_workers
                now[engine_idx, name] += amount
                self._workers.labels(*labels, GAUGES[name]).set(now[engine_idx, name])
            else:
                self._counters[name].labels(*labels).inc(amount)
