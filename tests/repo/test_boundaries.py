"""Dependencies point one way: kvdock_vllm -> kvdock -> proto <- kvdock_server.

The connector also uses the server's transfers, to copy GPU memory in shared mode.
"""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

FORBIDDEN = {
    "client/kvdock": {"kvdock_server", "kvdock_vllm", "torch", "vllm", "cupy"},
    "server/kvdock_server": {"kvdock_vllm", "torch", "vllm"},
    "vllm_plugin/kvdock_vllm": {"kvdock_server"},
}
ALLOWED_IN = {
    "vllm_plugin/kvdock_vllm/engine/device": ("kvdock_server.transfer",),
}

# printable: server, command and connector show names alike. It imports nothing of the client.
SERVER_MAY_USE = ("kvdock.v1", "kvdock.address", "kvdock.errors", "kvdock.printable")
PURE = ("server/kvdock_server/index",)

TRANSFER = "server/kvdock_server/transfer"
KNOWN_TO_TRANSFER = {
    "plans": ("plans",),
    "devices": ("plans", "devices"),
    "fan_out": ("plans", "devices", "fan_out"),
}
"""The folders of transfer/, and those that each of them may import."""
ENGINE = "vllm_plugin/kvdock_vllm/engine"
WITH_TORCH = ("device", "tensor_regions.py")
"""What in engine/ may import torch: blocks on GPUs are torch's memory, with its streams, events and
kernels, and the layout of any block is read off a tensor's strides."""

FOR_PURE_NUMBERS = {
    "__future__", "bisect", "collections", "dataclasses", "functools", "itertools", "math",
    "numpy", "typing",
}  # fmt: skip


def imports(path: Path) -> Iterator[str]:
    """Full names of all modules that a file imports, at its head or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        match node:
            case ast.Import(names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                yield module
                yield from (f"{module}.{name.name}" for name in names)


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


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
        if name.split(".")[0] in FORBIDDEN[package] and not is_allowed(path, name)
    ]
    assert not wrong


def is_allowed(path: Path, name: str) -> bool:
    return any(
        path.is_relative_to(REPOSITORY / folder) and any(is_in(name, one) for one in packages)
        for folder, packages in ALLOWED_IN.items()
    )


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


@pytest.mark.parametrize("package", ["rpc", "service"])
def test_who_is_above_the_core_knows_no_index(package: str) -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in files(f"server/kvdock_server/{package}")
        for name in imports(path)
        if is_in(name, "kvdock_server.index")
    ]
    assert not wrong


def test_core_does_not_wait_and_knows_nothing_above_it() -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in files("server/kvdock_server/core")
        for name in imports(path)
        if name.split(".")[0] in {"asyncio", "threading", "grpc", "google", "kvdock"}
        or any(is_in(name, f"kvdock_server.{above}") for above in ("rpc", "service", "transfer"))
    ]
    waiting = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno} waits"
        for path in files("server/kvdock_server/core")
        for node in ast.walk(ast.parse(path.read_text(), str(path)))
        if isinstance(node, ast.AsyncFunctionDef | ast.Await)
    ]
    assert not wrong + waiting


def test_service_knows_no_grpc_and_no_proto() -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in files("server/kvdock_server/service")
        for name in imports(path)
        if name.split(".")[0] in {"grpc", "google", "kvdock"} or is_in(name, "kvdock_server.rpc")
    ]
    assert not wrong


def test_transfer_knows_nothing_of_the_rest_of_the_server() -> None:
    wrong = [
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in files(TRANSFER)
        for name in imports(path)
        if name.split(".")[0] in {"grpc", "google", "kvdock"}
        or (is_in(name, "kvdock_server") and not is_in(name, "kvdock_server.transfer"))
    ]
    assert not wrong


def test_the_rest_of_the_server_knows_only_the_face_of_transfer() -> None:
    face = "kvdock_server.transfer"
    modules = {path.stem for path in files(TRANSFER)} | set(KNOWN_TO_TRANSFER)
    wrong = [
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in files("server/kvdock_server")
        if not path.is_relative_to(REPOSITORY / TRANSFER)
        for name in imports(path)
        if is_in(name, face) and set(name.removeprefix(face).split(".")) & modules
    ]
    assert not wrong


@pytest.mark.parametrize("folder", KNOWN_TO_TRANSFER)
def test_folders_of_transfer_import_only_those_before_them(folder: str) -> None:
    known = [f"kvdock_server.transfer.{other}" for other in KNOWN_TO_TRANSFER[folder]]
    wrong = [
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in files(f"{TRANSFER}/{folder}")
        for name in imports(path)
        if is_in(name, "kvdock_server") and not any(is_in(name, other) for other in known)
    ]
    assert not wrong


def test_plans_of_transfer_are_pure() -> None:
    """No I/O, no CUDA, no threads: they import nothing with which any of it could be done."""
    wrong = [
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in files(f"{TRANSFER}/plans")
        for name in imports(path)
        if name.split(".")[0] not in FOR_PURE_NUMBERS | {"kvdock_server"}
    ]
    calls = [
        f"{path.relative_to(REPOSITORY)}:{node.lineno} calls {node.func.id}"
        for path in files(f"{TRANSFER}/plans")
        for node in ast.walk(ast.parse(path.read_text(), str(path)))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"open", "print", "input", "__import__", "eval", "exec"}
    ]
    assert not wrong + calls


def test_the_connectors_neutral_part_knows_no_vllm() -> None:
    """Nor, beside what is listed, torch; and nothing of the connector that might know either."""
    wrong = [
        f"{path.relative_to(REPOSITORY)} imports {name}"
        for path in files(ENGINE)
        for name in imports(path)
        if is_in(name, "vllm")
        or (is_in(name, "kvdock_vllm") and not is_in(name, "kvdock_vllm.engine"))
        or (
            is_in(name, "torch")
            and path.relative_to(REPOSITORY / ENGINE).parts[0] not in WITH_TORCH
        )
        or (
            is_in(name, "kvdock_vllm.engine.device")
            and path.relative_to(REPOSITORY / ENGINE).parts[0] != "device"
        )
    ]
    assert not wrong


def test_slots_of_the_pool_are_pure() -> None:
    slots = REPOSITORY / "server/kvdock_server/tiers/host/slots.py"
    assert {name.split(".")[0] for name in imports(slots)} <= FOR_PURE_NUMBERS


@pytest.mark.parametrize("package", FORBIDDEN)
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    root = (REPOSITORY / package).parent
    modules = {
        ".".join(path.relative_to(root).with_suffix("").parts): path for path in files(package)
    }
    graph = {
        module: {name for name in imports(path) if name in modules and name != module}
        for module, path in modules.items()
    }
    graphlib.TopologicalSorter(graph).prepare()
