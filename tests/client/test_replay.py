"""Policies against cases worked out by hand, against brute force, and against each other."""

from __future__ import annotations

import functools
import io
import itertools
import json
import random
from collections.abc import Sequence
from xml.etree import ElementTree

import pytest
from workloads import Prompts, chats

from kvdock.errors import InvalidArgument
from kvdock.replay import advice, plot
from kvdock.replay.simulation import (
    BOUND,
    LRU,
    MEMORY,
    POLICIES,
    default_sizes,
    simulate,
    smallest_for,
)
from kvdock.replay.trace import NEVER, NO_BLOCK, Trace, read_trace

FORGETFUL = [name for name in POLICIES if name != BOUND]


def trace_of(prompts: Sequence[Sequence[int]], most_blocks: int = 1_000_000) -> Trace:
    lines = "".join(json.dumps({"hash_ids": list(prompt)}) + "\n" for prompt in prompts)
    return read_trace(io.BytesIO(lines.encode()), "t", most_blocks)


def hits(policy: str, prompts: Sequence[Sequence[int]], size: int) -> list[int]:
    """What each prompt finds."""
    trace = trace_of(prompts)
    pool = POLICIES[policy](size, trace)
    return [pool.use(prompt) for prompt in trace.prompts]


def small_prompts(seed: int) -> Prompts:
    """A few short prompts of a random tree of blocks."""
    draw = random.Random(seed)
    tree: list[tuple[int, ...]] = [()]
    for block in range(7):
        tree.append((*draw.choice(tree[:4]), block))
    return [draw.choice(tree[1:]) for _ in range(7)]


# Traces


def test_a_trace_is_numbered_from_nought_with_parents_and_next_uses() -> None:
    trace = trace_of([[70, 80], [], [70, 90], [70, 80]])
    assert trace.prompts == [(0, 1), (0, 2), (0, 1)]
    assert trace.parents == [NO_BLOCK, 0, 0]
    assert trace.next_uses == [[1, 2], [2, NEVER], [NEVER, NEVER]]
    assert (trace.references, trace.distinct, trace.repeated) == (6, 3, 3)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "t, line 3 is no JSON"),
        (b"[1]", "t, line 3 has no hash_ids"),
        (b'{"input_length": 5}', "t, line 3 has no hash_ids"),
        (b'{"hash_ids": [1, 2.5]}', "t, line 3 has no hash_ids"),
        (b'{"hash_ids": [true]}', "t, line 3 has no hash_ids"),
        (b'{"hash_ids": [2]}', "t, line 3: block 2 follows another block"),
        (b'{"hash_ids": [1, 1]}', "t, line 3: block 1 follows another block"),
        (b"\xff", "t, line 3 is no JSON"),
        (b" " * (17 << 20), "t, line 3 is longer than 16 MiB"),
    ],
)
def test_a_line_that_is_no_prompt_is_named_by_its_number(line: bytes, said: str) -> None:
    file = io.BytesIO(b'{"hash_ids": [1, 2]}\n\n' + line + b"\n")
    with pytest.raises(InvalidArgument, match=said):
        read_trace(file, "t", 100)


def test_a_trace_without_prompts_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no prompts"):
        trace_of([[]])


def test_a_long_trace_is_cut_and_not_read_to_its_end() -> None:
    file = io.BytesIO(b'{"hash_ids": [1, 2, 3]}\n' * 3 + b"not read")
    trace = read_trace(file, "t", 7)
    assert (len(trace.prompts), trace.is_cut) == (2, True)


def test_a_first_prompt_that_is_cut_is_named() -> None:
    with pytest.raises(InvalidArgument, match="line 2: the first prompt has 3 blocks"):
        trace_of([[], [1, 2, 3]], 2)


# Policies


def test_lru_evicts_from_the_ends_of_prompts() -> None:
    # 5 takes the place of 4, not of 3. Then 4 takes that of 2, and 6 that of 1.
    found = hits(LRU, [[1, 2], [3, 4], [1, 2], [5], [3, 4], [6], [1, 2]], 4)
    assert found == [0, 0, 2, 0, 1, 0, 0]


def test_a_prompt_longer_than_the_pool_leaves_its_beginning() -> None:
    for policy in (LRU, MEMORY, BOUND):
        assert hits(policy, [[1, 2, 3, 4], [1, 2, 3, 4]], 2)[1] == 2, policy


def test_s3_fifo_keeps_what_comes_back_from_among_what_passes() -> None:
    passing = [[number] for number in range(100, 120)]
    # 1 passes through the small queue, is remembered, and comes back into the main queue.
    assert hits("s3-fifo", [[1], *passing[:10], [1], *passing[10:], [1]], 10)[-1] == 1
    assert hits(LRU, [[1], *passing[:10], [1], *passing[10:], [1]], 10)[-1] == 0


