"""What an engine of a benchmark is connected with: KVDock and its server, vLLM's own offloading, or
a peer with its server. And a run of such an engine in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serverkit import ServerError, ServerProcess

PEER_SECONDS = 120.0
POLL_SECONDS = 0.3
LOG_LINES = 25
_PEER_PORT, _PEER_HTTP_PORT = 50_055, 9_091
_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false"}


@dataclass(frozen=True)
class Connection:
    """How an engine reaches its cache."""

    transfer_config: dict[str, Any] | None
    """vLLM's KVTransferConfig; None without connector."""
    server: ServerProcess | None = None
    """KVDock's."""

    def pinned_by(self, on_cpu: bool = False) -> str:
        """Who pins the pool for CUDA: "worker", "nobody", or the server's address."""
        if self.server is None or self.transfer_config is None or on_cpu:
            return "nobody"
        shared = "kvdock.transfer_mode" in self.transfer_config["kv_connector_extra_config"]
        return "worker" if shared else self.server.address


def installed(kind: str) -> bool:
    """Whether a peer can be run here; True for what comes with vLLM and KVDock."""
    if kind == "lmcache":
        return importlib.util.find_spec("lmcache") is not None
    if kind == "pegaflow":
        found = importlib.util.find_spec("pegaflow") is not None
        return found and shutil.which("pegaflow-server") is not None
    return True


@contextmanager
def connected(
    kind: str, folder: Path, gib: int, chunk_tokens: int | None = None
) -> Iterator[Connection]:
    """Starts what a kind of engine needs, and stops it again.

    Args:
        kind: "plain", "native", "lmcache", "pegaflow", "kvdock" or "kvdock-shared"; "kvdock"
            leaves the mode to the server. What follows a colon is not looked at.
        folder: takes logs and sockets.
        gib: host memory for the cache.
        chunk_tokens: of KVDock's server; None leaves it to the server.
    """
    kind = kind.split(":")[0]
    if kind == "plain":
        yield Connection(None)
    elif kind == "native":
        yield Connection(_config("OffloadingConnector", {"cpu_bytes_to_use": gib << 30}))
    elif kind == "lmcache":
        with _peer(folder / "lmcache.log", _lmcache_command(gib), "/healthcheck"):
            extra = {"lmcache.mp.port": _PEER_PORT, "lmcache.mp.host": "tcp://127.0.0.1"}
            yield Connection(_config("LMCacheMPConnector", extra))
    elif kind == "pegaflow":
        with _peer(folder / "pegaflow.log", _pegaflow_command(gib), "/health"):
            yield Connection(_config("PegaKVConnector", {}, "pegaflow.connector"))
    else:
        options = {} if chunk_tokens is None else {"chunk_tokens": chunk_tokens}
        with ServerProcess(folder, memory=f"{gib}GiB", timeout_s=60, **options) as server:
            own = {"kvdock.address": server.address}
            if kind == "kvdock-shared":
                own["kvdock.transfer_mode"] = "shared"
            yield Connection(_config("KVDockConnector", own, "kvdock_vllm.connector"), server)


def _config(name: str, extra: Mapping[str, Any], module: str | None = None) -> dict[str, Any]:
    config = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": dict(extra)}
    return config if module is None else {**config, "kv_connector_module_path": module}


def _lmcache_command(gib: int) -> list[str]:
    """Its multi-process server, with the settings that measured best."""
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1"]
    command += ["--port", str(_PEER_PORT), "--http-port", str(_PEER_HTTP_PORT)]
    command += ["--l1-size-gb", str(gib), "--eviction-policy", "LRU", "--chunk-size", "256"]
    return [*command, "--no-l1-use-lazy", "--max-cpu-workers", "4", "--max-gpu-workers", "1"]


def _pegaflow_command(gib: int) -> list[str]:
    command = ["pegaflow-server", "--addr", f"127.0.0.1:{_PEER_PORT}", "--pool-size", f"{gib}gb"]
    return [*command, "--http-addr", f"127.0.0.1:{_PEER_HTTP_PORT}"]


@contextmanager
def _peer(log: Path, command: Sequence[str], health: str) -> Iterator[None]:
    """A peer's server. Raises ServerError if it is not healthy within PEER_SECONDS."""
    with log.open("wb") as output:
        environment = {**os.environ, **_ENVIRONMENT}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    try:
        deadline = time.monotonic() + PEER_SECONDS
        while not _answers(f"http://127.0.0.1:{_PEER_HTTP_PORT}{health}"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServerError(f"{command[0]} does not serve; its log:\n{_tail(log)}")
            time.sleep(POLL_SECONDS)
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except (urllib.error.URLError, OSError):
        return False


def run_child(
    script: Path,
    plan: Mapping[str, Any],
    folder: Path,
    seconds: float,
    environment: Mapping[str, str] | None = None,
) -> tuple[dict[str, Any], str]:
    """Run ``script PLAN.json RESULT.json``.

    Returns what it measured before it ended, and why it failed, if it did. Its output is in the
    folder's engine.log.
    """
    plan_file, found, log = (folder / name for name in ("plan.json", "result.json", "engine.log"))
    plan_file.write_text(json.dumps(plan))
    failure = ""
    with log.open("wb") as output:
        try:
            status = subprocess.run(
                [sys.executable, str(script), str(plan_file), str(found)],
                env={**os.environ, **_ENVIRONMENT, **(environment or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            ).returncode
            if status:
                failure = f"status {status}"
        except subprocess.TimeoutExpired:
            failure = f"not done after {seconds:.0f} s"
    result: dict[str, Any] = json.loads(found.read_text()) if found.exists() else {}
    return result, f"{failure}\n{_tail(log)}" if failure else ""


def keep_log(name: str, log: Path, server: ServerProcess | None) -> None:
    """Keep the logs in the folder named by the environment variable BENCH_LOGS, if there is one."""
    folder = os.environ.get("BENCH_LOGS")
    if folder:
        name = name.replace(":", "-")
        (Path(folder) / f"{name}.log").write_text(log.read_text(errors="replace")[-2_000_000:])
        if server is not None:
            (Path(folder) / f"{name}-server.log").write_text(server.log_text)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:])
