"""``kvdock replay``: what a trace would have found in pools of several sizes."""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from kvdock.cli import inputs, output
from kvdock.client import Client
from kvdock.errors import InvalidArgument
from kvdock.replay import advice, plot
from kvdock.replay.server import replay_on_server, sizes_of_server
from kvdock.replay.simulation import (
    LRU,
    MEMORY,
    POLICIES,
    Outcome,
    default_sizes,
    simulate,
)
from kvdock.replay.trace import Trace, read_trace


def run(arguments: argparse.Namespace) -> int:
    """``kvdock replay``"""
    names = _policies(arguments.policies)
    with _opened(arguments.trace) as (file, name):
        trace = read_trace(file, name, arguments.most_blocks)
    scale = _Scale(arguments.block_tokens, arguments.bytes_per_token)
    sizes = _sizes(arguments.sizes, scale) if arguments.sizes else default_sizes(trace)
    with contextlib.ExitStack() as stack:
        client = None
        if arguments.server:
            client = stack.enter_context(Client(arguments.server, timeout=arguments.timeout))
            of_server = sizes_of_server(client, sizes)
            sizes = sorted(of_server)
        runs = len(sizes) * (len(names) + bool(client))
        advance = stack.enter_context(output.count_bar("replay", runs * trace.references))
        outcomes = simulate(trace, names, sizes, advance)
        if client is not None:
            outcomes += replay_on_server(client, trace, of_server, advance)
    found = advice.advise(trace, outcomes)
    if arguments.json:
        output.print_json(_as_json(trace, outcomes, found, scale))
    else:
        _print(name, trace, outcomes, found, scale)
    # Last, since a file that cannot be written must not cost the figures.
    if arguments.plot:
        _write_plot(arguments.plot, name, trace, outcomes, scale)
    return 0


class _Scale:
    """Turns blocks into bytes, where it is known how many bytes a token takes."""

    def __init__(self, block_tokens: int, bytes_per_token: int | None) -> None:
        self.block_bytes = block_tokens * bytes_per_token if bytes_per_token else None

    def bytes(self, blocks: int) -> int | None:
        return None if self.block_bytes is None else blocks * self.block_bytes

    def name(self, blocks: int) -> str:
        """``32,000 blocks (15.3 GiB)``"""
        nbytes = self.bytes(blocks)
        return f"{blocks:,} blocks" + (f" ({output.size(nbytes)})" if nbytes else "")

    def tick(self, blocks: int) -> str:
        nbytes = self.bytes(blocks)
        return output.size(nbytes) if nbytes else f"{blocks:,}"


def _policies(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in POLICIES:
            raise InvalidArgument(f"--policies: {name!r} is none of {', '.join(POLICIES)}")
    return names


def _sizes(text: str, scale: _Scale) -> list[int]:
    """Numbers of blocks, from numbers of blocks or from sizes with a unit."""
    sizes = set()
    for each in text.split(","):
        if re.fullmatch(r"[0-9]{1,18}", each):
            blocks = int(each)
        elif scale.block_bytes is None:
            raise InvalidArgument(
                f"--sizes: {each!r} is no number of blocks; for a size such as 8GiB give "
                "--bytes-per-token, too"
            )
        else:
            blocks = inputs.size(each) // scale.block_bytes
        if not blocks:
            raise InvalidArgument(f"--sizes: {each!r} is less than one block")
        sizes.add(blocks)
    return sorted(sizes)


@contextlib.contextmanager
def _opened(file: str) -> Iterator[tuple[BinaryIO, str]]:
    if file == inputs.STDIO:
        yield sys.stdin.buffer, "stdin"
        return
    try:
        with Path(file).open("rb") as opened:
            yield opened, file
    except OSError as error:
        raise InvalidArgument(f"cannot read {file}: {error.strerror}") from error


def _by_policy(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    rows: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        rows.setdefault(outcome.policy, []).append(outcome)
    return rows


def _size(outcome: Outcome) -> int:
    return outcome.size


def _print(
    name: str,
    trace: Trace,
    outcomes: Sequence[Outcome],
    found: advice.Advice,
    scale: _Scale,
) -> None:
    total = trace.references
    print(f"{len(trace.prompts):,} prompts of {total:,} blocks, {trace.distinct:,} different.")
    output.print_table(
        f"{Path(name).name}: share of blocks found",
        ["policy", *(scale.tick(size) for size in sorted({each.size for each in outcomes}))],
        [
            (policy, *(f"{each.hits / total:.4f}" for each in sorted(row, key=_size)))
            for policy, row in _by_policy(outcomes).items()
        ],
    )
    if trace.is_cut:
        print(f"The file has more prompts: only the first {len(trace.prompts):,} were replayed.")
    for sentence in _sentences(trace, found, scale):
        print(sentence)


def _sentences(trace: Trace, found: advice.Advice, scale: _Scale) -> Iterator[str]:
    total = trace.references
    if not trace.repeated:
        yield "No block comes twice: no pool of any size would find anything."
        return
    yield (
        f"Memory: give it {scale.name(found.size)}. Then {LRU} finds {found.hits / total:.4f} of "
        f"all blocks, {advice.ENOUGH:.0%} of what a pool without limit finds "
        f"({trace.repeated / total:.4f}, for which it keeps {scale.name(trace.distinct)})."
    )
    if found.better:
        size, ratio = max(found.better.items(), key=lambda item: item[1])
        largest = max(found.better)
        yield (
            f"Policy: if you give it less, --eviction {MEMORY} finds more, up to "
            f"{scale.name(largest)}: {ratio:.2f} times as much as {LRU} at {scale.name(size)}."
        )
    elif found.compared:
        yield f"Policy: --eviction {MEMORY} finds no more than {LRU} at these sizes (up to 1%)."
    for size, ratio in found.worse.items():
        yield f"But at {scale.name(size)} {MEMORY} finds only {ratio:.2f} times as much as {LRU}."


def _as_json(
    trace: Trace, outcomes: Sequence[Outcome], found: advice.Advice, scale: _Scale
) -> dict[str, object]:
    total = trace.references
    return {
        "trace": {
            "prompts": len(trace.prompts),
            "blocks": total,
            "different": trace.distinct,
            "is_cut": trace.is_cut,
            "unbounded_hit_rate": trace.repeated / total,
        },
        "outcomes": [
            asdict(each) | {"bytes": scale.bytes(each.size), "hit_rate": each.hits / total}
            for each in outcomes
        ],
        "advice": asdict(found)
        | {"bytes": scale.bytes(found.size), "hit_rate": found.hits / total},
    }


def _write_plot(
    file: str, name: str, trace: Trace, outcomes: Sequence[Outcome], scale: _Scale
) -> None:
    lines = {
        policy: [(each.size, each.hits / trace.references) for each in row]
        for policy, row in _by_policy(outcomes).items()
    }
    ticks = {size: scale.tick(size) for line in lines.values() for size, _ in line}
    unit = "size of the pool" if scale.block_bytes else "size of the pool, in blocks"
    picture = plot.draw(f"{Path(name).name}: share of blocks found", unit, lines, ticks)
    try:
        Path(file).write_text(picture)
    except OSError as error:
        raise InvalidArgument(f"cannot write {file}: {error.strerror}") from error
