"""The address that a server listens on, kept from other servers and other users."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvdock.address import Address, ownership_fault


class EndpointError(Exception):
    """The address cannot be used. The message says why and what to do."""


@contextmanager
def claimed(address: Address) -> Iterator[None]:
    """Within it no other server listens on the address; EndpointError if that cannot be."""
    if address.socket_path is None:
        refuse_taken("listen", address.target)
        yield
        return
    lock = _claim_socket(address.socket_path)
    try:
        yield
    finally:
        address.socket_path.unlink(missing_ok=True)
        os.close(lock)


@contextmanager
def private_files() -> Iterator[None]:
    """Within it the whole process makes files of mode 0600. For gRPC, which asks for no mode."""
    before = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(before)


def refuse_taken(setting: str, host_port: str) -> None:
    """EndpointError if somebody listens at HOST:PORT. Nothing else that is wrong is found here."""
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


def _claim_socket(path: Path) -> int:
    """Remove a socket that was left behind; the descriptor of the socket's lock.

    EndpointError if another server has the path, or the folder is not safe. Then nothing was made
    beside something that is no socket.
    """
    try:
        _refuse_what_is_no_socket(path)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_foreign_folder(path.parent)
        lock = _lock(path)
        try:
            _refuse_what_is_no_socket(path)  # something may have come meanwhile
            path.unlink(missing_ok=True)
        except BaseException:
            os.close(lock)
            raise
        return lock
    except OSError as error:
        raise EndpointError(f"socket {path} cannot be made: {error}") from None


def _lock(path: Path) -> int:
    """Descriptor of the locked file beside the socket; EndpointError if another server has it.

    The lock tells a live server from a socket that was left behind. The file is never removed: two
    servers could then hold a lock each.
    """
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
    """Another user who made this user's folder in /tmp could lead clients to their own server."""
    fault = ownership_fault(folder, {0, os.getuid()})
    if fault is not None:
        raise EndpointError(
            f"{fault}: the socket's folder must be yours (or root's), and only its owner may write "
            "in it; mend that, or choose another with --listen"
        )
