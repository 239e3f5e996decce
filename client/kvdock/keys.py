"""Keys: 32 bytes that stand for a chunk of a prompt and for everything before it.

The recipe is part of the protocol: clients in any language must make the same keys. docs/keys.md
defines it byte by byte, docs/key_vectors.json holds test vectors. It uses only SHA-256 and
fixed-width little-endian integers, so a key depends on no interpreter, hash seed, process or engine
version.

    key = SHA-256( parent key (32 bytes) | number of tokens (u32) | token ids (u32 each) | extras )

Beside the tokens, other things decide the KV cache: an adapter, a salt, a picture, prompt
embeddings. Each enters a key as an *extra*, a record of tag, length and payload, so two different
sets of extras never encode alike. Adapter and salt belong to the whole request and enter the first
chunk's key only; later chunks inherit them through their parent. An item with a place in the prompt
enters the key of every chunk that it overlaps, with its offset from that chunk's start.

For a long prompt, converting a list of Python integers takes about as long as hashing. Hence
`array.fromlist`, the fastest way measured (struct.pack takes 1.3 times as long, numpy five times),
and no conversion for a buffer of 32-bit integers.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

if TYPE_CHECKING:
    from typing_extensions import Buffer

    TokenIds: TypeAlias = Sequence[int] | Buffer

__all__ = [
    "KEY_BYTES",
    "ROOT",
    "CacheSalt",
    "Extra",
    "KeyChain",
    "LoRA",
    "MultiModalItem",
    "PromptEmbeds",
    "chunk_keys",
]

KEY_BYTES: Final = 32
"""Length of every key."""

ROOT: Final = bytes(KEY_BYTES)
"""Parent of a first chunk. On the wire an empty parent means the same."""

_TOKEN_BYTES: Final = 4
_MAX_TOKEN: Final = 2**32 - 1
_MAX_CHUNK_TOKENS: Final = 65_536
_OFFSETS: Final = range(-(2**62), 2**62)
_LENGTHS: Final = range(1, 2**32)


def _record(tag: int, payload: bytes) -> bytes:
    return struct.pack("<BI", tag, len(payload)) + payload


def _text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<I", len(encoded)) + encoded


def _require_text(value: str, name: str) -> None:
    if not value:
        raise ValueError(f"{name} is empty: leave the extra out instead")


def _require_place(offset: int, length: int, name: str) -> None:
    if offset not in _OFFSETS:
        raise ValueError(f"{name}.offset is {offset}: it must lie within 62 bits")
    if length not in _LENGTHS:
        raise ValueError(f"{name}.length is {length}: it must be from 1 to 4294967295 tokens")


@dataclass(frozen=True, slots=True)
class LoRA:
    """The adapter that the whole request runs with. At most one a request.

    `name` is what users call it. `source` tells adapters of one name apart: a path, a revision or
    a digest; empty if the name alone is enough. Raises ValueError if the name is empty.
    """

    name: str
    source: str = ""

    def __post_init__(self) -> None:
        _require_text(self.name, "LoRA.name")

    def record(self) -> bytes:
        """The extra as it enters a key."""
        return _record(1, _text(self.name) + _text(self.source))


@dataclass(frozen=True, slots=True)
class CacheSalt:
    """Keeps one tenant's chunks apart from all others'. At most one a request.

    Raises ValueError if the salt is empty.
    """

    salt: str

    def __post_init__(self) -> None:
        _require_text(self.salt, "CacheSalt.salt")

    def record(self) -> bytes:
        """The extra as it enters a key."""
        return _record(2, _text(self.salt))


@dataclass(frozen=True, slots=True)
class MultiModalItem:
    """A picture, a sound, a video whose placeholder tokens stand in the prompt.

    `identifier` commits to the item's content and to how it is processed. `offset` is the place of
    the first placeholder, in tokens from the first token that the chain is given (negative if the
    item began earlier). `length` is the number of placeholders. Raises ValueError if a field is out
    of its limits.
    """

    identifier: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        _require_text(self.identifier, "MultiModalItem.identifier")
        _require_place(self.offset, self.length, "MultiModalItem")

    def record(self, chunk_start: int) -> bytes:
        """The extra as it enters the key of the chunk that begins at token `chunk_start`."""
        place = struct.pack("<qI", self.offset - chunk_start, self.length)
        return _record(3, place + _text(self.identifier))


@dataclass(frozen=True, slots=True)
class PromptEmbeds:
    """A run of positions whose input is an embedding instead of a token.

    `digest` is SHA-256 over the embeddings in the model's dtype, row by row, little-endian.
    `offset` and `length` are as in MultiModalItem. Give one PromptEmbeds for each chunk: prompts
    that begin with the same embeddings share chunks only if the run is cut where chunks end. Raises
    ValueError if a field is out of its limits.
    """

    digest: bytes
    offset: int
    length: int

    def __post_init__(self) -> None:
        if len(self.digest) != KEY_BYTES:
            raise ValueError(
                f"PromptEmbeds.digest has {len(self.digest)} bytes: a SHA-256 has {KEY_BYTES}"
            )
        _require_place(self.offset, self.length, "PromptEmbeds")

    def record(self, chunk_start: int) -> bytes:
        """The extra as it enters the key of the chunk that begins at token `chunk_start`."""
        place = struct.pack("<qI", self.offset - chunk_start, self.length)
        return _record(4, place + self.digest)


Extra: TypeAlias = LoRA | CacheSalt | MultiModalItem | PromptEmbeds
"""Anything beside the tokens that decides the KV cache."""


class KeyChain:
    """Keys of a prompt that grows. An `extend` takes time only for the tokens that it adds.

    `chunk_tokens` is the chunk size in tokens. `extras` are a set: their order does not matter, and
    one that is given twice counts once. Offsets of items count from the first token given to the
    chain. With a `parent` the chain continues a prompt: it inherits adapter and salt through the
    parent, so those in `extras` change nothing.

    Raises ValueError for a chunk size outside 1 to 65,536, for a parent that is neither empty nor
    32 bytes long, and for two adapters or two salts.

    >>> chain = KeyChain(chunk_tokens=2)
    >>> len(chain.extend([1, 2, 3])), len(chain.extend([4])), chain.num_tokens
    (1, 1, 4)
    """

    __slots__ = (
        "_active",
        "_chunk_tokens",
        "_count",
        "_keys",
        "_pending",
        "_quiet_from",
        "_request_wide",
        "_rest",
        "_tip",
        "_upcoming",
    )

    def __init__(
        self, chunk_tokens: int, extras: Iterable[Extra] = (), *, parent: bytes = ROOT
    ) -> None:
        if not 1 <= chunk_tokens <= _MAX_CHUNK_TOKENS:
            raise ValueError(f"chunk_tokens is {chunk_tokens}: it must be from 1 to 65536")
        if len(parent) not in (0, KEY_BYTES):
            raise ValueError(
                f"parent has {len(parent)} bytes: a key has {KEY_BYTES}, and none means the root"
            )
        self._chunk_tokens = chunk_tokens
        self._count = struct.pack("<I", chunk_tokens)
        self._tip = parent or ROOT
        self._keys: list[bytes] = []
        self._rest = bytearray()

        request_wide, items = _sort_out(extras)
        self._request_wide = request_wide if self._tip == ROOT else []
        # The next item is the last in the list, so that it can be popped.
        self._upcoming = sorted(items, key=lambda item: item.offset, reverse=True)
        self._active: list[MultiModalItem | PromptEmbeds] = []
        # From this token on no extra enters any key.
        self._quiet_from = max([1, *(item.offset + item.length for item in items)])

    @property
    def keys(self) -> Sequence[bytes]:
        """Keys of all full chunks so far. The list grows with the chain; do not change it."""
        return self._keys

    @property
    def num_tokens(self) -> int:
        """How many tokens the chain was given, with those of the last, incomplete chunk."""
        return len(self._keys) * self._chunk_tokens + len(self._rest) // _TOKEN_BYTES

    def extend(self, token_ids: TokenIds) -> list[bytes]:
        """Appends tokens. Returns the keys of the chunks that they completed, perhaps none.

        Takes any sequence or buffer of integers. A list is fast; a contiguous buffer of unsigned
        32-bit integers (array('I'), numpy.uint32, a memoryview of either) is several times faster.
        Raises ValueError for a token id outside 0 to 4,294,967,295 and TypeError for one that is no
        integer. Both name its place, and leave the chain unchanged.
        """
        given = _little_endian_u32(token_ids)
        if self._rest:
            self._rest += given
            with memoryview(self._rest) as joined:
                new, used = self._hash_chunks(joined)
            del self._rest[:used]
        else:
            new, used = self._hash_chunks(given)
            self._rest += given[used:]
        return new

    def _hash_chunks(self, tokens: memoryview) -> tuple[list[bytes], int]:
        """Hashes the full chunks of `tokens`. Returns their keys and how many bytes they took."""
        sha256 = hashlib.sha256
        key, count = self._tip, self._count
        chunk_tokens, quiet_from = self._chunk_tokens, self._quiet_from
        width = chunk_tokens * _TOKEN_BYTES
        used = len(tokens) - len(tokens) % width
        start = len(self._keys) * chunk_tokens
        new = []
        for begin in range(0, used, width):
            message = key + count + tokens[begin : begin + width]
            if start < quiet_from:
                message += self._extras_at(start)
            key = sha256(message).digest()
            new.append(key)
            start += chunk_tokens
        self._tip = key
        self._keys += new
        return new, used

    def _extras_at(self, start: int) -> bytes:
        """Records of the extras that enter the chunk at token `start`. Starts must ascend."""
        end = start + self._chunk_tokens
        while self._upcoming and self._upcoming[-1].offset < end:
            self._active.append(self._upcoming.pop())
        self._active = [item for item in self._active if item.offset + item.length > start]
        records = {item.record(start) for item in self._active}
        if start == 0:
            records.update(self._request_wide)
        return b"".join(sorted(records))


def chunk_keys(
    token_ids: TokenIds,
    chunk_tokens: int,
    *,
    parent: bytes = ROOT,
    extras: Iterable[Extra] = (),
) -> list[bytes]:
    """Keys of the full chunks of a prompt. Tokens after the last full chunk have no key.

    Arguments and errors are those of KeyChain and its extend.

    >>> [key.hex()[:8] for key in chunk_keys([1, 2, 3, 4, 5], chunk_tokens=2)]
    ['d53ab891', '021c24d2']
    """
    return KeyChain(chunk_tokens, extras, parent=parent).extend(token_ids)


def _sort_out(
    extras: Iterable[Extra],
) -> tuple[list[bytes], list[MultiModalItem | PromptEmbeds]]:
    """The records of the request-wide extras, and the items that have a place."""
    request_wide: list[LoRA | CacheSalt] = []
    items: list[MultiModalItem | PromptEmbeds] = []
    for extra in set(extras):
        if isinstance(extra, LoRA | CacheSalt):
            request_wide.append(extra)
        elif isinstance(extra, MultiModalItem | PromptEmbeds):
            items.append(extra)
        else:
            raise TypeError(f"{extra!r} is no extra: use LoRA, CacheSalt, MultiModalItem, ...")
    for kind in (LoRA, CacheSalt):
        same = [extra for extra in request_wide if isinstance(extra, kind)]
        if len(same) > 1:
            raise ValueError(f"a request has at most one {kind.__name__}, got {len(same)}")
    return [extra.record() for extra in request_wide], items


def _little_endian_u32(token_ids: TokenIds) -> memoryview:
    """Token ids as bytes, four each. Copies nothing if they already have this form."""
    if isinstance(token_ids, list):
        return _from_integers(token_ids)
    if isinstance(token_ids, Sequence) and not isinstance(
        token_ids, bytes | bytearray | memoryview | array
    ):
        return _from_integers(list(token_ids))
    try:
        view = memoryview(token_ids)
    except TypeError:
        raise TypeError(
            f"token_ids is a {type(token_ids).__name__}: give a sequence of integers or a buffer "
            "of them, such as array('I') or numpy.uint32"
        ) from None
    return _from_buffer(view)


def _from_buffer(view: memoryview) -> memoryview:
    code = view.format.lstrip("@=" + ("<" if sys.byteorder == "little" else ">"))
    if view.ndim != 1 or code not in {"h", "H", "i", "I", "l", "L", "q", "Q"}:
        raise TypeError(
            f"token_ids is a buffer of format {view.format!r} in {view.ndim} dimensions: it must "
            "have one, of integers of this machine's byte order (cast bytes with "
            'memoryview(...).cast("I"))'
        )
    if code not in {"I", "L"} or view.itemsize != _TOKEN_BYTES:
        return _from_integers(view.tolist())
    if sys.byteorder == "little" and view.format == code and view.c_contiguous and len(view):
        return view.cast("B")
    raw = array("I", view.tobytes())
    if sys.byteorder == "big":
        raw.byteswap()
    return memoryview(raw.tobytes())


def _from_integers(token_ids: list[int]) -> memoryview:
    packed = array("I")
    try:
        packed.fromlist(token_ids)
    except (OverflowError, TypeError):
        raise _bad_token(token_ids) from None
    if sys.byteorder == "big":
        packed.byteswap()
    return memoryview(packed).cast("B") if packed else memoryview(b"")


def _bad_token(token_ids: Iterable[object]) -> ValueError | TypeError:
    for place, token_id in enumerate(token_ids):
        if not hasattr(token_id, "__index__"):
            return TypeError(f"token_ids[{place}] is {token_id!r}: it must be an integer")
        if not 0 <= token_id.__index__() <= _MAX_TOKEN:
            return ValueError(
                f"token_ids[{place}] is {token_id!r}: it must be from 0 to {_MAX_TOKEN}"
            )
    raise AssertionError("every token id is in its range")
