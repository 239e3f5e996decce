"""The lists beside vLLM's own tests name tests that exist, each once."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
UPSTREAM = ROOT / "tests" / "upstream"


def test_what_is_skipped_is_named_once_and_has_a_reason() -> None:
    skipped = tomllib.loads((UPSTREAM / "skipped.toml").read_text())["skipped"]
    names = [name for entry in skipped for name in entry["tests"]]
    assert len(names) == len(set(names)) > 10
    assert all(len(entry["reason"]) > 10 for entry in skipped)


def test_each_scenario_of_the_offloading_connector_has_tests_of_ours_or_a_reason() -> None:
    scenarios = tomllib.loads((UPSTREAM / "offloading.toml").read_text())["scenarios"]
    for scenario in scenarios:
        assert bool(scenario.get("ours")) != bool(scenario.get("why_not")), scenario["theirs"]
        for name in scenario.get("ours", ()):
            file, _, function = name.partition("::")
            text = (ROOT / "tests" / file).read_text()
            assert re.search(rf"^def {function}\(", text, re.MULTILINE), name
    theirs = [scenario["theirs"] for scenario in scenarios]
    assert len(theirs) == len(set(theirs)) > 50
