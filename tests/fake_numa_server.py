"""A server that takes another host's sockets for its own.

python fake_numa_server.py ROOT [OPTION...]
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvdock_server import __main__ as program
from kvdock_server import lifecycle
from kvdock_server.tiers.host.placement import wanted_topology

ROOT = Path(sys.argv.pop(1))

if __name__ == "__main__":
    lifecycle.wanted_topology = lambda mode: wanted_topology(mode, ROOT)  # type: ignore[attr-defined]
    sys.exit(program.main())
