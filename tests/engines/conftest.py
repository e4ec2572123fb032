"""Tests with the engines themselves, in the environment of `make engines`; elsewhere they are not collected."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent

collect_ignore_glob = [] if find_spec("vllm") else ["test_*vllm*.py"]


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


def start(program: str, *arguments: Any, **variables: str) -> subprocess.Popen[str]:
    """A program of `tests/engines/programs`, with what it prints in one pipe."""
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path]), "HF_HUB_OFFLINE": "1", "UCX_TLS": "all",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions of the tests for workers
        "NIXL_LOG_LEVEL": "FATAL", **variables,
    }  # fmt: skip
    command = [sys.executable, str(HERE / "programs" / f"{program}.py"), *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def end(process: subprocess.Popen[str], limit: float = 240) -> str:
    """What it printed; AssertionError where it failed, or takes longer."""
    try:
        printed, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        printed, _ = process.communicate()
        raise AssertionError(f"{process.args}: not done after {limit} s\n{printed[-8000:]}") from None
    assert process.returncode == 0, f"{process.args}: {process.returncode}\n{printed[-8000:]}"
    return printed


def run(program: str, *arguments: Any, limit: float = 240, **variables: str) -> str:
    """What a program of `tests/engines/programs` prints."""
    return end(start(program, *arguments, **variables), limit)


def result(printed: str) -> Any:
    """What stands behind RESULT."""
    [line] = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))
