"""The ``kvdock`` command against a real server, in processes of its own."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kvdock.cli import commands, events, main
from kvdock.events import Batch, Cleared, Cursor
from kvdock.keys import chunk_keys
from kvdock.v1 import admin_pb2

TOKENS = list(range(1000, 1000 + 3 * 32 + 17))
KEYS = chunk_keys(TOKENS, 32)
SHARD_BYTES = 171 * 4096


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(3 * SHARD_BYTES))
    return path


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(TOKENS))
    return path


def kvdock(
    address: str, *arguments: str | Path, stdin: bytes = b"", **environment: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "kvdock", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        timeout=60,
        check=False,
        env=os.environ | {"KVDOCK_ADDRESS": address, "COLUMNS": "160"} | environment,
    )


def ok(address: str, *arguments: str | Path, stdin: bytes = b"") -> bytes:
    done = kvdock(address, *arguments, stdin=stdin)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_put_and_get_by_tokens_and_by_keys(
    server: Any, data: Path, tokens: Path, tmp_path: Path
) -> None:
    at = server.address
    assert ok(at, "put", "n", "--register", "--tokens", tokens, "--file", data) == b"3 stored\n"
    hexes = [key.hex() for key in KEYS]
    assert ok(at, "get", "n", *hexes) == data.read_bytes()
    assert ok(at, "get", "n", "-", stdin="\n".join(hexes).encode()) == data.read_bytes()
    out = tmp_path / "out"
    ok(at, "get", "n", "--tokens", tokens, "--file", out)
    assert out.read_bytes() == data.read_bytes()

    answer = json.loads(ok(at, "put", "n", *hexes, "--json", stdin=data.read_bytes()))
    assert answer == [{"key": key, "status": "exists"} for key in hexes]
    spaced = " ".join(map(str, TOKENS)).encode()
    found = json.loads(ok(at, "lookup", "n", "--tokens", "-", "--json", stdin=spaced))
    assert (found["hit_chunks"], found["hit_tokens"], found["keys"]) == (3, 96, hexes)
    assert b"3 of 3 chunks, 96 tokens" in ok(at, "lookup", "n", "--tokens", tokens)
    status = json.loads(ok(at, "status", "--json"))
    assert status["index"]["locks"] == 0


def test_put_of_a_continuation_names_its_parent(server: Any, data: Path) -> None:
    hexes = [key.hex() for key in KEYS]
    half = len(data.read_bytes()) // 3
    ok(server.address, "put", "n", "--register", hexes[0], stdin=data.read_bytes()[:half])
    rest = data.read_bytes()[half:]

    refused = kvdock(
        server.address, "put", "n", *hexes[1:], "--parent", "00" * 31 + "01", stdin=rest
    )
    assert (refused.returncode, refused.stdout) == (1, b"2 parent_missing\n")
    ok(server.address, "put", "n", *hexes[1:], "--parent", hexes[0], stdin=rest)
    assert ok(server.address, "get", "n", *hexes) == data.read_bytes()


def test_listings(server: Any, data: Path, tokens: Path) -> None:
    at = server.address
    ok(at, "put", "n", "--register", "--tokens", tokens, "--file", data)

    [entry] = json.loads(ok(at, "ls", "--json"))
    assert (entry["name"], entry["parts"]) == ("n", 3)
    assert entry["bytes"] == 3 * SHARD_BYTES
    [group] = entry["groups"]
    assert (group["group_idx"], group["kind"]) == (None, "full_attention")
    assert group["shard_bytes"] == [SHARD_BYTES]
    parts = json.loads(ok(at, "ls", "n", "--json"))
    assert [part["key"] for part in parts] == [key.hex() for key in KEYS]
    assert b"2.0 MiB" in ok(at, "ls")
    assert json.loads(ok(at, "ls", "--label", "model=m", "--json")) == []
    assert ok(at, "ls", "n").decode().splitlines()[1].split() == [
        KEYS[0].hex(),
        *("-", "1", "684.0", "KiB", "0"),
    ]

    assert ok(at, "clear", "n") == b"3 parts cleared\n"
    assert json.loads(ok(at, "clear", "--all", "--json")) == {"parts": 0}
    assert ok(at, "ls", "n") == b"nothing stored\n"
    assert json.loads(ok(at, "ls", "n", "--json")) == []


def test_status_shows_pool_and_sessions(server: Any) -> None:
    import kvdock as library

    with (
        library.Client(server.address) as client,
        client.session("engine-7", role="scheduler"),
        client.session("engine-7", role="worker"),
    ):
        shown = ok(server.address, "status").decode()
        answer = json.loads(ok(server.address, "status", "--json"))

    assert "64.0 MiB" in shown
    rows = [line.replace("│", " ").split()[:5] for line in shown.splitlines() if "engine-7" in line]
    assert rows == [  # only a worker has a mode
        ["engine-7", "scheduler", "0", "0", "-"],
        ["engine-7", "worker", "0", "0", "shared"],
    ]
    assert answer["pool"]["total_bytes"] == 64 << 20
    assert [session["role"] for session in answer["sessions"]] == ["scheduler", "worker"]
    assert isinstance(answer["epoch"], str)


def test_pins(server: Any, data: Path, tokens: Path) -> None:
    ok(server.address, "put", "pinned", "--tokens", tokens, "--file", data, "--register")
    keys = [key.hex() for key in KEYS]
    said = ok(server.address, "pin", "pinned", *keys[:2], "--name", "mine", "--seconds", "600")
    assert said == b"2 of 2 chunks kept by pin mine\n"
    missed = kvdock(server.address, "pin", "pinned", "--tokens", tokens, "--json", keys[0])
    assert missed.returncode == 2
    assert json.loads(ok(server.address, "pin", "pinned", "--tokens", tokens, "--json")) == {
        "pin": "default",
        "keys": 3,
        "kept_chunks": 3,
    }
    assert b"mine" in ok(server.address, "pins")
    mine, default = json.loads(ok(server.address, "pins", "pinned", "--json"))
    assert (mine["pin"], mine["parts"], mine["bytes"]) == ("mine", 2, 2 * SHARD_BYTES)
    assert 590 < mine["first_end_seconds"] <= mine["last_end_seconds"] < 640
    assert (default["pin"], default["last_end_seconds"]) == ("default", None)
    assert b"2 keep 3 parts" in ok(server.address, "status")
    assert b"pinned" in ok(server.address, "ls", "pinned")
    assert ok(server.address, "unpin", "mine").startswith(b"1 pins ended; 0 parts")
    assert kvdock(server.address, "unpin", "mine").returncode == 1
    assert kvdock(server.address, "unpin").returncode == 2
    ended = json.loads(ok(server.address, "unpin", "--all", "--json", "--namespace", "pinned"))
    assert ended == {"pins": 1, "parts": 3, "bytes": 3 * SHARD_BYTES}


def test_names_are_shown_as_they_are(server: Any) -> None:
    import kvdock as library

    names = ["llama[bf16]:key:", "a[/b]"]
    with library.Client(server.address) as client, client.session("engine[/x]"):
        for name in names:
            client.register_namespace(library.Namespace(name, 16, 1, (library.Group((1,)),)))
        listed, status = ok(server.address, "ls").decode(), ok(server.address, "status").decode()
    assert all(f" {name} " in listed for name in names)
    assert " engine[/x] " in status

    link = server.socket.parent / ":key:[b].sock"
    link.symlink_to(server.socket)
    assert f"Namespaces at unix://{link}" in ok(f"unix://{link}", "ls").decode()
    link.unlink()
    assert f"{link} does not exist" in kvdock(f"unix://{link}", "doctor").stdout.decode()


def test_names_move_no_cursor_and_take_no_screen(server: Any) -> None:
    import kvdock as library

    evil = "x\x1b[2J\n\r\x9b\u202e"
    namespace = library.Namespace("n", 16, 1, (library.Group((1,)),), {evil: "é" + evil})
    with (
        library.Client(server.address) as client,
        client.session(evil, client=evil),
        client.session("e" * 256, client="c"),
    ):
        client.register_namespace(namespace)
        shown = ok(server.address, "ls").decode() + ok(server.address, "status").decode()
        answer = json.loads(ok(server.address, "status", "--json"))

    assert all(line.isprintable() for line in shown.splitlines())
    assert "\r" not in shown
    escaped = r"x\x1b[2J\n\r\x9b\u202e"
    flat = "".join(shown.replace("│", " ").split())  # a long name takes several lines
    assert f"{escaped}=é{escaped}" in flat
    assert flat.count(escaped) >= 4
    assert answer["sessions"][0]["engine_id"] == evil


def test_what_a_server_writes_moves_no_cursor_either(capsys: pytest.CaptureFixture[str]) -> None:
    message = Batch(Cursor(1, 1), 0, (Cleared(1, "n\x1b[2J\u2066"),))

    events._print_line(message, message.events[0])

    assert capsys.readouterr().out.endswith("  n\\x1b[2J\\u2066\n")


def test_what_only_a_newer_server_knows_of_a_session_is_shown() -> None:
    known = admin_pb2.SessionStatus.FromString

    def numbers(role: int, mode: int) -> bytes:
        fields = admin_pb2.SessionStatus.DESCRIPTOR.fields_by_name
        pairs = ((fields["role"], role), (fields["mode"], mode))
        return b"".join(bytes([field.number << 3, value]) for field, value in pairs)

    assert commands._mode(known(numbers(role=99, mode=1))) == "-"
    assert commands._mode(known(numbers(role=2, mode=99))) == "unspecified"


def test_a_miss_leaves_the_old_file_alone(server: Any, data: Path, tmp_path: Path) -> None:
    hexes = [key.hex() for key in KEYS]
    ok(server.address, "put", "n", "--register", *hexes, "--file", data)
    old = tmp_path / "old"
    old.write_text("old")

    missed = kvdock(server.address, "get", "n", "ab" * 32, "--file", old)
    assert missed.returncode == 1
    assert old.read_text() == "old"

    part = kvdock(server.address, "get", "n", hexes[0], "ab" * 32, "--file", old, "--json")
    assert part.returncode == 1
    assert json.loads(part.stdout) == {"chunks": 2, "found": 1, "bytes": SHARD_BYTES}
    assert b"wrote the 1 chunks before it" in part.stderr
    assert old.read_bytes() == data.read_bytes()[:SHARD_BYTES]


MISTAKES = [
    (["lookup", "n", "xyz"], 2, "not hexadecimal"),
    (["lookup", "n", "abcd"], 2, "a key has 64"),
    (["lookup", "n"], 2, "either keys or --tokens"),
    (["lookup", "n", "--tokens", "/nowhere"], 2, "cannot read /nowhere: No such file"),
    (["lookup", "n", "--tokens", "/dev/null", "--chunk-tokens", "4"], 2, "0 tokens"),
    (["lookup", "n", "ab" * 32], 1, "not registered"),
    (["ls", "n"], 1, "not registered"),
    (["ls", "--label", "model"], 2, "NAME=VALUE"),
    (["clear", "n"], 1, "not registered"),
    (["clear"], 2, "NAMESPACE"),
    (["clear", ""], 1, "not registered"),
    (["clear", "n", "--all"], 2, "NAMESPACE"),
    (["put", "n", "ab" * 32, "--register", "--file", "/dev/null"], 2, "0 bytes cannot be parted"),
    (["put", "n", "--tokens", "-"], 2, "both"),
    (["get", "n", "ab" * 32, "--json"], 2, "--file"),
    (["status", "--address", "nonsense"], 2, "nonsense"),
]


def test_what_cannot_be_done_is_said(
    server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVDOCK_ADDRESS", server.address)

    for arguments, status, message in MISTAKES:
        assert main(arguments) == status, arguments
        assert message in capsys.readouterr().err


def test_keys_from_stdin_are_alone_there_and_there_are_some(server: Any, data: Path) -> None:
    for arguments, message in (
        (["put", "n", "-"], "both --file and the keys would be read from stdin"),
        (["put", "n", "-", "--register", "--file", data], "stdin has no keys"),
        (["get", "n", "-"], "stdin has no keys"),
    ):
        done = kvdock(server.address, *arguments, stdin=b"\n")
        assert (done.returncode, done.stderr.decode()) == (2, f"kvdock: {message}\n")
    hexes = "\n".join(key.hex() for key in KEYS).encode()
    ok(server.address, "put", "n", "-", "--register", "--file", data, stdin=hexes)


def test_the_help_shows_any_default_address() -> None:
    assert b"unix:///tmp/100%d.sock" in ok("unix:///tmp/100%d.sock", "status", "--help")


def test_a_reader_that_has_seen_enough_is_no_error(server: Any, data: Path, tokens: Path) -> None:
    ok(server.address, "put", "n", "--register", "--tokens", tokens, "--file", data)
    line = f"{sys.executable} -m kvdock get n --tokens {tokens} | head -c 1 | wc -c"

    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", line],
        capture_output=True,
        timeout=60,
        check=False,
        env=os.environ | {"KVDOCK_ADDRESS": server.address},
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, b"1", b"")


def test_serve_becomes_the_server(tmp_path: Path) -> None:
    shown = ok("", "serve", "--help").decode()
    assert "--memory" in shown
    assert len(shown.splitlines()) <= 24

    socket = tmp_path / "k.sock"
    process = subprocess.Popen(
        [sys.executable, "-m", "kvdock", "serve", "--memory", "8MiB", "--listen", str(socket)],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert any("serving at" in line for line in process.stderr)
    assert json.loads(ok(f"unix://{socket}", "status", "--json"))["pid"] == process.pid
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0


def test_a_bar_appears_once_it_takes_over_a_second() -> None:
    def shown(seconds: float) -> str:
        code = (
            "import time; from kvdock.cli.output import transfer_bar\n"
            "with transfer_bar('put', 100) as advance:\n"
            f"    advance(20); time.sleep({seconds}); advance(30)\n"
        )
        leader, follower = pty.openpty()
        subprocess.run([sys.executable, "-c", code], stderr=follower, timeout=30, check=True)
        os.close(follower)
        text = b""
        try:
            while part := os.read(leader, 4096):
                text += part
        except OSError:
            # How Linux tells that the other end of a terminal is closed.
            pass
        os.close(leader)
        return text.decode()

    assert shown(0.1) == ""
    assert "50/100 bytes" in shown(1.1)


def test_importing_the_library_is_light() -> None:
    code = "import kvdock, kvdock.aio, sys; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()

    assert not {"rich", "numpy", "torch", "kvdock_server", "kvdock.cli"} & set(modules)


@pytest.fixture
def doctor(server: Any) -> Any:
    def run(address: str = "", **environment: str) -> tuple[int, dict[str, dict[str, str]]]:
        done = kvdock(address or server.address, "doctor", "--json", **environment)
        assert not done.stderr, done.stderr.decode()
        return done.returncode, {entry["subject"]: entry for entry in json.loads(done.stdout)}

    return run


def test_doctor_finds_nothing_wrong_where_nothing_is(server: Any, doctor: Any) -> None:
    status, findings = doctor()

    assert status == 0
    assert not [entry for entry in findings.values() if entry["verdict"] == "broken"]
    for subject in ("socket", "server", "version", "pool mapping", "/dev/shm", "grpcio"):
        assert findings[subject]["verdict"] == "ok"
    assert b"pool mapping" in ok(server.address, "doctor")


def test_doctor_and_a_variable_that_cannot_be_used(server: Any) -> None:
    done = kvdock("foo", "doctor", "--json", "--address", server.address)

    assert done.returncode == 0, done.stderr.decode()
    findings = {entry["subject"]: entry for entry in json.loads(done.stdout)}
    assert findings["address"]["verdict"] == "warning"
    assert "$KVDOCK_ADDRESS cannot be used: address 'foo'" in findings["address"]["text"]
    assert findings["server"]["verdict"] == "ok"


def test_doctor_and_sockets(server: Any, doctor: Any, tmp_path: Path) -> None:
    status, findings = doctor(f"unix://{tmp_path}/none.sock")
    assert status == 1
    assert "does not exist" in findings["socket"]["text"]
    assert "kvdock serve" in findings["socket"]["advice"]

    (tmp_path / "file").touch()
    status, findings = doctor(f"unix://{tmp_path}/file")
    assert "no socket" in findings["socket"]["text"]

    server.kill()
    status, findings = doctor()
    assert status == 1
    assert "nobody listens" in findings["socket"]["text"]
    assert findings["server"]["verdict"] == "broken"


def test_doctor_and_what_all_may_write_to(server: Any, doctor: Any) -> None:
    server.socket.chmod(0o777)
    status, findings = doctor()
    assert status == 1
    assert findings["socket"]["verdict"] == "broken"
    assert f"{server.socket} has mode 0777" in findings["socket"]["text"]
    assert findings["socket"]["advice"] == f"chmod 600 {server.socket}"
    server.socket.chmod(0o600)

    server.socket.parent.chmod(0o777)
    status, findings = doctor()
    assert status == 1
    assert f"{server.socket.parent} has mode 0777" in findings["socket"]["text"]
    assert findings["server"]["verdict"] == "broken"
    server.socket.parent.chmod(0o700)

    _, findings = doctor(KVDOCK_SERVER_USER="nobody-of-this-name")
    assert "KVDOCK_SERVER_USER=nobody-of-this-name" in findings["socket"]["text"]


def test_doctor_and_a_server_that_hangs(server: Any) -> None:
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        began = time.monotonic()
        done = kvdock(server.address, "doctor", "--timeout", "0.5")
        assert time.monotonic() - began < 10
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    assert done.returncode == 1
    assert "did not answer in time" in done.stdout.decode()


def test_doctor_and_proxies(doctor: Any) -> None:
    _, findings = doctor(http_proxy="http://127.0.0.1:1")
    assert findings["proxy"]["verdict"] == "note"

    _, findings = doctor("192.0.2.1:1", http_proxy="http://127.0.0.1:1", no_proxy="")
    assert findings["proxy"]["verdict"] == "warning"
    assert "add 192.0.2.1 to no_proxy" in findings["proxy"]["advice"]

    _, findings = doctor("192.0.2.1:1", http_proxy="http://127.0.0.1:1", no_proxy="192.0.2.1")
    assert findings["proxy"]["verdict"] == "ok"


def test_doctor_and_plugins_that_are_filtered_out(doctor: Any) -> None:
    status, findings = doctor(VLLM_PLUGINS="another")
    if "vLLM plugin" in findings:
        assert status == 1
        assert "add kvdock to VLLM_PLUGINS" in findings["vLLM plugin"]["advice"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        # A file stays mapped while a failing call still holds views of it.
        (["put", "n", "ab" * 32, "--file", "DATA"], 1, "not registered"),
        (["put", "n", "ab" * 32, "--file", "DATA", "--register", "--group", "-1"], 2, "-1"),
        (["put", "n m", "ab" * 32, "--file", "DATA", "--register"], 2, "without space"),
        (["put", "n", "ab" * 32, "--file", "DATA", "--parent", "xyz"], 2, "not hexadecimal"),
        (["put", "n", "ab" * 32, "--file", "DATA", "--address", "/nowhere"], 1, "kvdock serve"),
    ],
)
def test_a_put_that_fails_says_why(
    server: Any, data: Path, arguments: list[str], status: int, message: str
) -> None:
    done = kvdock(server.address, *(data if word == "DATA" else word for word in arguments))

    assert done.returncode == status, done.stderr.decode()
    assert message in done.stderr.decode()
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"[1, 2.5]", "2.5 is no integer"),
        (b"[1, true]", "true is no integer"),
        (b'[1, "2"]', '"2" is no integer'),
        (b"[[1]]", "[1] is no integer"),
        (b"[1, -1]", "token_ids[1] is -1"),
        (b"1 2.5", "2.5"),
        (b"\xff\xfe", "no text"),
        (b"[" * 100_000, "no token ids"),
    ],
)
def test_what_is_no_token_is_refused(server: Any, text: bytes, message: str) -> None:
    done = kvdock(server.address, "lookup", "n", "--tokens", "-", "--chunk-tokens", "1", stdin=text)

    assert done.returncode == 2, done.stderr.decode()
    assert message in done.stderr.decode()
    assert "stdin" in done.stderr.decode()


@pytest.mark.parametrize(
    "option", [["--timeout", "0"], ["--timeout", "nan"], ["--chunk-tokens", "0"]]
)
def test_numbers_that_mean_nothing_are_refused(server: Any, option: list[str]) -> None:
    done = kvdock(server.address, "lookup", "n", "ab" * 32, *option)

    assert done.returncode == 2
    assert f"{option[1]} is not a positive number" in done.stderr.decode()


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("kvdock status > /dev/full", 1, "kvdock: [Errno 28] No space left on device\n"),
        ("kvdock get n --tokens T > /dev/full", 1, "kvdock: [Errno 28] No space left on device\n"),
        ("kvdock status >&-", 0, ""),
        ("kvdock doctor >&-", 0, ""),
        ("kvdock get n --tokens T >&-", 0, ""),
        ("kvdock lookup n zz 2>&-", 2, ""),
        (
            "kvdock put n --tokens T <&-",
            2,
            "kvdock: 0 bytes cannot be parted into 3 equal shards\n",
        ),
    ],
)
def test_full_and_closed_streams(
    server: Any, data: Path, tokens: Path, line: str, status: int, message: str
) -> None:
    ok(server.address, "put", "n", "--register", "--tokens", tokens, "--file", data)
    done = subprocess.run(
        line.replace("kvdock", f"{sys.executable} -m kvdock", 1).replace(" T", f" {tokens}"),
        shell=True,
        stderr=subprocess.PIPE,
        check=False,
        env=os.environ | {"KVDOCK_ADDRESS": server.address},
    )
    assert (done.returncode, done.stderr.decode()) == (status, message)


def test_an_empty_address_is_not_the_default_one(server: Any) -> None:
    done = kvdock(server.address, "clear", "--all", "--address", "")

    assert done.returncode == 2
    assert b"address ''" in done.stderr
