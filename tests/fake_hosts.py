"""What Linux tells of hosts with several NUMA nodes, as files below a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MIB = 1 << 20
NEAR, FAR = 12, 32
"""Distances within a processor and between two."""


@dataclass
class FakeHost:
    """``nodes`` has the processors and the MiB of each node; ``gpus`` the node of each GPU.

    Nodes in one of the ``processors`` are near each other; others are far. Empty ``mems`` and
    ``cpus``: this process may use all.
    """

    nodes: Mapping[int, tuple[str, int]]
    processors: Sequence[set[int]] = ()
    gpus: Mapping[str, int] = field(default_factory=dict)
    mems: str = ""
    cpus: str = ""

    def write(self, root: Path) -> Path:
        """Makes the files; the root."""
        online = ",".join(map(str, self.nodes))
        folder = root / "sys/devices/system/node"
        for node, (cpus, mib) in self.nodes.items():
            of = folder / f"node{node}"
            of.mkdir(parents=True)
            (of / "cpulist").write_text(f"{cpus}\n")
            (of / "meminfo").write_text(
                f"Node {node} MemTotal:       {mib * 1024} kB\nNode {node} MemFree: 7 kB\n"
            )
            distances = [self._distance(node, other) for other in self.nodes]
            (of / "distance").write_text(" ".join(map(str, distances)) + "\n")
        (folder / "online").write_text(f"{online}\n")
        for address, node in self.gpus.items():
            for bus in ("devices", "drivers/nvidia"):
                device = root / "sys/bus/pci" / bus / address
                device.mkdir(parents=True)
                (device / "numa_node").write_text(f"{node}\n")
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/status").write_text(
            f"Name:\tpython\nCpus_allowed_list:\t{self.cpus or '0-1023'}\n"
            f"Mems_allowed:\tff\nMems_allowed_list:\t{self.mems or '0-1023'}\n"
        )
        return root

    def _distance(self, node: int, other: int) -> int:
        if node == other:
            return 10
        is_near = any({node, other} <= processor for processor in self.processors)
        return NEAR if is_near else FAR + abs(node - other)


TWO = FakeHost(
    {0: ("0-1,4-5", 4096), 1: ("2-3,6-7", 4096)},
    gpus={"0000:19:00.0": 0, "0001:9a:00.0": 1, "0000:1b:00.0": -1},
)
FOUR = FakeHost(
    {0: ("0", 1024), 1: ("1", 1024), 2: ("2", 1024), 3: ("3", 1024)},
    processors=({0, 1}, {2, 3}),
    gpus={"0000:19:00.0": 3},
)
