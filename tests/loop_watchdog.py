"""Finds what holds up an event loop, and names the line.

A thread looks every few milliseconds at what the loop's thread does. A callback that goes on from
look to look holds the loop up. For how long, the clock cannot tell: on a busy machine it also
counts waiting for a processor. What counts between two looks at one callback is

* the processor time that the loop's thread used, and
* the time in which it slept: it was asleep at both looks and had not woken between them. It may
  have waited for another thread of the process; as long as one of these waits for a processor, the
  sleep does not count.

Waiting for the interpreter lock does not count. A thread that wants the lock wakes every switch
interval to ask again, and ``SWITCH_SECONDS``, the server's own setting, is shorter than the time
between two looks. Whoever keeps the lock keeps the watchdog from looking as well. If that is the
loop's thread itself, in one long call of C, the watchdog finds it when it can look again.

What a callback does before the first look at it is not counted, so up to ``LOOK_SECONDS`` more than
the limit may pass unseen. Many short callbacks in a row are not found: none of them is at fault.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

LIMIT_SECONDS: Final = 0.02
LOOK_SECONDS: Final = 0.004
SWITCH_SECONDS: Final = 0.0005

_TASKS: Final = Path("/proc/self/task")
# Every callback is called by a frame of this.
_RUN: Final = asyncio.Handle._run.__code__


class HoldUp(NamedTuple):
    """One callback held the loop up for at least so long. ``stack`` is where it was found."""

    seconds: float
    stack: str

    def __str__(self) -> str:
        return f"the loop was held up for {self.seconds * 1000:.0f} ms:\n{self.stack}"


class _Thread(NamedTuple):
    """Another thread of the process: whether it wants a processor, and for how many seconds it has
    used and awaited one so far.
    """

    is_runnable: bool
    ran: float
    waited: float


class _Sleep(NamedTuple):
    """The loop's thread is asleep, for the ``number``-th time, while others do this."""

    number: int
    others: dict[str, _Thread]


class _Look(NamedTuple):
    """What was seen at one moment. Times are in seconds, and only their differences count.

    ``stack`` leads from the current frame to the one that called the callback. It is empty while
    the loop waits and while what runs does not count. ``computed`` is how long the loop's thread
    has used a processor, ``kept_waiting`` how long the watchdog has waited for one. ``sleep`` is
    None while the loop's thread is awake.
    """

    at: float
    stack: list[tuple[FrameType, int]]
    computed: float
    kept_waiting: float
    sleep: _Sleep | None

    @property
    def callback(self) -> FrameType | None:
        """Tells one callback from another, also where one task has its turn again."""
        return self.stack[-1][0] if self.stack else None


