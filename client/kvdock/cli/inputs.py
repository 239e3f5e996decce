"""Keys, token ids and bytes from the command's arguments, from files and from stdin."""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvdock.client import Client
from kvdock.errors import InvalidArgument, UnknownNamespace
from kvdock.keys import KEY_BYTES, chunk_keys
from kvdock.types import Namespace

STDIO = "-"


def keys(client: Client, arguments: argparse.Namespace) -> list[bytes]:
    """The chunk keys that the arguments give, or those of the token ids that they give."""
    if bool(arguments.keys) == bool(arguments.tokens):
        raise InvalidArgument("give either keys or --tokens FILE")
    if arguments.tokens:
        token_ids = _token_ids(_read_text(arguments.tokens), arguments.tokens)
        chunk_tokens = arguments.chunk_tokens or namespace(client, arguments.namespace).chunk_tokens
        try:
            made = chunk_keys(token_ids, chunk_tokens)
        except (ValueError, TypeError) as error:
            raise InvalidArgument(f"{_name(arguments.tokens)}: {error}") from None
        if not made:
            raise InvalidArgument(
                f"{_name(arguments.tokens)} has {len(token_ids)} tokens, less than one chunk of "
                f"{chunk_tokens}"
            )
        return made
    texts: Sequence[str] = arguments.keys
    if are_from_stdin(arguments):
        texts = _read_text(STDIO).split()
        if not texts:
            raise InvalidArgument("stdin has no keys")
    return [key(text) for text in texts]


def are_from_stdin(arguments: argparse.Namespace) -> bool:
    """Whether the keys, or the token ids that they are made of, are read from stdin."""
    return [STDIO] in ([arguments.tokens], arguments.keys)


def labels(texts: Sequence[str]) -> dict[str, str]:
    """The labels that are written as NAME=VALUE."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidArgument(f"label {text!r}: write NAME=VALUE")
        found[name] = value
    return found


def key(text: str) -> bytes:
    """The key that stands for 64 hexadecimal digits."""
    try:
        value = bytes.fromhex(text)
    except ValueError:
        raise InvalidArgument(f"key {text!r} is not hexadecimal") from None
    if len(value) != KEY_BYTES:
        raise InvalidArgument(
            f"key {text!r} has {len(text)} hexadecimal digits; a key has {2 * KEY_BYTES}"
        )
    return value


def size(text: str) -> int:
    """Bytes from a number with a unit, such as ``8GiB`` or ``128KiB``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(I?)B?", text.strip().upper())
    if match is None:
        raise InvalidArgument(f"{text!r} is not a size: write for example 8GiB or 500MB")
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(unit or " "))


def namespace(client: Client, name: str) -> Namespace:
    """The registered namespace of this name. Raises UnknownNamespace."""
    for status in client.namespaces():
        if status.namespace.name == name:
            return status.namespace
    raise UnknownNamespace(
        f"namespace {name!r} is not registered at {client.address}; `kvdock ls` shows which are"
    )


def content(file: str) -> memoryview:
    """The bytes of a file, mapped if possible; of stdin for ``-``."""
    if file == STDIO:
        return memoryview(sys.stdin.buffer.read())
    with _reading(file), Path(file).open("rb") as opened:
        if Path(file).is_file() and Path(file).stat().st_size:
            # Unmapped when the last view is gone. A call that failed may still hold one.
            return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        return memoryview(opened.read())


def _read_text(file: str) -> str:
    with _reading(file):
        encoded = sys.stdin.buffer.read() if file == STDIO else Path(file).read_bytes()
    try:
        return encoded.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{_name(file)} is no text: {error}") from None


@contextlib.contextmanager
def _reading(file: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InvalidArgument(f"cannot read {_name(file)}: {error.strerror}") from error


def _name(file: str) -> str:
    return "stdin" if file == STDIO else file


def _token_ids(text: str, file: str) -> list[int]:
    try:
        if not text.lstrip().startswith("["):
            return [int(value) for value in text.split()]
        values = json.loads(text)
        for value in values:
            # Not int(), which would turn 1.5 and true into token 1.
            if type(value) is not int:
                raise ValueError(f"{json.dumps(value)} is no integer")
        return list(values)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"{_name(file)} holds no token ids: {error}; write a JSON array, or integers with "
            f"blanks between"
        ) from None
