"""The examples that a reader meets first do what they say, as they are written."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import kvdock

README = Path(__file__).parents[2] / "README.md"

# What the examples in docstrings take for granted.
GIVEN = """
import asyncio, kvdock
token_ids = list(range(512))
keys = kvdock.keys.chunk_keys(token_ids, 256)
namespace = kvdock.Namespace("my-namespace", 256, 1, (kvdock.Group((1,)),))
with kvdock.Client() as client:
    client.register_namespace(namespace)
    client.put("my-namespace", keys, [b"."] * 2)
"""


def example_in(docstring: str | None) -> str:
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    (example,) = [part for part in paragraphs if part.startswith("    ")]
    return textwrap.dedent(example)


@pytest.fixture
def run(server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("KVDOCK_ADDRESS", server.address)

    def program(text: str) -> str:
        done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return program


def test_the_readme(run: Any) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)

    assert run(example) == "2 of 3 chunks are cached\n"


def test_the_package(run: Any) -> None:
    assert run(f"{GIVEN}\n{example_in(kvdock.__doc__)}\nprint(hit.chunks)") == "2\n"


def test_the_asyncio_face(run: Any) -> None:
    body = textwrap.indent(f"{example_in(kvdock.aio.__doc__)}\nprint(hit.chunks)", "    ")

    assert run(f"{GIVEN}\nasync def main():\n{body}\nasyncio.run(main())") == "2\n"
