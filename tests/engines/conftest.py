"""Tests with the engines themselves, in the environment of `make engines`; elsewhere they are not collected."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE / "programs"))

import forked  # noqa: E402

collect_ignore_glob = [] if find_spec("vllm") else ["test_*vllm*.py"]


def has_avx512() -> bool:
    """True if the processor has what vLLM's fp8 caches need on CPUs."""
    return bool(import_module("torch").cpu._is_avx512_supported())


class Apart(NamedTuple):
    """How much log probabilities differ, of the ten likeliest tokens of each prompt and step."""

    mean: float
    most: float


def apart(found: list[dict[str, Any]], exact: list[dict[str, Any]], steps: int = 1) -> Apart:
    """What programs print of the same prompts, beside each other: of the first tokens that are generated."""
    differences = []
    for one, other in zip(found, exact, strict=True):
        for ours, theirs in zip(one["logprobs"][:steps], other["logprobs"][:steps], strict=True):
            likeliest = sorted(theirs, key=theirs.__getitem__)[-10:]
            differences += [abs(ours.get(token, min(ours.values())) - theirs[token]) for token in likeliest]
    return Apart(sum(differences) / len(differences), max(differences))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a tiny model of random weights, once: its folder.  A name may have a seed behind it: ``llama 1``."""
    folder = tmp_path_factory.getbasetemp().parent / "kvbm-models"

    def model(name: str) -> Path:
        path = folder / name
        if not path.exists():
            part = folder / f"{name}.{os.getpid()}"
            kind, *seed = name.split()
            run("models", kind, str(part), *seed)
            try:
                part.rename(path)
            except OSError:  # another process was first
                if not path.exists():
                    raise
                shutil.rmtree(part)
        return path

    return model


def environment() -> dict[str, str]:
    """Variables of all programs."""
    return {
        **os.environ, "HF_HUB_OFFLINE": "1", "UCX_TLS": "all",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parent / "helpers"), *sys.path]),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions of the tests for workers
        "TORCH_COMPILE_DISABLE": "1",  # of vLLM's sampler: 4 s an engine, and 20 s where nothing is compiled yet
        "NIXL_LOG_LEVEL": "FATAL", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip


class Program:
    """A program of `tests/engines/programs` that runs.  What it prints goes to a file: a full pipe would stop it.

    It has a process group of its own, not a session: Linux would schedule that as a group of its own (autogroup).  Beside engines
    of several workers, which call sched_yield(2) while they wait, Linux 6.18 then ran nothing else for 30 seconds.
    """

    def __init__(self, program: str, *arguments: Any, **variables: str) -> None:
        self._command = self.words(program, arguments)
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115  closed by `kill`
        self._start({**environment(), **variables})

    def words(self, program: str, arguments: tuple[Any, ...]) -> list[str]:
        """The words of its command."""
        return [sys.executable, str(HERE / "programs" / f"{program}.py"), *map(str, arguments)]

    def _start(self, variables: dict[str, str]) -> None:
        started = subprocess.Popen(
            self._command, env=variables, stdin=subprocess.DEVNULL, stdout=self._file, stderr=subprocess.STDOUT, process_group=0
        )
        self._pid, self._status, self._wait = started.pid, started.poll, started.wait

    @property
    def printed(self) -> str:
        """The last 16 MiB."""
        size, most = os.fstat(self._file.fileno()).st_size, 1 << 24
        return os.pread(self._file.fileno(), most, max(size - most, 0)).decode(errors="replace")

    @property
    def has_failed(self) -> bool:
        """Whether it ended with an error.  A program that was killed did not: tests do that."""
        return self._status() not in (None, 0, -signal.SIGKILL)

    def end(self, limit: float = 240, *, beside: Program | None = None) -> str:
        """What it printed.  AssertionError if it fails, takes longer, or another one that it depends on fails."""
        last = time.monotonic() + limit
        while self._status() is None and time.monotonic() < last and not (beside and beside.has_failed):
            time.sleep(0.05)
        code, printed = self._status(), self.printed
        if code != 0:
            told = [f"{self._command}: {'not done' if code is None else code}\n{printed[-8000:]}"]
            if beside:
                told.append(f"beside it {beside._command}: {beside._status()}\n{beside.printed[-8000:]}")
            raise AssertionError("\n".join(told))
        return printed

    def kill(self) -> None:
        """End it, and the processes it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        self._wait()
        self._file.close()


@cache
def with_vllm() -> Any:
    """Processes of `multiprocessing`, forked from one that has imported vLLM: see programs/forked.py."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(list(forked.MODULES))
    with mock.patch.dict(os.environ, environment()):
        forkserver.ensure_running()
    return found


class Forked(Program):
    """A program that uses vLLM, forked where others are started."""

    def _start(self, variables: dict[str, str]) -> None:
        started = with_vllm().Process(target=forked.main, args=(self._command[1:], variables, self._file.name))
        started.start()
        self._pid, self._wait = started.pid, started.join
        self._status = lambda: started.exitcode


#: Programs that import vLLM as it is; the others change what it finds.
FORKED = {"disaggregate", "generate", "models", "offload", "pressure"}


def program(name: str, *arguments: Any, **variables: str) -> Program:
    """A program of `tests/engines/programs` that runs."""
    is_forked = name in FORKED and find_spec("vllm") is not None and find_spec("sglang") is None
    return (Forked if is_forked else Program)(name, *arguments, **variables)


def run(name: str, *arguments: Any, limit: float = 240, **variables: str) -> str:
    """What a program of `tests/engines/programs` prints."""
    started = program(name, *arguments, **variables)
    try:
        return started.end(limit)
    finally:
        started.kill()


def result(printed: str) -> Any:
    """What stands behind RESULT."""
    [line] = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))
