"""Prompts that resemble what engines are asked, as traces of blocks."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

Prompts = list[tuple[int, ...]]


def chats(seed: int, requests: int, *, users: int = 60, topics: int = 12) -> Prompts:
    """Long chats whose users come back late, and single long prompts in between.

    A chat begins with one of a few topics' instructions, and each turn adds some blocks.
    """
    draw = random.Random(seed)
    new = itertools.count()
    instructions = [tuple(next(new) for _ in range(4)) for _ in range(topics)]
    histories: dict[int, tuple[int, ...]] = {}
    prompts: Prompts = []
    for _ in range(requests):
        if draw.random() < 0.5:
            prompts.append(tuple(next(new) for _ in range(draw.randint(10, 30))))
            continue
        user = min(int(draw.expovariate(6 / users)), users - 1)
        history = histories.get(user, ()) or instructions[user % topics]
        history += tuple(next(new) for _ in range(draw.randint(1, 3)))
        histories[user] = history if len(history) < 40 else ()
        prompts.append(history)
    return prompts


def write(prompts: Prompts, path: Path) -> Path:
    """The prompts as a file that ``kvdock replay`` reads."""
    lines = (
        json.dumps(
            {
                "timestamp": 100 * number,
                "input_length": 512 * len(prompt),
                "output_length": 10,
                "hash_ids": prompt,
            }
        )
        for number, prompt in enumerate(prompts)
    )
    path.write_text("\n".join(lines) + "\n")
    return path
