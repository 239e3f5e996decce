"""The models of the end-to-end tests can tell a right KV cache from a wrong one."""

from pathlib import Path
from typing import Any

import pytest
from enginekit import Request
from modelkit import DeepseekV2, Gemma3, Llama, Llama4, Shape, make_checkpoint, random_prompt
from tests.e2e.engines import start_engine

pytestmark = pytest.mark.e2e

PROMPT_TOKENS = 1500
CHUNK_TOKENS = 256


@pytest.mark.parametrize(
    ("shape", "arguments"),
    [
        (Llama(), {}),
        (DeepseekV2(), {"block_size": 16}),
        (Gemma3(), {}),
        (Llama4(), {}),
    ],
    ids=["llama", "deepseek_v2", "gemma3", "llama4"],
)
def test_zeroing_one_chunk_changes_the_greedy_tokens(
    shape: Shape, arguments: dict[str, Any], tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / "model", shape)
    prompt = random_prompt(PROMPT_TOKENS, seed=1)
    with start_engine(
        model, log=tmp_path / "engine.log", enable_prefix_caching=False, **arguments
    ) as engine:
        intact, again = (engine.generate(Request(prompt))[0].tokens for _ in range(2))
        assert again == intact
        assert len(set(intact)) > 8, "a model that repeats itself would prove nothing"
        for chunk in range(PROMPT_TOKENS // CHUNK_TOKENS):
            zeroed = (chunk * CHUNK_TOKENS, (chunk + 1) * CHUNK_TOKENS)
            (damaged,) = engine.generate(Request(prompt, zero_kv=zeroed))
            assert damaged.tokens != intact, f"chunk {chunk} made no difference"


def test_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    first, second, other = (
        (make_checkpoint(tmp_path / name, Llama(), seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first == second
    assert first != other
