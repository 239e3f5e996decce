"""How much memory a pool may take: of /dev/shm, of the host, and of this process's cgroups.

The server checks these limits at its start. The kernel would kill a server that went beyond one
later.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SHM = Path("/dev/shm")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


class PoolError(Exception):
    """The pool cannot be made as large as asked for. The message has the numbers and what to do."""


def check_memory_limits(nbytes: int) -> None:
    """PoolError if a pool of ``nbytes`` is beyond one of the limits."""
    stats = os.statvfs(SHM)
    free = stats.f_bavail * stats.f_frsize
    if nbytes > free:
        raise PoolError(
            f"--memory {nbytes} bytes, but {SHM} has {free} bytes free: start with less --memory, "
            f"or enlarge {SHM} (in a container: --shm-size)"
        )
    available = _available_on_host()
    if nbytes > available:
        raise PoolError(
            f"--memory {nbytes} bytes, but this host has {available} bytes available: start with "
            "less --memory"
        )
    for folder, left in left_by_cgroups(_OWN_CGROUPS, _CGROUPS):
        if nbytes > left:
            raise PoolError(
                f"--memory {nbytes} bytes, but the memory limit of the cgroup {folder} leaves "
                f"{left} bytes: start with less --memory, or raise the limit of the server's "
                "container, pod or systemd unit (MemoryMax)"
            )


def _available_on_host() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, value = line.split(":", 1)
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    raise PoolError("/proc/meminfo has no MemAvailable: this kernel is not supported")


class _Files(NamedTuple):
    """Names of files in a cgroup's folder, for one version of cgroups. Their numbers are bytes."""

    limit: str
    usage: str
    reclaimable: tuple[str, ...]
    """Keys of memory.stat, for memory that the kernel takes back before it refuses more."""


_V1 = _Files(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_V2 = _Files("memory.max", "memory.current", ("active_file", "inactive_file", "slab_reclaimable"))


def left_by_cgroups(own: Path, root: Path) -> Iterator[tuple[Path, int]]:
    """Each cgroup around this process that limits memory, and how many bytes its limit leaves.

    ``own`` is /proc/self/cgroup, and ``root`` is where cgroups are mounted (cgroups(7)). In a
    container ``own`` may name the host's paths, which do not exist there. The container's own
    limits are at the root then.
    """
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files, mounted = _V2, root
        elif "memory" in controllers.split(","):
            files, mounted = _V1, root / "memory"
        else:
            continue
        inside = mounted / path.lstrip("/")
        for folder in (inside, *inside.parents):
            if not folder.is_relative_to(mounted):
                break
            left = _left(folder, files)
            if left is not None:
                yield folder, left


def _left(folder: Path, files: _Files) -> int | None:
    """Bytes that the cgroup's limit leaves; None if it has no limit, or does not exist."""
    try:
        limit = (folder / files.limit).read_text().strip()
        if limit == "max":
            return None
        usage = int((folder / files.usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return None
    return int(limit) - usage + sum(int(stat.get(key, 0)) for key in files.reclaimable)
