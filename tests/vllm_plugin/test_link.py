"""The supervised connection, against real servers that come and go."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvdock import Client, Session
from kvdock.address import parse
from kvdock.errors import ServerError
from kvdock_vllm.engine.autostart import Autostart
from kvdock_vllm.engine.link import Link

StartServer = Callable[..., Any]


def open_session(client: Client, on_lost: Callable[[str], None]) -> Session:
    return client.session("engine", on_lost=on_lost)


class Preparation:
    """Counts, and may refuse."""

    def __init__(self) -> None:
        self.count = 0
        self.refuse: Exception | None = None

    def __call__(self, client: Client, session: Session) -> int:
        self.count += 1
        if self.refuse is not None:
            raise self.refuse
        return self.count


@pytest.fixture
def prepare() -> Preparation:
    return Preparation()


@pytest.fixture
def make_link(prepare: Preparation) -> Iterator[Callable[..., Link[int]]]:
    links: list[Link[int]] = []

    def make(address: str, **arguments: Any) -> Link[int]:
        links.append(Link("test", parse(address), open_session, prepare, **arguments))
        return links[-1]

    yield make
    for link in links:
        link.close()


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_start_waits_for_the_first_session(server: Any, make_link: Any) -> None:
    link = make_link(server.address)
    assert link.current is None
    link.start(5)
    assert link.current.prepared == 1
    assert link.current.session.alive


def test_start_waits_no_longer_than_the_first_failure(tmp_path: Path, make_link: Any) -> None:
    link = make_link(f"unix://{tmp_path}/nobody.sock")
    began = time.monotonic()
    link.start(5)
    assert link.current is None
    assert time.monotonic() - began < 2


def test_a_lost_session_is_replaced_and_closed(
    server: Any, make_link: Any, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[Session] = []
    link = make_link(server.address, before_close=closed.append)
    with caplog.at_level(logging.WARNING):
        link.start(5)
        first = link.current
        server.kill()
        eventually(lambda: link.current is None)
        time.sleep(0.5)
        server.start()
        began = time.monotonic()
        eventually(lambda: link.current is not None)
        assert time.monotonic() - began < 2.5, "found again at once, not after gRPC's backoff"
    second = link.current
    assert second is not first
    assert second.session.epoch != first.session.epoch
    assert closed == [first.session]
    messages = [r.getMessage() for r in caplog.records if r.name == "kvdock_vllm.engine.link"]
    assert len(messages) == 2, "one line when it goes, one when it is back"
    assert "without cache" in messages[0]
    assert "is connected" in messages[1]


def test_wait_is_for_one_epoch_and_for_so_long(server: Any, make_link: Any) -> None:
    link = make_link(server.address)
    link.start(5)
    epoch = link.current.session.epoch
    assert link.wait(epoch, 0) is link.current
    began = time.monotonic()
    assert link.wait(epoch + 1, 0.2) is None
    assert 0.15 < time.monotonic() - began < 1


def test_what_one_waited_for_in_vain_the_next_does_not_wait_for(
    server: Any, make_link: Any
) -> None:
    link = make_link(server.address)
    link.start(5)
    epoch = link.current.session.epoch
    assert link.wait(epoch + 1, 0.5) is None
    began = time.monotonic()
    assert link.wait(epoch + 1, 0.5) is None
    assert time.monotonic() - began < 0.25
    server.process.send_signal(signal.SIGSTOP)
    try:
        link.renew(0)
        assert link.wait(epoch, 0.1) is None
    finally:
        server.process.send_signal(signal.SIGCONT)
    eventually(lambda: link.current is not None, 10)
    link.renew(0)
    assert link.wait(epoch, 5) is not None, "of an outage that is over nothing is kept"


def test_wait_hurries_the_next_attempt(server: Any, make_link: Any) -> None:
    link = make_link(server.address)
    server.kill()
    link.start(5)
    # By now the pause between attempts has grown to its limit of two seconds.
    time.sleep(3.5)
    server.start()
    with Client(server.address) as client:
        epoch = client.status().epoch
    began = time.monotonic()
    assert link.wait(epoch, 5) is not None
    assert time.monotonic() - began < 1


def test_renewal_ends_the_session_and_prepares_another(
    server: Any, make_link: Any, prepare: Preparation
) -> None:
    link = make_link(server.address)
    link.start(5)
    old = link.current
    assert link.renew(5)
    assert link.current is not old
    assert link.current.prepared == 2
    assert not old.session.alive
    prepare.refuse = ServerError("not now")
    assert link.renew(0.2) is False
    assert link.current is None
    prepare.refuse = None
    eventually(lambda: link.current is not None)


def test_a_renewal_waits_for_one_that_is_under_way(server: Any) -> None:
    allowed = threading.Semaphore(1)

    def prepare(client: Client, session: Session) -> None:
        assert allowed.acquire(timeout=5)

    link = Link("test", parse(server.address), open_session, prepare)
    try:
        link.start(5)
        assert link.current is not None
        assert link.renew(0) is False
        renewed: list[bool] = []
        second = threading.Thread(target=lambda: renewed.append(link.renew(5)))
        second.start()
        allowed.release(2)  # the attempt that the second one refuses, perhaps, and the one after
        second.join()
        assert renewed == [True]
        assert link.failure is None
    finally:
        link.close()


def test_a_renewal_ends_with_the_first_failure_and_says_why(server: Any, make_link: Any) -> None:
    link = make_link(server.address)
    assert link.renew(5) is False, "nobody connects yet"
    link.start(5)
    server.kill()
    eventually(lambda: link.current is None)
    began = time.monotonic()
    assert link.renew(60) is False
    assert time.monotonic() - began < 30
    assert "no KVDock server answers" in link.failure
    server.start()
    eventually(lambda: link.current is not None)
    assert link.failure is None


def test_renewal_also_refuses_a_session_that_is_just_being_prepared(server: Any) -> None:
    preparing, go_on = threading.Event(), threading.Event()
    prepared: list[int] = []

    def prepare(client: Client, session: Session) -> int:
        prepared.append(len(prepared))
        preparing.set()
        go_on.wait(5)
        return prepared[-1]

    link = Link("test", parse(server.address), open_session, prepare)
    try:
        link.start()
        assert preparing.wait(5)
        assert link.renew(0) is False
        go_on.set()
        eventually(lambda: link.current is not None)
        live = link.current
        assert live is not None
        assert live.prepared == 1, "what was prepared before the renewal must not be used"
    finally:
        link.close()


def test_what_cannot_succeed_is_not_tried_again(
    server: Any, make_link: Any, prepare: Preparation, caplog: pytest.LogCaptureFixture
) -> None:
    prepare.refuse = ValueError("this model is not supported")
    link = make_link(server.address)
    link.start(5)
    eventually(lambda: all(thread.name != "kvdock-test" for thread in threading.enumerate()))
    assert link.current is None
    assert prepare.count == 1
    assert "this model is not supported" in caplog.text


def test_what_should_not_happen_is_logged_and_tried_again(
    server: Any, make_link: Any, prepare: Preparation, caplog: pytest.LogCaptureFixture
) -> None:
    prepare.refuse = RuntimeError("a bug of ours")
    link = make_link(server.address)
    link.start(5)
    assert link.current is None
    prepare.refuse = None
    eventually(lambda: link.current is not None)
    assert "a bug of ours" in caplog.text


def test_closing_twice_and_before_the_start(server: Any, prepare: Preparation) -> None:
    link = Link("test", parse(server.address), open_session, prepare)
    link.close()
    link = Link("test", parse(server.address), open_session, prepare)
    link.start(5)
    live = link.current
    assert live is not None
    link.close()
    link.close()
    assert link.current is None
    assert not live.session.alive


@pytest.fixture
def short_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as folder:
        yield Path(folder)


def test_autostart_starts_one_server_that_outlives_the_engine(
    short_folder: Path, make_link: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVDOCK_MEMORY", "1MiB")
    socket = short_folder / "new" / "auto.sock"
    address = parse(f"unix://{socket}")
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(*arguments: Any, **named: Any) -> Any:
        assert named["start_new_session"]
        started.append(real(*arguments, **named))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    link = make_link(str(address), autostart=Autostart(address))
    try:
        link.start()
        eventually(lambda: link.current is not None, 20)
        link.close()
        with Client(str(address)) as client:
            assert client.status().pid == started[0].pid
        assert len(started) == 1
        assert os.getsid(started[0].pid) == started[0].pid
        log = socket.with_suffix(".log")
        assert log.stat().st_mode & 0o777 == 0o600
        assert "serving at" in log.read_text()
    finally:
        for process in started:
            process.terminate()
            process.wait(20)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The programs that would have been started."""
    started: list[Any] = []

    def popen(command: Any, **_: Any) -> Any:
        started.append(command)
        return SimpleNamespace(poll=lambda: None)

    monkeypatch.setattr(subprocess, "Popen", popen)
    return started


