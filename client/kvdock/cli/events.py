"""``kvdock events``: prints what is cached and evicted, as it happens."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import datetime

from kvdock.cli import output
from kvdock.client import Client
from kvdock.errors import InvalidArgument
from kvdock.events import (
    Batch,
    Cleared,
    Compacted,
    Cursor,
    Event,
    Filter,
    Message,
    Removed,
    SnapshotPiece,
    Stored,
)
from kvdock.printable import printable

_STARTS = ("now", "snapshot")

# After so many seconds without events the server says that it is there.
_PROGRESS_SECONDS = 5.0


def follow(arguments: argparse.Namespace) -> int:
    """Prints events until it is interrupted. Returns 1 if the log does not reach back to --from."""
    start: Cursor | str = arguments.start
    if start not in _STARTS:
        start = Cursor.parse(arguments.start)
    only = Filter(tuple(arguments.namespace), arguments.group)
    show = _print_json if arguments.json else _print_line
    with Client(arguments.address, timeout=arguments.timeout) as client:
        for message in client.events(start, only=only, progress_interval=_PROGRESS_SECONDS):
            if isinstance(message, Compacted):
                print(
                    f"kvdock: the log of {client.address} does not reach back to {start}: its "
                    f"oldest place is {message.oldest}; --from snapshot begins with what is there",
                    file=sys.stderr,
                )
                return 1
            for event in _events(message):
                show(message, event)
            sys.stdout.flush()
    return 0


def start_argument(text: str) -> str:
    """Checks the value of --from."""
    if text not in _STARTS:
        try:
            Cursor.parse(text)
        except InvalidArgument as error:
            raise argparse.ArgumentTypeError(f"{error.message}, now or snapshot") from None
    return text


def _events(message: Message) -> tuple[Event, ...]:
    match message:
        case Batch():
            return message.events
        case SnapshotPiece():
            return message.stored
        case _:
            return ()


def _print_json(message: Message, event: Event) -> None:
    """One object a line. ``cursor`` is where to resume after it; null if that is impossible."""
    place = _place(message, event)
    line: dict[str, object] = {
        "cursor": None if place is None else str(place),
        "event": type(event).__name__.lower(),
        "namespace": event.namespace,
    }
    if isinstance(message, SnapshotPiece):
        line["snapshot"] = True
    if isinstance(event, Stored | Removed):
        line["key"] = event.key.hex()
        line["group_idx"] = event.group_idx
        line["medium"] = output.enum_name(event.medium)
    if isinstance(event, Stored):
        line["parent_key"] = event.parent_key.hex()
        line["kind"] = output.enum_name(event.kind)
        line["window_tokens"] = event.window_tokens
        if (data := event.data) is not None:
            line["block_hashes"] = [one.hex() for one in data.block_hashes]
            line["parent_block_hash"] = data.parent_block_hash.hex()
            line["tokens"] = len(data.token_ids) // 4
            line["block_size"] = data.block_size
            line["lora_name"] = data.lora_name
            line["hash_scheme"] = data.hash_scheme
            line["extra_keys"] = _as_json(data.extra_keys)
    if isinstance(event, Removed):
        line["block_hashes"] = [one.hex() for one in event.block_hashes]
    print(json.dumps(line))


def _as_json(value: object) -> object:
    """Extra keys: tuples as lists, bytes as {"hex": ...}, text and numbers as they are."""
    if isinstance(value, tuple):
        return [_as_json(one) for one in value]
    return {"hex": value.hex()} if isinstance(value, bytes) else value


def _print_line(message: Message, event: Event) -> None:
    when = ""
    if isinstance(message, Batch):
        when = datetime.fromtimestamp(message.unix_ms / 1000).strftime("%H:%M:%S.%f")[:-3]
    what = type(event).__name__.lower()
    key = "everything" if isinstance(event, Cleared) else ""
    group = medium = ""
    if isinstance(event, Stored | Removed):
        key = event.key.hex()
        medium = output.enum_name(event.medium)
        if event.group_idx is not None:
            group = f"  group {event.group_idx}"
    namespace = printable(event.namespace, output.MOST_CHARACTERS)
    where = f"{medium:7}  {key:64}  {namespace}{group}"
    print(f"{when:12}  {event.sequence:>10}  {what:7}  {where}")


def _place(message: Message, event: Event) -> Cursor | None:
    if isinstance(message, SnapshotPiece):
        # A snapshot that was cut off cannot be resumed, so only its last part has a cursor.
        is_complete = message.last and event is message.stored[-1]
        return message.cursor if is_complete else None
    return Cursor(message.cursor.epoch, event.sequence)
