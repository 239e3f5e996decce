"""Product files, and the whole clients of the examples, stay short enough to be read at once."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("client/kvdock", "server/kvdock_server", "vllm_plugin/kvdock_vllm")
GENERATED = REPOSITORY / "client/kvdock/v1"

# What a reader would copy: without the checks, and without the example that routes.
CLIENTS = {"cpp": "*.h", "go": "kvdock/*.go", "ts": "src/*.ts"}

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


def test_every_example_has_its_client_here() -> None:
    examples = {run.parent.name for run in (REPOSITORY / "examples").glob("*/run.sh")}
    assert examples == CLIENTS.keys()


@pytest.mark.parametrize("language", CLIENTS)
def test_no_client_of_the_examples_is_longer_than_its_limit(language: str) -> None:
    files = sorted((REPOSITORY / "examples" / language).glob(CLIENTS[language]))
    assert files, f"examples/{language} has no {CLIENTS[language]}"
    lines = {path.name: len(path.read_text().splitlines()) for path in files}
    assert sum(lines.values()) < MOST_LINES, lines
