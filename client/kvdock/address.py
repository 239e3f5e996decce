"""Addresses of servers, and the default address of this host's server.

An address is ``unix:///run/user/1000/kvdock.sock`` for a Unix socket, ``host:port`` for TCP.
"""

from __future__ import annotations

import ipaddress
import os
import re
import stat
import urllib.parse
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

from kvdock.errors import InvalidArgument

ENVIRONMENT_VARIABLE = "KVDOCK_ADDRESS"
SOCKET_NAME = "kvdock.sock"

# sizeof(sockaddr_un.sun_path) on Linux, less the terminating zero.
_MAX_SOCKET_PATH_BYTES = 107

# A name, or an IPv4 address.
_HOST = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens. ``str()`` gives :attr:`text`."""

    text: str
    """Canonical spelling: ``unix:///path`` or ``host:port``."""
    target: str
    """The address in gRPC's spelling."""
    socket_path: Path | None
    """Path of the Unix socket; None for TCP."""
    is_local: bool
    """True if the server is on this host: a Unix socket or a loopback address."""

    def __str__(self) -> str:
        return self.text


def default_address() -> str:
    """Address of this host's server: ``$KVDOCK_ADDRESS``, else the Unix socket of this user."""
    return os.environ.get(ENVIRONMENT_VARIABLE) or f"unix://{default_socket_path()}"


def default_socket_path() -> Path:
    """``$XDG_RUNTIME_DIR/kvdock.sock``, else ``/tmp/kvdock-<uid>/kvdock.sock``."""
    runtime_dir = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime_dir) if runtime_dir else Path(f"/tmp/kvdock-{os.getuid()}")
    return folder / SOCKET_NAME


def ownership_fault(path: Path, users: Container[int]) -> str | None:
    """Why others than ``users`` can change what is at ``path``, in words; None if they cannot.

    The file or folder at ``path`` must belong to ``users``, and so must the target of a symbolic
    link. A folder must not let everybody replace its files. Raises OSError.
    """
    for place in dict.fromkeys((path, Path(os.path.realpath(path)))):
        found = place.lstat()
        if found.st_uid not in users:
            return f"{place} belongs to user {found.st_uid}"
        mode = stat.S_IMODE(found.st_mode)
        if stat.S_ISDIR(found.st_mode) and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"{place} has mode {mode:04o}, so every user may write in it (chmod o-w)"
    return None


def parse(address: str) -> Address:
    """Understands ``unix:///path``, ``unix:path``, ``/path``, ``host:port``, ``tcp://host:port``.

    Raises InvalidArgument for anything else.
    """
    text = address.strip()
    if text.startswith("unix:"):
        rest = text.removeprefix("unix:")
        return _unix(rest.removeprefix("//") if rest.startswith("///") else rest, address)
    if text.startswith("/"):
        return _unix(text, address)
    return _tcp(text.removeprefix("tcp://"), address)


def _unix(path_text: str, given: str) -> Address:
    if not path_text or path_text.startswith("//"):
        raise InvalidArgument(
            f"address {given!r} names no socket; write unix:///path/to/{SOCKET_NAME}"
        )
    path = Path(path_text).absolute()
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise InvalidArgument(
            f"socket path {str(path)!r} is {len(os.fsencode(path))} bytes long; the kernel takes "
            f"at most {_MAX_SOCKET_PATH_BYTES}, choose a shorter one"
        )
    return Address(
        text=f"unix://{path}",
        target=f"unix:{urllib.parse.quote(str(path))}",
        socket_path=path,
        is_local=True,
    )


def _tcp(host_port: str, given: str) -> Address:
    scheme, has_scheme, _ = host_port.partition("://")
    if has_scheme:
        raise InvalidArgument(
            f"address {given!r}: {scheme!r} is no scheme of KVDock's; write host:port, or "
            f"unix:///path/to/{SOCKET_NAME}"
        )
    host, colon, port_text = host_port.rpartition(":")
    if _is_ipv6(host_port) or _is_ipv6(host):
        raise InvalidArgument(f"address {given!r}: write an IPv6 host and its port as [::1]:7000")
    if not colon or not host or not port_text.isascii() or not port_text.isdigit():
        raise InvalidArgument(
            f"address {given!r} is neither host:port nor unix:///path/to/{SOCKET_NAME}"
        )
    if not 0 < int(port_text) < 65536:
        raise InvalidArgument(f"address {given!r}: port {port_text} is not in 1 to 65535")
    in_brackets = host.startswith("[") and host.endswith("]") and _is_ipv6(host[1:-1])
    if not in_brackets and not _HOST.fullmatch(host):
        raise InvalidArgument(f"address {given!r}: {host!r} is no host's name or address")
    text = f"{host}:{int(port_text)}"
    return Address(text=text, target=text, socket_path=None, is_local=is_loopback(host))


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this host reaches what listens there. ``host``: of ``host:port``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
