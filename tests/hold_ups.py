"""Tests in which something may hold up the server's event loop for longer than usual, for now.

Each entry is owed: whoever mends what its reason names takes it out. What is to stay is a marker at
its test, ``@pytest.mark.hold_up(seconds, reason=...)``.
"""

from __future__ import annotations

from typing import Final

# How the names of the tests begin, for how many seconds, and why.
HOLD_UPS: Final[dict[str, tuple[float, str]]] = {
    "tests/server/test_wire_limits.py": (0.4, "a message of 4 MiB is decoded in one call"),
    "tests/server/test_status.py": (0.2, "1,000 sessions are put into one message, or end at once"),
}
