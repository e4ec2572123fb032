"""Tests with the engines themselves, in the environment of `make engines`; elsewhere they are not collected."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a tiny model of random weights, once: its folder."""
    folder = tmp_path_factory.getbasetemp().parent / "kvbm-models"

    def model(name: str) -> Path:
        path = folder / name
        if not path.exists():
            part = folder / f"{name}.{os.getpid()}"
            run("models", name, str(part))
            part.rename(path)
        return path

    return model


def run(program: str, *arguments: Any, limit: float = 240, **variables: str) -> str:
    """What a program of `tests/engines/programs` prints; AssertionError with its output where it fails."""
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path]), "HF_HUB_OFFLINE": "1", "UCX_TLS": "all",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", **variables,
    }  # fmt: skip
    command = [sys.executable, str(HERE / "programs" / f"{program}.py"), *map(str, arguments)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=limit, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.returncode}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    return done.stdout
