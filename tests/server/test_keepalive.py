"""Clients that ping while they have no call under way, as Go's do, keep their connections."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from wire import DEADLINE, Wire

PING, GOAWAY = 6, 7
ACK = 1
INTERVAL_MS = 100

# The server itself, but that pings may come every 0.1 s instead of every 5.
SERVER_IN_A_HURRY = f"""
import sys
from kvdock_server import __main__
from kvdock_server.rpc import server
name = "grpc.http2.min_ping_interval_without_data_ms"
assert dict(server._OPTIONS)[name] == 5_000
server._OPTIONS[:] = [*(dict(server._OPTIONS) | {{name: {INTERVAL_MS}}}).items()]
sys.exit(__main__.main())
"""


def frame(kind: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """An HTTP/2 frame of the connection."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + bytes(4) + payload


def next_frame(connection: socket.socket) -> tuple[int, int, bytes]:
    """Kind, flags and payload of the next frame."""
    head = receive(connection, 9)
    return head[3], head[4], receive(connection, int.from_bytes(head[:3], "big"))


def receive(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        piece = connection.recv(nbytes - len(data))
        assert piece, "the server closed the connection"
        data += piece
    return data


def test_pings_without_a_call_are_answered(start_server: Callable[..., Any]) -> None:
    server = start_server(program=("-c", SERVER_IN_A_HURRY))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(DEADLINE)
        connection.connect(str(server.socket))
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4))
        for number in range(6):  # the third strike would have been the end
            connection.sendall(frame(PING, struct.pack(">Q", number)))
            while True:
                kind, flags, payload = next_frame(connection)
                assert kind != GOAWAY, payload
                if (kind, flags) == (PING, ACK):
                    break
            assert payload == struct.pack(">Q", number)
            time.sleep(2 * INTERVAL_MS / 1000)


@pytest.mark.skipif(
    "KVDOCK_LONG_TESTS" not in os.environ, reason="takes 2 minutes: set KVDOCK_LONG_TESTS"
)
def test_an_idle_client_that_pings_every_10_seconds_stays_connected(server: Any) -> None:
    channel = grpc.insecure_channel(
        server.address.replace("unix://", "unix:"),
        options=[
            ("grpc.keepalive_time_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
        ],
    )
    states: list[grpc.ChannelConnectivity] = []
    channel.subscribe(states.append, try_to_connect=True)
    grpc.channel_ready_future(channel).result(DEADLINE)
    states.clear()
    time.sleep(120)
    assert states in ([], [grpc.ChannelConnectivity.READY])
    channel.close()
    wire = Wire(server.address)
    assert wire.status().epoch
    wire.channel.close()
