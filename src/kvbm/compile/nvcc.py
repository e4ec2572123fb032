"""Finds the CUDA compiler and compiles kernels into fatbins.

The build (``setup.py``) and `kvbm doctor` use it. Nothing here needs a GPU or a driver. Compiled files are kept. The name
of each contains a hash of everything that can change its bytes, so a second build without changes compiles nothing, even
if the compiler comes from a new build environment under another path.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import BuildError
from ..system.cache import replacing

DEFAULT_ARCHS = "80;90;100;120"  # cubins run on later minor versions: 86 and 89, 103, 121 are covered too
MIN_VERSION = (12, 8)  # the first that supports sm_100, sm_120 and --compress-mode
_FATBIN = 0xBA55ED50
#: `#include "file"` and <file>, Cython's `include "file"`, and as the second group the macro in `#include MACRO`.
_INCLUDE = re.compile(r"""^[ \t]*(?:#[ \t]*)?include[ \t]*["'<]([^"'>\n]+)|^[ \t]*#[ \t]*include[ \t]+(\w+)""", re.MULTILINE)
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


@dataclass(frozen=True)
class Targets:
    """The targets of a build: real architectures (``sm_90``), and virtual ones, whose PTX a later driver compiles.

    Attributes
    ----------
    archs, ptx : tuple of str
        Compute capabilities without the dot, such as ``90`` or ``100a``; oldest first.
    """

    archs: tuple[str, ...]
    ptx: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join([*(f"sm_{a}" for a in self.archs), *(f"compute_{a}" for a in self.ptx)])

    @property
    def flags(self) -> list[str]:
        """The ``-gencode`` options."""
        real = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in self.archs]
        return real + [f"-gencode=arch=compute_{a},code=compute_{a}" for a in self.ptx]


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


def targets(environ: Mapping[str, str] | None = None) -> Targets:
    """Read ``CUDA_ARCHS`` (default ``80;90;100;120``) and ``CUDA_PTX_ARCHS`` (default: the oldest of them).

    Entries are separated by semicolons, commas or blanks; ``90``, ``9.0`` and ``sm_90`` are the same. ``none`` is an
    empty list. At least one of the two lists must have an entry.

    Returns
    -------
    Targets

    Raises
    ------
    BuildError
        An entry is not a compute capability, or both lists are empty.

    Examples
    --------
    >>> str(targets({"CUDA_ARCHS": "9.0 sm_80"}))
    'sm_80 sm_90 compute_80'
    >>> str(targets({"CUDA_ARCHS": "100a", "CUDA_PTX_ARCHS": "none"}))
    'sm_100a'
    """
    environ = os.environ if environ is None else environ
    archs = _capabilities("CUDA_ARCHS", environ.get("CUDA_ARCHS", "").strip() or DEFAULT_ARCHS)
    # 90a and 100f are specific to one family. Their PTX runs nowhere else, so it cannot be the fallback.
    portable = [a for a in archs if a.isdigit()]
    ptx_text = environ.get("CUDA_PTX_ARCHS", "").strip() or (portable[0] if portable else "none")
    ptx = _capabilities("CUDA_PTX_ARCHS", ptx_text)
    if not archs and not ptx:
        raise BuildError("CUDA_ARCHS and CUDA_PTX_ARCHS are both 'none': expected an entry, or KVBM_CUDA=0")
    return Targets(archs, ptx)


