"""Compile kernels at run time: a kernel's name → source text → cubin, cached in the user's cache folder.

NVRTC compiles, through cuda.core.  The text is the same line for ``cuda/permute.cuh`` that a build compiles, so a run-time kernel
equals the built kernel.  No GPU is needed to compile.  NVRTC is optional (``pip install 'kvbm-layouts[runtime]'``): if it is
missing, `why_not` returns the reason, and no error is raised.

The cache is a folder with one file per kernel, architecture and compiler.  cuda.core's `FileStreamProgramCache` is not used: it
stores bare cubins, so it would pass a truncated or foreign file to the driver; older versions of cuda.core lack it; and to find an
entry it loads NVRTC (50 ms and 100 MB), while reading a file takes far less than a millisecond.  Files here have a header and a
digest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BuildError, escaping
from ..planner.kernel_forms import Kernel, parse_kernel
from ..system import cache
from ..system.locks import Lock
from ..system.private import PrivateFolder
from .codegen import cuda_dir, source

_log = escaping(logging.getLogger(__name__))

#: How to get NVRTC, and how to do without.
INSTALL = "pip install 'kvbm-layouts[runtime]'"
PERMANENT = (
    "To build it in: `kvbm codegen --layouts DIR --out OUT` shows what the layouts in DIR need, and a rebuild of kvbm with "
    "KVBM_LAYOUTS=DIR compiles it"
)

#: Magic bytes and version of a cache file.
_MAGIC = b"kvbm-cubin-1\n"
_KEY = _DIGEST = 32
_ELF, _EM_CUDA = b"\x7fELF", 190
#: Bytes of a cache file, and of the note of a compiler, at most.
_MOST_BYTES, _MOST_NOTE = 64 << 20, 1 << 16

#: Options for NVRTC, without the architecture.  All that changes the result is part of the key.
_OPTIONS: dict[str, Any] = {"std": "c++17", "device_as_default_execution_space": True}


@dataclass(frozen=True, slots=True)
class Compiler:
    """A working NVRTC.

    Attributes
    ----------
    version : str
        Version, such as ``13.0``.
    path : str
        Path of the library.
    size : int
        Bytes of the library: releases of one version differ in it.
    archs : tuple of int
        Supported architectures, ascending; 90 is sm_90.
    """

    version: str
    path: str
    size: int
    archs: tuple[int, ...]

    def __str__(self) -> str:
        return f"NVRTC {self.version}"

    def arch(self, capability: int) -> int | None:
        """The best architecture for a GPU: its own, else the latest earlier one that it can run; None if there is none."""
        fitting = [arch for arch in self.archs if arch // 10 == capability // 10 and arch <= capability]
        return max(fitting, default=None)


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a run-time kernel's code.

    Attributes
    ----------
    kernel : str
        Name of the kernel.
    arch : int
        Architecture: 90 is sm_90.
    cached : bool
        True if it came from the cache, False if it was compiled.
    seconds : float
        Time to load or compile it.
    compiler : str
        The compiler that compiled it, now or earlier.
    path : str
        Its file in the cache; empty if the folder is not writable.
    """

    kernel: str
    arch: int
    cached: bool
    seconds: float
    compiler: str
    path: str

    def __str__(self) -> str:
        if self.cached:
            return f"{self.kernel} is not built in: it came from the cache of run-time kernels, {self.path}"
        kept = f"kept in {self.path}" if self.path else "not kept, as the cache folder is not to be used"
        return f"{self.kernel} is not built in: {self.compiler} compiled it for sm_{self.arch} in {self.seconds:.2f} s; {kept}"


# ---- the compiler --------------------------------------------------------------------------------------------------

_lock = Lock()  # held while compiling and loading, not while looking up a known kernel
_found: Compiler | str | None = None


def is_off() -> bool:
    """True if ``KVBM_NVRTC=0`` turns compiling at run time off."""
    return os.environ.get("KVBM_NVRTC", "1") == "0"


def find() -> Compiler:
    """Find NVRTC with cuda.pathfinder: wheels, conda, the system, ``CUDA_HOME``.  It is searched once per process.

    Raises
    ------
    BuildError
        NVRTC is not found, does not work, or is turned off.
    """
    global _found
    if is_off():
        raise BuildError("KVBM_NVRTC=0 turns compiling at run time off")
    with _lock:
        if _found is None:
            try:
                _found = _remembered() or _ask()
            except BuildError as error:
                _found = str(error)  # not the error: its traceback would keep the pools of the copy that asked first
        if isinstance(_found, str):
            raise BuildError(_found)
        return _found


