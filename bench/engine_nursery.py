"""Starts vLLM engines as forks of one process that has imported vLLM: enginekit.Nursery's child.

The imports take half of what a small engine's start costs, and are the same for all. A fork has
run nothing of an engine, so its engine is as new as one of an interpreter of its own; only Python's
hash seed is the same for all forks (the demo's engines have one each).

Each message on the socket whose file descriptor is the only argument holds an environment, as JSON,
and four file descriptors: standard input, log, answers, and a pipe that tells the process's id and
in the end its status, a line each. The end of the socket ends this process.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from importlib import import_module
from typing import NoReturn

# What vLLM imports only when an engine needs it.
LATE = (
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.models.llama",
    "vllm.v1.worker.cpu_worker",
)


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    import engine_runner

    for name in LATE:
        import_module(name)
    # Workers of an engine with several ranks are forks as well.
    executor = import_module("vllm.v1.executor.multiproc_executor")
    executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    assert threading.active_count() == 1, "a fork has only the thread that forks"
    while True:
        message, descriptors, *_ = socket.recv_fds(channel, 1 << 20, 4)
        if not message:
            return
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
        if not os.fork():
            channel.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            stdin, log, answers, status = descriptors
            keep(json.loads(message), stdin, log, answers, status, engine_runner.main)
        for descriptor in descriptors:
            os.close(descriptor)


def keep(
    environment: dict[str, str],
    stdin: int,
    log: int,
    answers: int,
    status: int,
    run: Callable[[int], NoReturn],
) -> NoReturn:
    """Run the engine in a child and tell how it ended; does not return."""
    engine = os.fork()
    if engine:
        for descriptor in (stdin, log, answers):
            os.close(descriptor)
        os.write(status, b"%d\n" % engine)
        _, ended = os.waitpid(engine, 0)
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(ended))
        os._exit(0)
    os.close(status)
    for source, target in ((stdin, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(environment)
    run(answers)


if __name__ == "__main__":
    main()
