"""Carries out work in steps on the event loop."""

from __future__ import annotations

import asyncio
import time
from typing import Final, TypeVar

from kvdock_server.steps import Steps

T = TypeVar("T")

# A call that comes meanwhile takes some rounds of the loop, and waits for one turn in each.
_TURN_SECONDS: Final = 0.0005


async def in_turns(steps: Steps[T]) -> T:
    """Carry out steps, and let the loop serve others every half millisecond; the steps' result.

    If the caller is cancelled, the steps are closed where they are, and undo what they have to.
    """
    try:
        while True:
            end = time.monotonic() + _TURN_SECONDS
            while time.monotonic() < end:
                next(steps)
            await asyncio.sleep(0)
    except StopIteration as ended:
        result: T = ended.value
        return result
    finally:
        steps.close()
