"""The subcommands that are about pins: what is kept from eviction, and for how long."""

from __future__ import annotations

import argparse

from kvdock.cli import inputs, output
from kvdock.client import Client
from kvdock.errors import InvalidArgument
from kvdock.pin import DEFAULT_PIN, Keep


def pin(arguments: argparse.Namespace) -> int:
    """``kvdock pin``"""
    with _client(arguments) as client:
        keys = inputs.keys(client, arguments)
        kept = client.pin(arguments.namespace, keys, Keep(arguments.name, arguments.seconds))
    if arguments.json:
        output.print_json({"pin": arguments.name, "keys": len(keys), "kept_chunks": kept})
    else:
        print(f"{kept:,} of {len(keys):,} chunks kept by pin {arguments.name}")
    return 0 if kept == len(keys) else 1


def unpin(arguments: argparse.Namespace) -> int:
    """``kvdock unpin``"""
    if (arguments.name is not None) == arguments.all:
        raise InvalidArgument("give either the NAME of a pin or --all")
    with _client(arguments) as client:
        ended = client.unpin(arguments.name, all=arguments.all, namespace=arguments.namespace)
    if arguments.json:
        output.print_json({"pins": ended.pins, "parts": ended.parts, "bytes": ended.nbytes})
    else:
        print(
            f"{ended.pins:,} pins ended; {ended.parts:,} parts, {output.size(ended.nbytes)}, may "
            "be evicted again"
        )
    return 0 if ended.pins or arguments.all else 1


def pins(arguments: argparse.Namespace) -> int:
    """``kvdock pins``"""
    with _client(arguments) as client:
        found = client.pins(arguments.namespace)
    if arguments.json:
        output.print_json(
            [
                {
                    "namespace": each.namespace,
                    "pin": each.pin,
                    "parts": each.parts,
                    "bytes": each.nbytes,
                    "first_end_seconds": each.first_end,
                    "last_end_seconds": each.last_end,
                }
                for each in found
            ]
        )
        return 0
    output.print_table(
        f"Pins at {client.address}",
        ["pin", "namespace", "parts", "size", "lets go"],
        [
            (
                each.pin,
                each.namespace,
                each.parts,
                output.size(each.nbytes),
                _ends(each.first_end, each.last_end),
            )
            for each in found
        ],
    )
    return 0


def add_parsers(
    subcommands: argparse._SubParsersAction[argparse.ArgumentParser],
    keys: argparse.ArgumentParser,
    server: argparse.ArgumentParser,
) -> None:
    """Adds the subcommands; ``keys`` and ``server`` have the arguments that they share."""
    parser = subcommands.add_parser(
        "pin", parents=[keys, server], help="keep the cached chunks of a prompt from eviction"
    )
    parser.add_argument(
        "--name", metavar="NAME", default=DEFAULT_PIN, help="name of the pin (%(default)s)"
    )
    parser.add_argument(
        "--seconds", metavar="N", type=_seconds, help="for how long (until kvdock unpin)"
    )
    parser.set_defaults(run=pin)

    parser = subcommands.add_parser("unpin", parents=[server], help="end a pin")
    parser.add_argument("name", metavar="NAME", nargs="?")
    parser.add_argument("--all", action="store_true", help="every pin")
    parser.add_argument(
        "--namespace", metavar="NAMESPACE", default="", help="only in this one (in all)"
    )
    parser.set_defaults(run=unpin)

    parser = subcommands.add_parser("pins", parents=[server], help="list what pins keep")
    parser.add_argument("namespace", metavar="NAMESPACE", nargs="?", default="")
    parser.set_defaults(run=pins)


def _client(arguments: argparse.Namespace) -> Client:
    return Client(arguments.address, timeout=arguments.timeout)


def _ends(first: float | None, last: float | None) -> str:
    if first is None:
        return "at unpin"
    if last is None:
        return f"from {output.duration(first)} on, the rest at unpin"
    if output.duration(first) == output.duration(last):
        return f"in {output.duration(last)}"
    return f"in {output.duration(first)} to {output.duration(last)}"


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return seconds


# argparse names it in its message when a value is no number.
_seconds.__name__ = "number"
