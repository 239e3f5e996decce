"""Checks that the protocol breaks no client of an earlier version of it.

    python tools/proto_breaking.py

Compares proto/ with the first of these that exists and is not the commit checked out: the commit
named by $KVDOCK_PROTO_BASE, origin/main, main, the parent of the commit checked out. A clone so
shallow that it has none of them compares with the commit itself, which still catches what is not
committed. Exits with buf's status; with 0 if no earlier commit has a protocol.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

BUF = Path(sys.executable).with_name("buf")


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


def main() -> int:
    """Runs the comparison; returns the exit status."""
    base = find_base()
    if base is None:
        print("buf breaking: skipped: not in a git clone with a commit, nothing to compare with")
        return 0
    name, commit = base
    if not git("ls-tree", commit, "proto/"):
        print(f"buf breaking: skipped: {name} ({commit[:12]}) has no proto/ yet")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", commit, "proto", "buf.yaml"], capture_output=True, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        print(f"buf breaking: against {name} ({commit[:12]})", flush=True)
        return subprocess.run([BUF, "breaking", "--against", folder], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
