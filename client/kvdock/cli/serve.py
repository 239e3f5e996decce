"""``kvdock serve``: becomes the server."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

_NEEDED = ("kvdock_server", "grpc_health", "grpc_reflection", "numpy", "prometheus_client")


def serve(arguments: Sequence[str]) -> NoReturn:
    """Replaces this process by ``python -m kvdock_server`` with these arguments."""
    missing = [module for module in _NEEDED if importlib.util.find_spec(module) is None]
    if missing:
        needed = ", ".join(missing)
        sys.exit(f"kvdock: the server needs {needed}: install kvdock with its extra server")
    os.execv(sys.executable, [sys.executable, "-m", "kvdock_server", *arguments])
