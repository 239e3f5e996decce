"""Tests in which something may hold up the server's event loop for longer than usual, for now.

Each entry is owed: whoever mends what its reason names takes it out. What is to stay is a marker at
its test, ``@pytest.mark.hold_up(seconds, reason=...)``.
"""

from __future__ import annotations

from typing import Final

ANY_TIME: Final = float("inf")

# How the names of the tests begin, for how many seconds, and why.
HOLD_UPS: Final[dict[str, tuple[float, str]]] = {
    "tests/server/test_wire_limits.py": (1.0, "a message of 4 MiB is decoded in one call"),
    "tests/server/test_bad_input.py": (1.0, "a message of 4 MiB is decoded in one call"),
    "tests/server/test_status.py": (0.2, "1,000 sessions are put into one message, or end at once"),
    "tests/server/test_limits.py": (0.1, "an answer of 4,096 chunks becomes bytes in one call"),
    "tests/server/transfer/": (ANY_TIME, "not tried under the watchdog to the end yet"),
    "tests/client/": (ANY_TIME, "not tried under the watchdog yet"),
    "tests/events/": (ANY_TIME, "not tried under the watchdog yet"),
    "tests/repo/": (ANY_TIME, "not tried under the watchdog yet"),
    "tests/gpu/": (ANY_TIME, "not tried under the watchdog yet"),
    "tests/vllm_plugin/": (ANY_TIME, "not tried under the watchdog yet"),
}
