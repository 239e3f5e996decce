"""The subcommands that ask a server something."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from kvdock.cli import inputs, output
from kvdock.client import Client
from kvdock.errors import InvalidArgument
from kvdock.types import (
    ChunkStatus,
    Group,
    Namespace,
    PartStatus,
    SessionRole,
    TransferMode,
)
from kvdock.v1 import admin_pb2

# Tokens a chunk that `put --register` assumes.
_DEFAULT_CHUNK_TOKENS = 32

# `get` asks for this much in one call, and holds it in memory.
_GET_BYTES = 64 << 20

_SUCCESS = (ChunkStatus.STORED, ChunkStatus.EXISTS)


def status(arguments: argparse.Namespace) -> int:
    """``kvdock status``"""
    with _client(arguments) as client:
        answer = client.status()
    if arguments.json:
        output.print_json(output.message_to_json(answer))
        return 0
    pool, index, counters = answer.pool, answer.index, answer.counters
    output.print_facts(
        f"KVDock {answer.version} at {client.address}",
        [
            ("state", "draining" if answer.draining else "serving"),
            ("process", f"{answer.pid}, up {output.duration(answer.uptime_ms / 1000)}"),
            ("epoch", answer.epoch),
            ("chunk", f"{answer.chunk_tokens} tokens"),
            ("features", ", ".join(answer.features) or "none"),
            ("pool", _pool(pool)),
            *(("", _socket(socket)) for socket in pool.sockets),
            (
                "index",
                f"{index.chunks:,} chunks, {index.parts:,} parts in {index.namespaces:,} "
                f"namespaces; {index.pending_parts:,} parts incomplete",
            ),
            (
                "locks",
                f"{index.locks:,} of {index.leases:,} leases on {index.locked_parts:,} parts",
            ),
            ("pins", _pins(answer.pins, counters)),
            ("lookups", _lookups(counters)),
            ("stored", f"{counters.stored_shards:,} shards, {output.size(counters.stored_bytes)}"),
            (
                "retrieved",
                f"{counters.retrieved_shards:,} shards, {output.size(counters.retrieved_bytes)}",
            ),
            ("copied", _copied(counters)),
            (
                "lost",
                f"{counters.evicted_parts:,} parts evicted, {counters.abandoned_parts:,} given up, "
                f"{counters.no_space:,} chunks without room",
            ),
        ],
    )
    if answer.sessions:
        output.print_table(
            "Sessions",
            ["engine", "role", "rank", "shard", "mode", "leases", "reserved", "client"],
            [
                (
                    session.engine_id + (" (expired)" if session.expired else ""),
                    output.message_to_json(session)["role"],
                    session.worker_id,
                    session.kv_worker_id,
                    _mode(session),
                    session.leases,
                    session.reserved_chunks,
                    session.client,
                )
                for session in answer.sessions
            ],
        )
    if answer.sessions_total > len(answer.sessions):
        print(
            f"The oldest {len(answer.sessions):,} of {answer.sessions_total:,} sessions are shown."
        )
    return 0


def lookup(arguments: argparse.Namespace) -> int:
    """``kvdock lookup``"""
    with _client(arguments) as client:
        keys = inputs.keys(client, arguments)
        hit = client.lookup(arguments.namespace, keys, probe=True)
        chunk_tokens = inputs.namespace(client, arguments.namespace).chunk_tokens
    if arguments.json:
        output.print_json(
            {
                "namespace": arguments.namespace,
                "epoch": str(hit.epoch),
                "keys": [key.hex() for key in keys],
                "hit_chunks": hit.chunks,
                "hit_tokens": hit.chunks * chunk_tokens,
                "groups": [
                    {
                        "group_idx": group.group_idx,
                        "first_chunk": group.first_chunk,
                        "end_chunk": group.end_chunk,
                    }
                    for group in hit.groups
                ],
            }
        )
        return 0
    print(f"{hit.chunks:,} of {len(keys):,} chunks, {hit.chunks * chunk_tokens:,} tokens")
    if any(group.group_idx is not None for group in hit.groups):
        output.print_table(
            "To load",
            ["group", "first chunk", "end chunk"],
            [(_group(group.group_idx), group.first_chunk, group.end_chunk) for group in hit.groups],
        )
    return 0


def put(arguments: argparse.Namespace) -> int:
    """``kvdock put``"""
    if arguments.file == inputs.STDIO and inputs.are_from_stdin(arguments):
        raise InvalidArgument("both --file and the keys would be read from stdin")
    content = inputs.content(arguments.file)
    with _client(arguments) as client:
        if arguments.register and not arguments.chunk_tokens:
            arguments.chunk_tokens = _DEFAULT_CHUNK_TOKENS
        keys = inputs.keys(client, arguments)
        shard_bytes, rest = divmod(len(content), len(keys))
        if rest or not shard_bytes:
            raise InvalidArgument(
                f"{len(content):,} bytes cannot be parted into {len(keys):,} equal shards"
            )
        if arguments.register:
            client.register_namespace(
                Namespace(
                    name=arguments.namespace,
                    chunk_tokens=arguments.chunk_tokens,
                    kv_world_size=1,
                    groups=(Group(group_idx=arguments.group, shard_bytes=(shard_bytes,)),),
                    labels={"registered-by": "kvdock put"},
                )
            )
        with output.transfer_bar("put", len(content)) as advance:
            statuses = client.put(
                arguments.namespace,
                keys,
                [
                    content[start : start + shard_bytes]
                    for start in range(0, len(content), shard_bytes)
                ],
                parent=inputs.key(arguments.parent) if arguments.parent else b"",
                group_idx=arguments.group,
                kv_worker_id=arguments.shard,
                progress=advance,
            )
    if arguments.json:
        output.print_json(
            [
                {"key": key.hex(), "status": output.enum_name(status)}
                for key, status in zip(keys, statuses, strict=True)
            ]
        )
    else:
        counts = Counter(output.enum_name(status) for status in statuses)
        print(", ".join(f"{count:,} {name}" for name, count in counts.items()))
    return 0 if all(status in _SUCCESS for status in statuses) else 1


def get(arguments: argparse.Namespace) -> int:
    """``kvdock get``"""
    if arguments.file == inputs.STDIO and sys.stdout.isatty():
        raise InvalidArgument("a terminal shows no bytes: give --file FILE, or redirect stdout")
    if arguments.file == inputs.STDIO and arguments.json:
        raise InvalidArgument("--json needs --file FILE: stdout cannot carry both")
    with _client(arguments) as client:
        keys = inputs.keys(client, arguments)
        shard_bytes = _shard_bytes(
            inputs.namespace(client, arguments.namespace), arguments.group, arguments.shard
        )
        batch = max(1, _GET_BYTES // shard_bytes) if shard_bytes else len(keys)
        found = written = 0
        with contextlib.ExitStack() as stack:
            advance = stack.enter_context(output.transfer_bar("get", shard_bytes * len(keys)))
            file: IO[bytes] | None = None
            for start in range(0, len(keys), batch):
                wanted = keys[start : start + batch]
                shards = client.get(
                    arguments.namespace,
                    wanted,
                    group_idx=arguments.group,
                    kv_worker_id=arguments.shard,
                    progress=advance,
                )
                present = [shard for shard in shards if shard is not None]
                if present and file is None:
                    # Opened only when there is something to write: a miss keeps the old file.
                    file = stack.enter_context(_destination(arguments.file))
                for shard in present:
                    assert file is not None
                    written += file.write(shard)
                found += len(present)
                if len(present) < len(wanted):
                    break
    if arguments.json:
        output.print_json({"chunks": len(keys), "found": found, "bytes": written})
    if found < len(keys):
        print(
            f"kvdock: chunk {found} ({keys[found].hex()}) is not there; wrote the {found:,} chunks "
            f"before it",
            file=sys.stderr,
        )
        return 1
    return 0


def ls(arguments: argparse.Namespace) -> int:
    """``kvdock ls``"""
    with _client(arguments) as client:
        if arguments.namespace is not None:
            return _list_chunks(client, arguments.namespace, as_json=arguments.json)
        entries = client.namespaces(labels=inputs.labels(arguments.labels))
    if arguments.json:
        output.print_json(
            [
                {
                    **output.message_to_json(entry.namespace.to_proto()),
                    "parts": entry.parts,
                    "bytes": entry.nbytes,
                }
                for entry in entries
            ]
        )
        return 0
    output.print_table(
        f"Namespaces at {client.address}",
        ["namespace", "chunk", "shards", "groups", "parts", "size", "labels"],
        [
            (
                entry.namespace.name,
                entry.namespace.chunk_tokens,
                entry.namespace.kv_world_size,
                len(entry.namespace.groups),
                entry.parts,
                output.size(entry.nbytes),
                ", ".join(
                    f"{name}={value}" for name, value in sorted(entry.namespace.labels.items())
                ),
            )
            for entry in entries
        ],
    )
    return 0


def clear(arguments: argparse.Namespace) -> int:
    """``kvdock clear``"""
    if (arguments.namespace is not None) == arguments.all:
        raise InvalidArgument("give either NAMESPACE or --all")
    with _client(arguments) as client:
        parts = client.clear(arguments.namespace, all=arguments.all)
    if arguments.json:
        output.print_json({"parts": parts})
    else:
        print(f"{parts:,} parts cleared")
    return 0


def _client(arguments: argparse.Namespace) -> Client:
    return Client(arguments.address, timeout=arguments.timeout)


def _list_chunks(client: Client, namespace: str, *, as_json: bool) -> int:
    """Prints each part as it comes, since there may be a million."""
    parts = client.chunks(namespace)
    if as_json:
        output.print_json_list(_part_to_json(part) for part in parts)
        return 0
    first = next(parts, None)
    if first is None:
        print("nothing stored")
        return 0
    print(f"{'key':64}  {'group':>5}  {'shards':>6}  {'size':>10}  {'locks':>5}")
    for part in itertools.chain([first], parts):
        note = "" if part.visible else "  incomplete"
        note += "  pinned" if part.pins else ""
        print(
            f"{part.key.hex()}  {_group(part.group_idx):>5}  {part.sealed_shards:>6}  "
            f"{output.size(part.nbytes):>10}  {part.locks:>5}{note}"
        )
    return 0


def _part_to_json(part: PartStatus) -> dict[str, object]:
    return {
        "key": part.key.hex(),
        "parent_key": part.parent_key.hex(),
        "group_idx": part.group_idx,
        "sealed_shards": part.sealed_shards,
        "bytes": part.nbytes,
        "locks": part.locks,
        "visible": part.visible,
        "pins": part.pins,
    }


def _shard_bytes(namespace: Namespace, group_idx: int | None, shard: int) -> int:
    """Bytes of one shard. 0 if not known: the server refuses a shard that does not exist."""
    for group in namespace.groups:
        if group.group_idx == group_idx and group.shard_bytes:
            sizes = group.shard_bytes
            return sizes[shard] if len(sizes) > shard else sizes[0]
    return 0


@contextlib.contextmanager
def _destination(file: str) -> Iterator[IO[bytes]]:
    if file == inputs.STDIO:
        yield sys.stdout.buffer
        return
    try:
        with Path(file).open("wb") as opened:
            yield opened
    except OSError as error:
        raise InvalidArgument(f"cannot write {file}: {error.strerror}") from error


def _group(group_idx: int | None) -> str:
    return "-" if group_idx is None else str(group_idx)


def _pool(pool: admin_pb2.PoolStatus) -> str:
    used = 100 * pool.used_bytes / pool.total_bytes if pool.total_bytes else 0.0
    text = (
        f"{output.size(pool.used_bytes)} of {output.size(pool.total_bytes)} used ({used:.0f}%), "
        f"{output.size(pool.reserved_bytes)} being written"
    )
    if pool.ready_bytes < pool.total_bytes:
        text += f"; {output.size(pool.ready_bytes)} faulted in so far"
    if pool.pinned_bytes:
        text += f"; {output.size(pool.pinned_bytes)} pinned"
    if pool.pin_refused:
        text += f"; {pool.pin_refused}"
    if pool.place_refused:
        text += f"; {pool.place_refused}"
    return text


def _socket(socket: admin_pb2.SocketStatus) -> str:
    nodes = ", ".join(map(str, socket.nodes))
    return (
        f"{output.size(socket.ready_bytes)} on NUMA node{'s' * (len(socket.nodes) > 1)} "
        f"{nodes}, {output.size(socket.free_bytes)} of it free, {len(socket.devices)} GPUs"
    )


def _mode(session: admin_pb2.SessionStatus) -> str:
    """The transfer mode of a worker. Other sessions have none: they move no bytes."""
    if SessionRole(session.role) is not SessionRole.WORKER:
        return "-"
    return output.enum_name(TransferMode(session.mode))


def _copied(counters: admin_pb2.Counters) -> str:
    return (
        f"by the server {output.size(counters.device_to_host_bytes)} from devices, "
        f"{output.size(counters.host_to_device_bytes)} to devices, "
        f"{output.size(counters.device_to_device_bytes)} between devices"
    )


def _pins(pins: admin_pb2.PinTotals, counters: admin_pb2.Counters) -> str:
    text = (
        f"{pins.pins:,} keep {pins.parts:,} parts, {output.size(pins.bytes)} of at most "
        f"{output.size(pins.limit_bytes)}"
    )
    if counters.refused_keeps:
        text += f"; {counters.refused_keeps:,} chunks not kept, for this limit"
    return text


def _lookups(counters: admin_pb2.Counters) -> str:
    text = f"{counters.lookups:,}"
    if counters.lookup_chunks:
        rate = 100 * counters.hit_chunks / counters.lookup_chunks
        text += f", {rate:.1f}% of {counters.lookup_chunks:,} chunks hit"
    return text
