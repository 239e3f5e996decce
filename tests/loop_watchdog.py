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
between two looks. Whoever keeps the lock keeps the watchdog from looking as well. So each callback
also measures its own processor time: one that was never seen is told by its name.

Many short callbacks in a row are not found: none of them is at fault.
"""

from __future__ import annotations

import asyncio
import faulthandler
import linecache
import os
import re
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

LIMIT_SECONDS: Final = 0.02
_USUAL_SECONDS: Final = 0.0022
"""What :func:`slowness` computes, on the processor for which the limit was chosen."""
LOOK_SECONDS: Final = 0.004
SWITCH_SECONDS: Final = 0.0005

_TASKS: Final = Path("/proc/self/task")
_FRAME: Final = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')


def slowness() -> float:
    """How many times as long this processor takes now, with what else it does, as the one for which
    the limit was chosen; at least 1.
    """

    def compute() -> float:
        began = time.thread_time()
        numbers = {}
        joined = bytearray()
        for number in range(20_000):
            numbers[number % 97] = number, str(number)
        for _ in range(200):
            joined += bytes(5000)
        return time.thread_time() - began

    return max(1.0, min(compute() for _ in range(3)) / _USUAL_SECONDS)


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

    ``callback`` is the number of the callback that runs, 0 while the loop waits. ``computed`` is
    how long the loop's thread has used a processor. ``sleep`` is None while it is awake.
    """

    at: float
    callback: int
    computed: float
    sleep: _Sleep | None


class Watchdog:
    """Watches the loop of the main thread, the only one of the process, from ``start`` to ``stop``.

    Tells ``found``. It asks Python for no frame of another thread: Python 3.11 may give one out
    that is just being freed, and stands still if a collection of garbage begins meanwhile.
    """

    def __init__(self, found: Callable[[HoldUp], None], limit: float = LIMIT_SECONDS) -> None:
        self._found = found
        self._limit = limit
        self._stopping = False
        self._begun = 0
        """Callbacks so far."""
        self._runs = False
        self._ended: deque[tuple[int, HoldUp]] = deque()
        """By number, callbacks that have computed for too long, seen or not."""
        self._thread = threading.Thread(target=self._watch, name="loop-watchdog", daemon=True)
        main = threading.main_thread()
        assert main.ident is not None
        self._main = main.ident
        # Of a fork's main thread, threading knows the parent's native id.
        self._main_task = _TASKS / str(os.getpid())
        self._clock = time.pthread_getcpuclockid(main.ident)

    def start(self) -> None:
        """Begin to watch."""
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        self._real_run = asyncio.Handle._run
        asyncio.Handle._run = self._counted(self._real_run)  # type: ignore[method-assign]
        self._thread.start()

    def stop(self) -> None:
        """End. All that was found is told when this returns."""
        self._stopping = True
        self._thread.join()
        asyncio.Handle._run = self._real_run  # type: ignore[method-assign]
        sys.setswitchinterval(self._switch_interval)

    def _counted(self, run: Callable[[asyncio.Handle], None]) -> Callable[[asyncio.Handle], None]:
        def counted_run(handle: asyncio.Handle) -> None:
            self._begun += 1
            self._runs = True
            computed = -time.thread_time()
            try:
                run(handle)
            finally:
                self._runs = False
                computed += time.thread_time()
                if computed >= self._limit:
                    self._ended.append((self._begun, HoldUp(computed, f"  {handle!r}\n")))

        return counted_run

    def _watch(self) -> None:
        self._task = _TASKS / str(threading.get_native_id())
        with tempfile.TemporaryFile() as self._stacks:
            self._look_on()

    def _look_on(self) -> None:
        last = self._look()
        held_up = HoldUp(0.0, "")
        while not self._stopping:
            time.sleep(LOOK_SECONDS)
            look = self._look()
            if look.callback != last.callback:
                self._tell(last.callback, held_up)
                held_up = HoldUp(0.0, "")
            seconds = held_up.seconds + _held_up(last, look)
            stack = held_up.stack
            if seconds >= self._limit and not stack:
                stack = self._stack()
            held_up = HoldUp(seconds, stack)
            last = look
        self._tell(last.callback, held_up)
        self._tell(0, HoldUp(0.0, ""))

    def _tell(self, callback: int, held_up: HoldUp) -> None:
        """What was seen of one callback, and those before it that ended before they were seen."""
        while self._ended and (self._ended[0][0] <= callback or not callback):
            number, unseen = self._ended.popleft()
            if number != callback or not held_up.stack:
                self._found(unseen)
        if held_up.stack:
            self._found(held_up)

    def _look(self) -> _Look:
        callback = self._begun if self._runs else 0
        return _Look(
            time.monotonic(),
            callback,
            time.clock_gettime(self._clock),
            self._sleep() if callback else None,
        )

    def _stack(self) -> str:
        """What the callback runs now, from the loop's call of it on."""
        self._stacks.seek(0)
        self._stacks.truncate()
        faulthandler.dump_traceback(self._stacks, all_threads=True)
        self._stacks.seek(0)
        _, _, text = self._stacks.read().decode().partition(f"Thread {self._main:#018x} ")
        stack: list[str] = []
        for line in text.partition("\n\n")[0].splitlines():
            if "in counted_run" in line:
                break
            if frame := _FRAME.match(line):
                file, number, function = frame.groups()
                source = linecache.getline(file, int(number)).strip()
                stack.append(f'  File "{file}", line {number}, in {function}\n    {source}\n')
        return "".join(reversed(stack)) or "  (it ended before it was seen)\n"

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


def _thread(task: Path) -> _Thread:
    state = (task / "stat").read_bytes().rpartition(b")")[2].split()[0]
    ran, waited, _ = (task / "schedstat").read_bytes().split()
    return _Thread(state == b"R", int(ran) / 1e9, int(waited) / 1e9)


def _held_up(last: _Look, look: _Look) -> float:
    """For how long, at least, one callback held up the loop between two looks."""
    if not look.callback or look.callback != last.callback:
        return 0.0
    computed = look.computed - last.computed
    if look.sleep is None or last.sleep is None or look.sleep.number != last.sleep.number:
        return computed
    # Much more may have elapsed: the whole process was stopped.
    slept = min(look.at - last.at, 2 * LOOK_SECONDS)
    return computed + max(0.0, slept - _waited(last.sleep.others, look.sleep.others, slept))


def _waited(before: dict[str, _Thread], now: dict[str, _Thread], elapsed: float) -> float:
    """For how long any of the threads waited for a processor meanwhile."""
    waited = [0.0]
    for name, thread in now.items():
        earlier = before.get(name, _Thread(False, 0.0, 0.0))
        still_waits = thread.is_runnable and thread.ran == earlier.ran
        waited.append(elapsed if still_waits else thread.waited - earlier.waited)
    return max(waited)
