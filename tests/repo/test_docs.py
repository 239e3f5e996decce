"""Pages that people read first: their links lead somewhere and their claims are the code's."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

import kvdock_server
from kvdock_server.config import Config

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")])

ONE_FLAG = """--kv-transfer-config '{"kv_connector":"KVDockConnector","kv_role":"kv_both"}'"""
FIRST_SCREEN_LINES = 45


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_lead_to_files(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing


def test_links_lead_to_headings() -> None:
    """As GitHub makes a heading's anchor."""
    anchors = {}
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        plain = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
        anchors[page.resolve()] = {title.replace(" ", "-") for title in plain}
    links = [
        (page, target, anchor)
        for page in PAGES
        for target, anchor in re.findall(r"\]\(([^)#:]*\.md|)#([^)]+)\)", page.read_text())
    ]
    assert len(links) > 10
    for page, target, anchor in links:
        led_to = (page.parent / target).resolve() if target else page
        assert anchor in anchors[led_to], (page.name, target, anchor)


def test_each_row_of_models_is_run_by_something() -> None:
    page = (REPOSITORY / "docs" / "models.md").read_text()
    table = page.partition("| model or deployment |")[2].partition("\n\n")[0]
    rows = [row.strip("|").split("|") for row in table.splitlines()[2:]]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)`", row[-1])
        assert named, row
        for path in named:
            roots = (REPOSITORY, REPOSITORY / "tests")
            assert any((root / path).exists() for root in roots), path


def test_the_walks_name_files_and_functions_that_exist() -> None:
    page = (REPOSITORY / "CONTRIBUTING.md").read_text()
    walks = page.partition("## Three walks")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)`(?:\s\(((?:`\w+`(?:, )?)+)\))?", walks)
    assert len(named) > 30
    roots = re.findall(r"`((?:vllm_plugin|client|server)/\w+)`", walks)
    for file, functions in named:
        files = [REPOSITORY / root / file for root in roots if (REPOSITORY / root / file).exists()]
        assert files, file
        texts = [path.read_text() for path in files]
        for function in re.findall(r"`(\w+)`", functions):
            assert any(f"def {function}(" in text for text in texts), (file, function)


def test_first_screen_of_the_readme() -> None:
    lines = (REPOSITORY / "README.md").read_text().splitlines()
    screen = "\n".join(lines[:FIRST_SCREEN_LINES])
    assert "kvdock serve" in screen
    assert ONE_FLAG in screen
    assert "make demo" in screen


def test_ci_runs_the_command_of_the_readme() -> None:
    assert "\nmake test\n" in (REPOSITORY / "README.md").read_text()
    assert "make test" in (REPOSITORY / ".ci" / "run").read_text()


def test_one_version_everywhere() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert f"## [{project['version']}]" in (REPOSITORY / "CHANGELOG.md").read_text()
    assert kvdock_server.__version__ == project["version"]


def test_every_server_setting_is_documented() -> None:
    page = (REPOSITORY / "docs" / "configuration.md").read_text()
    rows = dict(re.findall(r"^\| `--([a-z-]+)` (.*)$", page, re.MULTILINE))
    assert rows.keys() == {setting.name.replace("_", "-") for setting in fields(Config)}
    for setting in fields(Config):
        row = rows[setting.name.replace("_", "-")]
        assert f"`KVDOCK_{setting.name.upper()}`" in row
        assert f"`{setting.name}`" in row


def test_every_connector_setting_is_documented() -> None:
    page = (REPOSITORY / "docs" / "configuration.md").read_text()
    documented = set(re.findall(r"^\| `kvdock\.([a-z_]+)`", page, re.MULTILINE))
    source = (REPOSITORY / "vllm_plugin" / "kvdock_vllm" / "config.py").read_text()
    assert documented == set(re.findall(r"``kvdock\.([a-z_]+)``", source))


def test_every_environment_variable_of_clients_is_documented() -> None:
    page = (REPOSITORY / "docs" / "configuration.md").read_text()
    documented = set(re.findall(r"^\| `(KVDOCK_[A-Z_]+)", page, re.MULTILINE))
    named: set[str] = set()
    for package in ("client", "vllm_plugin"):
        for module in (REPOSITORY / package).rglob("*.py"):
            named.update(re.findall(r'= "(KVDOCK_[A-Z_]+)"', module.read_text()))
    assert len(named) >= 3
    assert documented == named


def test_every_metric_is_documented() -> None:
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"`((?:vllm:)?kvdock_[a-z_]+)`", page))
    server = (REPOSITORY / "server" / "kvdock_server" / "metrics.py").read_text()
    counters = set(re.findall(r'_counter\(\s*"([a-z_]+)"', server))
    gauges = set(re.findall(r'_gauge\(\s*"([a-z_]+)"', server))
    labelled = set(re.findall(r'(Counter|Gauge)MetricFamily\(\s*"kvdock_([a-z_]+)"', server))
    counters |= {name for kind, name in labelled if kind == "Counter"}
    gauges |= {name for kind, name in labelled if kind == "Gauge"}
    connector = (REPOSITORY / "vllm_plugin" / "kvdock_vllm" / "metrics.py").read_text()
    of_vllm = set(re.findall(r'^    "([a-z_]+)": "', connector, re.MULTILINE))
    assert len(counters) > 10
    assert len(of_vllm) > 10
    assert documented == {
        *(f"kvdock_{name}_total" for name in counters),
        *(f"kvdock_{name}" for name in gauges),
        *(f"vllm:kvdock_{name}_total" for name in of_vllm),
        "vllm:kvdock_workers",
    }
