"""Settings and addresses that make a server destroy, crash or serve nobody."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.users import ANOTHER, OTHER, as_user, needs_other_users

from kvdock_server.tiers.host.segment import Segment, remove_stale_segments


def run_server(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvdock_server", "--memory", "1MiB", *arguments],
        capture_output=True,
        text=True,
        timeout=10,
        env={name: value for name, value in os.environ.items() if "KVDOCK" not in name},
    )


def refused(*arguments: str) -> str:
    """Standard error of a server that must refuse to start, in words and not in a traceback."""
    try:
        ended = run_server(*arguments)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"it started: {error.stderr!r}")
    assert "Traceback" not in ended.stderr, ended.stderr[-300:]
    assert ended.returncode == 2
    return ended.stderr


def test_a_file_at_the_sockets_path_that_is_no_socket_is_not_deleted(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    with contextlib.suppress(subprocess.TimeoutExpired):
        run_server("--listen", f"unix://{file}")
    assert file.is_file()
    assert file.read_text() == "mine"


def test_nothing_is_made_beside_what_is_no_socket(tmp_path: Path) -> None:
    device = Path("/dev/null")
    file, link = tmp_path / "notes.txt", tmp_path / "link"
    file.touch()
    link.symlink_to(file)
    for path in (device, file, link, link / "k.sock"):
        message = refused("--listen", f"unix://{path}")
        assert str(path) in message
        assert not path.with_name(path.name + ".lock").exists()
    assert sorted(tmp_path.iterdir()) == [link, file]


def test_a_link_to_the_sockets_folder_must_be_this_users_and_lead_to_ones(
    tmp_path: Path,
) -> None:
    """Whoever made the link may change it, and with it where clients go."""
    mine, link = tmp_path / "mine", tmp_path / "link"
    mine.mkdir()
    link.symlink_to(mine)
    if os.getuid() == 0:
        os.chown(link, 12345, 12345, follow_symlinks=False)
        assert f"{link} belongs to user 12345" in refused("--listen", f"unix://{link}/k.sock")
    mine.chmod(0o777)
    assert "mode 0777" in refused("--listen", f"unix://{mine}/k.sock")
    assert not list(mine.iterdir())


@pytest.mark.parametrize("setting", ["--listen", "--metrics-listen"])
def test_an_address_that_is_taken_is_known_before_memory_is_taken(
    tmp_path: Path, setting: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        # More memory than there is: what is looked at first is what is named.
        message = refused(
            *("--listen", f"unix://{tmp_path}/k.sock", "--memory", "4000TiB", setting, address)
        )
    assert f"{setting[2:].replace('-', '_')} {address}: somebody listens there" in message
    assert not (tmp_path / "k.sock").exists()


@needs_other_users
def test_a_file_that_another_user_gave_the_form_of_a_dead_servers_memory_stays(
    tmp_path: Path,
) -> None:
    file = Path(f"/dev/shm/kvdock-{OTHER}-x\nkvdock: ERROR: forged")
    tmp_path.chmod(0o755)
    (tmp_path / "run").mkdir(mode=0o700)
    os.chown(tmp_path / "run", OTHER, OTHER)
    file.write_bytes(b"mine")
    try:
        os.chown(file, ANOTHER, ANOTHER)
        file.chmod(0o666)
        command = [sys.executable, "-m", "kvdock_server", "--memory", "1MiB"]
        process = subprocess.Popen(
            [*as_user(OTHER), *command, "--listen", f"unix://{tmp_path}/run/k.sock"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        first = process.stderr.readline()
        process.terminate()
        assert process.wait(timeout=20) == 0
        assert "serving at" in first
        assert file.read_bytes() == b"mine"
    finally:
        file.unlink()


def test_a_folder_at_the_sockets_path_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "k.sock").mkdir()
    assert "k.sock" in refused("--listen", f"unix://{tmp_path}/k.sock")


@pytest.mark.parametrize("number", ["65537", "4294967296", "99999999999999999999999"])
def test_chunk_tokens_that_no_namespace_can_have_are_refused(tmp_path: Path, number: str) -> None:
    assert "65536" in refused(
        "--listen", f"unix://{tmp_path}/k.sock", "--chunk-tokens", number
    ).replace(",", "")


@pytest.mark.parametrize("size", ["9" * 400, "9" * 400 + "GiB", "1e9", "-1", "0x10", "nan"])
def test_sizes_that_are_none_are_refused_in_words(tmp_path: Path, size: str) -> None:
    assert "--memory" in refused("--listen", f"unix://{tmp_path}/k.sock", "--memory", size)


def test_a_configuration_file_that_is_no_text_is_refused_in_words(tmp_path: Path) -> None:
    file = tmp_path / "kvdock.toml"
    file.write_bytes(b"memory = '\xff\xfe'\n")
    assert str(file) in refused("--config", str(file))


@pytest.mark.parametrize("name", ["a%41.sock", "a b.sock", "a#b.sock", "a?b.sock", "ü.sock"])
def test_client_and_server_mean_the_same_path(tmp_path: Path, name: str) -> None:
    import kvdock

    path = f"/tmp/{tmp_path.name[:20]}-{os.getpid()}-{name}"
    process = subprocess.Popen(
        [sys.executable, "-m", "kvdock_server", "--memory", "1MiB", "--listen", f"unix://{path}"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        # It may say first that it reclaimed what a killed server left behind.
        assert any("serving at" in line for line in process.stderr)
        with kvdock.Client(f"unix://{path}", timeout=2) as client:
            assert client.status()
        assert Path(path).is_socket()
    finally:
        process.terminate()
        process.wait(timeout=20)
        for left in Path("/tmp").glob(f"{tmp_path.name[:20]}-{os.getpid()}-*"):
            left.unlink()


def _reclaim_for_ever() -> None:
    while True:
        remove_stale_segments()


def test_a_starting_server_never_loses_its_segment_to_another_ones_reclaiming() -> None:
    context = multiprocessing.get_context("spawn")
    other = context.Process(target=_reclaim_for_ever, daemon=True)
    other.start()
    time.sleep(1.0)
    try:
        lost = 0
        deadline = time.monotonic() + 5
        made = 0
        while time.monotonic() < deadline:
            made += 1
            try:
                segment = Segment(4096)
            except OSError as error:
                lost += 1
                print(repr(error))
                continue
            lost += not Path(f"/dev/shm{segment.shm_name}").exists()
            segment.stop()
            os.close(segment._fd)
        print(made, lost)
        assert lost == 0
    finally:
        other.terminate()
        other.join()
