from pathlib import Path

import pytest

from kvdock.address import default_address, parse
from kvdock.errors import InvalidArgument


@pytest.mark.parametrize("given", ["unix:///run/k.sock", "unix:/run/k.sock", "/run/k.sock"])
def test_a_socket_has_one_canonical_spelling(given: str) -> None:
    address = parse(given)

    assert str(address) == "unix:///run/k.sock"
    assert address.socket_path == Path("/run/k.sock")
    assert address.is_local


def test_a_relative_socket_is_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert parse("unix:k.sock").socket_path == tmp_path / "k.sock"


@pytest.mark.parametrize(
    ("given", "text", "is_local"),
    [
        ("tcp://10.0.0.7:50051", "10.0.0.7:50051", False),
        ("cache.example:1", "cache.example:1", False),
        ("localhost:50051", "localhost:50051", True),
        ("127.0.0.1:50051", "127.0.0.1:50051", True),
        ("[::1]:50051", "[::1]:50051", True),
        ("[2001:db8::1]:50051", "[2001:db8::1]:50051", False),
    ],
)
def test_tcp(given: str, text: str, is_local: bool) -> None:
    address = parse(given)

    assert (address.text, address.is_local, address.socket_path) == (text, is_local, None)


@pytest.mark.parametrize(
    "given",
    [
        *("", "host", "host:", ":1", "host:0", "host:65536", "host:http", "::1:50051", "a/b:1"),
        *("unix:", "unix://", "unix:////", "unix:///" + "x" * 107),
    ],
)
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(InvalidArgument, match=r"address|socket"):
        parse(given)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ("http://h:1", "'http' is no scheme of KVDock's; write host:port, or unix:///path"),
        ("grpc://h:5", "'grpc' is no scheme"),
        ("tcp://http://h:1", "'http' is no scheme"),
        ("nowhere", "neither host:port nor unix:///path"),
        ("dns:///h:1", "'dns' is no scheme"),
        ("a/b:1", "'a/b' is no host's name"),
        ("ipv4:10.0.0.7:1", "'ipv4:10.0.0.7' is no host's name"),
        ("my host:1", "'my host' is no host's name"),
        ("user@host:1", "'user@host' is no host's name"),
        ("[host]:1", r"'\[host\]' is no host's name"),
        ("::1:50051", r"write an IPv6 host and its port as \[::1\]:7000"),
        ("2001:db8::1", "write an IPv6 host and its port as"),
        ("host:0", "port 0 is not in 1 to 65535"),
    ],
)
def test_it_says_what_is_wrong(given: str, what: str) -> None:
    with pytest.raises(InvalidArgument, match=what):
        parse(given)


def test_the_default_is_the_variable_then_the_runtime_folder_then_tmp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVDOCK_ADDRESS", "host:1")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_address() == "host:1"

    monkeypatch.delenv("KVDOCK_ADDRESS")
    assert default_address() == "unix:///run/user/7/kvdock.sock"

    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_address().startswith("unix:///tmp/kvdock-")
