"""Finds the CUDA compiler, for the build and for `kvbm doctor`.  Nothing here needs a GPU or a driver."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import BuildError

MIN_VERSION = (12, 8)  # the first that supports sm_100, sm_120 and --compress-mode
_NEXT = (
    "install a CUDA toolkit, or `pip install 'cuda-toolkit[nvcc,nvvm,crt,cudart,cccl]==13.0.*'`, or name a compiler in "
    "CUDACXX or CUDA_HOME; KVBM_CUDA=0 builds without CUDA"
)


@dataclass(frozen=True)
class Compiler:
    """A working nvcc.

    Attributes
    ----------
    command : tuple of str
        The command that starts it; more than one word if ``CUDACXX`` has a launcher, as in ``ccache nvcc``.
    version : str
        The release, such as ``13.0.88``.
    banner : str
        The whole output of ``nvcc --version``; part of the hash in file names.
    origin : str
        Where it was found: ``CUDACXX``, ``CUDA_HOME``, ``CUDA_PATH``, ``wheel`` or ``PATH``.
    passed_over : tuple of str
        The places before it that were named but had no usable compiler, each with the reason.
    """

    command: tuple[str, ...]
    version: str
    banner: str
    origin: str
    passed_over: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"nvcc {self.version} from {self.origin} ({shlex.join(self.command)})"


def find(environ: Mapping[str, str] | None = None, path: Iterable[str] | None = None) -> Compiler:
    """Find the CUDA compiler: ``CUDACXX``, ``CUDA_HOME``, ``CUDA_PATH``, the wheels on ``path``, ``PATH``, in this order.

    A place that is named but has no compiler is skipped and recorded. Only ``CUDACXX`` without a compiler is an error, because
    it names one compiler explicitly.

    Parameters
    ----------
    environ : mapping, optional
        The environment. Default: ``os.environ``.
    path : iterable of str, optional
        Folders to search for wheels. Default: ``sys.path``.

    Returns
    -------
    Compiler

    Raises
    ------
    BuildError
        There is no compiler. The message lists every place and the reason why it was not used.

    Examples
    --------
    >>> find({"PATH": ""}, path=[])
    Traceback (most recent call last):
    ...
    kvbm.errors.BuildError: no CUDA compiler: CUDACXX, CUDA_HOME and CUDA_PATH are not set; no nvidia/*/bin/nvcc...
    """
    environ = os.environ if environ is None else environ
    passed_over: list[str] = []
    for origin, where, command in _candidates(environ, sys.path if path is None else path):
        try:
            banner, version = _ask(command, environ)
        except BuildError as error:
            if origin == "CUDACXX":
                raise BuildError(f"CUDACXX={where}: {error}", command=error.command, log=error.log) from None
            passed_over.append(f"{origin}={where}: {error}")
            continue
        return Compiler(command, version, banner, origin, tuple(passed_over))
    unset = [name for name in ("CUDACXX", "CUDA_HOME", "CUDA_PATH") if not environ.get(name)]
    if unset:
        passed_over.append(f"{' and '.join(', '.join(unset).rsplit(', ', 1))} {'are' if unset[1:] else 'is'} not set")
    found_wheel = any(reason.startswith("wheel=") for reason in passed_over)
    passed_over += [] if found_wheel else ["no nvidia/*/bin/nvcc among the installed wheels"]
    passed_over += [] if any(reason.startswith("PATH=") for reason in passed_over) else ["no nvcc on PATH"]
    raise BuildError(f"no CUDA compiler: {'; '.join(passed_over)}. Next: {_NEXT}")


def _candidates(environ: Mapping[str, str], path: Iterable[str]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield (origin, place as text, command), in the order of `find`."""
    if words := shlex.split(environ.get("CUDACXX", "")):
        yield "CUDACXX", environ["CUDACXX"], tuple(words)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if home := environ.get(name):
            yield name, home, (str(Path(home) / "bin" / "nvcc"),)
    for folder in path:
        # If an environment has two toolkits, the newest is first.
        for wheel in sorted(Path(folder or ".").glob("nvidia/cu[0-9]*/bin/nvcc"), reverse=True):
            yield "wheel", str(wheel), (str(wheel.resolve()),)
    if nvcc := shutil.which("nvcc", path=environ.get("PATH", "")):
        yield "PATH", nvcc, (nvcc,)


def _ask(command: tuple[str, ...], environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the output of ``nvcc --version`` and the release in it."""
    if shutil.which(command[0], path=environ.get("PATH", "")) is None:
        raise BuildError("not there" if command[1:] or os.sep not in command[0] else f"no compiler at {command[0]}")
    banner = run([*command, "--version"], "does not run")
    match = re.search(r"release [\d.]+, V([\d.]+)", banner)
    if match is None:
        raise BuildError("expected nvcc, got another program", command=shlex.join(command), log=banner)
    version = match[1]
    if tuple(int(n) for n in version.split(".")[:2]) < MIN_VERSION:
        raise BuildError(f"nvcc {version} is too old: expected {'.'.join(map(str, MIN_VERSION))} or newer")
    return banner, version


def run(command: Sequence[str], what: str) -> str:
    """Run a command and return its output, both streams together."""
    line = shlex.join(command)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise BuildError(f"{what}: {error.strerror}", command=line) from None
    if done.returncode:
        raise BuildError(f"{what} (exit status {done.returncode})", command=line, log=done.stdout)
    return done.stdout
