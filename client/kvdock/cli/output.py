"""How results are shown: tables for people, JSON for programs, a bar for long transfers.

In JSON, keys are hexadecimal and enumerations are names in lower case. Epochs and ids are strings,
since many readers of JSON cannot hold 64 bits in a number.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from kvdock.printable import printable

MOST_CHARACTERS = 512
"""How many characters of a name or value are shown. JSON has all of them."""

# Seconds after which a transfer gets a progress bar.
_PATIENCE = 1.0


def print_json(value: object) -> None:
    """Prints one JSON value on stdout. It is ASCII, with escapes for all else."""
    print(json.dumps(value, indent=2))


def print_json_list(values: Iterable[object]) -> None:
    """Prints one JSON array on stdout, each value as it comes."""
    separator = "[\n  "
    for value in values:
        print(separator, json.dumps(value), sep="", end="")
        separator = ",\n  "
    print("[]" if separator.startswith("[") else "\n]")


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a table on stdout. Columns of numbers are aligned to the right."""
    table = Table(title=_cell(title, "bold"), title_justify="left", header_style="dim")
    for index, name in enumerate(header):
        is_number = bool(rows) and all(isinstance(row[index], int) for row in rows)
        table.add_column(name, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(_cell(f"{cell:,}" if isinstance(cell, int) else cell) for cell in row))
    Console().print(table)


def print_facts(title: str, facts: Iterable[tuple[str, object]]) -> None:
    """Prints names and values in two columns on stdout."""
    table = Table(title=_cell(title, "bold"), title_justify="left", show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, _cell(value))
    Console().print(table)


def plain(text: str) -> Text:
    """The text for rich, which would look for markup and emoji in a string."""
    return Text(printable(text))


def _cell(value: object, style: str = "") -> Text:
    return Text(printable(str(value), MOST_CHARACTERS), style)


def message_to_json(message: Message) -> dict[str, Any]:
    """The message for JSON, with every field. An optional field that is not set is null."""
    result: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.has_presence and not message.HasField(field.name):
            result[field.name] = None
        elif isinstance(value, Mapping):
            result[field.name] = dict(value)
        elif field.is_repeated:
            result[field.name] = [_field_to_json(field, item) for item in value]
        else:
            result[field.name] = _field_to_json(field, value)
    return result


# field: its class depends on the implementation of protobuf.
def _field_to_json(field: Any, value: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return message_to_json(value)
    if field.type == FieldDescriptor.TYPE_ENUM:
        return _enum_name(field, value)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return value.hex()
    if field.name == "epoch" or (field.name.endswith("_id") and isinstance(value, int)):
        return str(value)
    return value


def _enum_name(field: Any, value: int) -> str | int:
    """``shared`` for TRANSFER_MODE_SHARED."""
    known = field.enum_type.values_by_number
    if value not in known:
        return value
    zero: str = known[0].name
    name: str = known[value].name
    return name.removeprefix(zero.removesuffix("UNSPECIFIED")).lower()


def enum_name(value: Enum) -> str:
    """``stored`` for ChunkStatus.STORED."""
    return value.name.lower()


def size(nbytes: float) -> str:
    """``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def duration(seconds: float) -> str:
    """``2 d 3 h``, ``5 min 12 s``: the two largest units."""
    parts: list[str] = []
    rest = int(seconds)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, rest = divmod(rest, length)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


@contextlib.contextmanager
def transfer_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function to call with the bytes moved. A bar appears on stderr after a second."""
    columns = DownloadColumn(binary_units=True), TransferSpeedColumn()
    with _bar(description, total, *columns) as advance:
        yield advance


@contextlib.contextmanager
def count_bar(description: str, total: int) -> Iterator[Callable[[int], None]]:
    """Likewise with a count of anything."""
    with _bar(description, total, TaskProgressColumn()) as advance:
        yield advance


@contextlib.contextmanager
def _bar(description: str, total: int, *columns: ProgressColumn) -> Iterator[Callable[[int], None]]:
    progress = Progress(
        TextColumn(description),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
    task = progress.add_task(description, total=total)
    began = time.monotonic()
    started = False

    def advance(nbytes: int) -> None:
        nonlocal started
        progress.advance(task, nbytes)
        if not started and time.monotonic() - began > _PATIENCE:
            started = True
            progress.start()

    try:
        yield advance
    finally:
        if started:
            progress.stop()
