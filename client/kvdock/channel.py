"""Channels to a server, with the options that both faces of the client share."""

from __future__ import annotations

from collections.abc import Sequence

from kvdock.address import Address

MAX_MESSAGE_BYTES = 4 << 20
"""No message of the protocol is larger, in either direction."""

Options = Sequence[tuple[str, int | str]]


def options(address: Address) -> Options:
    """gRPC channel options for a server at ``address``."""
    chosen: list[tuple[str, int | str]] = [
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # Finds a restarted server within about a second; gRPC's own backoff grows to two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # A connection of its own: gRPC would otherwise share one, and its backoff, between all
        # channels of the process that have the same target and options.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if address.is_local:
        # gRPC would otherwise send even 127.0.0.1 through $http_proxy.
        chosen.append(("grpc.enable_http_proxy", 0))
    if address.socket_path is None:
        # Finds a peer that vanished without closing its connection, which a Unix socket's cannot.
        # Our server allows a ping every 5 s. One with gRPC's own limit, a ping in 5 minutes, would
        # answer "Too many pings".
        chosen += [
            ("grpc.keepalive_time_ms", 30_000),
            ("grpc.keepalive_timeout_ms", 10_000),
            ("grpc.http2.ping_timeout_ms", 10_000),
        ]
    return chosen