def _frame(thread: int) -> FrameType:
    """What a thread runs.

    A collection of garbage within _current_frames can stop the process for ever: Python keeps its
    list of threads locked meanwhile, and lets a thread run that must take itself off the list.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()[thread]
    finally:
        if collects:
            gc.enable()


class Watchdog:
    """Watches the loop of the main thread from ``start`` to ``stop`` and tells ``found``.

    With ``only`` it counts only while code runs whose file's path has that in it, and no garbage
    collection: for a loop that the tests share with what they test.
    """

    def __init__(
        self, found: Callable[[HoldUp], None], limit: float = LIMIT_SECONDS, only: str = ""
    ) -> None:
        self._found = found
        self._limit = limit
        self._only = only
        self._stopping = False
        self._thread = threading.Thread(target=self._watch, name="loop-watchdog", daemon=True)
        main = threading.main_thread()
        assert main.ident is not None
        self._main = main.ident
        self._main_task = _TASKS / str(main.native_id)
        self._clock = time.pthread_getcpuclockid(main.ident)
        self._collected = self._collecting_since = 0.0

    def start(self) -> None:
        """Begin to watch."""
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        if self._only:
            gc.callbacks.append(self._collect)
        self._thread.start()

    def stop(self) -> None:
        """End. All that was found is told when this returns."""
        self._stopping = True
        self._thread.join()
        if self._only:
            gc.callbacks.remove(self._collect)
        sys.setswitchinterval(self._switch_interval)

    def _watch(self) -> None:
        self._task = _TASKS / str(threading.get_native_id())
        with (self._task / "schedstat").open("rb", buffering=0) as self._schedule:
            self._look_on()

    def _look_on(self) -> None:
        last = self._look()
        held_up = HoldUp(0.0, "")
        while not self._stopping:
            time.sleep(LOOK_SECONDS)
            look = self._look()
            is_new = look.callback is not last.callback
            if is_new:
                self._tell(held_up)
                held_up = HoldUp(0.0, "")
            # What went before in a shared loop was mostly the test's own.
            counts = not (is_new and self._only)
            seconds = held_up.seconds + (_held_up(last, look) if counts else 0.0)
            stack = held_up.stack
            if seconds >= self._limit and not stack:
                stack = "".join(traceback.StackSummary.extract(look.stack[-2::-1]).format())
            held_up = HoldUp(seconds, stack)
            last = look
        self._tell(held_up)

    def _tell(self, held_up: HoldUp) -> None:
        if held_up.stack:
            self._found(held_up)

    def _look(self) -> _Look:
        stack = self._stack()
        return _Look(
            time.monotonic(),
            stack,
            time.clock_gettime(self._clock) - self._collected,
            int(os.pread(self._schedule.fileno(), 100, 0).split()[1]) / 1e9,
            self._sleep() if stack else None,
        )

    def _stack(self) -> list[tuple[FrameType, int]]:
        stack: list[tuple[FrameType, int]] = []
        counts = not self._only
        for frame, line in traceback.walk_stack(_frame(self._main)):
            if frame.f_code is _RUN:
                return [*stack, (frame, line)] if counts and stack else []
            counts = counts or self._only in frame.f_code.co_filename
            stack.append((frame, line))
        return []

    def _sleep(self) -> _Sleep | None:
        status = (self._main_task / "status").read_bytes()
        if status.partition(b"State:\t")[2][:1] not in b"SD":
            return None
        number = int(status.partition(b"\nvoluntary_ctxt_switches:")[2].split()[0])
        others = {}
        for task in _TASKS.iterdir():
            if task not in (self._task, self._main_task):
                with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                    others[task.name] = _thread(task)
        return _Sleep(number, others)

    def _collect(self, phase: str, info: dict[str, int]) -> None:
        if threading.get_ident() != self._main:
            return
        if phase == "start":
            self._collecting_since = time.thread_time()
        else:
            self._collected += time.thread_time() - self._collecting_since


def _thread(task: Path) -> _Thread:
    state = (task / "stat").read_bytes().rpartition(b")")[2].split()[0]
    ran, waited, _ = (task / "schedstat").read_bytes().split()
    return _Thread(state == b"R", int(ran) / 1e9, int(waited) / 1e9)


def _held_up(last: _Look, look: _Look) -> float:
    """For how long, at least, the callback held up the loop between two looks."""
    if look.callback is None:
        return 0.0
    elapsed = look.at - last.at
    computed = look.computed - last.computed
    if look.callback is not last.callback:
        # It may have begun long ago and kept the interpreter lock in one call since.
        kept_from_looking = elapsed - LOOK_SECONDS - (look.kept_waiting - last.kept_waiting)
        return max(0.0, min(computed, kept_from_looking))
    if look.sleep is None or last.sleep is None or look.sleep.number != last.sleep.number:
        return computed
    # Much more may have elapsed: the whole process was stopped.
    slept = min(elapsed, 2 * LOOK_SECONDS)
    return computed + max(0.0, slept - _waited(last.sleep.others, look.sleep.others, slept))


def _waited(before: dict[str, _Thread], now: dict[str, _Thread], elapsed: float) -> float:
    """For how long any of the threads waited for a processor meanwhile."""
    waited = [0.0]
    for name, thread in now.items():
        earlier = before.get(name, _Thread(False, 0.0, 0.0))
        still_waits = thread.is_runnable and thread.ran == earlier.ran
        waited.append(elapsed if still_waits else thread.waited - earlier.waited)
    return max(waited)
