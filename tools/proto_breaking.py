"""Checks that the protocol breaks no client of an earlier version of it.

    python tools/proto_breaking.py

Compares proto/ with the frozen v1, proto/v1.binpb, and with the first of these that exists and is
not the commit checked out: the commit named by $KVDOCK_PROTO_BASE, origin/main, main, the parent of
the commit checked out. A clone so shallow that it has none of them compares with the commit itself,
which still catches what is not committed. Breaks that proto/accepted_breaks.toml names are listed
and accepted. Exits with 0 if there is no other, or if no earlier commit has a protocol; with 1
otherwise.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

BUF = Path(sys.executable).with_name("buf")
ACCEPTED = Path("proto/accepted_breaks.toml")
# Made by `buf build --exclude-source-info -o proto/v1.binpb`. Until the first release it is made
# anew where a break is accepted; after the release never.
FROZEN = Path("proto/v1.binpb")


def git(*arguments: str) -> str | None:
    """Output of a git command, or None if it failed."""
    done = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def commit_of(name: str) -> str | None:
    """Full id of a commit, or None if there is no such commit here."""
    return git("rev-parse", "--quiet", "--verify", f"{name}^{{commit}}")


def find_base() -> tuple[str, str] | None:
    """Name and id of the commit to compare with. Exits if the one asked for is not there."""
    head = commit_of("HEAD")
    if head is None:
        return None
    asked = os.environ.get("KVDOCK_PROTO_BASE")
    if asked:
        commit = commit_of(asked)
        if commit is None:
            sys.exit(f"buf breaking: KVDOCK_PROTO_BASE is {asked!r}: there is no such commit here")
        return asked, commit
    for name in ("origin/main", "main", "HEAD^"):
        commit = commit_of(name)
        if commit is not None and commit != head:
            return name, commit
    return "HEAD", head


def find_breaks(against: str) -> list[dict[str, Any]]:
    """Each break as buf tells it, with ``path``, ``start_line`` and ``message`` among its fields.

    Exits if buf could not compare.
    """
    done = subprocess.run(
        [BUF, "breaking", "--against", against, "--error-format=json"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    try:
        breaks = [json.loads(line) for line in done.stdout.splitlines()]
    except json.JSONDecodeError:
        breaks = []
    if bool(breaks) != bool(done.returncode):
        sys.exit(f"buf breaking: buf failed with status {done.returncode}: {done.stdout}")
    return breaks


def accepted_breaks() -> dict[tuple[str, str], str]:
    """The date of each accepted break, by its file and buf's message."""
    if not ACCEPTED.exists():
        return {}
    accepted = {}
    for entry in tomllib.loads(ACCEPTED.read_text())["accepted"]:
        if not entry["reason"].strip():
            sys.exit(f"{ACCEPTED}: the entry of {entry['date']} gives no reason")
        for message in entry["breaks"]:
            accepted[entry["file"], message] = str(entry["date"])
    return accepted


def compare(name: str, against: str, accepted: dict[tuple[str, str], str]) -> int:
    """Prints each break; returns the exit status: 1 if one is not accepted."""
    print(f"buf breaking: against {name}", flush=True)
    status = 0
    for each in find_breaks(against):
        date = accepted.get((each["path"], each["message"]))
        verdict = f"accepted on {date}" if date else "breaks clients"
        print(f"{each['path']}:{each['start_line']}: {verdict}: {each['message']}")
        if date is None:
            status = 1
    return status


def main() -> int:
    """Runs the comparisons; returns the exit status."""
    accepted = accepted_breaks()
    frozen = compare(f"the frozen {FROZEN}", str(FROZEN), accepted) if FROZEN.exists() else 0
    base = find_base()
    if base is None:
        print("buf breaking: skipped: not in a git clone with a commit, nothing to compare with")
        return frozen
    name, commit = base
    if not git("ls-tree", commit, "proto/"):
        print(f"buf breaking: skipped: {name} ({commit[:12]}) has no proto/ yet")
        return frozen
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", commit, "proto", "buf.yaml"], capture_output=True, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        return compare(f"{name} ({commit[:12]})", folder, accepted) or frozen


if __name__ == "__main__":
    sys.exit(main())
