from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvdock_server.transfer import gpu

sys.path.insert(0, str(Path(__file__).parent))

from one_engine import Engine
from wire import Wire


@pytest.fixture
def wire(server) -> Iterator[Wire]:  # type: ignore[no-untyped-def]
    wire = Wire(server.address)
    wire.register()
    yield wire
    wire.channel.close()


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Engine]:
    engine = Engine()
    monkeypatch.setattr(gpu, "load_driver", lambda: engine.driver)
    await engine.start()
    yield engine
    assert len(engine.core.leases) == 0
    assert engine.core.index.pinned_parts == 0
    await engine.close()
