"""A table of what a benchmark measured, beside the machine's own ceiling and the bound promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One measured figure. Texts carry their units."""

    what: str
    measured: str
    ceiling: str = ""
    """What the machine itself does, measured in the same run, in turns with ``measured``."""
    ratio: str = ""
    bound: str = ""
    holds: bool = True
    """Whether the bound is kept; a row without one always holds."""


def print_report(title: str, rows: Sequence[Row]) -> int:
    """Print the table; exit status 0 if every bound holds, else 1."""
    table = Table(title=title)
    table.add_column("what")
    for heading in ("measured", "machine's own", "ratio"):
        table.add_column(heading, justify="right")
    table.add_column("bound")
    table.add_column("")
    for row in rows:
        mark = "" if not row.bound else "[green]ok[/]" if row.holds else "[bold red]MISSED[/]"
        table.add_row(row.what, row.measured, row.ceiling, row.ratio, row.bound, mark)
    console().print(table)
    return 0 if all(row.holds for row in rows) else 1


def console() -> Console:
    """The terminal. A file gets wide lines that are not wrapped: scripts search it by lines."""
    found = Console()
    return found if found.is_terminal else Console(width=180)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that ``percent`` per cent of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
