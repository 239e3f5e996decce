from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from wire import Wire


@pytest.fixture
def wire(server) -> Iterator[Wire]:  # type: ignore[no-untyped-def]
    wire = Wire(server.address)
    wire.register()
    yield wire
    wire.channel.close()
