"""Pins: names under which chunks are kept from eviction."""

from __future__ import annotations

from dataclasses import dataclass

from kvdock.errors import InvalidArgument
from kvdock.v1 import admin_pb2, types_pb2

DEFAULT_PIN = "default"


@dataclass(frozen=True, slots=True)
class Keep:
    """Asks that chunks, and what comes before them, be kept from eviction under a name."""

    pin: str = DEFAULT_PIN
    """1 to 128 printable ASCII characters without space. A pin belongs to one namespace."""
    seconds: float | None = None
    """For at least so long, 30 days at most. None: until Unpin."""

    def to_proto(self) -> types_pb2.Keep:
        if self.seconds is None:
            return types_pb2.Keep(pin=self.pin)
        # On the wire 0 means until Unpin.
        if not self.seconds > 0:
            raise InvalidArgument(
                f"a pin for {self.seconds:g} seconds: give a positive number, or None for until "
                "unpin"
            )
        return types_pb2.Keep(pin=self.pin, ttl_ms=max(1, round(self.seconds * 1000)))


@dataclass(frozen=True, slots=True)
class PinStatus:
    """A pin and what it keeps."""

    namespace: str
    pin: str
    parts: int
    nbytes: int
    """Memory of the parts, in slots."""
    first_end: float | None
    """In how many seconds it lets go of the first of them. None: of none before Unpin."""
    last_end: float | None
    """In how many seconds it lets go of the last of them, and ends. None: not before Unpin."""

    @classmethod
    def from_proto(cls, message: admin_pb2.PinStatus) -> PinStatus:
        return cls(
            message.namespace,
            message.pin,
            message.parts,
            message.bytes,
            message.first_end_ms / 1000 or None,
            message.last_end_ms / 1000 or None,
        )


@dataclass(frozen=True, slots=True)
class Unpinned:
    """What an Unpin released."""

    pins: int
    parts: int
    """How many no pin keeps any more."""
    nbytes: int