def _ask() -> Compiler:
    """Load the library, and query its version and architectures."""
    try:
        from cuda import pathfinder
        from cuda.bindings import nvrtc

        path = str(pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path or "")
        status, major, minor = nvrtc.nvrtcVersion()
        if int(status):
            raise RuntimeError(f"nvrtcVersion returned {status}")
        status, archs = nvrtc.nvrtcGetSupportedArchs()
        if int(status):
            raise RuntimeError(f"nvrtcGetSupportedArchs returned {status}")
        size = Path(path).stat().st_size if path else 0
    except Exception as error:  # an incomplete installation may raise anything
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise BuildError(f"NVRTC was not found ({reason}): {INSTALL}") from None
    found = Compiler(f"{major}.{minor}", path, size, tuple(sorted(archs)))
    _remember(found)
    return found


# Loading NVRTC takes longer than a cached kernel: its version and architectures are cached, with data of its file.


def _note() -> Path:
    """The file of this cache.  Each environment has its own, as it may find another library."""
    places = [
        sys.prefix,
        *(os.environ.get(name, "") for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX", "LD_LIBRARY_PATH")),
    ]
    return folder() / f"compiler-{hashlib.sha256(json.dumps(places).encode()).hexdigest()[:16]}.json"


def _remember(found: Compiler) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # then the library is queried again
        stat = Path(found.path).stat()
        data = {
            "path": found.path,
            "size": found.size,
            "mtime": stat.st_mtime_ns,
            "version": found.version,
            "archs": found.archs,
        }
        _write(_note(), json.dumps(data).encode())


def _remembered() -> Compiler | None:
    try:
        note = _note()
        with PrivateFolder(note.parent) as private:
            data = json.loads(private.read(note.name, _MOST_NOTE))
        stat = Path(data["path"]).stat()
        if (stat.st_size, stat.st_mtime_ns) != (data["size"], data["mtime"]):
            return None
        if not re.fullmatch(r"\d+\.\d+", data["version"]) or not all(type(arch) is int for arch in data["archs"]):
            return None
        return Compiler(data["version"], data["path"], data["size"], tuple(data["archs"]))
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):  # missing, incomplete, or not kvbm's
        return None


# ---- the cache -----------------------------------------------------------------------------------------------------


def folder() -> Path:
    """The folder of compiled kernels: ``nvrtc`` in the user's cache folder."""
    return cache.folder() / "nvrtc"


@functools.cache
def _headers() -> bytes:
    """A hash of all headers that a kernel can include."""
    state = hashlib.sha256()
    for path in sorted(p for p in cuda_dir().iterdir() if p.suffix in {".h", ".cuh"}):
        text = path.read_bytes()
        state.update(f"{path.name} {len(text)}\n".encode() + text)
    return state.digest()


def _key(name: str, arch: int, compiler: Compiler) -> bytes:
    """A hash of everything that a cubin depends on, 32 bytes."""
    from .._version import __version__

    what = [
        source(name),
        _headers().hex(),
        compiler.version,
        compiler.size,
        arch,
        sorted(_OPTIONS.items()),
        __version__,
    ]
    return hashlib.sha256(json.dumps(what).encode()).digest()


