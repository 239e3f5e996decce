"""Starts a server that outlives the engine."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import IO

from kvdock.address import Address, ownership_fault

_log = logging.getLogger(__name__)


class Autostart:
    """Starts a server when none is found. Used by one thread."""

    def __init__(self, address: Address) -> None:
        """``address`` is where the server shall listen. Raises ValueError if it is another host."""
        if not address.is_local:
            raise ValueError(
                f"kvdock.autostart cannot start a server at {address}, which is another host: "
                f"start it there, or leave kvdock.autostart off"
            )
        self._address = address
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts a server, unless the last one started still runs, perhaps getting ready.

        Its settings come from ``KVDOCK_…`` variables, and it writes to ``kvdock.log`` beside its
        socket. If another engine starts one at the same time, the second server ends by itself.
        """
        if self._process is not None and self._process.poll() is None:
            return
        command = [sys.executable, "-m", "kvdock_server", "--listen", str(self._address)]
        try:
            with self._open_log() as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # A session of its own: signals to the engine's are not for it.
                    start_new_session=True,
                )
        except OSError as error:
            _log.warning("could not start a KVDock server: %s", error)
        else:
            _log.info("started a KVDock server at %s: %s", self._address, " ".join(command))

    def _open_log(self) -> IO[bytes]:
        socket_path = self._address.socket_path
        if socket_path is None:
            return Path(os.devnull).open("wb")
        socket_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fault = ownership_fault(socket_path.parent, {0, os.geteuid()})
        if fault is not None:
            raise OSError(f"{fault}; remove it, or choose another place with KVDOCK_ADDRESS")
        return _own_file(socket_path.with_suffix(".log"))


def _own_file(path: Path) -> IO[bytes]:
    """Opens the file to append. Raises OSError if another user may have put it there."""
    # Without O_NONBLOCK this would wait if the path were a pipe.
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    file = os.fdopen(os.open(path, flags, 0o600), "ab")
    try:
        found = os.fstat(file.fileno())
        is_plain = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
        if not is_plain or found.st_uid != os.geteuid():
            raise OSError(f"{path} is there and is no file of this user's: remove it")
        os.fchmod(file.fileno(), 0o600)
    except BaseException:
        file.close()
        raise
    return file
