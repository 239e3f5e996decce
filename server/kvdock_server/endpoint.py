"""The address a server listens on, and making sure that it is the only one there."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from kvdock.address import Address


class EndpointError(Exception):
    """The address cannot be used. The message says why and what to do."""


class UnixEndpoint:
    """A Unix socket that only its owner can reach.

    A lock file beside the socket tells a live server from a socket left behind; it stays when the
    server goes, since removing it would let two servers hold a lock each.
    """

    def __init__(self, path: Path, target: str) -> None:
        """Claim the path; EndpointError if another server has it or the folder is not safe."""
        self.path = path
        self.target = target
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise EndpointError(f"folder of socket {path}: {error}") from None
        _refuse_foreign_folder(path.parent)
        lock = path.with_name(path.name + ".lock")
        try:
            self._lock = os.open(lock, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise EndpointError(f"lock file {lock}: {error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise EndpointError(
                f"another server listens on {path}: use that one, stop it, or choose another "
                "address with --listen"
            ) from None
        if path.exists() and not path.is_socket():
            os.close(self._lock)
            raise EndpointError(f"{path} is there and is no socket: choose another with --listen")
        path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the socket."""
        self.path.unlink(missing_ok=True)
        os.close(self._lock)


class TcpEndpoint:
    """A TCP address. gRPC itself refuses one that is taken."""

    def __init__(self, target: str) -> None:
        self.target = target

    def close(self) -> None:
        """Nothing to do."""


Endpoint = UnixEndpoint | TcpEndpoint


def claim(address: Address) -> Endpoint:
    """The endpoint for an address; EndpointError if it cannot be had."""
    if address.socket_path is not None:
        return UnixEndpoint(address.socket_path, address.target)
    return TcpEndpoint(address.target)


def _refuse_foreign_folder(folder: Path) -> None:
    """A per-user folder in /tmp that somebody else made could lead clients to their server."""
    info = folder.stat()
    shared = info.st_mode & stat.S_ISVTX and info.st_mode & stat.S_IWOTH
    if info.st_uid not in (os.getuid(), 0) or (info.st_mode & stat.S_IWOTH and not shared):
        raise EndpointError(
            f"folder {folder} belongs to user {info.st_uid} with mode {info.st_mode & 0o7777:o}: "
            "it must be yours and not writable by others; choose another with --listen"
        )
