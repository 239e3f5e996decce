"""When readers are shown what happened: at once after a quiet time, otherwise together."""

from __future__ import annotations

import asyncio

import pytest

from kvdock_server.events import event, subscribers
from kvdock_server.events.log import Limits, Log
from kvdock_server.events.subscribers import Subscribers

READERS = 5


async def test_what_happens_soon_after_is_shown_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscribers, "_PACE_SECONDS", 0.02)
    monkeypatch.setattr(subscribers, "_LONGEST_PACE_SECONDS", 1.0)
    log = Log(Limits(1 << 20, 1 << 10))
    readers = Subscribers(log)
    for _ in range(READERS):
        readers.join(0)

    def happen() -> None:
        log.append(event.cleared("n"))
        readers.wake()

    happen()
    assert await readers.news(0, 10)
    assert readers.shown == 1

    for _ in range(30):
        happen()
        await asyncio.sleep(0)
    assert readers.shown == 1
    began = asyncio.get_running_loop().time()
    heard = await asyncio.gather(*(readers.news(1, 10) for _ in range(READERS)))
    assert all(heard)
    assert readers.shown == log.last == 31
    assert asyncio.get_running_loop().time() - began > 0.05  # 0.1 from when the first was shown
