"""Settings of the connector, from vLLM's ``kv_connector_extra_config``.

All are optional. Their keys begin with ``kvdock.``, so that they can stand beside the keys of other
connectors::

    --kv-transfer-config '{"kv_connector": "KVDockConnector", "kv_role": "kv_both",
                           "kv_connector_extra_config": {"kvdock.address": "unix:///run/kvdock.sock"}}'
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvdock import address as addresses
from kvdock.address import Address
from kvdock.errors import InvalidArgument
from kvdock.types import TransferMode

if TYPE_CHECKING:
    from vllm.config import VllmConfig

PREFIX = "kvdock."

_TRANSFER_MODES = {
    "auto": TransferMode.UNSPECIFIED,
    "server": TransferMode.SERVER,
    "shared": TransferMode.SHARED,
}


# What vLLM does with a request whose load failed (its kv_load_failure_policy).
RECOMPUTE = "recompute"
FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Config:
    """The settings of one engine."""

    address: Address
    """``kvdock.address``. Default: ``$KVDOCK_ADDRESS``, else this user's socket on this host."""
    save_decode: bool = True
    """``kvdock.save_decode``: store the KV of generated tokens too, not only the prompt's."""
    autostart: bool = False
    """``kvdock.autostart``: start a server if none answers on this host. It outlives the engine."""
    chunk_tokens: int | None = None
    """``kvdock.chunk_tokens``. Default: what the server announces to all engines."""
    lookup_timeout: float = 0.1
    """``kvdock.lookup_timeout_ms``, here in seconds: how long a new request waits for its lookup
    before it goes on without cache."""
    transfer_mode: TransferMode = TransferMode.UNSPECIFIED
    """``kvdock.transfer_mode``: ``auto`` (UNSPECIFIED), ``server`` or ``shared``."""
    mla_on_cpu: bool = False
    """``kvdock.mla_on_cpu``: use hits although they change what an MLA model on a CPU answers."""
    state_interval_tokens: int | None = None
    """``kvdock.state_interval_tokens``: also store a recurrent state that vLLM does not keep, where
    the last one is so many tokens behind. Default: only those that vLLM keeps."""
    events: bool = True
    """``kvdock.events``: publish events of KVDock's cache, if the engine publishes KV events."""
    load_failure_policy: str = RECOMPUTE
    """``kvdock.load_failure_policy``: what cannot be loaded is computed (RECOMPUTE), or its request
    ends with an error (FAIL)."""

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> Config:
        """Reads the engine's settings. Raises ValueError, naming key and value, for a wrong one."""
        transfer: Any = vllm_config.kv_transfer_config
        return cls.from_mapping(transfer.kv_connector_extra_config or {})

    @classmethod
    def from_mapping(cls, extra_config: Mapping[str, Any]) -> Config:
        """Like :meth:`from_vllm`. Ignores keys without the prefix ``kvdock.``."""
        values: dict[str, Any] = {}
        for key, value in extra_config.items():
            if not key.startswith(PREFIX):
                continue
            name = key.removeprefix(PREFIX)
            if name not in _SETTINGS:
                raise ValueError(_unknown(name))
            field, read = _SETTINGS[name]
            values[field] = read(key, value)
        if "address" not in values:
            values["address"] = _address("", None)
        return cls(**values)


def _address(key: str, value: object) -> Address:
    """Reads an address. None or an empty one stands for the default."""
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{key} is {value!r}: it must be a string")
    try:
        return addresses.parse(value or addresses.default_address())
    except InvalidArgument as error:
        source = key if value else f"${addresses.ENVIRONMENT_VARIABLE}"
        raise ValueError(f"{source} cannot be used: {error.message}") from None


def _switch(key: str, value: object) -> bool:
    """Reads a truth value. It may be spelled as text, since command lines quote what they can."""
    spelled = {"true": True, "false": False}.get(str(value).lower())
    if spelled is None:
        raise ValueError(f"{key} is {value!r}: it must be true or false")
    return spelled


def _transfer_mode(key: str, value: object) -> TransferMode:
    mode = _TRANSFER_MODES.get(str(value))
    if mode is None:
        known = ", ".join(_TRANSFER_MODES)
        raise ValueError(f"{key} is {value!r}: it must be one of {known}")
    return mode


def _load_failure_policy(key: str, value: object) -> str:
    if value not in (RECOMPUTE, FAIL):
        raise ValueError(f"{key} is {value!r}: it must be {RECOMPUTE} or {FAIL}")
    return str(value)


def _number(key: str, value: object, most: int) -> int:
    text = "" if isinstance(value, bool) else str(value)
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise ValueError(f"{key} is {value!r}: it must be a whole number from 1 to {most}")
    return int(text)


def _milliseconds(key: str, value: object) -> float:
    return _number(key, value, 60_000) / 1000


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, _SETTINGS, n=1)
    hint = f"did you mean {PREFIX}{near[0]}?" if near else f"known are {', '.join(_SETTINGS)}"
    return f"{PREFIX}{name} is no setting of KVDock: {hint}"


_SETTINGS: dict[str, tuple[str, Callable[[str, object], Any]]] = {
    "address": ("address", _address),
    "save_decode": ("save_decode", _switch),
    "autostart": ("autostart", _switch),
    "chunk_tokens": ("chunk_tokens", partial(_number, most=65_536)),
    "lookup_timeout_ms": ("lookup_timeout", _milliseconds),
    "transfer_mode": ("transfer_mode", _transfer_mode),
    "mla_on_cpu": ("mla_on_cpu", _switch),
    "state_interval_tokens": ("state_interval_tokens", partial(_number, most=1 << 24)),
    "events": ("events", _switch),
    "load_failure_policy": ("load_failure_policy", _load_failure_policy),
}
"""For each key, without prefix: the field of :class:`Config`, and the function that reads it."""
