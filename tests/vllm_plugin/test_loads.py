"""A load that does not fit what was promised is computed, and its message stays short."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from kvdock.types import GroupKind
from kvdock_vllm.engine.groups import GroupShape
from kvdock_vllm.engine.loads import Loads
from kvdock_vllm.engine.specs import Target

CHUNK = 64


@pytest.mark.parametrize(
    ("blocks", "nulls"), [(800, 0), (3, 0), (1000, 2)], ids=["many", "few", "null blocks"]
)
def test_what_does_not_fit_is_told_by_counts(
    blocks: int, nulls: int, caplog: pytest.LogCaptureFixture
) -> None:
    shape = GroupShape(None, GroupKind.FULL_ATTENTION, 16, ("a",))
    session: Any = object()
    lookup: Any = SimpleNamespace(
        live=session,
        num_computed_tokens=0,
        hit_chunks=1,
        lease_id=7,
        locked={None: range(1)},
        target=Target(epoch=1, namespace="n", chunk_tokens=CHUNK),
    )
    record: Any = SimpleNamespace(
        request=SimpleNamespace(request_id="r"),
        tables=[[0] * nulls + list(range(5001, 5001 + blocks - nulls))],
        take_lookup=lambda: lookup,
    )
    loads = Loads([shape], all_or_nothing=False)
    with caplog.at_level(logging.ERROR):
        loads.begin(record, 1000 * 16, session)
    (spec,) = loads.take_new()
    assert spec.target is None
    assert len(spec.groups[0].block_ids) == blocks
    message = caplog.messages[0]
    assert f"{blocks} of 1000 blocks, {nulls} of them null" in message
    assert "500" not in message
    assert "chunks [0, 1) are locked" in message
    assert len(message) < 400
