"""Who may be the server: root, this user, and the user that ``KVDOCK_SERVER_USER`` names.

Any user of a host can listen under /tmp or on a port. A client gives its server the bytes of
prompts, and writes into a file that the server names. So a client checks whose socket it connects
to and whose file it maps. At a TCP address it can check only the file.
"""

from __future__ import annotations

import os
import pwd
import re
import socket
import stat
import struct
from pathlib import Path

from kvdock.address import Address, ownership_fault
from kvdock.errors import InvalidArgument, PoolUnmappable, UntrustedServer, unanswered
from kvdock.types import Segment

USER_VARIABLE = "KVDOCK_SERVER_USER"

_SHM_FOLDER = Path("/dev/shm")
_SHM_NAME = re.compile(r"/kvdock-[0-9]+-[0-9a-f]{16}")
_PROOF_BYTES = 32

# struct ucred: process, user, group.
_UCRED = struct.Struct("3i")


def trusted_users() -> frozenset[int]:
    """Numbers of the users who may be the server.

    Raises InvalidArgument if ``KVDOCK_SERVER_USER`` names a user that does not exist.
    """
    users = {0, os.geteuid()}
    named = os.environ.get(USER_VARIABLE)
    if named:
        try:
            users.add(int(named) if named.isdecimal() else pwd.getpwnam(named).pw_uid)
        except (KeyError, ValueError):
            raise InvalidArgument(
                f"{USER_VARIABLE}={named}: there is no such user here; give the user's number"
            ) from None
    return frozenset(users)


def socket_fault(path: Path) -> str | None:
    """Why the Unix socket at ``path`` cannot be trusted, in words; None if it can.

    Connects to the socket, to see which user listens. Raises OSError if nobody listens.
    """
    users = trusted_users()
    for place in (path.parent, path, Path(os.path.realpath(path)).parent):
        fault = ownership_fault(place, users)
        if fault is not None:
            return fault
    with socket.socket(socket.AF_UNIX) as probe:
        # A server that accepts no connection must not hold up an event loop.
        probe.setblocking(False)
        probe.connect(str(path))
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, user, _ = _UCRED.unpack(credentials)
    return None if user in users else f"user {user} listens at {path}"


def what_to_do(fault: str) -> str:
    """The fault, and advice to the user."""
    mine = os.geteuid()
    return (
        f"{fault}. Only root and this user ({mine}) are trusted as the server: if it is to run as "
        f"another, name that one in {USER_VARIABLE}; if not, remove what is there, or choose "
        f"another place with KVDOCK_LISTEN and KVDOCK_ADDRESS"
    )


class Gatekeeper:
    """Lets a client connect to a Unix socket only while a trusted user listens there.

    Any call may make gRPC connect anew. So every call is checked, and the socket is looked at again
    when it is another one than the last time. Thread-safe.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._seen: tuple[int, ...] | None = None

    def check(self) -> None:
        """Raises UntrustedServer, or Unavailable if nobody listens. Does nothing for TCP.

        Never waits. Costs one stat if the socket is the same as before.
        """
        path = self._address.socket_path
        if path is None:
            return
        identity = _identity(path)
        if identity is not None and identity == self._seen:
            return
        try:
            fault = socket_fault(path)
        except OSError as error:
            raise unanswered(str(self._address), error.strerror or str(error)) from error
        if fault is not None:
            raise UntrustedServer(what_to_do(fault))
        self._seen = identity


def _identity(path: Path) -> tuple[int, ...] | None:
    """Equal while the same file is at ``path``; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_ctime_ns)


def open_segment(segment: Segment, flags: int) -> int:
    """Opens the file of a segment, and checks that it is the server's. Returns the descriptor.

    ``flags`` say whether to read or to write (``os.O_RDWR``). Raises PoolUnmappable if the file is
    not the server's, OSError if it cannot be opened.
    """
    if not _SHM_NAME.fullmatch(segment.shm_name):
        raise PoolUnmappable(
            f"the server names {segment.shm_name!r} as its pool, which no KVDock server does"
        )
    path = _SHM_FOLDER / segment.shm_name[1:]
    # Without O_NONBLOCK, opening a pipe at this path would wait.
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fault = _file_fault(descriptor, segment)
        if fault is not None:
            raise PoolUnmappable(f"{path} is not the pool of the server that names it: {fault}")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _file_fault(descriptor: int, segment: Segment) -> str | None:
    found = os.fstat(descriptor)
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode):
        return "it is no regular file"
    if found.st_uid not in trusted_users():
        return what_to_do(f"it belongs to user {found.st_uid}")
    if mode & 0o077:
        return f"others may open it (mode {mode:04o})"
    if found.st_size < segment.nbytes + _PROOF_BYTES:
        return (
            f"it has {found.st_size:,} bytes, too few for a pool of {segment.nbytes:,}; do both "
            f"processes see the same /dev/shm?"
        )
    if len(segment.proof) != _PROOF_BYTES:
        return f"the server's proof has {len(segment.proof)} bytes, and not {_PROOF_BYTES}"
    if os.pread(descriptor, _PROOF_BYTES, found.st_size - _PROOF_BYTES) != segment.proof:
        return "the proof at its end is not the one that the server sent"
    return None
