"""Which part of the pool lies on which socket (see numa.py), and where its pages really are.

The pool is cut into shares, one a socket, in proportion to the sockets' memory. The kernel is told
(mbind) before a share is faulted in, and the threads that fault it in run on the socket's
processors, whose own memory they get by default. So where mbind is refused, as by the seccomp
profile of many containers, memory mostly lies as planned, too.

Nodes are preferred, not demanded: where a node has no free memory, the kernel takes another's.
Demanded memory would make it kill processes. So a few pages of all that was faulted in are looked
up, and what counts is where they are.

A socket of several nodes, or all sockets as one, gets its memory from its nodes in turn.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from kvdock_server.numa import Topology, read_topology

logger = logging.getLogger(__name__)

# From <linux/mempolicy.h>.
_MPOL_DEFAULT: Final = 0
_MPOL_PREFERRED: Final = 1
_MPOL_INTERLEAVE: Final = 3

# Numbers of the system calls, which libc has no functions for.
_CALLS: Final = {
    "x86_64": {"mbind": 237, "get_mempolicy": 239, "move_pages": 279},
    "aarch64": {"mbind": 235, "get_mempolicy": 236, "move_pages": 239},
}
_MASK_BITS: Final = 64

_SAMPLES: Final = 16
"""How many pages of a range are looked up."""
_MOST_ASTRAY: Final = 0.1
"""If a larger share of the pool lies elsewhere than planned, this is logged."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class Share(NamedTuple):
    """A range of the pool that is to lie on one socket, and the processors there."""

    offset: int
    nbytes: int
    socket: int = 0
    cpus: frozenset[int] = frozenset()


def wanted_topology(mode: str, root: Path = Path("/")) -> Topology:
    """The sockets to place the pool on, for the setting ``numa``.

    A policy that this process was started with (numactl) stays as it is.
    """
    topology = read_topology(root)
    if not topology.sockets:
        return topology
    if _own_policy() != _MPOL_DEFAULT:
        logger.info("the pool lies where this process's memory policy says (numactl)")
        return Topology()
    return topology.evened() if mode == "off" else topology


def cut(nbytes: int, unit: int, topology: Topology) -> list[Share]:
    """The shares of a pool, each a multiple of ``unit``. One share if there are no sockets."""
    total = sum(socket.nbytes for socket in topology.sockets)
    shares = []
    before = start = 0
    for index, socket in enumerate(topology.sockets):
        before += socket.nbytes
        end = round(nbytes // unit * before / total) * unit
        if end > start:
            shares.append(Share(start, end - start, index, socket.cpus))
        start = end
    return shares or [Share(0, nbytes)]


class Placement:
    """Where a pool lies that is mapped at ``address``, and has slabs of ``unit`` bytes.

    ``refused`` is empty unless the kernel refused to be told.
    """

    def __init__(self, topology: Topology, address: int, nbytes: int, unit: int) -> None:
        """Nothing of the pool may be faulted in yet."""
        self.topology = topology
        self.shares = cut(nbytes, unit, topology)
        self.refused = ""
        self._address = address
        if topology.sockets:
            self._bind()

    def found(self, offset: int, nbytes: int) -> int:
        """On which socket a range lies that was faulted in. Any thread.

        As planned, where the kernel does not tell.
        """
        planned = next(s.socket for s in self.shares if s.offset <= offset < s.offset + s.nbytes)
        if len(self.shares) == 1:
            return planned
        nodes = nodes_of(self._address + offset, nbytes)
        sockets = Counter(self.topology.nearest.get(node, planned) for node in nodes)
        return sockets.most_common(1)[0][0] if sockets else planned

    def check(self, found: Sequence[int]) -> None:
        """Log if the pool lies elsewhere than planned. ``found`` has each socket's bytes of it."""
        astray = sum(max(share.nbytes - found[share.socket], 0) for share in self.shares)
        if astray > _MOST_ASTRAY * sum(found):
            logger.warning(
                "%.1f of the pool's %.1f GiB lie on another socket than planned, so copies may be "
                "slower. A socket had too little free memory: less --memory, or an emptied page "
                "cache (/proc/sys/vm/drop_caches) before the start%s",
                astray / 2**30,
                sum(found) / 2**30,
                f"; {self.refused}" if self.refused else "",
            )

    def _bind(self) -> None:
        for share in self.shares:
            nodes = self.topology.sockets[share.socket].nodes
            try:
                bind(self._address + share.offset, share.nbytes, nodes)
            except OSError as error:
                self.refused = (
                    f"mbind to nodes {list(nodes)} was refused ({error.strerror}): in a container "
                    "allow it with the capability SYS_NICE"
                )
                logger.warning("%s; memory lies where threads touch it first", self.refused)
                return
        logger.info(
            "the pool lies %s",
            "; ".join(
                f"on nodes {list(self.topology.sockets[share.socket].nodes)} with "
                f"{share.nbytes / 2**30:.2f} GiB"
                for share in self.shares
            ),
        )


def bind(address: int, nbytes: int, nodes: tuple[int, ...]) -> None:
    """Pages that are faulted in from now on lie on the node, or on the nodes in turn. OSError."""
    mask = (ctypes.c_ulong * (max(nodes) // _MASK_BITS + 1))()
    for node in nodes:
        mask[node // _MASK_BITS] |= 1 << node % _MASK_BITS
    policy = _MPOL_PREFERRED if len(nodes) == 1 else _MPOL_INTERLEAVE
    # The kernel takes one bit less than it is told.
    _call("mbind", address, nbytes, policy, ctypes.addressof(mask), len(mask) * _MASK_BITS + 1, 0)


def nodes_of(address: int, nbytes: int) -> list[int]:
    """The nodes of some pages of a range. Without pages that are nowhere; none if not allowed."""
    step = max(nbytes // _SAMPLES // mmap.PAGESIZE, 1) * mmap.PAGESIZE
    addresses = range(address, address + nbytes, step)
    pages = (ctypes.c_void_p * len(addresses))(*addresses)
    nodes = (ctypes.c_int * len(addresses))()
    try:
        _call("move_pages", 0, len(pages), ctypes.addressof(pages), 0, ctypes.addressof(nodes), 0)
    except OSError:
        return []
    return [node for node in nodes if node >= 0]


def _own_policy() -> int:
    """This process's memory policy; the default one if the kernel does not tell."""
    policy = ctypes.c_int(_MPOL_DEFAULT)
    try:
        _call("get_mempolicy", ctypes.addressof(policy), 0, 0, 0, 0)
    except OSError:
        return _MPOL_DEFAULT
    return policy.value


def _call(name: str, *arguments: int) -> None:
    """A system call. OSError if it fails, or its number is not known for this machine."""
    number = _CALLS.get(platform.machine(), {}).get(name)
    if number is None:
        raise OSError(0, f"not known for {platform.machine()}")
    if _libc.syscall(number, *map(ctypes.c_ulong, arguments)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
