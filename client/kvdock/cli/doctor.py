"""``kvdock doctor``: what is wrong, and what to do about it."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict

from rich.console import Console

from kvdock.address import parse
from kvdock.cli import checks, output
from kvdock.cli.checks import Finding, Verdict

_SIGNS = {
    Verdict.OK: "[green]✓[/]",
    Verdict.NOTE: "[dim]·[/]",
    Verdict.WARNING: "[yellow]![/]",
    Verdict.BROKEN: "[red]✗[/]",
}


def run(arguments: argparse.Namespace) -> int:
    """Runs every check and prints each finding as it comes. Returns 1 if something is broken."""
    console = Console(highlight=False)
    findings: list[Finding] = []
    for finding in checks.all_findings(parse(arguments.address), arguments.timeout):
        findings.append(finding)
        if not arguments.json:
            console.print(f"{_SIGNS[finding.verdict]} [bold]{finding.subject}[/] ", end="")
            console.print(output.plain(finding.text), soft_wrap=True)
            if finding.advice:
                console.print("    [bold]→[/]", output.plain(finding.advice), soft_wrap=True)
            sys.stdout.flush()
    if arguments.json:
        output.print_json([asdict(finding) for finding in findings])
    return 1 if any(finding.verdict is Verdict.BROKEN for finding in findings) else 0
