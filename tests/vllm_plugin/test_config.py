"""Settings are few, and a wrong one is refused at the start, by name."""

from pathlib import Path
from typing import Any

import pytest

from kvdock.types import TransferMode
from kvdock_vllm.config import Config


def test_nothing_need_be_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVDOCK_ADDRESS", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    config = Config.from_mapping({})
    assert config.address.socket_path == Path("/run/user/7/kvdock.sock")
    assert config.save_decode
    assert not config.autostart
    assert config.chunk_tokens is None
    assert config.lookup_timeout == 0.1
    assert config.transfer_mode is TransferMode.UNSPECIFIED
    assert not config.mla_on_cpu
    assert config.events
    assert config.load_failure_policy == "recompute"


def test_the_environment_says_where_and_the_setting_says_it_louder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVDOCK_ADDRESS", "unix:///run/a.sock")
    assert str(Config.from_mapping({}).address) == "unix:///run/a.sock"
    config = Config.from_mapping({"kvdock.address": "cache.example:7000"})
    assert str(config.address) == "cache.example:7000"


def test_all_settings() -> None:
    config = Config.from_mapping(
        {
            "kvdock.address": "unix:///run/k.sock",
            "kvdock.save_decode": False,
            "kvdock.autostart": "true",
            "kvdock.chunk_tokens": 512,
            "kvdock.lookup_timeout_ms": "250",
            "kvdock.transfer_mode": "shared",
            "kvdock.mla_on_cpu": True,
            "kvdock.events": "false",
            "kvdock.load_failure_policy": "fail",
            "lmcache.mp.host": "is not ours",
            "connectors": [],
        }
    )
    assert not config.save_decode
    assert config.autostart
    assert config.chunk_tokens == 512
    assert config.lookup_timeout == 0.25
    assert config.transfer_mode is TransferMode.SHARED
    assert config.mla_on_cpu
    assert not config.events
    assert config.load_failure_policy == "fail"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"kvdock.adress": "x"}, "did you mean kvdock.address"),
        ({"kvdock.colour": 1}, "known are address, save_decode"),
        ({"kvdock.address": 7}, "kvdock.address is 7"),
        ({"kvdock.save_decode": "maybe"}, "kvdock.save_decode is 'maybe'"),
        ({"kvdock.autostart": 1}, "kvdock.autostart is 1"),
        ({"kvdock.chunk_tokens": 0}, "from 1 to 65536"),
        ({"kvdock.chunk_tokens": 1.5}, "kvdock.chunk_tokens is 1.5"),
        ({"kvdock.chunk_tokens": True}, "kvdock.chunk_tokens is True"),
        ({"kvdock.chunk_tokens": "inf"}, "kvdock.chunk_tokens is 'inf'"),
        ({"kvdock.lookup_timeout_ms": -1}, "kvdock.lookup_timeout_ms is -1"),
        ({"kvdock.transfer_mode": "inline"}, "'inline': it must be one of auto, server, shared"),
        ({"kvdock.load_failure_policy": "abort"}, "'abort': it must be recompute or fail"),
        ({"kvdock.lookup_timeout_ms": None}, "kvdock.lookup_timeout_ms is None"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config.from_mapping(extra)


@pytest.mark.parametrize("address", ["nowhere", "http://h:1", "grpc://h:5"])
def test_an_address_that_is_none_says_where_it_stands_and_how_to_write_one(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"^kvdock.address cannot be used: .*unix:///path"):
        Config.from_mapping({"kvdock.address": address})
    monkeypatch.setenv("KVDOCK_ADDRESS", address)
    with pytest.raises(ValueError, match=r"^\$KVDOCK_ADDRESS cannot be used: .*unix:///path"):
        Config.from_mapping({})
