"""Settings of the connector, from vLLM's ``kv_connector_extra_config``.

None is needed. Keys are written with the prefix ``kvdock.``, so that they stand beside those of
other connectors::

    --kv-transfer-config '{"kv_connector": "KVDockConnector", "kv_role": "kv_both",
                           "kv_connector_extra_config": {"kvdock.address": "unix:///run/kvdock.sock"}}'
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Config:
    """Raises ValueError, naming key and value, for what makes no sense."""

    address: Address
    """``kvdock.address``. Default: ``$KVDOCK_ADDRESS``, else this user's socket on this host."""
    save_decode: bool = True
    """``kvdock.save_decode``: store generated tokens' KV too, not only the prompt's."""
    autostart: bool = False
    """``kvdock.autostart``: start a server that outlives the engine if none answers locally."""
    chunk_tokens: int | None = None
    """``kvdock.chunk_tokens``. Default: what the server announces, the same for all engines."""
    lookup_timeout: float = 0.1
    """``kvdock.lookup_timeout_ms``, here in seconds: how long a new request waits for the answer
    before it goes on without cache."""
    transfer_mode: TransferMode = TransferMode.UNSPECIFIED
    """``kvdock.transfer_mode``: ``auto`` (UNSPECIFIED), ``server`` or ``shared``."""
    mla_on_cpu: bool = False
    """``kvdock.mla_on_cpu``: use hits also where they change what an MLA model answers."""
    events: bool = True
    """``kvdock.events``: tell of KVDock's cache among the engine's KV events, if it has any."""

    @classmethod
    def from_vllm(cls, vllm_config: VllmConfig) -> Config:
        """The settings of this engine. Raises ValueError also for an unknown ``kvdock.`` key."""
        transfer: Any = vllm_config.kv_transfer_config
        return cls.from_mapping(transfer.kv_connector_extra_config or {})

    @classmethod
    def from_mapping(cls, extra_config: Mapping[str, Any]) -> Config:
        """As :meth:`from_vllm`. Keys of others are left alone."""
        ours = {
            key.removeprefix(PREFIX): value
            for key, value in extra_config.items()
            if key.startswith(PREFIX)
        }
        values: dict[str, Any] = {}
        text = ours.pop("address", None)
        if text is not None and not isinstance(text, str):
            raise ValueError(f"{PREFIX}address is {text!r}: it must be a string")
        values["address"] = _address(text)
        for name in ("save_decode", "autostart", "mla_on_cpu", "events"):
            if name in ours:
                values[name] = _switch(name, ours.pop(name))
        if "chunk_tokens" in ours:
            values["chunk_tokens"] = _number("chunk_tokens", ours.pop("chunk_tokens"), 65_536)
        if "lookup_timeout_ms" in ours:
            milliseconds = _number("lookup_timeout_ms", ours.pop("lookup_timeout_ms"), 60_000)
            values["lookup_timeout"] = milliseconds / 1000
        if "transfer_mode" in ours:
            values["transfer_mode"] = _transfer_mode(ours.pop("transfer_mode"))
        if ours:
            _refuse(next(iter(ours)))
        return cls(**values)


def _address(text: str | None) -> Address:
    try:
        return addresses.parse(text or addresses.default_address())
    except InvalidArgument as error:
        source = f"{PREFIX}address" if text else f"${addresses.ENVIRONMENT_VARIABLE}"
        raise ValueError(f"{source} cannot be used: {error.message}") from None


def _switch(name: str, value: object) -> bool:
    """True or False; also spelled as text, since command lines quote what they can."""
    spelled = {"true": True, "false": False}.get(str(value).lower())
    if spelled is None:
        raise ValueError(f"{PREFIX}{name} is {value!r}: it must be true or false")
    return spelled


def _transfer_mode(value: object) -> TransferMode:
    mode = _TRANSFER_MODES.get(str(value))
    if mode is None:
        known = ", ".join(_TRANSFER_MODES)
        raise ValueError(f"{PREFIX}transfer_mode is {value!r}: it must be one of {known}")
    return mode


def _number(name: str, value: object, most: int) -> int:
    text = "" if isinstance(value, bool) else str(value)
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= most):
        raise ValueError(f"{PREFIX}{name} is {value!r}: it must be a whole number from 1 to {most}")
    return int(text)


def _refuse(name: str) -> None:
    known = [
        "address",
        "save_decode",
        "autostart",
        "chunk_tokens",
        "lookup_timeout_ms",
        "transfer_mode",
        "mla_on_cpu",
        "events",
    ]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {PREFIX}{near[0]}?" if near else f"known are {', '.join(known)}"
    raise ValueError(f"{PREFIX}{name} is no setting of KVDock: {hint}")
