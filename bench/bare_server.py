"""A gRPC server that does as little as one can, to compare KVDock's rates with.

It is a grpc.aio server of raw bytes, without messages, state or copies:

* /bare/Turn, a bidirectional stream: the first four bytes of each message (little-endian) say how
  many bytes its answer has.
* /bare/Upload, a client stream: answers with the number of bytes that came, in eight bytes.
* /bare/Download, a server stream: the request says how many messages to send, of how many bytes.

Run this file as a program, with the address to listen at. It prints a line when it is ready, and
stops at the end of its input.
"""

from __future__ import annotations

import asyncio
import struct
import sys
from collections.abc import AsyncIterator

import grpc

OPTIONS = [
    ("grpc.max_receive_message_length", 4 << 20),
    ("grpc.max_send_message_length", 4 << 20),
]


async def turn(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
    answer = b""
    async for request in requests:
        wanted = int.from_bytes(request[:4], "little")
        if len(answer) != wanted:
            answer = bytes(wanted)
        yield answer


async def upload(requests: AsyncIterator[bytes], context: object) -> bytes:
    total = 0
    async for request in requests:
        total += len(request)
    return struct.pack("<Q", total)


async def download(request: bytes, context: object) -> AsyncIterator[bytes]:
    count, nbytes = struct.unpack("<QQ", request)
    message = bytes(nbytes)
    for _ in range(count):
        yield message


async def main(target: str) -> None:
    server = grpc.aio.server(options=OPTIONS)
    handlers = {
        "Turn": grpc.stream_stream_rpc_method_handler(turn),
        "Upload": grpc.stream_unary_rpc_method_handler(upload),
        "Download": grpc.unary_stream_rpc_method_handler(download),
    }
    generic = grpc.method_handlers_generic_handler("bare", handlers)
    server.add_generic_rpc_handlers((generic,))
    server.add_insecure_port(target)
    await server.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
