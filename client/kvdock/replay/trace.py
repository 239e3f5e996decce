"""Reads traces: JSON lines with the blocks of one prompt each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO, Final

from kvdock.errors import InvalidArgument

NO_BLOCK: Final = -1
"""Stands for the block before a prompt's first one."""

NEVER: Final = 1 << 62
"""Stands for the next use of a block that is not used again."""

MOST_BLOCKS: Final = 5_000_000

_MOST_LINE_BYTES: Final = 16 << 20


@dataclass(frozen=True)
class Trace:
    """Prompts in the order in which they came.

    Blocks are numbered from 0, in the order in which they first appear. ``parents`` has for each
    block the block before it in every prompt, or NO_BLOCK. ``is_cut``: the file has more prompts.
    """

    prompts: list[tuple[int, ...]]
    parents: list[int]
    is_cut: bool = False

    @property
    def distinct(self) -> int:
        """How many different blocks there are."""
        return len(self.parents)

    @cached_property
    def references(self) -> int:
        """How many blocks all prompts have together."""
        return sum(map(len, self.prompts))

    @cached_property
    def repeated(self) -> int:
        """How many of these a pool without limit would have had."""
        return self.references - self.distinct

    @cached_property
    def next_uses(self) -> list[list[int]]:
        """For each block of each prompt the number of the next prompt with it, or NEVER."""
        following = [NEVER] * self.distinct
        found: list[list[int]] = []
        for number in range(len(self.prompts) - 1, -1, -1):
            prompt = self.prompts[number]
            found.append([following[block] for block in prompt])
            for block in prompt:
                following[block] = number
        found.reverse()
        return found


def read_trace(file: BinaryIO, name: str, most_blocks: int) -> Trace:
    """The trace in a file, up to the first prompt with which it has more than ``most_blocks``.

    Each line is a JSON object. ``hash_ids`` has a number for each block of the prompt: equal
    numbers mean that the prompts are equal up to the block's end. Other keys are not read. Raises
    InvalidArgument, with the number of the line, for a line that is something else.
    """
    numbers: dict[int, int] = {}
    parents: list[int] = []
    prompts: list[tuple[int, ...]] = []
    references = 0
    for where, ids in _lines(file, name):
        references += len(ids)
        if references > most_blocks:
            if not prompts:
                raise InvalidArgument(
                    f"{where}: the first prompt has {len(ids):,} blocks, and at most "
                    f"{most_blocks:,} are replayed (--most-blocks)"
                )
            return Trace(prompts, parents, is_cut=True)
        prompt: list[int] = []
        parent = NO_BLOCK
        for value in ids:
            block = numbers.setdefault(value, len(parents))
            if block == len(parents):
                parents.append(parent)
            elif parents[block] != parent:
                raise InvalidArgument(
                    f"{where}: block {value} follows another block than in an earlier prompt: "
                    "equal numbers must mean equal prompts up to there"
                )
            prompt.append(block)
            parent = block
        if prompt:
            prompts.append(tuple(prompt))
    if not prompts:
        raise InvalidArgument(f"{name} has no prompts")
    return Trace(prompts, parents)


def _lines(file: BinaryIO, name: str) -> Iterator[tuple[str, list[int]]]:
    """Where each line is, and its blocks."""
    number = 0
    while line := file.readline(_MOST_LINE_BYTES + 1):
        number += 1
        where = f"{name}, line {number}"
        if len(line) > _MOST_LINE_BYTES:
            raise InvalidArgument(f"{where} is longer than {_MOST_LINE_BYTES >> 20} MiB")
        if not line.strip():
            continue
        try:
            request = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InvalidArgument(f"{where} is no JSON: {error}") from None
        ids = request.get("hash_ids") if isinstance(request, dict) else None
        if not isinstance(ids, list) or not all(type(value) is int for value in ids):
            raise InvalidArgument(
                f"{where} has no hash_ids: write one JSON object a line, such as "
                '{"timestamp": 0, "input_length": 1030, "output_length": 20, "hash_ids": [7, 8, 9]}'
            )
        yield where, ids
