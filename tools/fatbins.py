"""What ``setup.py`` makes kernels with: their text, fatbins by nvcc, and names for what is kept.

Compiled files are kept. The name of each contains a hash of everything that can change its bytes, so a second build without
changes compiles nothing, even if the compiler comes from a new build environment under another path. Nothing here needs a GPU.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbm.compile import codegen
from kvbm.compile.nvcc import Compiler, run
from kvbm.errors import BuildError
from kvbm.layout.layout import Layout
from kvbm.layout.spec import layouts_dir
from kvbm.system.cache import replacing

DEFAULT_ARCHS = "80;90;100;120"  # cubins run on later minor versions: 86 and 89, 103, 121 are covered too
#: The values that the device code compares ``__CUDA_ARCH__`` with. From one to the next its text is the same.
TEXTS = (80, 89, 90)
_FATBIN = 0xBA55ED50
#: `#include "file"` and <file>, Cython's `include "file"`, and as the second group the macro in `#include MACRO`.
_INCLUDE = re.compile(r"""^[ \t]*(?:#[ \t]*)?include[ \t]*["'<]([^"'>\n]+)|^[ \t]*#[ \t]*include[ \t]+(\w+)""", re.MULTILINE)


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
        """The ``-gencode`` options. Targets that have the same text share its PTX, which takes two thirds of the time to make."""
        real = [f"-gencode=arch=compute_{_of_text(a)},code=sm_{a}" for a in self.archs]
        return real + [f"-gencode=arch=compute_{a},code=compute_{a}" for a in self.ptx]


def _of_text(arch: str) -> str:
    """The oldest virtual architecture for which the device code has the same text; 100a and 100f have one of their own."""
    return str(max((text for text in TEXTS if text <= int(arch)), default=arch)) if arch.isdigit() else arch


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
        run(command, f"nvcc {compiler.version} failed on {source.name}")
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


def generated(cache: Path, layouts: Sequence[Layout] | None = None) -> dict[str, str]:
    """What `codegen.generate` returns; what was generated before in this folder of a build, from the same inputs, is taken again.

    Parameters
    ----------
    cache : Path
        The folder of the build, such as ``build``. It is created if it does not exist.
    layouts : sequence of Layout, optional
        Default: the shipped layouts.

    Returns
    -------
    dict
        File name → text.
    """
    data = sorted(layouts_dir().rglob("*.yaml"))
    names = [path.relative_to(layouts_dir()).as_posix() for path in data]
    rooms = ("layout", "planner", "compile", "digest")
    code = [file for room in rooms for file in sorted((Path(codegen.__file__).parents[1] / room).glob("*.py"))]
    inputs = digest(list(map(repr, layouts or [])), names, [*data, codegen.cuda_dir() / "kernels.cu.in", *code])
    result = cache / "generated" / f"{inputs}.json"
    if not result.exists():
        with replacing(result) as part:
            Path(part).write_text(json.dumps(codegen.generate(layouts)), encoding="utf-8")
    return dict(json.loads(result.read_text(encoding="utf-8")))


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
