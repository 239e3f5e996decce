"""A server under the watchdog of its event loop.

    python watched_server.py FILE SECONDS PROGRAM [ARGUMENT...]

runs PROGRAM as Python would, which may be ``-m MODULE`` or ``-c CODE``, and adds to FILE what held
up the loop for longer than SECONDS while it served. What start and end take holds up nobody.
"""

from __future__ import annotations

import logging
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from loop_watchdog import HoldUp, Watchdog

READY = "serving at"
DRAINING = "draining"


class _Watch(logging.Handler):
    """Watches while the server serves, by its own words."""

    def __init__(self, watchdog: Watchdog) -> None:
        super().__init__()
        self._watchdog = watchdog

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith(READY):
            self._watchdog.start()
        elif message.startswith(DRAINING):
            self._watchdog.stop()


def watch(file: Path, limit: float) -> None:
    """Add to ``file`` what holds up this process's server for longer than ``limit`` seconds."""

    def found(held_up: HoldUp) -> None:
        with file.open("a") as findings:
            findings.write(f"{held_up}\n")

    logging.getLogger("kvdock_server.lifecycle").addHandler(_Watch(Watchdog(found, limit)))


def run(program: list[str]) -> None:
    """Run it in this process."""
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    elif program[0] == "-c":
        sys.argv = program[1:]
        exec(compile(program[1], "<code>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    watch(Path(sys.argv[1]), float(sys.argv[2]))
    run(sys.argv[3:])
