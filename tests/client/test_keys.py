"""Keys: the recipe of docs/keys.md, its test vectors, its properties and its speed."""

from __future__ import annotations

import ctypes
import doctest
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvdock.keys
from kvdock.keys import (
    ROOT,
    CacheSalt,
    Extra,
    KeyChain,
    LoRA,
    MultiModalItem,
    PromptEmbeds,
    chunk_keys,
)

REPOSITORY = Path(__file__).parents[2]


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "key_vectors", REPOSITORY / "tools" / "key_vectors.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()
PROGRAM = TOOL.documented_program()
VECTORS = json.loads(TOOL.VECTORS.read_text())["vectors"]


def as_extra(fields: dict[str, Any]) -> Extra:
    values = {name: value for name, value in fields.items() if name != "kind"}
    match fields["kind"]:
        case "lora":
            return LoRA(**values)
        case "cache_salt":
            return CacheSalt(**values)
        case "multimodal_item":
            return MultiModalItem(**values)
        case _:
            return PromptEmbeds(**values | {"digest": bytes.fromhex(values["digest"])})


def as_fields(extra: Extra) -> dict[str, Any]:
    match extra:
        case LoRA(name, source):
            return {"kind": "lora", "name": name, "source": source}
        case CacheSalt(salt):
            return {"kind": "cache_salt", "salt": salt}
        case MultiModalItem(identifier, offset, length):
            return {
                "kind": "multimodal_item",
                "identifier": identifier,
                "offset": offset,
                "length": length,
            }
        case PromptEmbeds(digest, offset, length):
            return {
                "kind": "prompt_embeds",
                "digest": digest.hex(),
                "offset": offset,
                "length": length,
            }


# --- the recipe and its documentation -----------------------------------------------------------


def test_vectors_are_what_the_documented_program_makes() -> None:
    assert TOOL.VECTORS.read_text() == TOOL.document(), "run python tools/key_vectors.py"


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: str(vector["name"]))
def test_library_makes_the_vectors(vector: dict[str, Any]) -> None:
    keys = chunk_keys(
        vector["token_ids"],
        vector["chunk_tokens"],
        parent=bytes.fromhex(vector["parent"]),
        extras=[as_extra(fields) for fields in vector["extras"]],
    )
    assert [key.hex() for key in keys] == vector["keys"]


def test_vectors_differ_where_their_inputs_differ() -> None:
    same_input_twice = {"adapter and salt after a parent change nothing"}
    first_keys = [
        (vector["keys"][0], vector["chunk_tokens"])
        for vector in VECTORS
        if vector["name"].startswith(("adapter", "salt", "two items", "one item", "text"))
        and vector["name"] not in same_input_twice
    ]
    assert len(first_keys) > 8
    assert len(set(first_keys)) == len(first_keys)


def test_step_by_step_example_is_true() -> None:
    page = (REPOSITORY / "docs" / "keys.md").read_text()
    blocks = re.findall(r"^```example\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2
    for block, preimage, key in zip(
        blocks, VECTORS[0]["preimages"], VECTORS[0]["keys"], strict=True
    ):
        parts = dict(line.split(maxsplit=1) for line in block.splitlines())
        assert parts.pop("key") == key
        assert "".join(parts.values()).replace(" ", "") == preimage
        assert hashlib.sha256(bytes.fromhex(preimage)).hexdigest() == key


def test_examples_in_documentation_run() -> None:
    assert doctest.testmod(kvdock.keys).failed == 0
    page = (REPOSITORY / "docs" / "keys.md").read_text()
    (session,) = re.findall(r"^```pycon\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    examples = doctest.DocTestParser().get_doctest(session, {}, "docs/keys.md", None, None)
    assert examples.examples
    assert doctest.DocTestRunner().run(examples).failed == 0


def test_keys_do_not_depend_on_the_hash_seed() -> None:
    code = (
        "from kvdock.keys import *\n"
        "extras = [LoRA('a'), CacheSalt('b'), *(MultiModalItem(c, 0, 2) for c in 'cdefg')]\n"
        "print([key.hex() for key in chunk_keys([1, 2, 3, 4], 2, extras=extras)])"
    )
    environments = [{**os.environ, "PYTHONHASHSEED": seed} for seed in ("0", "1", "random")]
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
        ).stdout
        for env in environments
    }
    assert len(outputs) == 1


