"""A rank of a program that `torchrun` starts, in a process that was forked: it costs no imports."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path


def run(variables: dict[str, str], output: str, words: list[str]) -> None:
    """Run ``words[0]`` as ``__main__`` with the other words as its arguments; what it prints is appended to a file."""
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(file, number)
    os.environ.update(variables)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")
