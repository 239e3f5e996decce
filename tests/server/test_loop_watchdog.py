"""The watchdog of the event loop: what it finds, and what it does not take for a fault."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from loop_watchdog import HoldUp, Watchdog
from servers import ServerProcess

import kvdock

TESTS = Path(__file__).parents[1]
PYPROJECT = TESTS.parent / "pyproject.toml"


def compute(seconds: float = 0.05) -> None:
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        pass


def sleep() -> None:
    time.sleep(0.05)


def search() -> None:
    """One call in C that keeps the interpreter lock."""
    (b"x" * 30_000_000).find(b"xxxxxxxxy")


def found_in(callback: Callable[[], None], times: int, pause: float) -> list[HoldUp]:
    """What the watchdog finds in a loop that calls this now and then."""

    async def run() -> None:
        for _ in range(times):
            asyncio.get_running_loop().call_soon(callback)
            await asyncio.sleep(pause)

    found: list[HoldUp] = []
    watchdog = Watchdog(found.append)
    watchdog.start()
    asyncio.run(run())
    watchdog.stop()
    return found


@contextmanager
def busy_machine() -> Iterator[None]:
    """More processes than processors, and a thread that always wants the interpreter lock."""
    program = "import time; end = time.monotonic() + 20\nwhile time.monotonic() < end: pass"
    burners = [subprocess.Popen([sys.executable, "-c", program]) for _ in range(2)]
    ending = threading.Event()

    def contend() -> None:
        while not ending.is_set():
            sum(range(1000))

    thread = threading.Thread(target=contend)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()
        for burner in burners:
            burner.kill()
            burner.wait()


@pytest.mark.parametrize(
    ("callback", "line"),
    [(sleep, "time.sleep(0.05)"), (compute, "while time.thread_time()"), (search, "search() at ")],
)
def test_what_holds_up_a_loop_is_found_with_its_line(
    callback: Callable[[], None], line: str
) -> None:
    found = found_in(callback, times=5, pause=0.03)
    # On a busy machine the watchdog may be kept from looking while the loop's thread sleeps.
    assert 1 <= len(found) <= 5
    assert all(0.02 <= one.seconds < 1 for one in found)
    assert any("test_loop_watchdog.py" in one.stack and line in one.stack for one in found)


def test_waiting_for_a_processor_or_for_the_interpreter_is_no_fault() -> None:
    with busy_machine():
        assert found_in(lambda: compute(0.001), times=300, pause=0) == []
        assert found_in(lambda: time.sleep(0.002), times=100, pause=0) == []


def test_a_task_that_gives_others_their_turn_is_no_fault() -> None:
    async def run() -> None:
        for _ in range(100):
            compute(0.002)
            await asyncio.sleep(0)

    found: list[HoldUp] = []
    watchdog = Watchdog(found.append)
    watchdog.start()
    asyncio.run(run())
    watchdog.stop()
    assert not found


def test_a_computation_is_found_on_a_busy_machine_too() -> None:
    with busy_machine():
        assert found_in(compute, times=1, pause=0.03)


PLANTED = """
import time
from kvdock_server.__main__ import main
from kvdock_server.core import Core

lookup = Core.lookup

def slow_lookup(*arguments, **options):
    time.sleep(0.05)
    return lookup(*arguments, **options)

Core.lookup = slow_lookup
time.sleep(0.05)  # in the start, which holds up nobody
main()
"""


def look_up(address: str, times: int) -> None:
    with kvdock.Client(address) as client:
        client.register_namespace(kvdock.Namespace("n", 16, 1, (kvdock.Group((4096,)),)))
        for _ in range(times):
            client.lookup("n", [bytes(32)], probe=True)


def test_a_server_in_a_process_of_its_own_is_watched(tmp_path: Path) -> None:
    program = tmp_path / "planted.py"
    program.write_text(PLANTED)
    held_up = tmp_path / "held-up"
    server = ServerProcess(
        tmp_path / "s", "--memory", "1MiB", program=[str(program)], held_up=held_up
    )
    look_up(server.address, 5)
    assert server.stop() == 0
    found = held_up.read_text()
    assert 'planted.py", line 9, in slow_lookup' in found
    assert "line 13" not in found


def test_a_server_that_was_stopped_for_a_while_is_not_at_fault(tmp_path: Path) -> None:
    held_up = tmp_path / "held-up"
    server = ServerProcess(tmp_path / "s", "--memory", "1MiB", held_up=held_up)
    asking = threading.Thread(target=look_up, args=(server.address, 500))
    asking.start()
    for _ in range(5):
        os.kill(server.process.pid, signal.SIGSTOP)
        time.sleep(0.06)
        os.kill(server.process.pid, signal.SIGCONT)
        time.sleep(0.01)
    asking.join()
    assert server.stop() == 0
    assert not held_up.exists()