# --- properties ---------------------------------------------------------------------------------

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)
chunk_sizes = st.integers(1, 9)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
offsets = st.integers(-5, 45)
lengths = st.integers(1, 20)
loras = st.builds(LoRA, names, st.one_of(st.just(""), names))
salts = st.builds(CacheSalt, names)
items = st.one_of(
    st.builds(MultiModalItem, names, offsets, lengths),
    st.builds(PromptEmbeds, st.binary(min_size=32, max_size=32), offsets, lengths),
)


@st.composite
def extra_sets(draw: st.DrawFn) -> list[Extra]:
    chosen: list[Extra] = list(draw(st.lists(items, max_size=4)))
    chosen += draw(st.lists(loras, max_size=1))
    chosen += draw(st.lists(salts, max_size=1))
    return draw(st.permutations(chosen))


parents = st.one_of(st.just(ROOT), st.binary(min_size=32, max_size=32))


@given(tokens, chunk_sizes, extra_sets(), parents)
def test_library_is_the_documented_program(
    token_ids: list[int], chunk_tokens: int, extras: list[Extra], parent: bytes
) -> None:
    _, expected = PROGRAM(token_ids, chunk_tokens, [as_fields(extra) for extra in extras], parent)
    assert chunk_keys(token_ids, chunk_tokens, parent=parent, extras=extras) == expected


@given(st.lists(tokens, max_size=6), chunk_sizes, extra_sets(), parents)
def test_incremental_equals_whole(
    pieces: list[list[int]], chunk_tokens: int, extras: list[Extra], parent: bytes
) -> None:
    chain = KeyChain(chunk_tokens, extras, parent=parent)
    new = [key for piece in pieces for key in chain.extend(piece)]
    whole = [token_id for piece in pieces for token_id in piece]
    assert new == chunk_keys(whole, chunk_tokens, parent=parent, extras=extras)
    assert list(chain.keys) == new
    assert chain.num_tokens == len(whole)


