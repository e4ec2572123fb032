"""Programs in separate processes: a `Server` is a Python that imports what programs need, and is forked for each of them.

`context` is for processes that a test talks with, or kills.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

HERE = Path(__file__).resolve().parents[1]
#: Folders of tests: programs share some of their parts.
FOLDERS = sorted({str(path.parent) for path in HERE.glob("*/test_*.py") if path.parent.name != "engines"})
COMPILER = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
#: Seconds that a program may take, beside other work.
LIMIT = 720 if os.environ.get("KVBM_SANITIZE") else 240


class Server:
    """A Python with `variables` in its environment; see programs/server.py."""

    def __init__(self, **variables: str) -> None:
        self.variables = variables
        self.process = subprocess.Popen(
            [sys.executable, HERE / "programs" / "server.py"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            env=self.environment(),
        )
        atexit.register(self.close)

    def environment(self, **knobs: str) -> dict[str, str]:
        folders = (str(HERE), str(HERE / "helpers"), *FOLDERS, str(HERE.parent))
        path = os.pathsep.join(filter(None, (*folders, os.environ.get("PYTHONPATH"))))
        return {**os.environ, "PYTHONPATH": path, **self.variables, **knobs}

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # nobody reads the other end any more
                pipe.close()
        self.process.wait()

    def ask(self, code: str, module: str = "", **knobs: str) -> subprocess.CompletedProcess[str]:
        """Run a program.  The server imports `module` before, and keeps it for the programs that follow."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            request = {"code": code, "module": module, "variables": self.environment(**knobs), "limit": LIMIT}
            print(json.dumps(request), file=self.process.stdin, flush=True)
            return subprocess.CompletedProcess(code, **json.loads(self.process.stdout.readline()))
        except BaseException:  # its answer may still come: no other test may read that
            self.process.kill()
            _server.cache_clear()
            raise

    def run(self, code: str, module: str = "", **knobs: str) -> str:
        """Run a program and return its output; an exit status other than 0 fails the test with that output."""
        done = self.ask(code, module, **knobs)
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"
        return done.stdout


#: They import PyTorch, which kvbm asks of the current stream wherever it is imported: each has a server of its own.
_WITH_TORCH = {"torch", "programs.tensor_lists"}


def server(module: str = "", library: Path | None = None) -> Server:
    """A server for programs with a module; `library`: libcuda.so.1 is the file in this folder."""
    return _server(module if module in _WITH_TORCH else "", library)


@cache
def _server(_of: str, library: Path | None) -> Server:
    return Server(**({"LD_LIBRARY_PATH": str(library)} if library else {}))


def cli(how: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``kvbm`` by a function of programs/commands.py."""
    code = f"from programs import commands\ncommands.{how}(*{arguments!r})"
    return server().ask(code, "programs.commands")


def script(text: str, folder: Path, *arguments: str, module: str = "", **knobs: str) -> subprocess.CompletedProcess[str]:
    """Run a text as ``python example.py`` in a folder; `module`: what it imports that takes long."""
    path = folder / "example.py"
    path.write_text(text, encoding="utf-8")
    code = f"""
import os, runpy, sys
os.chdir({str(folder)!r})
sys.path.insert(0, {str(folder)!r})
sys.argv = {[path.name, *arguments]!r}
runpy.run_path("example.py", run_name="__main__")
"""
    return server(module).ask(code, module, **knobs)


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder of this run that all processes of pytest-xdist share: the first one fills it, and the others wait for that."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with (folder.with_suffix(".lock")).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            part = folder.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            make(part)
            part.rename(folder)
    return folder


@cache
def context() -> Any:
    """Processes of `multiprocessing`, forked from one that has imported what connects engines and has not used it."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(["programs.wires", "programs.links", "programs.trials"])
    quiet = {"NIXL_LOG_LEVEL": os.environ.get("NIXL_LOG_LEVEL", "FATAL")}  # read at its import, which `kvbm link` sets it before
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), **quiet):
        forkserver.ensure_running()
    return found


def compile_fake_driver(folder: Path, source: Path = HERE / "data" / "fake_driver.c") -> Path:
    """The libcuda.so.1 of a folder."""
    from kvbm.compile import codegen

    assert COMPILER is not None
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-w", f"-I{codegen.cuda_dir()}", "-o", folder / "libcuda.so.1"]
    if sanitizers := os.environ.get("KVBM_SANITIZE"):  # what runs kvbm's code is looked at as well
        command += ["-g1", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    subprocess.run([*command, source], check=True)
    return folder


class FakeDriver:
    """Runs functions of programs/, each in a separate process whose libcuda.so.1 is the one in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, program: str, *arguments: object, **knobs: str) -> str:
        """Call ``"module.function"`` with plain data as arguments, and return its output.

        The module is imported once for all of its programs.  `knobs` are environment variables.
        """
        module, _, function = f"programs.{program}".rpartition(".")
        code = f"from {module} import {function}\n{function}(*{arguments!r})"
        return server(module, self.folder).run(code, module, **knobs)
