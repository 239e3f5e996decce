"""What a nursery of vLLM engines imports: see nursery.py."""

from __future__ import annotations

import multiprocessing
from importlib import import_module
from typing import NoReturn

import engine_runner

# What vLLM imports only when an engine needs it.
for _name in (
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.gemma3",
    "vllm.model_executor.models.llama",
    "vllm.v1.worker.cpu_worker",
):
    import_module(_name)

# Workers of an engine with several ranks are forks as well.
import_module("vllm.v1.executor.multiproc_executor").get_mp_context = lambda: (
    multiprocessing.get_context("fork")
)


def run(arguments: list[str], descriptors: list[int]) -> NoReturn:
    """Be an engine that answers at the only descriptor."""
    (answers,) = descriptors
    engine_runner.main(answers)