@given(tokens, tokens, tokens, chunk_sizes, extra_sets())
def test_keys_agree_exactly_on_the_common_prefix(
    common: list[int], left: list[int], right: list[int], chunk_tokens: int, extras: list[Extra]
) -> None:
    one, other = common + left, common + right
    differing = (a != b for a, b in zip(one, other, strict=False))
    shared = next(
        (place for place, differs in enumerate(differing) if differs), min(len(one), len(other))
    )
    for place, (a, b) in enumerate(
        zip(
            chunk_keys(one, chunk_tokens, extras=extras),
            chunk_keys(other, chunk_tokens, extras=extras),
            strict=False,
        )
    ):
        assert (a == b) == (place < shared // chunk_tokens)


@given(tokens, chunk_sizes, extra_sets(), st.integers(0, 40))
def test_a_chain_can_be_continued_from_any_of_its_keys(
    token_ids: list[int], chunk_tokens: int, extras: list[Extra], cut: int
) -> None:
    whole = chunk_keys(token_ids, chunk_tokens, extras=extras)
    cut = min(cut, len(whole))
    if cut == 0:
        return
    start = cut * chunk_tokens
    moved = [
        replace(extra, offset=extra.offset - start)
        for extra in extras
        if isinstance(extra, MultiModalItem | PromptEmbeds)
    ]
    rest = chunk_keys(token_ids[start:], chunk_tokens, parent=whole[cut - 1], extras=moved)
    assert rest == whole[cut:]


def what_enters(extras: Sequence[Extra], start: int, end: int) -> set[Extra]:
    return {
        extra
        for extra in extras
        if (start == 0 if isinstance(extra, LoRA | CacheSalt) else False)
        or (
            isinstance(extra, MultiModalItem | PromptEmbeds)
            and extra.offset < end
            and extra.offset + extra.length > start
        )
    }


@given(st.lists(st.integers(0, 9), min_size=8, max_size=8), extra_sets(), extra_sets())
def test_differing_extras_never_collide(
    token_ids: list[int], left: list[Extra], right: list[Extra]
) -> None:
    differ = False
    for place, (a, b) in enumerate(
        zip(
            chunk_keys(token_ids, 4, extras=left),
            chunk_keys(token_ids, 4, extras=right),
            strict=True,
        )
    ):
        start = place * 4
        differ |= what_enters(left, start, start + 4) != what_enters(right, start, start + 4)
        assert (a != b) == differ


def test_kinds_never_encode_alike() -> None:
    same = "X"
    variants: list[list[Extra]] = [
        [],
        [LoRA(same)],
        [CacheSalt(same)],
        [LoRA(same), CacheSalt(same)],
        [LoRA(same, same)],
        [LoRA(same + same)],
        [MultiModalItem(same, 0, 4)],
        [MultiModalItem(same, 0, 5)],
        [MultiModalItem(same, -1, 5)],
        [MultiModalItem(same * 32, 0, 4)],
        [PromptEmbeds(same.encode() * 32, 0, 4)],
    ]
    keys = {chunk_keys([1, 2, 3, 4], 4, extras=extras)[0] for extras in variants}
    assert len(keys) == len(variants)


def test_order_and_repetition_of_extras_do_not_matter() -> None:
    extras: list[Extra] = [LoRA("a"), CacheSalt("b")]
    extras += [MultiModalItem("c", 1, 2), MultiModalItem("d", 1, 2)]
    expected = chunk_keys(range(8), 4, extras=extras)
    assert chunk_keys(range(8), 4, extras=[*reversed(extras), *extras]) == expected


# --- what may be given ----------------------------------------------------------------------------

TOKENS = [5, 0, 2**32 - 1, 7, 8]

FORMS: dict[str, Callable[[list[int]], Any]] = {
    "list": list,
    "tuple": tuple,
    "array I": lambda ids: array("I", ids),
    "array q": lambda ids: array("q", ids),
    "numpy uint32": lambda ids: np.array(ids, dtype=np.uint32),
    "numpy int64": lambda ids: np.array(ids, dtype=np.int64),
    "numpy strided": lambda ids: np.repeat(np.array(ids, dtype=np.uint32), 2)[::2],
    "list of numpy integers": lambda ids: list(np.array(ids, dtype=np.int64)),
    "memoryview": lambda ids: memoryview(array("I", ids)),
    "memoryview of bytes, cast": lambda ids: memoryview(array("I", ids).tobytes()).cast("I"),
    "ctypes": lambda ids: (ctypes.c_uint32 * len(ids))(*ids),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_form_of_token_ids_gives_the_same_keys(form: Callable[[list[int]], Any]) -> None:
    assert chunk_keys(form(TOKENS), 2) == PROGRAM(TOKENS, 2)[1]
    assert chunk_keys(form([]), 2) == []


def test_a_buffer_may_be_changed_after_the_call() -> None:
    buffer = array("I", TOKENS)
    chain = KeyChain(3)
    chain.extend(buffer)
    buffer[4] = 99
    buffer.append(100)
    assert chain.extend([9]) == chunk_keys([*TOKENS, 9], 3)[1:]


@pytest.mark.parametrize(
    ("token_ids", "error", "message"),
    [
        ([1, -1], ValueError, r"token_ids\[1\] is -1: it must be from 0 to 4294967295"),
        ([1, 2, 2**32], ValueError, r"token_ids\[2\] is 4294967296"),
        (np.array([3, -7]), ValueError, r"token_ids\[1\] is -7"),
        ([1, 2.0], TypeError, r"token_ids\[1\] is 2.0: it must be an integer"),
        ([None], TypeError, r"token_ids\[0\] is None"),
        ("ab", TypeError, r"token_ids\[0\] is 'a'"),
        (b"\0\0\0\0", TypeError, r"cast\(\"I\"\)"),
        (bytearray(4), TypeError, r"cast\(\"I\"\)"),
        (np.zeros(3), TypeError, "format 'd'"),
        (np.zeros((2, 2), dtype=np.uint32), TypeError, "2 dimensions"),
        (7, TypeError, "token_ids is a int"),
    ],
)
def test_bad_token_ids_are_named_and_change_nothing(
    token_ids: Any, error: type[Exception], message: str
) -> None:
    chain = KeyChain(2)
    chain.extend([1])
    with pytest.raises(error, match=message):
        chain.extend(token_ids)
    assert chain.extend([2]) == chunk_keys([1, 2], 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KeyChain(0), "chunk_tokens is 0"),
        (lambda: KeyChain(65_537), "chunk_tokens is 65537"),
        (lambda: KeyChain(4, parent=b"abc"), "parent has 3 bytes"),
        (lambda: KeyChain(4, [LoRA("a"), LoRA("b")]), "at most one LoRA"),
        (lambda: KeyChain(4, [CacheSalt("a"), CacheSalt("b")]), "at most one CacheSalt"),
        (lambda: LoRA(""), "LoRA.name is empty"),
        (lambda: CacheSalt(""), "CacheSalt.salt is empty"),
        (lambda: MultiModalItem("", 0, 1), "MultiModalItem.identifier is empty"),
        (lambda: MultiModalItem("a", 0, 0), "MultiModalItem.length is 0"),
        (lambda: MultiModalItem("a", 2**62, 1), "MultiModalItem.offset is"),
        (lambda: PromptEmbeds(b"short", 0, 1), "PromptEmbeds.digest has 5 bytes"),
        (lambda: PromptEmbeds(bytes(32), 0, 2**32), "PromptEmbeds.length is 4294967296"),
    ],
)
def test_bad_arguments_are_named(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "extra",
    [LoRA("a\ud800"), LoRA("a", "\udfff"), CacheSalt("\ud800"), MultiModalItem("\ud800", 0, 1)],
)
def test_texts_without_utf8_are_refused(extra: Extra) -> None:
    """A replacement character would give two different names one key."""
    with pytest.raises(ValueError, match="surrogates not allowed"):
        chunk_keys([1, 2], chunk_tokens=2, extras=[extra])


