"""Real vLLM with latent attention (MLA) on a CPU, whose kernels cannot go on from a cached prefix.

vLLM's own prefix cache is off there. KVDock does nothing either: the answers are those without it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from enginekit import Request
from modelkit import DeepseekV2, make_checkpoint, random_prompt
from servers import ServerProcess
from tests.e2e.engines import start_engine

from kvdock import Client

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        torch.cpu._is_amx_tile_supported(), reason="vLLM's kernels for AMX go on from a prefix"
    ),
]


def test_a_prompt_is_answered_as_without_cache(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", DeepseekV2())
    log = tmp_path / "engine.log"
    # All but the last token would be a hit, which the decode kernel answers with other tokens.
    request = Request(
        random_prompt(256, seed=1), kv_transfer_params={"num_kvdock_extra_cached_tokens": None}
    )
    # Not pytest's folders: a socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="kvdock-test-") as folder:
        server = ServerProcess(Path(folder) / "s.sock", "--memory", "64MiB", "--chunk-tokens", "64")
        try:
            settings = {"kvdock.address": server.address, "kvdock.lookup_timeout_ms": 3000}
            with start_engine(model, log=log, block_size=16, kv_connector=settings) as engine:
                first, second = (engine.generate(request)[0] for _ in range(2))
                with Client(server.address) as client:
                    assert not client.status().sessions
        finally:
            server.stop()
    assert second.tokens == first.tokens
    assert second.num_cached_tokens == 0
    assert "KVDock does nothing for this engine" in log.read_text()
