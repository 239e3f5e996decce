"""Engines of these tests: forks of one process that has imported vLLM, each as new as any."""

from __future__ import annotations

import atexit
import functools
import tempfile
from pathlib import Path
from typing import Any

from enginekit import EngineProcess, engine_nursery
from nursery import Nursery


def start_engine(model: Path, *, log: Path, **arguments: Any) -> EngineProcess:
    """As EngineProcess, but sooner."""
    return EngineProcess(model, log=log, nursery=_nursery(), **arguments)


@functools.cache
def _nursery() -> Nursery:
    folder = tempfile.TemporaryDirectory(prefix="kvdock-nursery-")
    nursery = engine_nursery(Path(folder.name) / "log")
    atexit.register(folder.cleanup)
    atexit.register(nursery.close)
    return nursery
