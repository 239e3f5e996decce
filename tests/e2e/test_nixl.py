"""Prefill and decode on different engines with vLLM's NixlConnector, KVDock beside it in both.

NIXL is no dependency of the tests. They run where it is installed, on a CPU too:

    pip install --no-deps --target FOLDER nixl nixl-cu13
    PYTHONPATH=FOLDER python -m pytest tests/e2e/test_nixl.py

One engine computes a prompt and holds its blocks, the other one reads them from there and answers.
What they answer is what a plain engine answers.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from enginekit import EngineProcess, Generation, Request
from modelkit import Llama, make_checkpoint, random_prompt
from servers import ServerProcess

from kvdock import Client

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="NIXL is not installed"),
]

CHUNK = 128
ASK = {"num_kvdock_extra_cached_tokens": None}
PROMPT = random_prompt(5 * CHUNK + 50, seed=1)
# It leaves the prompt after three chunks.
TURN = PROMPT[: 3 * CHUNK] + random_prompt(200, seed=2)
PORTS = {"prefill": 25_600, "decode": 25_700}


def engine_at(
    server: ServerProcess, model: Path, folder: Path, name: str, *, kvdock_first: bool
) -> EngineProcess:
    kvdock = {
        "kv_connector": "KVDockConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "kvdock.address": server.address,
            "kvdock.lookup_timeout_ms": 3000,
        },
    }
    nixl = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
    connectors = [kvdock, nixl] if kvdock_first else [nixl, kvdock]
    return EngineProcess(
        model,
        log=folder / f"{name}.log",
        environment={
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(PORTS[name]),
            "UCX_TLS": "tcp,self,sm",
            "UCX_NET_DEVICES": "lo",
        },
        kv_transfer_config={
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"connectors": connectors},
        },
    )


def extra(answer: Generation) -> int:
    assert answer.kv_transfer_params is not None
    return int(answer.kv_transfer_params["num_kvdock_extra_cached_tokens"])


class Pair:
    """A prefill engine and a decode engine with one KVDock server."""

    def __init__(self, prefill: EngineProcess, decode: EngineProcess) -> None:
        self.prefill = prefill
        self.decode = decode

    def answer(self, prompt: list[int]) -> tuple[Generation, Generation]:
        """What both say of a prompt."""
        remote: Mapping[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        (first,) = self.prefill.generate(
            Request(prompt, max_tokens=1, kv_transfer_params={**remote, **ASK}), settle=False
        )
        assert first.kv_transfer_params is not None
        assert first.kv_transfer_params["do_remote_prefill"]
        told = {**first.kv_transfer_params, **ASK}
        # Else the decode engine would repeat how much the other one had cached.
        told.pop("remote_prefill_cached_tokens", None)
        (second,) = self.decode.generate(Request(prompt, kv_transfer_params=told))
        # Its blocks are free when the other engine has read them and KVDock has stored them.
        self.prefill.generate()
        return first, second


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nixl")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return make_checkpoint(folder / "model", Llama())


@pytest.fixture(scope="module")
def plain(model: Path, folder: Path) -> list[list[int]]:
    with EngineProcess(model, log=folder / "plain.log") as engine:
        answers = engine.generate(Request(PROMPT), Request(TURN))
    return [answer.tokens for answer in answers]


@pytest.fixture(params=[True, False], ids=["kvdock-first", "nixl-first"])
def pair(request: pytest.FixtureRequest, model: Path, folder: Path) -> Iterator[Pair]:
    with ExitStack() as stack:
        # Not pytest's folders: a socket's path must be short.
        short = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvdock-test-"))
        server = ServerProcess(
            Path(short) / "s.sock", "--memory", "128MiB", "--chunk-tokens", str(CHUNK)
        )
        stack.callback(server.stop)
        prefill, decode = (
            stack.enter_context(
                engine_at(server, model, folder, name, kvdock_first=bool(request.param))
            )
            for name in PORTS
        )
        yield Pair(prefill, decode)
        with Client(server.address) as client:
            now = client.status()
            assert (now.index.leases, now.index.locks, now.pool.reserved_bytes) == (0, 0, 0)


def test_prefill_here_and_decode_there(pair: Pair, plain: list[list[int]]) -> None:
    first, second = pair.answer(PROMPT)
    assert first.tokens == plain[0][:1]
    assert second.tokens == plain[0]
    # The decode engine got the prompt from the prefill engine, though KVDock has it by now.
    assert (extra(first), extra(second)) == (0, 0)
    assert second.num_cached_tokens is not None
    assert second.num_cached_tokens >= len(PROMPT) - 1
    # The prefill engine loads what it has forgotten from KVDock, and the other one reads all of it.
    assert pair.prefill.reset_prefix_cache()
    assert pair.decode.reset_prefix_cache()
    first, second = pair.answer(TURN)
    assert extra(first) == 3 * CHUNK
    assert extra(second) == 0
    assert second.num_cached_tokens is not None
    assert second.num_cached_tokens >= len(TURN) - 1
    assert second.tokens == plain[1]
    # What the decode engine read over NIXL, and what it generated, KVDock has stored too.
    assert pair.decode.reset_prefix_cache()
    (alone,) = pair.decode.generate(Request(TURN, kv_transfer_params=ASK))
    assert alone.tokens == plain[1]
    assert extra(alone) == len(TURN) // CHUNK * CHUNK
