"""A supervised connection: there is a session or there is none, and nobody waits to find out.

A thread opens the session, prepares it, waits for its end, and begins again. Promises of one
session are void in the next. So a session and what was prepared for it are published together, as
one immutable :class:`Live`, which holders compare by identity.

An engine that can do without cache never waits for this thread. The thread logs once that the
server is gone, and once that it is back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvdock import Client, Session
from kvdock.address import Address
from kvdock.errors import KVDockError, Unavailable
from kvdock_vllm.engine import affinity
from kvdock_vllm.engine.autostart import Autostart

_log = logging.getLogger(__name__)

_CONNECT_SECONDS = 2.0
_FIRST_DELAY = 0.1
_LONGEST_DELAY = 2.0
_JOIN_SECONDS = 3.0

Prepared = TypeVar("Prepared")


@dataclass(frozen=True, eq=False, slots=True)
class Live(Generic[Prepared]):
    """An open session and what was prepared for it."""

    client: Client
    session: Session
    prepared: Prepared


OpenSession = Callable[[Client, Callable[[str], None]], Session]


class Link(Generic[Prepared]):
    """Keeps one session open for as long as there is a server."""

    def __init__(
        self,
        name: str,
        address: Address,
        open_session: OpenSession,
        prepare: Callable[[Client, Session], Prepared],
        *,
        before_close: Callable[[Session], None] = lambda session: None,
        autostart: Autostart | None = None,
    ) -> None:
        """``name`` is for messages. ``open_session(client, on_lost)`` and ``prepare(client,
        session)`` run on the link's thread and may take some seconds. A KVDockError of theirs leads
        to another attempt. After a ValueError, which another attempt would raise again, the link
        gives up. ``before_close(session)`` runs on the same thread, and ends what still uses the
        session's memory.
        """
        self._name = name
        self._address = address
        self._open_session = open_session
        self._prepare = prepare
        self._before_close = before_close
        self._autostart = autostart
        self._changed = threading.Condition()
        self._current: Live[Prepared] | None = None
        self._failure: str | None = "it has not begun to connect"
        self._awaited: dict[int, float] = {}
        """Epochs that were waited for since the last session, and since when."""
        self._renewals = 0
        self._closing = False
        self._attempt_now = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"kvdock-{name}", daemon=True)

    def start(self, seconds: float = 0.0) -> None:
        """Begins to connect. Waits at most ``seconds`` for the first attempt to succeed or fail."""
        with self._changed:
            self._failure = None
            self._thread.start()
            self._changed.wait_for(self._is_settled, seconds)

    @property
    def current(self) -> Live[Prepared] | None:
        """The open session, or None. Never waits."""
        live = self._current
        return live if live is not None and live.session.alive else None

    @property
    def failure(self) -> str | None:
        """Why the last attempt failed. None if it succeeded, or none has ended."""
        return self._failure

    def wait(self, epoch: int, seconds: float) -> Live[Prepared] | None:
        """The open session with the server process of that epoch, or None if there is none within
        ``seconds``.

        For background threads that know from another process that the server is there. The time
        begins with the first thread that waits, for all of them.
        """
        with self._changed:
            while not self._closing:
                live = self.current
                if live is not None and live.session.epoch == epoch:
                    return live
                self._attempt_now.set()
                now = time.monotonic()
                deadline = self._awaited.setdefault(epoch, now) + seconds
                if not self._changed.wait(max(0.0, deadline - now)):
                    return None
        return None

    def renew(self, seconds: float) -> bool:
        """Ends the session and has another one opened. Whether that is there within ``seconds``.

        Waits at most until the first attempt fails (:attr:`failure`), and not at all if the last
        one failed. The old session's promises are void when this returns.
        """
        with self._changed:
            self._current = None
            # Also refuses a session that is being prepared.
            self._renewals += 1
            self._changed.notify_all()
            self._attempt_now.set()
            self._changed.wait_for(self._is_settled, seconds)
            return self._current is not None

    def close(self) -> None:
        """Ends the session and the thread."""
        with self._changed:
            self._closing = True
            self._current = None
            self._failure = "it has been closed"
            self._changed.notify_all()
        self._attempt_now.set()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_SECONDS)

    def _run(self) -> None:
        affinity.restore()
        delay = _FIRST_DELAY
        outage = _Outage(self._name, self._address)
        while not self._closing:
            self._attempt_now.clear()
            renewals = self._renewals
            try:
                live = self._connect()
            except KVDockError as error:
                outage.noticed(error)
                self._fail(error.message)
                if self._autostart is not None and type(error) is Unavailable:
                    self._autostart.start()
                self._attempt_now.wait(delay)
                delay = min(2 * delay, _LONGEST_DELAY)
                continue
            except ValueError as error:
                _log.error("KVDock is not used by this engine (%s): %s", self._name, error)
                self._fail(str(error))
                return
            except Exception as error:
                _log.exception("KVDock (%s) could not connect to %s", self._name, self._address)
                self._fail(repr(error))
                self._attempt_now.wait(_LONGEST_DELAY)
                continue
            delay = _FIRST_DELAY
            if renewals == self._renewals:
                outage.over()
                self._hold(live, renewals)
            self._before_close(live.session)
            live.session.close()
            live.client.close()
        _log.debug("%s: link closed", self._name)

    def _connect(self) -> Live[Prepared]:
        with ExitStack() as opened:
            client = Client(str(self._address), timeout=_CONNECT_SECONDS)
            opened.callback(client.close)
            session = self._open_session(client, self._lost)
            opened.callback(session.close)
            live = Live(client, session, self._prepare(client, session))
            opened.pop_all()
            return live

    def _hold(self, live: Live[Prepared], renewals: int) -> None:
        """Publishes the session and waits for its end."""
        with self._changed:
            if self._closing or renewals != self._renewals:
                return
            self._current = live
            self._failure = None
            self._awaited.clear()
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._current is not live or not live.session.alive)
            self._current = None
        if (why := live.session.lost) is not None:
            _log.info("%s: session ended: %s", self._name, why)

    def _fail(self, why: str) -> None:
        with self._changed:
            self._failure = why
            self._changed.notify_all()

    def _is_settled(self) -> bool:
        """Whether there is a session, or the last attempt failed. Called under the lock."""
        return self._current is not None or self._failure is not None

    def _lost(self, why: str) -> None:
        """Runs on the session's thread."""
        with self._changed:
            self._changed.notify_all()


class _Outage:
    """Logs once that there is no server, and once that there is one again."""

    def __init__(self, name: str, address: Address) -> None:
        self._name = name
        self._address = address
        self._since: float | None = None

    def noticed(self, error: KVDockError) -> None:
        if self._since is None:
            self._since = time.monotonic()
            _log.warning(
                "KVDock (%s) serves without cache and goes on trying to connect to %s: %s",
                self._name,
                self._address,
                error.message,
            )

    def over(self) -> None:
        if self._since is None:
            _log.info("KVDock (%s) is connected to %s", self._name, self._address)
        else:
            seconds = time.monotonic() - self._since
            _log.warning(
                "KVDock (%s) is connected to %s after %.1f s", self._name, self._address, seconds
            )
        self._since = None
