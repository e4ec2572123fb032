"""The ranks of a program that `torchrun` starts, in processes that were forked: they cost no imports."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Iterable
from pathlib import Path


def side_by_side(modules: Iterable[str], each: Iterable[tuple[dict[str, str], str, list[str]]], seconds: float) -> None:
    """Import modules, and `run` each rank in a process of its own.  If one fails, the others are killed."""
    for module in modules:
        importlib.import_module(module)
    fork = multiprocessing.get_context("fork")
    started = [fork.Process(target=run, args=one) for one in each]
    for one in started:
        one.start()
    end = time.monotonic() + seconds
    while any(one.exitcode is None for one in started) and not any(one.exitcode for one in started) and time.monotonic() < end:
        time.sleep(0.02)
    for one in started:
        one.kill()
        one.join()
    sys.exit(max(abs(one.exitcode or 0) for one in started))


def run(variables: dict[str, str], output: str, words: list[str]) -> None:
    """Run ``words[0]`` as ``__main__`` with the other words as its arguments; what it prints is appended to a file."""
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.environ.update(variables)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")
