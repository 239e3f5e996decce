"""The calls of a client that are about pins. Each face says in ``_call`` how a request is sent."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from kvdock._verbs import Call, Request, Response, Result, within_limits
from kvdock.errors import InvalidArgument
from kvdock.pin import Keep, PinStatus, Unpinned
from kvdock.v1 import admin_pb2, admin_pb2_grpc


class PinVerbs(ABC):
    """What a client can ask of pins."""

    _admin: admin_pb2_grpc.AdminServiceStub

    @abstractmethod
    def _call(
        self, method: Any, call: Call[Request, Response, Result], timeout: float | None
    ) -> Result:
        """Sends the request, and returns what the call makes of the answer."""

    @abstractmethod
    def _download(
        self, method: Any, request: Any, feed: Any, result: Any, timeout: float | None
    ) -> Any:
        """Sends the request, feeds each answer, and returns the result."""

    def pin(
        self,
        namespace: str,
        keys: Sequence[bytes],
        keep: Keep | None = None,
        *,
        timeout: float | None = None,
    ) -> int:
        """Keeps what is cached of a prompt from eviction: what a lookup of these keys would lock.

        ``keep`` None: under the name "default", until :meth:`unpin`. Returns how many chunks, from
        the first on, are kept. Raises PinLimit if pins may not keep so much, UnknownNamespace.
        """
        return self._call(self._admin.Pin, _pin(namespace, keys, keep or Keep()), timeout)

    def unpin(
        self,
        pin: str | None = None,
        *,
        all: bool = False,
        namespace: str = "",
        timeout: float | None = None,
    ) -> Unpinned:
        """Ends the pins of one name, or ``all``; with ``namespace`` only those of a namespace.

        Raises InvalidArgument unless one of the two is given.
        """
        return self._call(self._admin.Unpin, _unpin(pin, all, namespace), timeout)

    def pins(self, namespace: str = "", *, timeout: float | None = None) -> list[PinStatus]:
        """The pins of all namespaces, or of one, in the order in which they were made."""
        found: list[PinStatus] = []
        request = _list_pins(namespace)
        pins: list[PinStatus] = self._download(
            self._admin.ListPins,
            request,
            lambda response: found.append(PinStatus.from_proto(response.pin)),
            lambda: found,
            timeout,
        )
        return pins


@within_limits("pin")
def _pin(
    namespace: str, keys: Sequence[bytes], keep: Keep
) -> Call[admin_pb2.PinRequest, admin_pb2.PinResponse, int]:
    return Call(
        admin_pb2.PinRequest(namespace=namespace, keys=keys, keep=keep.to_proto()),
        lambda response: response.kept_chunks,
    )


@within_limits("unpin")
def _unpin(
    pin: str | None, everything: bool, namespace: str
) -> Call[admin_pb2.UnpinRequest, admin_pb2.UnpinResponse, Unpinned]:
    if (pin is not None) == everything:
        raise InvalidArgument("unpin takes either the name of a pin or all=True")
    request = (
        admin_pb2.UnpinRequest(all=True, namespace=namespace)
        if pin is None
        else admin_pb2.UnpinRequest(pin=pin, namespace=namespace)
    )
    return Call(request, lambda answer: Unpinned(answer.pins, answer.parts, answer.bytes))


@within_limits("pins")
def _list_pins(namespace: str) -> admin_pb2.ListPinsRequest:
    return admin_pb2.ListPinsRequest(namespace=namespace)
