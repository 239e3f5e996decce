"""What an engine's steps wait for answers to lookups that come late, or never.

    python bench/lookup_wait.py [--quick]

vLLM's own scheduler and the connector around a model that costs nothing (the simulator of
tests/vllm_plugin), which always has a request to compute. In each round new requests come, 1 or 32,
and are computed. The server's answers are delayed. Measured is what the scheduler's thread waits in
each step that has new requests: time that is not its own computing.

Prints a table; exit status 1 if a bound is missed.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from delayed import Delayed
from modelkit import Llama, make_checkpoint, random_prompt
from report import Row, print_report
from serverkit import ServerProcess

# Behind the rest, so that another version's simulator may be put before it.
sys.path.append(str(Path(__file__).parents[1] / "tests" / "vllm_plugin"))

from simulator import CHUNK_TOKENS, SimulatedEngine

DELAYS: Final = (0.0, 0.001, 0.005, 0.05, math.inf)
AT_ONCE: Final = {1: 200, 32: 40}
"""New requests in a step, and how many such steps."""
MOST_SECONDS: Final = 0.0025
LATE_SECONDS: Final = 0.005
"""Answers that take so long are not waited for, but for a trial now and then."""
BLOCKS: Final = 2000


def main() -> int:
    parser = argparse.ArgumentParser(description="Benchmark of waits for lookups.")
    parser.add_argument("--quick", action="store_true", help="a fifth of the rounds")
    rounds = {n: count // (5 if parser.parse_args().quick else 1) for n, count in AT_ONCE.items()}
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvdock-bench-") as name:
        folder = Path(name)
        model = make_checkpoint(folder / "model", Llama(layers=1))
        with (
            ServerProcess(folder, memory="64MiB", chunk_tokens=CHUNK_TOKENS) as server,
            Delayed(server.address, folder) as proxy,
        ):
            for delay in DELAYS:
                for count, steps in rounds.items():
                    proxy.set(0.0)
                    with BusyEngine(model, proxy.address) as engine:
                        engine.waits_with(count, 5)
                        proxy.set(delay)
                        rows += rows_of(delay, count, engine.waits_with(count, steps))
                        proxy.set(0.0)
    return print_report("Waits of a step for answers to lookups", rows)


def rows_of(delay: float, count: int, waits: list[float]) -> list[Row]:
    answers = "that never come" if math.isinf(delay) else f"after {delay * 1e3:g} ms"
    what = f"answers {answers}, {count} new in a step"
    waits.sort()
    p50, p99 = (waits[int(share * (len(waits) - 1))] for share in (0.5, 0.99))
    shown = f"{p50 * 1e3:.2f}, {p99 * 1e3:.2f}, {waits[-1] * 1e3:.2f} ms"
    is_late = delay >= LATE_SECONDS
    holds = p99 <= MOST_SECONDS and not (is_late and p50 > 1e-4)
    bound = f"<= {MOST_SECONDS * 1e3:g} ms" + (", p50 0" if is_late else "")
    return [Row(f"{what}: p50, p99, most", shown, bound=bound, holds=holds)]


class BusyEngine(SimulatedEngine):
    """An engine that always has a request to compute, and whose waits are counted."""

    def __init__(self, model: Path, address: str) -> None:
        super().__init__(model, address, num_blocks=BLOCKS, max_num_seqs=64)
        self._waited = 0.0
        self._names = 0
        asked = self.connector.get_num_new_matched_tokens

        def counted(*arguments: object) -> object:
            began = time.monotonic() - time.thread_time()
            try:
                return asked(*arguments)
            finally:
                self._waited += time.monotonic() - time.thread_time() - began

        self.connector.get_num_new_matched_tokens = counted

    def waits_with(self, count: int, steps: int) -> list[float]:
        """Seconds that steps with new requests waited. ``steps`` times ``count`` requests come."""
        waits = []
        for _ in range(steps):
            self._keep_busy()
            new = [self._add(CHUNK_TOKENS + 1, 1) for _ in range(count)]
            while any(self.outcomes[name].finish_reason is None for name in new):
                self._waited = 0.0
                self.step()
                waits.append(self._waited)
        return waits

    def _keep_busy(self) -> None:
        if not self.scheduler.running:
            self._add(CHUNK_TOKENS - 1, 2000)
            while not self.scheduler.running:
                self.step()

    def _add(self, tokens: int, max_tokens: int) -> str:
        self._names += 1
        name = f"request {self._names}"
        self.add(name, random_prompt(tokens, seed=self._names), max_tokens=max_tokens)
        return name


if __name__ == "__main__":
    sys.exit(main())
