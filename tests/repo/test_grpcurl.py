"""docs/grpcurl.md: every command in it is run against a real server, every answer compared."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "grpcurl.md"

ANYTHING = "…"
END_OF_ANSWER = "-- end of answer --"


@dataclass(frozen=True)
class Step:
    """A command of the page and the answer that the page shows for it."""

    command: str
    kind: str
    answer: str


def steps() -> list[Step]:
    blocks = re.findall(r"^```(bash|json|text)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    found = []
    for place, (kind, content) in enumerate(blocks):
        if kind == "bash":
            following, answer = blocks[place + 1] if place + 1 < len(blocks) else ("bash", "")
            found.append(Step(content, "none" if following == "bash" else following, answer))
    return found


def messages(text: str) -> list[Any]:
    """The JSON messages that stand one after the other in a text."""
    decoder, found = json.JSONDecoder(), []
    while text := text.strip():
        message, end = decoder.raw_decode(text)
        found.append(message)
        text = text[end:]
    return found


def snake(name: str) -> str:
    return re.sub(r"[A-Z]", lambda letter: "_" + letter[0].lower(), name)


def matches(shown: Any, came: Any) -> bool:
    if shown == ANYTHING:
        return True
    if isinstance(shown, dict) and isinstance(came, dict):
        one = {snake(name): value for name, value in shown.items()}
        other = {snake(name): value for name, value in came.items()}
        return one.keys() == other.keys() and all(matches(one[name], other[name]) for name in one)
    if isinstance(shown, list) and isinstance(came, list):
        return len(shown) == len(came) and all(map(matches, shown, came))
    return bool(shown == came)


@pytest.fixture(scope="module")
def server_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The socket of a server of its own."""
    socket = tmp_path_factory.mktemp("server") / "kvdock.sock"
    server = subprocess.Popen(
        [sys.executable, "-m", "kvdock_server", "--memory=64MiB", f"--listen=unix://{socket}"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    try:
        for line in server.stderr:
            if "serving at" in line:
                break
        else:
            pytest.fail(f"the server ended with {server.wait()} before it served")
        yield socket
    finally:
        server.terminate()
        assert server.wait(timeout=30) == 0


def test_every_command_of_the_page_answers_as_shown(server_socket: Path) -> None:
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        pytest.skip("the packaged grpcurl is a program for Linux on x86-64")
    page = steps()
    assert len(page) > 20
    script = f"\necho '{END_OF_ANSWER}'\n".join(step.command for step in page)
    tools = Path(sys.executable).parent
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "SOCKET": str(server_socket), "PATH": f"{tools}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    answers = done.stdout.split(END_OF_ANSWER + "\n")
    assert len(answers) == len(page), done.stdout
    for step, came in zip(page, answers, strict=True):
        problem = f"{step.command}\nshown:\n{step.answer}\ncame:\n{came}"
        match step.kind:
            case "json":
                assert matches(messages(step.answer), messages(came)), problem
            case "text":
                for line in step.answer.splitlines():
                    assert line in came, problem
            case _:
                assert not came.strip(), problem


def test_the_page_shows_everything_that_must_go_by_hand() -> None:
    commands = "".join(step.command for step in steps())
    for call in (
        " list\n",
        " describe ",
        "grpc.health.v1.Health/Check",
        "CacheService/Put",
        "CacheService/Lookup",
        "CacheService/Get",
        "CacheService/FreeLocks",
        "AdminService/Clear",
        "AdminService/Status",
        "AdminService/ListChunks",
    ):
        assert call in commands
