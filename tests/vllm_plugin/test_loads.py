"""A load that does not fit what was promised is computed, and its message stays short."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvdock.types import GroupKind
from kvdock_vllm.engine.groups import GroupShape
from kvdock_vllm.engine.loads import plan_load
from kvdock_vllm.engine.specs import Target

CHUNK = 64


@pytest.mark.parametrize(
    ("blocks", "shown"), [(800, "1, 2, 3, 4, 5, 6, 7, 8, ..."), (3, "1, 2, 3")]
)
def test_what_does_not_fit_is_told_by_counts_and_the_first_few(
    blocks: int, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    shape = GroupShape(None, GroupKind.FULL_ATTENTION, 16, ("a",))
    lookup: Any = SimpleNamespace(
        num_computed_tokens=0,
        hit_chunks=1,
        lease_id=7,
        locked={None: range(1)},
        target=Target(epoch=1, namespace="n", chunk_tokens=CHUNK),
    )
    with caplog.at_level(logging.ERROR):
        load = plan_load(
            "r",
            [shape],
            [list(range(1, blocks + 1))],
            lookup,
            1000 * 16,
            is_usable=True,
            all_or_nothing=False,
        )
    assert load.spec.target is None
    assert len(load.spec.block_ids) == blocks
    message = caplog.messages[0]
    assert f"{blocks} of 1000 blocks ({shown})" in message
    assert "chunks [0, 1) are locked" in message
    assert len(message) < 400
