"""Whatever the protocol reserves has a name, and a comment above it that says why."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PROTO = Path(__file__).parents[2] / "proto" / "kvdock" / "v1"


@pytest.mark.parametrize("path", sorted(PROTO.glob("*.proto")), ids=lambda path: path.name)
def test_reserved_numbers_have_a_name_and_a_reason(path: Path) -> None:
    lines = [line.strip() for line in path.read_text().splitlines()]
    for number, line in enumerate(lines):
        if re.match(r"reserved \d", line):
            assert lines[number - 1].startswith("// "), f"{path.name}:{number + 1} has no reason"
            assert re.match(r'reserved "\w+', lines[number + 1]), (
                f"{path.name}:{number + 1} has no name"
            )
