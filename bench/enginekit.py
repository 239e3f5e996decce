"""Real vLLM engines as child processes, for the demo and the end-to-end tests."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from nursery import ForkedProcess, Nursery

RUNNER = Path(__file__).with_name("engine_runner.py")
SEED = Path(__file__).with_name("engine_seed.py")

DEFAULT_ARGUMENTS: Mapping[str, Any] = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    # Cold and warm runs batch differently, and so round differently. In float32 that difference is
    # far below the distance between the best two tokens; in bfloat16 it is not.
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 4096,
    "max_num_batched_tokens": 2048,
    "disable_log_stats": True,
}

ENVIRONMENT: Mapping[str, str] = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "1",  # tests without engines turn it off
    "HF_HUB_OFFLINE": "1",
}


class EngineError(Exception):
    """The engine process failed; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class Request:
    """One prompt and how to answer it. Decoding is greedy and never stops early."""

    prompt: Sequence[int]
    max_tokens: int = 16
    kv_transfer_params: Mapping[str, Any] | None = None
    cache_salt: str | None = None
    lora: str | None = None
    """Folder of an adapter, whose name is the folder's. The engine must have enable_lora."""
    abort_after_steps: int | None = None
    """Abort after this number of engine steps, counted for the whole batch."""
    zero_kv: tuple[int, int] | None = None
    """After the first token, zero the KV cache of the prompt's tokens [first, end)."""


@dataclass(frozen=True)
class Generation:
    """The answer to a request."""

    tokens: list[int]
    num_cached_tokens: int | None
    """Prompt tokens that were not computed, from whichever cache. None before the first token."""
    ttft_s: float | None
    """From handing the request to the engine to its first token, in seconds."""
    finish_reason: str | None
    """vLLM's word (length, error, ...), or abort where the request asked for it."""
    kv_transfer_params: Mapping[str, Any] | None


def engine_nursery(log: Path) -> Nursery:
    """A nursery of engines, which takes half off their start."""
    return Nursery(SEED, log, ENVIRONMENT)


class EngineProcess:
    """A vLLM engine in a process of its own, ready when the constructor returns.

    Args:
        model: folder of the checkpoint.
        log: file that takes everything the process prints.
        kv_connector: extra configuration of KVDockConnector; None runs without any connector.
        environment: variables to add to this process's own.
        timeout_s: for the start and for each command.
        nursery: forks the process (see ``engine_nursery``); None starts a new interpreter.
        arguments: of vLLM's EngineArgs, over DEFAULT_ARGUMENTS.

    Raises:
        EngineError: it did not start, died, or took longer than timeout_s. It is dead then.
    """

    def __init__(
        self,
        model: Path,
        *,
        log: Path,
        kv_connector: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 180.0,
        nursery: Nursery | None = None,
        **arguments: Any,
    ) -> None:
        settings: dict[str, Any] = {**DEFAULT_ARGUMENTS, "model": str(model), **arguments}
        if kv_connector is not None:
            settings["kv_transfer_config"] = {
                "kv_connector": "KVDockConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": dict(kv_connector),
            }
        self._log = log
        self._timeout_s = timeout_s
        answers, child_answers = os.pipe()
        child_stdin, stdin = os.pipe()
        self._stdin = os.fdopen(stdin, "wb")
        whole = {**os.environ, **ENVIRONMENT, **(environment or {})}
        self._process: subprocess.Popen[bytes] | ForkedProcess
        with log.open("ab") as output:
            if nursery is not None:
                streams = (child_stdin, output.fileno(), output.fileno())
                self._process = nursery.fork([], whole, streams, [child_answers])
            else:
                self._process = subprocess.Popen(
                    [sys.executable, str(RUNNER), str(child_answers)],
                    stdin=child_stdin,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=[child_answers],
                    env=whole,
                )
        os.close(child_stdin)
        os.close(child_answers)
        self._answers: IO[bytes] = os.fdopen(answers, "rb", buffering=0)
        self._exchange(settings)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log_text(self) -> str:
        """Everything the process has printed so far."""
        return self._log.read_text(errors="replace")

    def generate(self, *requests: Request, settle: bool = True) -> list[Generation]:
        """Run requests together; returns when all have finished and, to ``settle``, the engine is
        idle.
        """
        each = [asdict(request) for request in requests]
        answers = self._command("generate", requests=each, settle=settle)
        return [Generation(**answer) for answer in answers]

    def reset_prefix_cache(self, *, reset_connector: bool = False) -> bool:
        """Empty the engine's own prefix cache, and the connector's if wanted; False if the engine
        refused.
        """
        return bool(self._command("reset_prefix_cache", reset_connector=reset_connector))

    def proposed_drafts(self) -> int:
        """How many tokens a drafter (speculative decoding) has proposed so far."""
        return int(self._command("proposed_drafts"))

    def close(self) -> int:
        """Let the process shut its engine down and return its exit status."""
        self._stdin.close()
        try:
            return self._process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise self._failure("did not exit when told to") from None
        finally:
            self._answers.close()

    def kill(self) -> None:
        """End the process at once, as a crash would."""
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self.close()

    def _command(self, verb: str, **arguments: Any) -> Any:
        return self._exchange({"verb": verb, "arguments": arguments})

    def _exchange(self, message: object) -> Any:
        try:
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()
        except BrokenPipeError:
            raise self._failure("is gone") from None
        return json.loads(self._read_line())

    def _read_line(self) -> bytes:
        deadline = time.monotonic() + self._timeout_s
        line = bytearray()
        while not line.endswith(b"\n"):
            remaining = deadline - time.monotonic()
            readable, _, _ = select.select([self._answers], [], [], max(0.0, remaining))
            if not readable:
                self.kill()
                raise self._failure(f"gave no answer within {self._timeout_s:.0f} s")
            received = self._answers.read(1 << 16)
            if not received:
                self._process.wait()
                raise self._failure(f"died with status {self._process.returncode}")
            line += received
        return bytes(line)

    def _failure(self, what: str) -> EngineError:
        tail = "\n".join(self.log_text.splitlines()[-30:])
        return EngineError(f"the engine process {what}; its log ends with:\n{tail}")