def _link(log: Path, other: Path) -> None:
    log.symlink_to(other)


def _hard_link(log: Path, other: Path) -> None:
    log.hardlink_to(other)


def _pipe(log: Path, other: Path) -> None:
    os.mkfifo(log, 0o600)


def _another_users(log: Path, other: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    log.touch()
    os.chown(log, 54_321, 54_321)


@pytest.mark.parametrize("put", [_link, _hard_link, _pipe, _another_users])
def test_autostart_writes_to_no_log_that_another_may_have_put_there(
    short_folder: Path, started: list[Any], put: Any, caplog: pytest.LogCaptureFixture
) -> None:
    other = short_folder / "other"
    other.write_text("mine")
    other.chmod(0o644)
    put(short_folder / "k.log", other)

    Autostart(parse(f"unix://{short_folder}/k.sock")).start()

    assert not started
    assert (other.read_text(), other.stat().st_mode & 0o777) == ("mine", 0o644)
    assert "could not start a KVDock server: " in caplog.text
    assert f"{short_folder}/k.log" in caplog.text


@pytest.mark.parametrize("mode", [0o777, 0o700])
def test_autostart_makes_nothing_in_a_folder_that_is_not_this_users(
    short_folder: Path, started: list[Any], mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    folder = short_folder / "kvdock-0"
    folder.mkdir()
    folder.chmod(mode)
    if mode == 0o700:
        if os.getuid() != 0:
            pytest.skip("only root can give a folder away")
        os.chown(folder, 54_321, 54_321)

    Autostart(parse(f"unix://{folder}/k.sock")).start()

    assert not started
    assert not list(folder.iterdir())
    assert f"could not start a KVDock server: {folder} " in caplog.text


def test_an_engine_connects_to_no_place_that_is_not_this_users_and_starts_nothing_there(
    short_folder: Path, make_link: Any, started: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    short_folder.chmod(0o777)
    address = parse(f"unix://{short_folder}/k.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address.socket_path))
        listener.listen()
        link = make_link(str(address), autostart=Autostart(address))
        link.start(10)
        assert link.current is None
        link.close()

    assert not started
    assert f"serves without cache and goes on trying to connect to {address}" in caplog.text
    assert f"{short_folder} has mode 0777" in caplog.text


def test_autostart_makes_an_old_log_of_its_own_private(
    short_folder: Path, started: list[Any]
) -> None:
    log = short_folder / "k.log"
    log.write_text("old\n")
    log.chmod(0o644)

    Autostart(parse(f"unix://{short_folder}/k.sock")).start()

    assert len(started) == 1
    assert (log.read_text(), log.stat().st_mode & 0o777) == ("old\n", 0o600)


def test_autostart_elsewhere_is_refused() -> None:
    with pytest.raises(ValueError, match="another host"):
        Autostart(parse("cache.example:7000"))
