"""The demo works, and it notices when what it shows is not so."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import demo
import pytest
from enginekit import Generation

Answers = list[Generation]


@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_demo_ends_with_status_0() -> None:
    result = subprocess.run(
        [sys.executable, str(Path(demo.__file__))], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def answers(*, hit: bool, ttft_s: float) -> Answers:
    cached = [tokens // demo.CHUNK_TOKENS * demo.CHUNK_TOKENS for tokens in demo.PROMPT_TOKENS]
    return [
        Generation(
            tokens=[1, 2, 3],
            num_cached_tokens=tokens if hit else 0,
            ttft_s=ttft_s,
            finish_reason="length",
            kv_transfer_params={demo.CACHED_TOKENS: tokens if hit else 0},
        )
        for tokens in cached
    ]


def good() -> tuple[Answers, Answers, Answers]:
    control = answers(hit=True, ttft_s=0.1)
    control[demo.DAMAGED_PROMPT] = replace(control[demo.DAMAGED_PROMPT], tokens=[1, 9, 9])
    return answers(hit=False, ttft_s=1.0), answers(hit=True, ttft_s=0.1), control


def hit_in_first(cold: Answers, warm: Answers, control: Answers) -> None:
    cold[0] = replace(cold[0], kv_transfer_params={demo.CACHED_TOKENS: 256})


def lost_a_chunk(cold: Answers, warm: Answers, control: Answers) -> None:
    less = demo.PROMPT_TOKENS[-1] // demo.CHUNK_TOKENS * demo.CHUNK_TOKENS - demo.CHUNK_TOKENS
    warm[-1] = replace(warm[-1], kv_transfer_params={demo.CACHED_TOKENS: less})


def other_tokens(cold: Answers, warm: Answers, control: Answers) -> None:
    warm[0] = replace(warm[0], tokens=[1, 2, 4])


def too_slow(cold: Answers, warm: Answers, control: Answers) -> None:
    warm[0] = replace(warm[0], ttft_s=1.1)


def damage_without_effect(cold: Answers, warm: Answers, control: Answers) -> None:
    control[demo.DAMAGED_PROMPT] = warm[demo.DAMAGED_PROMPT]


def damage_elsewhere(cold: Answers, warm: Answers, control: Answers) -> None:
    control[demo.DAMAGED_PROMPT - 1] = replace(control[0], tokens=[7])


def test_all_that_is_shown_holds_when_all_is_well() -> None:
    assert all(check.holds for check in demo.verdict(*good()))


@pytest.mark.parametrize(
    "spoil",
    [
        hit_in_first,
        lost_a_chunk,
        other_tokens,
        too_slow,
        damage_without_effect,
        damage_elsewhere,
    ],
)
def test_each_fault_fails_exactly_one_check(
    spoil: Callable[[Answers, Answers, Answers], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    cold, warm, control = good()
    spoil(cold, warm, control)
    failed = [check for check in demo.verdict(cold, warm, control) if not check.holds]
    assert len(failed) == 1
