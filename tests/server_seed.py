"""What a nursery of servers imports: see bench/nursery.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import watched_server

import kvdock_server.__main__  # noqa: F401


def run(arguments: list[str], descriptors: list[int]) -> NoReturn:
    """Run a program as ``python ARGUMENT...`` would, under the watchdog if the first says so."""
    assert not descriptors
    if arguments[0] == watched_server.__file__:
        _, file, limit, *arguments = arguments
        watched_server.watch(Path(file), float(limit))
    watched_server.run(arguments)
    sys.exit()
