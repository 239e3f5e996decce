"""The bounds of bench/engine.py, over figures that are given."""

from __future__ import annotations

from typing import Any

import engine
import pytest

CEILING = 55e9


def results(name: str, loaded_ms: dict[str, float], gpu_ms: float = 10.0) -> dict[str, Any]:
    """What engines measured at one length: all tokens but the last were loaded."""
    tokens = engine.LENGTHS[name] - 1

    def sample(milliseconds: float) -> dict[str, Any]:
        return {"ttft": milliseconds / 1e3, "loaded_tokens": tokens, "local_tokens": 0}

    found: dict[str, Any] = {"plain": {"samples": {name: {"cold": [sample(9_000)]}}}}
    for kind, warm in loaded_ms.items():
        samples = {"cold": [sample(9_000)], "gpu": [sample(gpu_ms)], "warm": [sample(warm)]}
        found[kind] = {"samples": {name: samples}}
    return found


def missed(name: str, **loaded_ms: float) -> list[str]:
    found = results(name, {kind.replace("_", "-"): ms for kind, ms in loaded_ms.items()})
    rows = engine.first_token_rows(name, found, CEILING)
    return [row.what.partition(": ")[2] for row in rows if not row.holds]


@pytest.mark.parametrize(("name", "native"), [("1k", 1.0), ("4k", 0.85), ("10k", 0.85)])
def test_kvdock_beside_native(name: str, native: float) -> None:
    assert not missed(name, kvdock=20 * native * 0.99, native=20)
    assert missed(name, kvdock=20 * native * 1.01, native=20) == ["KVDock: over native"]
    assert not missed(name, kvdock_shared=20 * native * 1.01, native=20), "it has another bound"


@pytest.mark.parametrize(("name", "over"), [("10k", 1.3), ("32k", 1.1)])
def test_a_load_beside_its_bytes(name: str, over: float) -> None:
    own = (engine.LENGTHS[name] - 1) * engine.KV_BYTES_PER_TOKEN / CEILING * 1e3
    assert not missed(name, kvdock=10 + own * over * 0.99)
    (what,) = missed(name, kvdock=10 + own * over * 1.01)
    assert "tokens loaded" in what


def test_shared_mode_beside_server_mode() -> None:
    assert not missed("4k", kvdock=20, kvdock_shared=21.9)
    assert missed("4k", kvdock=20, kvdock_shared=22.1) == ["KVDock, shared mode: over server mode"]
