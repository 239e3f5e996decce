"""Keys, token ids and bytes that the command is given in arguments, files and on stdin."""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvdock.client import Client
from kvdock.errors import InvalidArgument, UnknownNamespace
from kvdock.keys import KEY_BYTES, chunk_keys
from kvdock.types import Namespace

STDIO = "-"


def keys(client: Client, arguments: argparse.Namespace) -> list[bytes]:
    """The chunk keys that the arguments name, by themselves or by token ids."""
    if bool(arguments.keys) == bool(arguments.tokens):
        raise InvalidArgument("give either keys or --tokens FILE")
    if arguments.tokens:
        token_ids = _token_ids(_read_text(arguments.tokens), arguments.tokens)
        chunk_tokens = arguments.chunk_tokens or namespace(client, arguments.namespace).chunk_tokens
        try:
            made = chunk_keys(token_ids, chunk_tokens)
        except ValueError as error:
            raise InvalidArgument(f"{arguments.tokens}: {error}") from None
        if not made:
            raise InvalidArgument(
                f"{arguments.tokens} has {len(token_ids)} tokens, less than one chunk of "
                f"{chunk_tokens}"
            )
        return made
    texts: Iterable[str] = arguments.keys
    if arguments.keys == [STDIO]:
        texts = sys.stdin.read().split()
    return [key(text) for text in texts]


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


def namespace(client: Client, name: str) -> Namespace:
    """The registered namespace of this name. Raises UnknownNamespace."""
    for status in client.namespaces():
        if status.namespace.name == name:
            return status.namespace
    raise UnknownNamespace(
        f"namespace {name!r} is not registered at {client.address}; `kvdock ls` shows which are"
    )


@contextlib.contextmanager
def content(file: str) -> Iterator[memoryview]:
    """The bytes of a file, mapped where it can be; of stdin for ``-``."""
    if file == STDIO:
        yield memoryview(sys.stdin.buffer.read())
        return
    try:
        with Path(file).open("rb") as opened:
            if Path(file).stat().st_size and Path(file).is_file():
                with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
                    view = memoryview(mapping)
                    yield view
                    view.release()
            else:
                yield memoryview(opened.read())
    except OSError as error:
        raise InvalidArgument(f"cannot read {file}: {error.strerror}") from error


def _read_text(file: str) -> str:
    if file == STDIO:
        return sys.stdin.read()
    try:
        return Path(file).read_text()
    except OSError as error:
        raise InvalidArgument(f"cannot read {file}: {error.strerror}") from error


def _token_ids(text: str, file: str) -> list[int]:
    try:
        values = json.loads(text) if text.lstrip().startswith("[") else text.split()
        return [int(value) for value in values]
    except (ValueError, TypeError) as error:
        raise InvalidArgument(
            f"{file} holds no token ids: {error}; write a JSON array, or integers with blanks "
            f"between"
        ) from None