def test_an_empty_parent_is_the_root() -> None:
    assert chunk_keys([1, 2], 2, parent=b"", extras=[LoRA("a")]) == chunk_keys(
        [1, 2], 2, extras=[LoRA("a")]
    )


def test_what_is_no_extra_is_refused() -> None:
    with pytest.raises(TypeError, match="'sql' is no extra"):
        KeyChain(4, ["sql"])  # type: ignore[list-item]


# --- speed ----------------------------------------------------------------------------------------


def best_of(runs: int, call: Callable[[], object]) -> float:
    """Shortest of some runs, in seconds."""
    durations = []
    for _ in range(runs):
        begin = time.perf_counter()
        call()
        durations.append(time.perf_counter() - begin)
    return min(durations)


def test_speed_beside_a_plain_pass_of_sha256() -> None:
    """The bound is a ratio, so that it holds on slow and on busy machines. Measured where SHA-256
    runs fastest, which is where the ratio is worst: 2.0 from a buffer, 3.4 from a list."""
    token_ids = [7919 * place % 128_256 for place in range(131_072)]
    buffer = array("I", token_ids)
    plain = best_of(20, lambda: hashlib.sha256(buffer).digest())
    assert best_of(20, lambda: chunk_keys(buffer, 256)) < 6 * plain
    assert best_of(20, lambda: chunk_keys(token_ids, 256)) < 12 * plain


def test_growing_token_by_token_costs_no_more_with_length() -> None:
    chain = KeyChain(256)
    chain.extend(array("I", range(1_000)))
    early = best_of(5, lambda: [chain.extend([1]) for _ in range(1_000)])
    chain.extend(array("I", range(500_000)))
    late = best_of(5, lambda: [chain.extend([1]) for _ in range(1_000)])
    assert late < 10 * early
