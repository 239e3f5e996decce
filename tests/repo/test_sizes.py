"""Product files stay short enough to be read at once."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("client/kvdock", "server/kvdock_server", "vllm_plugin/kvdock_vllm")
GENERATED = REPOSITORY / "client/kvdock/v1"

MOST_LINES = 500


@pytest.mark.parametrize("package", PACKAGES)
def test_no_product_file_is_longer_than_its_limit(package: str) -> None:
    files = [
        path
        for path in sorted((REPOSITORY / package).rglob("*.py"))
        if not path.is_relative_to(GENERATED)
    ]
    assert files, f"{package} has no modules"
    lines = {
        str(path.relative_to(REPOSITORY)): len(path.read_text().splitlines()) for path in files
    }
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}
