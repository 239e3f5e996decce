"""``python -m kvdock_server``: what ``kvdock serve`` runs."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys

from kvdock.errors import KVDockError
from kvdock.printable import PrintableLog
from kvdock_server import config as configuration
from kvdock_server import lifecycle
from kvdock_server.endpoint import EndpointError
from kvdock_server.malloc_tuning import keep_freed_memory
from kvdock_server.tiers.host.memory_limits import PoolError

_USAGE_ERROR = 2

# A copy thread that wants the interpreter waits this long at most while the event loop computes.
# Meanwhile the link is idle: with Python's default of 5 ms, for a third of a gigabyte each time.
_SWITCH_SECONDS = 0.0005

# Calls leave cycles behind, which die young. The index and the event log live long, have no cycles,
# and are millions of objects. To look through them stops the loop for 0.2 s a million objects, and
# finds nothing.
_COLLECT_AFTER = (10_000, 5, 10_000)


def main() -> int:
    """Serve; the exit code is 0 after a clean stop, 2 if the server could not start."""
    try:
        config = configuration.load(sys.argv[1:])
        logging.basicConfig(
            level=config.log_level.upper(),
            format="kvdock: %(levelname)s: %(message)s",
            handlers=[PrintableLog(), logging.StreamHandler()],
        )
        sys.setswitchinterval(_SWITCH_SECONDS)
        gc.set_threshold(*_COLLECT_AFTER)
        keep_freed_memory()
        asyncio.run(lifecycle.run(config))
    except (
        configuration.ConfigError,
        EndpointError,
        PoolError,
        KVDockError,
        RuntimeError,
    ) as error:
        print(f"kvdock: cannot start: {error}", file=sys.stderr)
        return _USAGE_ERROR
    return 0


if __name__ == "__main__":
    sys.exit(main())
