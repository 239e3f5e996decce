"""The address a server listens on, and making sure that it is the only one there."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from kvdock.address import Address, ownership_fault


class EndpointError(Exception):
    """The address cannot be used. The message says why and what to do."""


class UnixEndpoint:
    """A Unix socket that only its owner can reach.

    A lock file beside the socket tells a live server from a socket left behind; it stays when the
    server goes, since removing it would let two servers hold a lock each.
    """

    def __init__(self, path: Path, target: str) -> None:
        """Claim the path; EndpointError if another server has it or the folder is not safe.

        Nothing is made beside something that is no socket.
        """
        self.path = path
        self.target = target
        try:
            _refuse_what_is_no_socket(path)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_foreign_folder(path.parent)
            self._lock = _lock(path)
            try:
                # It may have come meanwhile.
                _refuse_what_is_no_socket(path)
                path.unlink(missing_ok=True)
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise EndpointError(f"socket {path} cannot be made: {error}") from None

    def close(self) -> None:
        """Remove the socket."""
        self.path.unlink(missing_ok=True)
        os.close(self._lock)


class TcpEndpoint:
    """A TCP address."""

    def __init__(self, target: str) -> None:
        """EndpointError if it is taken. So it is known before anything else is made."""
        refuse_taken("listen", target)
        self.target = target

    def close(self) -> None:
        """Nothing to do."""


Endpoint = UnixEndpoint | TcpEndpoint


def claim(address: Address) -> Endpoint:
    """The endpoint for an address; EndpointError if it cannot be had."""
    if address.socket_path is not None:
        return UnixEndpoint(address.socket_path, address.target)
    return TcpEndpoint(address.target)


def refuse_taken(setting: str, host_port: str) -> None:
    """EndpointError if somebody listens there. What else is wrong, whoever listens finds out."""
    host, _, port = host_port.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:
        return
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise EndpointError(
                    f"{setting} {host_port}: somebody listens there already; choose another port, "
                    "or stop them"
                ) from None


def _lock(path: Path) -> int:
    """Descriptor of the locked file beside the socket; EndpointError if another server has it."""
    flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(path.with_name(path.name + ".lock"), flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise EndpointError(
            f"another server listens on {path}: use that one, stop it, or choose another "
            "address with --listen"
        ) from None
    return lock


def _refuse_what_is_no_socket(path: Path) -> None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise EndpointError(f"{path} is there and is no socket: choose another with --listen")


def _refuse_foreign_folder(folder: Path) -> None:
    """A per-user folder in /tmp that somebody else made could lead clients to their server."""
    fault = ownership_fault(folder, {0, os.getuid()})
    if fault is not None:
        raise EndpointError(
            f"{fault}: the socket's folder must be yours (or root's), and only its owner may write "
            "in it; mend that, or choose another with --listen"
        )