def _read(path: Path, key: bytes) -> bytes | None:
    """The cubin of a cache file; None if there is no file.

    Raises
    ------
    ValueError
        The file is wrong.
    OSError
        The file cannot be read.
    """
    try:
        with PrivateFolder(path.parent) as private:
            data = private.read(path.name, _MOST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    head = len(_MAGIC)
    if not data.startswith(_MAGIC):
        raise ValueError("it is no cache file of kvbm")
    if data[head : head + _KEY] != key:
        raise ValueError("it holds another kernel")
    digest, cubin = data[head + _KEY :][:_DIGEST], data[head + _KEY + _DIGEST :]
    if hashlib.sha256(key + cubin).digest() != digest:
        raise ValueError("it is not whole, or not what was written")
    _require_cubin(cubin)
    return cubin


def _require_cubin(cubin: bytes) -> None:
    if cubin[:4] != _ELF or int.from_bytes(cubin[18:20], "little") != _EM_CUDA:
        raise ValueError("it holds no code for a GPU")


def _write(path: Path, data: bytes) -> None:
    """Write a file atomically.  If two processes write it, the last one wins.  The folder is private: its code is executed."""
    with PrivateFolder(path.parent, make=True) as private:
        private.write(path.name, data)


def cubin(name: str, capability: int) -> tuple[bytes, Origin]:
    """The code of a kernel for a GPU, from the cache or from the compiler.

    Parameters
    ----------
    name : str
        Name of the kernel, such as ``rows_o2_i5_w8``.
    capability : int
        Capability of the GPU: 90 is sm_90.

    Returns
    -------
    bytes
        The cubin.
    Origin
        Its origin.

    Raises
    ------
    BuildError
        There is no NVRTC, it does not support the GPU, or it refused the source: ``.log`` has its output and the source.

    Notes
    -----
    A cache file that is unreadable or wrong is replaced, with a warning.  If the folder is not writable, there is a warning, and
    the next process compiles again.  The same applies to a folder or file that others may write, or that belongs to another user
    than this one or root: its code is not executed, and nothing is written there.
    """
    compiler = find()
    arch = compiler.arch(capability)
    if arch is None:
        raise BuildError(f"{compiler} compiles nothing for sm_{capability}: update it ({INSTALL})")
    started = time.perf_counter()
    key, path = _key(name, arch, compiler), None
    try:
        path = folder() / f"{name}-sm_{arch}-{key.hex()[:16]}.cubin"
        found = _read(path, key)
        if found is not None:
            return found, Origin(name, arch, True, time.perf_counter() - started, str(compiler), str(path))
    except ValueError as error:
        _log.warning("kvbm: %s is replaced: %s", path, str(error))
    except OSError as error:
        _warn_unusable(f"{folder()}: {error.strerror}")
    except RuntimeError as error:  # no home
        _warn_unusable(str(error))
    made = _compile(name, arch, compiler)
    if path is not None:
        try:
            _write(path, _MAGIC + key + hashlib.sha256(key + made).digest() + made)
        except OSError as error:
            _warn_unusable(f"{folder()}: {error.strerror}")
            path = None
    return made, Origin(name, arch, False, time.perf_counter() - started, str(compiler), str(path or ""))


@functools.cache
def _warn_unusable(why: str) -> None:
    """Once: a machine without a home would say it for every kernel."""
    _log.warning(
        "kvbm: run-time kernels are not kept, every process compiles its own: %s; KVBM_CACHE_DIR names a folder", why
    )


def _compile(name: str, arch: int, compiler: Compiler) -> bytes:
    from cuda.core import Program, ProgramOptions

    text = source(name)
    try:
        options = ProgramOptions(name=f"{name}.cu", arch=f"sm_{arch}", include_path=str(cuda_dir()), **_OPTIONS)
        made = bytes(Program(text, "c++", options).compile("cubin").code)
        _require_cubin(made)
    except Exception as error:  # cuda.core may raise anything
        numbered = "\n".join(f"{number:4} | {line}" for number, line in enumerate(text.splitlines(), 1))
        log = f"{str(error).strip()}\n\n{name}.cu:\n{numbered}"
        raise BuildError(
            f"{compiler} ({compiler.path}) did not compile the kernel {name} for sm_{arch}; KVBM_NVRTC=0 takes a built kernel "
            f"instead. {log}",
            command=f"{compiler.path} --gpu-architecture=sm_{arch} --std=c++17 -default-device -I{cuda_dir()}",
            log=log,
        ) from error
    return made


# ---- in this process -----------------------------------------------------------------------------------------------

_known: dict[tuple[str, int], Origin] = {}


@functools.cache
def _capability(device: int) -> int:
    from .. import _core  # the other half: this module's first half needs nothing compiled

    major, minor = _core.device_info(device)["capability"]
    return major * 10 + minor


def why_not(device: int) -> str:
    """Why kernels cannot be compiled for a GPU; empty if they can."""
    try:
        compiler = find()
    except BuildError as error:
        return str(error)
    if compiler.arch(_capability(device)) is None:
        return f"{compiler} compiles nothing for sm_{_capability(device)}: update it ({INSTALL})"
    return ""


def kernel(name: str, device: int) -> Origin:
    """Load a kernel that is not built in into the compiled part, for a GPU.  A loaded kernel is returned at once.

    Raises
    ------
    BuildError
        As `cubin`.
    CudaError
        There is no such GPU.
    """
    known = _known.get((name, _capability(device)))
    if known is not None:
        return known
    with _lock:  # two threads that need one kernel compile it once
        known = _known.get((name, _capability(device)))
        if known is None:
            from .. import _core

            code, known = cubin(name, _capability(device))
            forms = [
                ("tile" if f.kind == "tile" else "rows", f.outer, f.inner, f.element, f.word, f.sm_limited)
                for f in parse_kernel(name)
            ]
            _core.add_kernel(name, forms, code, known.arch)
            _known[name, _capability(device)] = known
    return known


def is_known_kind(kernel: Kernel) -> bool:
    """True if the compiled part can launch such a kernel."""
    return not any(form.of_planes or form.digests or form.kind == "cast" for form in kernel)


def origin(name: str, device: int) -> Origin | None:
    """The origin of a kernel's code, if this process compiled or loaded it at run time; else None."""
    return _known.get((name, _capability(device))) if device >= 0 else None
