"""Dependencies point one way: kvdock_vllm -> kvdock -> proto <- kvdock_server."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

FORBIDDEN = {
    "client/kvdock": {"kvdock_server", "kvdock_vllm", "torch", "vllm", "cupy"},
    "server/kvdock_server": {"kvdock_vllm", "torch", "vllm"},
    "vllm_plugin/kvdock_vllm": {"kvdock_server"},
}

# printable: server, command and connector show names alike. It imports nothing of the client.
SERVER_MAY_USE = ("kvdock.v1", "kvdock.address", "kvdock.errors", "kvdock.printable")
PURE = ("server/kvdock_server/index",)


def imports(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, at its head or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        match node:
            case ast.Import(names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                yield module
                yield from (f"{module}.{name.name}" for name in names)


def files(package: str) -> list[Path]:
    found = sorted((REPOSITORY / package).rglob("*.py"))
    assert found, f"{package} has no modules"
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_package_imports_nothing_beyond_its_boundary(package: str) -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in files(package)
        for name in imports(path)
        if name.split(".")[0] in FORBIDDEN[package]
    ]
    assert not wrong


def test_server_uses_of_the_client_only_what_is_listed() -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in files("server/kvdock_server")
        for name in imports(path)
        if name.split(".")[0] == "kvdock"
        and name != "kvdock"
        and not any(name == allowed or name.startswith(allowed + ".") for allowed in SERVER_MAY_USE)
    ]
    assert not wrong


@pytest.mark.parametrize("package", PURE)
def test_pure_packages_know_no_grpc_and_no_proto(package: str) -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in files(package)
        for name in imports(path)
        if name.split(".")[0] in {"grpc", "google", "asyncio", "kvdock"}
    ]
    assert not wrong
