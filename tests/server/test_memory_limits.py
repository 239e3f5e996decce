"""What is left for a pool by the memory limits of cgroups, of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdock_server.tiers.host import memory_limits
from kvdock_server.tiers.host.memory_limits import PoolError, check_memory_limits, left_by_cgroups

GIB = 1 << 30


class Host:
    """Made-up folders of cgroups, and what a process is told of its own."""

    def __init__(self, folder: Path) -> None:
        self.own = folder / "own"
        self.root = folder / "cgroups"

    def limit(self, folder: str, limit: str, usage: int = 0, cache: int = 0) -> Path:
        return self._write(
            folder,
            {"memory.max": limit, "memory.current": str(usage)},
            f"anon 5\nfile 77\ninactive_file {cache}\nslab_reclaimable 0",
        )

    def limit_v1(self, folder: str, limit: int, usage: int = 0, cache: int = 0) -> Path:
        return self._write(
            "memory/" + folder,
            {"memory.limit_in_bytes": str(limit), "memory.usage_in_bytes": str(usage)},
            f"cache 77\ntotal_inactive_file {cache}",
        )

    def left(self, *own: str) -> dict[Path, int]:
        self.own.write_text("".join(f"{line}\n" for line in own))
        return dict(left_by_cgroups(self.own, self.root))

    def _write(self, folder: str, files: dict[str, str], stat: str) -> Path:
        path = self.root / folder
        path.mkdir(parents=True, exist_ok=True)
        for name, text in (files | {"memory.stat": stat}).items():
            (path / name).write_text(text + "\n")
        return path


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_each_cgroup_around_the_process_counts(host: Host) -> None:
    unit = host.limit("system.slice/kvdock.service", str(8 * GIB), usage=3 * GIB, cache=GIB)
    around = host.limit("system.slice", str(9 * GIB), usage=8 * GIB)
    host.limit("", "max")
    host.limit("system.slice/another.service", str(GIB))
    assert host.left("0::/system.slice/kvdock.service") == {unit: 6 * GIB, around: GIB}


def test_a_container_that_is_told_the_hosts_path_finds_its_limit_at_the_root(host: Host) -> None:
    root = host.limit("", str(4 * GIB), usage=GIB)
    assert host.left("0::/kubepods/pod7/abc") == {root: 3 * GIB}
    assert host.left("0::/") == {root: 3 * GIB}


def test_version_1_beside_other_controllers(host: Host) -> None:
    mine = host.limit_v1("docker/abc", 4 * GIB, usage=2 * GIB, cache=GIB)
    host.limit_v1("docker", 1 << 62)
    left = host.left("5:cpu,cpuacct:/docker/abc", "4:memory:/docker/abc", "0::/")
    assert left[mine] == 3 * GIB
    assert min(left.values()) == 3 * GIB


def test_no_limit(host: Host) -> None:
    assert host.left("0::/") == {}
    assert host.left() == {}


def test_a_pool_beyond_the_limit_is_refused_with_the_numbers(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = host.limit("pod", str(3 << 20), usage=1 << 20)
    host.left("0::/pod")
    monkeypatch.setattr(memory_limits, "_OWN_CGROUPS", host.own)
    monkeypatch.setattr(memory_limits, "_CGROUPS", host.root)
    check_memory_limits(2 << 20)
    with pytest.raises(PoolError) as caught:
        check_memory_limits((2 << 20) + 1)
    for said in (str(folder), "--memory 2097153", "leaves 2097152 bytes", "container"):
        assert said in str(caught.value)
