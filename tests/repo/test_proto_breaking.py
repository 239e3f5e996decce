"""tools/proto_breaking.py, in real clones: what it compares with, and that it finds a break."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TOOL = REPOSITORY / "tools" / "proto_breaking.py"

BEFORE = 'syntax = "proto3";\npackage a.v1;\nmessage M {\n  string name = 1;\n}\n'
AFTER = BEFORE.replace("string name", "bytes name")


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=test", "-c", "user.email=test@localhost")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def check(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, TOOL],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", "HOME": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def write(folder: Path, proto: str) -> None:
    (folder / "proto" / "a" / "v1").mkdir(parents=True, exist_ok=True)
    (folder / "proto" / "a" / "v1" / "a.proto").write_text(proto)
    shutil.copy(REPOSITORY / "buf.yaml", folder)


def accept(folder: Path, *messages: str) -> None:
    breaks = ", ".join(f"'{message}'" for message in messages)
    (folder / "proto" / "accepted_breaks.toml").write_text(
        '[[accepted]]\ndate = 2026-11-28\nfile = "proto/a/v1/a.proto"\nreason = "a test"\n'
        f"breaks = [{breaks}]\n"
    )


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "--allow-empty", "-m", message)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository of two commits on main: one without a protocol, one with."""
    folder = tmp_path / "clone"
    folder.mkdir()
    git(folder, "init", "--initial-branch=main")
    commit(folder, "empty")
    write(folder, BEFORE)
    commit(folder, "protocol")
    return folder


def test_no_earlier_protocol_is_said(clone: Path) -> None:
    done = check(clone)
    assert done.returncode == 0
    assert "skipped: HEAD^" in done.stdout
    assert "has no proto/ yet" in done.stdout


def test_a_break_that_is_not_committed_is_found(clone: Path) -> None:
    commit(clone, "later")
    assert check(clone).returncode == 0
    write(clone, AFTER)
    done = check(clone)
    assert done.returncode != 0
    assert "against HEAD^" in done.stdout
    assert "changed type" in done.stdout


def test_a_break_on_a_branch_is_found_against_main(clone: Path) -> None:
    git(clone, "switch", "-c", "work")
    write(clone, AFTER)
    commit(clone, "break")
    commit(clone, "something else")
    done = check(clone)
    assert done.returncode != 0
    assert "against main" in done.stdout


def test_main_ahead_of_its_origin_is_compared_with_the_origin(clone: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--bare", str(clone), "origin.git")
    git(clone, "remote", "add", "origin", str(tmp_path / "origin.git"))
    git(clone, "fetch", "origin")
    write(clone, AFTER)
    commit(clone, "break")
    commit(clone, "something else")
    done = check(clone)
    assert done.returncode != 0
    assert "against origin/main" in done.stdout


def test_a_detached_shallow_clone_compares_with_what_it_has(clone: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--depth=1", f"file://{clone}", "shallow")
    shallow = tmp_path / "shallow"
    git(shallow, "checkout", "--detach")
    git(shallow, "branch", "--delete", "--force", "main")
    done = check(shallow)
    assert done.returncode == 0
    assert "against HEAD" in done.stdout
    write(shallow, AFTER)
    assert check(shallow).returncode != 0


def test_the_base_can_be_named(clone: Path) -> None:
    commit(clone, "later")
    assert "against HEAD~1" in check(clone, KVDOCK_PROTO_BASE="HEAD~1").stdout
    done = check(clone, KVDOCK_PROTO_BASE="nowhere")
    assert done.returncode != 0
    assert "no such commit" in done.stderr


CHANGED = 'Field "1" with name "name" on message "M" changed type from "string" to "bytes".'


def test_an_accepted_break_passes_and_is_listed(clone: Path) -> None:
    write(clone, AFTER)
    accept(clone, CHANGED)
    done = check(clone, KVDOCK_PROTO_BASE="main")
    assert done.returncode == 0
    assert f"accepted on 2026-11-28: {CHANGED}" in done.stdout


def test_a_break_beside_an_accepted_one_is_found(clone: Path) -> None:
    write(clone, AFTER.replace("bytes name", "bytes title"))
    accept(clone, CHANGED.replace('name "name"', 'name "title"'))
    done = check(clone, KVDOCK_PROTO_BASE="main")
    assert done.returncode == 1
    assert "accepted on" in done.stdout
    assert "breaks clients" in done.stdout


def test_an_accepted_break_that_is_not_there_any_more_is_no_error(clone: Path) -> None:
    accept(clone, CHANGED)
    done = check(clone, KVDOCK_PROTO_BASE="main")
    assert (done.returncode, done.stdout.count("\n")) == (0, 1)


def test_the_frozen_version_is_compared_with_as_well(clone: Path) -> None:
    buf = str(Path(sys.executable).with_name("buf"))
    build = [buf, "build", "--exclude-source-info", "-o", "proto/v1.binpb"]
    subprocess.run(build, cwd=clone, check=True)
    commit(clone, "frozen")
    write(clone, AFTER)
    commit(clone, "broken")
    commit(clone, "later")  # what it breaks is no longer what it is compared with first
    done = check(clone, KVDOCK_PROTO_BASE="HEAD")
    assert done.returncode == 1, done.stdout
    frozen, _, main = done.stdout.partition("buf breaking: against HEAD")
    assert "the frozen proto/v1.binpb" in frozen
    assert "breaks clients" in frozen
    assert "breaks clients" not in main