def test_arc_keeps_what_was_used_twice_from_what_passes() -> None:
    passing = [[number] for number in range(100, 120)]
    assert hits("arc", [[1], [1], *passing, [1]], 10)[-1] == 1
    assert hits(LRU, [[1], [1], *passing, [1]], 10)[-1] == 0


def test_lru_with_memory_is_lru_until_something_comes_back() -> None:
    passing = [[number] for number in range(100, 140)]
    assert hits(MEMORY, [[1], [1], *passing, [1]], 10)[-1] == 0
    # Now 1 to 5 come back late, several times. Most of them come to outlive what passes.
    late = [[number] for number in range(1, 6)]
    work = [each for start in range(0, 40, 10) for each in (*late, *passing[start : start + 10])]
    assert sum(hits(MEMORY, [*work, *late], 10)[-5:]) >= 4
    assert sum(hits(LRU, [*work, *late], 10)[-5:]) == 0


@pytest.mark.parametrize("seed", range(30))
def test_the_bound_is_what_brute_force_finds(seed: int) -> None:
    prompts = small_prompts(seed)

    @functools.cache
    def best(number: int, pool: frozenset[int], size: int) -> int:
        if number == len(prompts):
            return 0
        prompt = prompts[number]
        hit = len(list(itertools.takewhile(pool.__contains__, prompt)))
        all_kept = pool | set(prompt)
        kept = itertools.combinations(sorted(all_kept), min(size, len(all_kept)))
        return hit + max(best(number + 1, frozenset(chosen), size) for chosen in kept)

    for size in (1, 2, 3):
        assert sum(hits(BOUND, prompts, size)) == best(0, frozenset(), size)


@pytest.mark.parametrize("policy", FORGETFUL)
def test_no_policy_beats_the_bound_nor_finds_what_never_came(policy: str) -> None:
    for seed in range(40):
        prompts = small_prompts(seed)
        for size in (1, 2, 3, 5):
            assert sum(hits(policy, prompts, size)) <= sum(hits(BOUND, prompts, size))
        # In a pool for all of them each policy finds all that was there before.
        trace = trace_of(prompts)
        assert sum(hits(policy, prompts, trace.distinct)) == trace.repeated


@pytest.mark.parametrize("seed", range(2))
def test_memory_finds_more_than_lru_in_small_pools_and_no_less_in_large_ones(seed: int) -> None:
    trace = trace_of(chats(seed, 1_200))
    sizes = [trace.distinct // share for share in (64, 32, 16, 8, 4, 2)]
    lru, memory = (simulate(trace, [name], sizes, lambda blocks: None) for name in (LRU, MEMORY))
    ratios = [mine.hits / other.hits for mine, other in zip(memory, lru, strict=True)]
    assert min(ratios) > 0.99
    assert max(ratios) > 1.2


# What follows


def test_the_smallest_size_is_exact() -> None:
    trace = trace_of(chats(1, 300))
    wanted = trace.repeated // 2
    size = smallest_for(trace, wanted)
    below, at = (
        simulate(trace, [LRU], [each], lambda blocks: None)[0].hits for each in (size - 1, size)
    )
    assert below < wanted <= at


def test_advice_names_the_size_and_where_the_policy_pays() -> None:
    trace = trace_of(chats(1, 800))
    sizes = default_sizes(trace)
    assert len(sizes) == 6
    found = advice.advise(trace, simulate(trace, [LRU, MEMORY], sizes, lambda blocks: None))
    assert 0.95 * trace.repeated <= found.hits < 0.95 * trace.repeated + 1
    assert set(found.compared) == set(sizes)
    assert max(found.better.values()) > 1.2
    assert not found.worse


def test_a_plot_has_a_line_and_a_name_for_each_policy() -> None:
    lines = {"a<b": [(10, 0.1), (100, 0.4)], "c": [(10, 0.0), (100, 0.2)]}
    picture = ElementTree.fromstring(plot.draw("t & u", "size", lines, {10: "ten", 100: "100"}))
    texts = [element.text for element in picture.iter() if element.tag.endswith("}text")]
    assert {"t & u", "size", "a<b", "c", "ten", "100", "40%"} <= set(texts)
    circles = [element for element in picture.iter() if element.tag.endswith("}circle")]
    heights = [float(circle.attrib["cy"]) for circle in circles]
    assert len(heights) == 4
    assert heights[1] < heights[3] < heights[0] < heights[2]  # more is further up
    plot.draw("nothing found", "size", {"a": [(10, 0.0)]}, {10: "ten"})


def test_progress_comes_to_all_blocks_of_all_runs() -> None:
    trace = trace_of(chats(1, 200))
    steps: list[int] = []
    simulate(trace, list(POLICIES), [10, 20], steps.append)
    assert sum(steps) == trace.references * len(POLICIES) * 2
