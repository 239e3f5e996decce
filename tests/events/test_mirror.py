"""The mirror check of mirror_check.py for a minute; by hand it runs for as long as wanted."""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from mirror_check import KINDS, check


def test_every_mirror_equals_the_server_at_every_quiet_point() -> None:
    seed = random.randrange(1 << 32)
    print(f"again: python tests/events/mirror_check.py --seed {seed}")
    totals = check(60, seed)
    assert totals["quiet points"] >= 8
    assert totals["restarts"] >= 1
    # Everybody had something to do, and the slow ones fell behind the log and came back.
    assert all(totals[f"changes, {kind.name}"] for kind in KINDS)
    assert totals["resyncs, very slow"] > totals["restarts"]
