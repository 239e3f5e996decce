"""The command's arguments, and the function that each subcommand runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kvdock._client_base import DEFAULT_TIMEOUT
from kvdock._version import __version__
from kvdock.address import ENVIRONMENT_VARIABLE, default_address
from kvdock.cli import commands, doctor, events, inputs, pins, replay
from kvdock.errors import InvalidArgument
from kvdock.replay.simulation import POLICIES
from kvdock.replay.trace import MOST_BLOCKS


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The parsed arguments, with the function to call as ``run``. Exits if they are wrong."""
    top, subcommands = _parsers()
    if arguments and arguments[0] in subcommands:
        # Allows options between the keys, which a parser with subcommands does not.
        return subcommands[arguments[0]].parse_intermixed_args(arguments[1:])
    return top.parse_args(arguments)


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of the whole command, for its help, and each subcommand's parser by name."""
    top = argparse.ArgumentParser(
        prog="kvdock",
        description="A KV cache for the inference engines of this host.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"kvdock {__version__}")
    subcommands = top.add_subparsers(metavar="COMMAND", required=True)

    # Only for the help: main() starts the server before anything is parsed.
    subcommands.add_parser("serve", help="run a server (kvdock serve --help)")

    server = argparse.ArgumentParser(add_help=False)
    server.add_argument(
        "--address",
        metavar="ADDRESS",
        default=default_address(),
        help=f"unix:///PATH or HOST:PORT (${ENVIRONMENT_VARIABLE}, else "
        # argparse would take a percent sign in the path for a placeholder.
        f"{default_address().replace('%', '%%')})",
    )
    server.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=_seconds,
        default=DEFAULT_TIMEOUT,
        help="how long to wait for an answer (%(default)g)",
    )
    server.add_argument("--json", action="store_true", help="print JSON, for programs")

    keys = argparse.ArgumentParser(add_help=False)
    keys.add_argument("namespace", metavar="NAMESPACE")
    keys.add_argument(
        "keys",
        metavar="KEY",
        nargs="*",
        help="chunk keys of one prompt in order, 64 hex digits each; - reads them from stdin",
    )
    keys.add_argument(
        "--tokens",
        metavar="FILE",
        help="make the keys from the token ids in FILE (JSON, or integers with blanks between); "
        "- is stdin",
    )
    keys.add_argument(
        "--chunk-tokens",
        metavar="N",
        type=_chunk_tokens,
        help="tokens a chunk (the namespace's own)",
    )

    shard = argparse.ArgumentParser(add_help=False)
    shard.add_argument("--group", metavar="N", type=int, help="KV-cache group (none)")
    shard.add_argument("--shard", metavar="N", type=int, default=0, help="shard (%(default)s)")

    status = subcommands.add_parser("status", parents=[server], help="how the server is doing")
    status.set_defaults(run=commands.status)

    lookup = subcommands.add_parser(
        "lookup", parents=[keys, server], help="how much of a prompt is cached; locks nothing"
    )
    lookup.set_defaults(run=commands.lookup)

    put = subcommands.add_parser(
        "put", parents=[keys, shard, server], help="store chunks, one after another in a file"
    )
    put.add_argument("--file", metavar="FILE", default="-", help="what to store (stdin)")
    put.add_argument("--parent", metavar="KEY", help="key of the chunk before (a prompt's first)")
    put.add_argument(
        "--register",
        action="store_true",
        help="register the namespace first: one shard, one group, shards as long as the file's",
    )
    put.set_defaults(run=commands.put)

    get = subcommands.add_parser(
        "get", parents=[keys, shard, server], help="fetch chunks, one after another into a file"
    )
    get.add_argument("--file", metavar="FILE", default="-", help="where to write (stdout)")
    get.set_defaults(run=commands.get)

    ls = subcommands.add_parser(
        "ls", parents=[server], help="list namespaces, or the chunks of one"
    )
    ls.add_argument("namespace", metavar="NAMESPACE", nargs="?")
    ls.add_argument(
        "--label",
        dest="labels",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="only namespaces with this label; may be repeated",
    )
    ls.set_defaults(run=commands.ls)

    follow = subcommands.add_parser(
        "events", parents=[server], help="what is cached and evicted, as it happens"
    )
    follow.add_argument(
        "--from",
        dest="start",
        metavar="WHERE",
        type=events.start_argument,
        default="now",
        help="now, snapshot (what is there, then the rest), or EPOCH:SEQUENCE (%(default)s)",
    )
    follow.add_argument(
        "--namespace", metavar="NAME", action="append", default=[], help="only this one (all)"
    )
    follow.add_argument("--group", metavar="N", type=int, help="only this KV-cache group (all)")
    follow.set_defaults(run=events.follow)

    pins.add_parsers(subcommands, keys, server)

    clear = subcommands.add_parser("clear", parents=[server], help="forget what is stored")
    clear.add_argument("namespace", metavar="NAMESPACE", nargs="?")
    clear.add_argument("--all", action="store_true", help="in every namespace")
    clear.set_defaults(run=commands.clear)

    _add_replay(subcommands)

    check = subcommands.add_parser(
        "doctor", parents=[server], help="find out what is wrong, and what to do about it"
    )
    check.set_defaults(run=doctor.run)
    return top, dict(subcommands.choices)


def _add_replay(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subcommands.add_parser(
        "replay", help="how much memory, and which policy: what a trace of prompts would find"
    )
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help="JSON lines, each with the hash_ids of one prompt's blocks; - is stdin",
    )
    parser.add_argument(
        "--sizes",
        metavar="N,...",
        help="sizes of the pool, in blocks, or as 8GiB with --bytes-per-token (six of them)",
    )
    parser.add_argument(
        "--bytes-per-token", metavar="SIZE", type=_bytes, help="of KV cache, for example 128KiB"
    )
    parser.add_argument(
        "--block-tokens",
        metavar="N",
        type=_chunk_tokens,
        default=512,
        help="tokens a block of the trace (%(default)s)",
    )
    parser.add_argument(
        "--policies",
        metavar="NAME,...",
        default=",".join(POLICIES),
        help="what to simulate (%(default)s)",
    )
    parser.add_argument(
        "--server",
        metavar="ADDRESS",
        help="measure this server, too, which must hold nothing: unix:///PATH or HOST:PORT",
    )
    parser.add_argument(
        "--most-blocks",
        metavar="N",
        type=_chunk_tokens,
        default=MOST_BLOCKS,
        help="replay the trace's first N blocks; a million take up to 150 MB (%(default)s)",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw the hit rates, as SVG")
    parser.add_argument("--timeout", type=_seconds, default=DEFAULT_TIMEOUT, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    parser.set_defaults(run=replay.run)


def _bytes(text: str) -> int:
    try:
        return inputs.size(text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return seconds


def _chunk_tokens(text: str) -> int:
    tokens = int(text)
    if tokens < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return tokens


# argparse names these in its message when a value is no number.
_seconds.__name__ = "number"
_chunk_tokens.__name__ = "whole number"