def fatbin(source: Path, include: Path, out: Path, compiler: Compiler, target: Targets, threads: int = 1) -> Path:
    """Compile one source into a fatbin, unless the same fatbin exists already.

    Parameters
    ----------
    source : Path
        A ``.cu`` file.
    include : Path
        The folder of its headers. Only those that the source includes, directly or indirectly, are part of the hash.
    out : Path
        The folder of the fatbin ``<stem>.<hash>.fatbin``. It is created if it does not exist.
    compiler : Compiler
    target : Targets
    threads : int
        Number of architectures that are compiled at a time.

    Returns
    -------
    Path
        The fatbin.

    Raises
    ------
    BuildError
        nvcc failed: see ``.command`` and ``.log``. No half-written file is left.
    """
    flags = [
        "-fatbin",
        "-std=c++17",
        "-O3",
        "--compress-mode=size",  # without this option, cubins are ten times as large
        "-allow-unsupported-compiler",  # the host compiler only preprocesses here
        f"-frandom-seed={source.stem}",  # for reproducible bytes
        *target.flags,
    ]
    host = os.environ.get("CUDAHOSTCXX")
    if host:
        flags.append(f"-ccbin={host}")
    ambient = [os.environ.get(name, "") for name in ("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN")]
    name = f"{source.stem}.{digest(compiler.banner, flags, ambient, sources(source, include))}.fatbin"
    result = out / name
    if _is_whole(result):
        return result
    with replacing(result) as part:
        command = [*compiler.command, *flags, f"--threads={threads}", f"-I{include}", "-o", str(part), str(source)]
        _run(command, f"nvcc {compiler.version} failed on {source.name}")
        if not _is_whole(part):
            raise BuildError(f"nvcc {compiler.version} wrote no whole fatbin of {source.name}: is the disk full?")
    return result


def _is_whole(path: Path) -> bool:
    """True for a fatbin of the size that its header states (magic, version, bytes of the header, bytes after it)."""
    try:
        with path.open("rb") as file:
            magic, _, header, behind = struct.unpack("<IHHQ", file.read(16))
        return bool(magic == _FATBIN and path.stat().st_size == header + behind)
    except (OSError, struct.error):
        return False


def digest(*parts: str | Sequence[str | Path]) -> str:
    """Hash text, lists of text, and files (a `Path`: its name and content); 16 hex digits.

    Examples
    --------
    >>> digest("a", ["b"]) == digest("a", ["b"]) != digest("ab", [])
    True
    """
    state = hashlib.sha256()

    def add(kind: bytes, data: bytes) -> None:
        state.update(kind + len(data).to_bytes(8, "little") + data)

    for part in parts:
        items = [part] if isinstance(part, str) else part
        add(b"l", len(items).to_bytes(8, "little"))
        for item in items:
            if isinstance(item, Path):
                add(b"n", item.name.encode())
                add(b"f", item.read_bytes())
            else:
                add(b"s", item.encode())
    return state.hexdigest()[:16]


def sources(path: Path, *folders: Path) -> list[Path]:
    """Return a source and every file that it includes, directly or indirectly.

    Parameters
    ----------
    path : Path
        A C, C++, CUDA or Cython source.
    *folders : Path
        Folders to search for included files, after the folder of the file that includes them. A file that is in none of
        them belongs to the system and is left out.

    Returns
    -------
    list of Path
        `path` first, each file once. Files inside a false ``#if`` are included.

    Raises
    ------
    BuildError
        An ``#include`` names a macro, so its file is not known here.
    """
    found = [path]
    for file in found:  # the list grows during the loop
        for name, macro in _INCLUDE.findall(file.read_text(encoding="utf-8")):
            if macro:
                raise BuildError(f'{file}: expected #include "file" or <file>, got #include {macro}')
            places = (folder / name for folder in (file.parent, *folders))
            included = next(filter(Path.is_file, places), path)
            if included not in found:
                found.append(included)
    return found


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
    banner = _run([*command, "--version"], "does not run")
    match = re.search(r"release [\d.]+, V([\d.]+)", banner)
    if match is None:
        raise BuildError("expected nvcc, got another program", command=shlex.join(command), log=banner)
    version = match[1]
    if tuple(int(n) for n in version.split(".")[:2]) < MIN_VERSION:
        raise BuildError(f"nvcc {version} is too old: expected {'.'.join(map(str, MIN_VERSION))} or newer")
    return banner, version


def _capabilities(variable: str, text: str) -> tuple[str, ...]:
    if text.lower() == "none":
        return ()
    found = set()
    for word in re.split(r"[;,\s]+", text.strip(";, ")):
        match = re.fullmatch(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)([af]?)", word)
        if match is None:
            raise BuildError(f"{variable}={text}: expected compute capabilities such as {DEFAULT_ARCHS}, got {word!r}")
        found.add("".join(match.groups()))
    return tuple(sorted(found, key=lambda a: (int(a.rstrip("af")), a)))


def _run(command: Sequence[str], what: str) -> str:
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
