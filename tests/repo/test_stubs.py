"""The committed stubs: fresh, and usable with the oldest and the newest libraries promised."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
STUBS = REPOSITORY / "client" / "kvdock" / "v1"
PROTO_ENV = REPOSITORY / ".cache" / "proto-env"

IMPORT_ALL = """
import importlib, sys, types
import google.protobuf, grpc
# Not kvdock/__init__.py, which needs all of our dependencies.
package = types.ModuleType("kvdock")
package.__path__ = [sys.argv[1] + "/kvdock"]
sys.modules["kvdock"] = package
for name in ("admin", "cache", "events", "session", "types"):
    importlib.import_module(f"kvdock.v1.{name}_pb2")
    importlib.import_module(f"kvdock.v1.{name}_pb2_grpc")
print(grpc.__version__, google.protobuf.__version__)
"""


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3])


@pytest.fixture(scope="module")
def proto_python() -> Path:
    """The interpreter that has the generators, and the oldest gRPC and protobuf promised."""
    python = PROTO_ENV / "bin" / "python"
    assert python.exists(), f"{python} is missing: run `make setup`"
    return python


def test_stubs_are_what_the_protocol_generates(proto_python: Path, tmp_path: Path) -> None:
    buf = Path(sys.executable).with_name("buf")
    subprocess.run(
        [buf, "generate", "--output", tmp_path],
        cwd=REPOSITORY,
        env={**os.environ, "PATH": f"{proto_python.parent}:{os.environ['PATH']}"},
        check=True,
    )
    fresh = {path.name: path.read_text() for path in (tmp_path / "client/kvdock/v1").iterdir()}
    committed = {path.name: path.read_text() for path in STUBS.glob("*_pb2*.py*") if path.is_file()}
    assert fresh.keys() == committed.keys(), "run `make proto` and commit client/kvdock/v1"
    stale = sorted(name for name in fresh if fresh[name] != committed[name])
    assert not stale, "run `make proto` and commit client/kvdock/v1"


def test_a_distributions_compiler_takes_the_protocol(tmp_path: Path) -> None:
    """Debian's protoc (3.21) refuses a file with an option that came later."""
    protos = sorted((REPOSITORY / "proto" / "kvdock" / "v1").glob("*.proto"))
    assert protos
    assert not [path for path in protos if "[debug_redact" in path.read_text()]
    if compiler := shutil.which("protoc"):
        command = [compiler, "-I", REPOSITORY / "proto", f"--python_out={tmp_path}", *protos]
        subprocess.run(command, check=True)


def test_stubs_are_no_newer_than_what_they_must_import_with() -> None:
    for path in STUBS.glob("*_pb2.py"):
        match = re.search(r"^# Protobuf Python Version: ([\d.]+)$", path.read_text(), re.MULTILINE)
        assert match is not None, path
        assert version(match[1]) <= (6, 31, 1), path
    for path in STUBS.glob("*_pb2_grpc.py"):
        match = re.search(r"^GRPC_GENERATED_VERSION = '([\d.]+)'$", path.read_text(), re.MULTILINE)
        assert match is not None, path
        assert version(match[1]) <= (1, 78, 0), path


def import_all(python: Path) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Imports all stubs, warnings being errors; returns the versions of gRPC and protobuf."""
    done = subprocess.run(
        [python, "-W", "error", "-c", IMPORT_ALL, STUBS.parents[1]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    grpc_version, protobuf_version = done.stdout.split()
    return version(grpc_version), version(protobuf_version)


def test_stubs_import_with_the_oldest_libraries(proto_python: Path) -> None:
    grpc_version, protobuf_version = import_all(proto_python)
    assert grpc_version == (1, 78, 0)
    assert protobuf_version[:2] == (6, 33)


def test_stubs_import_with_the_newest_libraries() -> None:
    grpc_version, protobuf_version = import_all(Path(sys.executable))
    assert grpc_version >= (1, 85)
    assert protobuf_version >= (7, 36)
