"""Flags, environment and file: the same settings by the same names, in that order."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvdock_server.config import Config, ConfigError, load, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 << 30),
        ("8g", 8 * 10**9),
        ("500MB", 500 * 10**6),
        ("1.5GiB", 3 << 29),
        ("1048576", 1 << 20),
        (" 2 TiB ", 2 << 40),
        ("64Ki", 64 << 10),
    ],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "8 gigs", "1e9", "0x10"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(text)


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvdock.toml"
    file.write_text("memory = '2GiB'\nchunk_tokens = 512\ndrain_seconds = 1.5\n")
    environment = {
        "KVDOCK_CONFIG": str(file),
        "KVDOCK_CHUNK_TOKENS": "128",
        "KVDOCK_MEMORY": "3GiB",
    }
    config = load(["--memory", "4GiB"], environment)
    assert config == Config(memory=4 << 30, chunk_tokens=128, drain_seconds=1.5)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--memory", "much"], {}, "--memory much: 'much' is not a size"),
        (["--memory", "1KiB"], {}, "--memory 1KiB: at least 1MiB"),
        ([], {"KVDOCK_CHUNK_TOKENS": "0"}, "KVDOCK_CHUNK_TOKENS 0: from 1 to 65536"),
        (["--drain-seconds", "inf"], {}, "--drain-seconds inf: at least 0"),
        (["--log-level", "loud"], {}, "--log-level loud"),
        (["--numa", "on"], {}, "--numa on: auto or off"),
        (["--config", "/nowhere.toml"], {}, "/nowhere.toml"),
    ],
)
def test_what_cannot_be_used_is_named(
    arguments: list[str], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load(arguments, environment)
    assert message in str(caught.value)


def test_an_unknown_key_in_the_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "kvdock.toml"
    file.write_text("memroy = '2GiB'\n")
    with pytest.raises(ConfigError, match=r"memroy.*known: memory"):
        load(["--config", str(file)], {})


def test_help_fits_one_screen() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "kvdock_server", "--help"], capture_output=True, text=True
    )
    assert shown.returncode == 0
    assert len(shown.stdout.splitlines()) <= 24
