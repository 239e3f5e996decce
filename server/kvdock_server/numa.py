"""The sockets of this host, as far as this process may use them.

A host with several processors has several NUMA nodes: memory that is near to some processors and
GPUs, and further away from the others. A processor may itself be cut into nodes, which differ
little. So nodes whose distance is less than that of another processor count as one here, a socket.

What Linux tells is read below a root folder (sysfs, and what this process's cpuset allows), so
that tests can give other hosts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_OTHER_PROCESSOR: Final = 20
"""The distance that Linux, and firmware by custom, gives to memory of another processor."""


@dataclass(frozen=True, slots=True)
class Socket:
    """NUMA nodes that are near each other.

    ``nodes`` are those whose memory this process may use, and ``nbytes`` is their memory. ``cpus``
    are the processors that it may run on.
    """

    nodes: tuple[int, ...]
    cpus: frozenset[int]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Topology:
    """A host's sockets. Those without memory for this process are left out.

    None at all if there is only one node to use. ``nearest`` has the index of the socket that is
    nearest to a node, for every node of the host.
    """

    sockets: tuple[Socket, ...] = ()
    nearest: Mapping[int, int] = field(default_factory=dict)
    root: Path = Path("/")

    def socket_of_device(self, pci_id: str) -> int | None:
        """Index of the socket that is nearest to a PCI device. None if Linux does not know."""
        file = self.root / "sys/bus/pci/devices" / pci_id.lower() / "numa_node"
        try:
            return self.nearest.get(int(file.read_text()))
        except (OSError, ValueError):
            return None

    def evened(self) -> Topology:
        """All nodes as one socket: nothing is near or far, and memory is spread evenly."""
        if not self.sockets:
            return self
        nodes = sorted(node for socket in self.sockets for node in socket.nodes)
        cpus = frozenset(cpu for socket in self.sockets for cpu in socket.cpus)
        whole = Socket(tuple(nodes), cpus, sum(socket.nbytes for socket in self.sockets))
        return Topology((whole,), dict.fromkeys(self.nearest, 0), self.root)

    @contextmanager
    def running_on(self, socket: int | None) -> Iterator[None]:
        """Until the block ends, this thread runs on the socket's processors.

        So do the threads that it starts meanwhile, for as long as they live.
        """
        cpus = os.sched_getaffinity(0)
        if socket is not None:
            run_on(self.sockets[socket].cpus)
        try:
            yield
        finally:
            run_on(cpus)


def run_on(cpus: frozenset[int] | set[int]) -> None:
    """This thread runs on these processors from now on, if it may. It is only slower elsewhere."""
    if cpus and cpus != os.sched_getaffinity(0):
        # Refused if the cpuset has changed, or by a seccomp profile.
        with suppress(OSError):
            os.sched_setaffinity(0, cpus)


def read_topology(root: Path = Path("/")) -> Topology:
    """What Linux tells of this host. No sockets if it has one node, or Linux knows of none.

    Only nodes with processors count. Others are slow memory, or a GPU's own.
    """
    folder = root / "sys/devices/system/node"
    try:
        online = _numbers((folder / "online").read_text())
        of = {node: folder / f"node{node}" for node in online}
        cpus = {node: _numbers((of[node] / "cpulist").read_text()) for node in online}
        nbytes = {node: _memory(of[node]) for node in online}
        distances = {
            node: dict(
                zip(online, map(int, (of[node] / "distance").read_text().split()), strict=True)
            )
            for node in online
        }
        mems_allowed, cpus_allowed = _allowed(root)
        usable = [n for n in online if n in mems_allowed and nbytes[n] and cpus[n]]
        groups: list[list[int]] = []
        for node in usable:
            near = (g for g in groups if distances[g[0]][node] < _OTHER_PROCESSOR)
            group = next(near, None)
            if group is None:
                groups.append([node])
            else:
                group.append(node)
        nearest = {
            node: min(
                range(len(groups)), key=lambda index: min(distances[node][n] for n in groups[index])
            )
            for node in online
            if groups
        }
    except (OSError, ValueError, LookupError):
        return Topology()
    if len(usable) < 2:
        return Topology()
    sockets = tuple(
        Socket(
            tuple(group),
            frozenset(cpu for node in group for cpu in cpus[node] if cpu in cpus_allowed),
            sum(nbytes[node] for node in group),
        )
        for group in groups
    )
    return Topology(sockets, nearest, root)


def _numbers(text: str) -> list[int]:
    """The numbers of a list as Linux prints it: ``0-3,8``."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return [n for first, _, last in ranges for n in range(int(first), int(last or first) + 1)]


def _memory(node: Path) -> int:
    """Bytes of a node's memory."""
    lines = (node / "meminfo").read_text().splitlines()
    return int(next((line.split()[3] for line in lines if "MemTotal" in line), "")) * 1024


def _allowed(root: Path) -> tuple[set[int], set[int]]:
    """The nodes and the processors that this process may use."""
    lines = (root / "proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return set(_numbers(fields["Mems_allowed_list"])), set(_numbers(fields["Cpus_allowed_list"]))
