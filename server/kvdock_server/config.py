"""The settings of a server, and the three places where they can be given.

A flag wins over an environment variable, a variable over the configuration file, the file over the
default. Each field of ``Config`` is one setting: ``chunk_tokens`` is ``--chunk-tokens``,
``KVDOCK_CHUNK_TOKENS`` and the key ``chunk_tokens`` of the file.
"""

from __future__ import annotations

import argparse
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

from kvdock.address import default_socket_path
from kvdock_server import __version__
from kvdock_server.index.keeping import DEFAULT_PIN_SHARE
from kvdock_server.index.namespace import MAX_CHUNK_TOKENS
from kvdock_server.index.policies import POLICIES

T = TypeVar("T")

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{unit}I": 1 << 10 * power for power, unit in enumerate("KMGT", 1)}

MIN_MEMORY_BYTES = 1 << 20
MAX_MEMORY_BYTES = 1 << 63


class ConfigError(Exception):
    """A setting that cannot be used. The message names it, its value and where it was given."""


def parse_bytes(text: str) -> int:
    """Bytes from a number with a unit: ``8GiB``, ``500MB``, ``1048576``. ValueError otherwise."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if not match:
        raise ValueError(f"{text!r} is not a size: write for example 8GiB, 500MB or 1048576")
    return int(Decimal(match[1]) * _UNITS[match[2]])


def _checked(
    parse: Callable[[str], T], allowed: Callable[[T], bool], rule: str
) -> Callable[[str], T]:
    """A parser that raises ValueError with the rule for values that are not allowed."""

    def parsed(text: str) -> T:
        value = parse(text)
        if not allowed(value):
            raise ValueError(rule)
        return value

    return parsed


_LEVELS = ("debug", "info", "warning", "error")
_level = _checked(str, lambda name: name in _LEVELS, "debug, info, warning or error")
_eviction = _checked(str, lambda name: name in POLICIES, " or ".join(POLICIES))
_numa = _checked(str, lambda mode: mode in ("auto", "off"), "auto or off")
_positive = _checked(int, lambda count: count >= 1, "at least 1")
_chunk_tokens = _checked(
    int, lambda tokens: 1 <= tokens <= MAX_CHUNK_TOKENS, f"from 1 to {MAX_CHUNK_TOKENS}"
)
_seconds = _checked(float, lambda seconds: 0 <= seconds < float("inf"), "at least 0")
_share = _checked(float, lambda share: 0 <= share <= 0.9, "from 0 to 0.9")
_memory = _checked(
    parse_bytes,
    lambda nbytes: MIN_MEMORY_BYTES <= nbytes < MAX_MEMORY_BYTES,
    "at least 1MiB and less than 8EiB",
)
_size = _checked(
    parse_bytes, lambda nbytes: not 0 < nbytes < MIN_MEMORY_BYTES, "0, or at least 1MiB"
)


def _host_port(text: str) -> str:
    host, _, port = text.rpartition(":")
    if text and not (host and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError("write HOST:PORT, for example 127.0.0.1:9464")
    return text


def _setting(default: Any, parse: Any, metavar: str, text: str) -> Any:
    return field(default=default, metadata={"parse": parse, "metavar": metavar, "help": text})


@dataclass(frozen=True)
class Config:
    """All settings. Sizes in bytes, times in seconds."""

    memory: int = _setting(1 << 30, _memory, "SIZE", "host memory for KV cache (1GiB)")
    listen: str = _setting(
        "",
        str,
        "ADDRESS",
        "unix:///PATH or HOST:PORT (a Unix socket in $XDG_RUNTIME_DIR, else in /tmp/kvdock-UID)",
    )
    chunk_tokens: int = _setting(
        32, _chunk_tokens, "N", "tokens a chunk that engines are told to use (32)"
    )
    eviction: str = _setting(
        "lru-with-memory", _eviction, "NAME", "lru or lru-with-memory (lru-with-memory)"
    )
    pin_share: float = _setting(
        DEFAULT_PIN_SHARE, _share, "SHARE", "of the memory, what pins may keep at most (0.25)"
    )
    numa: str = _setting("auto", _numa, "MODE", "auto: cache near each GPU; off: evenly (auto)")
    event_log: int = _setting(0, _size, "SIZE", "memory for the log of KV events; 0: none (0)")
    event_log_count: int = _setting(
        1_000_000, _positive, "N", "events the log keeps at most (1000000)"
    )
    metrics_listen: str = _setting(
        "", _host_port, "HOST:PORT", "serve Prometheus metrics over HTTP (off)"
    )
    drain_seconds: float = _setting(
        10.0, _seconds, "N", "how long SIGTERM waits for copies under way (10)"
    )
    log_level: str = _setting("info", _level, "LEVEL", "debug, info, warning or error (info)")

    @property
    def address(self) -> str:
        """Where to listen, the default filled in."""
        return self.listen or f"unix://{default_socket_path()}"


def load(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Config:
    """The configuration for these command-line arguments; ConfigError if it cannot be used."""
    environment = os.environ if environment is None else environment
    parser = argparse.ArgumentParser(
        prog="kvdock serve",
        usage="%(prog)s [OPTIONS]",
        description="Keep the KV cache of this host's inference engines.",
        epilog="Every setting is also an environment variable (KVDOCK_MEMORY, ...) and a key of "
        "the TOML file (memory = '8GiB', ...).",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    parser.add_argument("--version", action="version", version=f"kvdock {__version__}")
    for setting in fields(Config):
        parser.add_argument(
            f"--{setting.name.replace('_', '-')}",
            metavar=setting.metadata["metavar"],
            help=setting.metadata["help"],
        )
    flags = vars(parser.parse_args(arguments))
    file = flags.pop("config") or environment.get("KVDOCK_CONFIG")
    from_file = _read(file) if file else {}
    values: dict[str, Any] = {}
    for setting in fields(Config):
        name = setting.name
        flag, variable = f"--{name.replace('_', '-')}", f"KVDOCK_{name.upper()}"
        for source, given in (
            (flag, flags[name]),
            (variable, environment.get(variable)),
            (f"{name} in {file}", from_file.get(name)),
        ):
            if given is None:
                continue
            try:
                values[name] = setting.metadata["parse"](str(given))
            except ValueError as error:
                raise ConfigError(f"{source} {given}: {error}") from None
            break
    return Config(**values)


def _read(file: str) -> dict[str, Any]:
    try:
        values = tomllib.loads(Path(file).read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"configuration file {file}: {error}") from None
    unknown = set(values) - {setting.name for setting in fields(Config)}
    if unknown:
        known = ", ".join(setting.name for setting in fields(Config))
        raise ConfigError(f"configuration file {file}: unknown {sorted(unknown)}; known: {known}")
    return values
