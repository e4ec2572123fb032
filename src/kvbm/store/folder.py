"""A folder of KV-cache contents that all engines share, for any tp and block size.

A sequence is cut into units of a fixed number of tokens, which `keys` names.  A file holds some heads of a unit, and a digest of
each head.  A unit is complete when its files hold all heads.  ``docs/reference/store.md`` describes folder and files.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import BindError, KvbmError, printable
from ..system.cache import replacing
from .casting import require_told
from .digests import Digests
from .file import Stored, framed, opened
from .keys import RULE, Content, key_of_json
from .open_file import Opened

__all__ = [
    "Described", "Folder", "Part", "Unit", "alone", "by_use", "cover", "described", "folders_of", "forget",
    "old_units_of", "remove", "touch", "units_of",
]  # fmt: skip

#: A temporary file that was not changed for so many seconds belongs to a process that has ended.
_LOST_SECONDS = 3600.0

#: The description in the folder of a content, and the most bytes that are read of it.
_DESCRIPTION, _MOST_BYTES = "content.json", 1 << 22

_KEY = re.compile(r"[0-9a-f]{64}")
_PREFIX = re.compile(r"[0-9a-f]{2}")
_DIGEST = re.compile(r"[0-9a-f]{16}")
#: Files of SGLang's pages from earlier versions.
_PAGE = re.compile(r"[A-Za-z0-9_]{1,128}\.l[0-9]+-[0-9]+(?:\.h[0-9]+-[0-9]+)?\.safetensors")
_PART = re.compile(r"heads-([0-9]{1,6})-([0-9]{1,6})\.safetensors")


class Part(NamedTuple):
    """A file of a unit: the first head that it holds, and the last plus one."""

    first: int
    last: int

    @property
    def name(self) -> str:
        return f"heads-{self.first}-{self.last - 1}.safetensors"


def cover(parts: Sequence[Part], first: int, last: int) -> list[tuple[Part, int, int]] | None:
    """The heads to take from each part so that all of `first` to `last` (exclusive) are covered; None if some are missing."""
    found = []
    while first < last:
        best = max((part for part in parts if part.first <= first), key=lambda part: part.last, default=None)
        if best is None or best.last <= first:
            return None
        found.append((best, first, min(best.last, last)))
        first = best.last
    return found


class Folder:
    """A folder of units of one content.  Any number of processes may read and write it at the same time.

    Parameters
    ----------
    folder : Path
        It may hold units of other contents, each kind in its own subfolder.
    content : Content
        The content of the units.
    most_bytes : int, optional
        Limit of the bytes of all files in the folder.  Above it, the least recently used units are removed.  Each process checks
        this after it has written 1/64 of the limit, so each process may exceed it by that much.  Default: no limit.
    key : str, optional
        The key of the content, if it is known.

    Notes
    -----
    The disk is not accessed before something is read or written.  Call `make` to check the folder early.
    """

    def __init__(self, folder: Path, content: Content, most_bytes: int | None = None, *, key: str = "") -> None:
        self.folder, self.content, self.most_bytes = folder, content, most_bytes
        self._key = key or content.key
        self.root = folder / self._key
        self._root, self._layout, self._heads = str(self.root), content.layout, content.shape.nh
        self._written = most_bytes or 0  # others may have written before: check on the first write
        self._guard = threading.Lock()

    def make(self, model: Mapping[str, Any]) -> None:
        """Create the folder, with a file that describes its content and `model`: that of which `Content.model` is the key.

        Raises `BindError` if it cannot be created or written, or is a link: its files would not count.
        """
        if self.root.is_symlink():
            raise BindError(f"folder: {self.root}: expected a folder, got a link: the limit of bytes would not count its files")
        description = {"title": self.content.title, "content": self.content.fields, "model": model}
        try:
            with replacing(self.root / _DESCRIPTION, follow=False) as part:
                part.write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise BindError(f"folder: expected a writable folder, got {self.folder} ({error})") from None

    def home(self, name: str) -> Path:
        """The folder of a unit."""
        if not _KEY.fullmatch(name):
            raise BindError(f"store: expected the key of a unit, 64 hexadecimal digits, got {name!r:.100}")
        return self.root / name[:2] / name

    def parts(self, name: str) -> list[Part]:
        """The files of a unit.  What cannot be one of them is left out, or its unit would count as stored for ever."""
        if not _KEY.fullmatch(name):
            return []
        try:
            with os.scandir(f"{self._root}/{name[:2]}/{name}") as found:  # the scheduler waits for it
                return [part for part in map(self._part, found) if part is not None]
        except OSError:
            return []

    def _part(self, file: os.DirEntry[str]) -> Part | None:
        """The part of a regular file with the name of one; None for anything else, links included."""
        match = _PART.fullmatch(file.name)
        if match is None:
            return None
        part = Part(int(match[1]), int(match[2]) + 1)
        is_name = part.name == file.name and part.first < part.last <= self._heads
        return part if is_name and file.is_file(follow_symlinks=False) else None

    def strangers(self, name: str) -> list[Path]:
        """What looks like a file of a unit by its name, and is none of `parts`.  What cannot be read is a problem of `units_of`."""
        return [Path(file.path) for file in _files(self.home(name)) if _PART.fullmatch(file.name) and self._part(file) is None]

    def holds(self, name: str, part: Part | None = None) -> bool:
        """True if files hold some heads of a unit; all of them if not given.  Their contents are checked when they are read."""
        first, last = part or (0, self.content.shape.nh)
        return cover(self.parts(name), first, last) is not None

    def drop(self, name: str, part: Part, place: tuple[int, int] | None = None) -> None:
        """Remove a wrong file; with its `Opened.place`, only if it still has its name."""
        path = self.home(name) / part.name
        with contextlib.suppress(OSError):
            found = path.stat()
            if place in (None, (found.st_dev, found.st_ino)):
                path.unlink()

    # ---- files -----------------------------------------------------------------------------------------------------

    def write(self, name: str, part: Part, first: int, row: npt.NDArray[Any], block: int, heads: Sequence[int]) -> int:
        """Write a file, which gets its name when it is complete, and return its bytes.

        `name` and `part` are the unit and the heads of the file, `first` the position of the unit's first token.  `row` has the
        heads, shape ``(nh, nl, no, nt, hd)``; of quantised values ``(nh, nl, no, bytes)``.  `block` is their digest at position
        0, as in files of `kvbm.store`; `heads` has the digest of each head, at its place in the model, as for a unit at
        position 0.
        """
        shape = replace(self.content.shape, nh=part.last - part.first)
        metadata = {
            "store.content": self._key, "store.unit": name, "store.heads": f"{part.first}-{part.last - 1}",
            "store.digests": " ".join(f"{digest:016x}" for digest in heads),
            **({"store.values": values} if (values := self.content.values) else {}),
        }  # fmt: skip
        start = framed(self._layout, shape, 1, Digests(np.array([block], np.uint64)), metadata)
        data = row.reshape(-1).view(np.uint8)
        path = self.home(name) / part.name
        with replacing(path, follow=False) as temporary, temporary.open("wb", buffering=0) as file:
            for piece in (memoryview(start), data.data):
                while len(piece):
                    piece = piece[file.write(piece) :]
        touch(path, first)
        self.wrote(len(start) + data.nbytes)
        return len(start) + data.nbytes

    def open(self, name: str, part: Part) -> tuple[Stored, list[int]]:
        """An open file with its header, and the digests of its heads.

        Raises `BindError` for a file that is cut short, or whose contents do not fit its name.  It is removed.
        """
        file = Opened(self.home(name) / part.name)
        try:
            return self._checked(opened(file), name, part)
        except BindError:
            self.drop(name, part, file.place)
            raise

    def inspect(self, name: str, part: Part) -> tuple[Stored, list[int]]:
        """As `open`.  A wrong file is not removed."""
        return self._checked(opened(Opened(self.home(name) / part.name)), name, part)

    def _checked(self, stored: Stored, name: str, part: Part) -> tuple[Stored, list[int]]:
        metadata, expected = stored.metadata, replace(self.content.shape, nh=part.last - part.first)
        stored.require_format()
        require_told(stored.path, stored.casts, None, expected)
        for key, wanted in (
            ("kvbm.fingerprint", self._layout.fingerprint), ("store.content", self._key), ("store.unit", name),
            ("store.heads", f"{part.first}-{part.last - 1}"),
        ):  # fmt: skip
            if metadata.get(key) != wanted:
                raise BindError(f"{stored.path}: {key}: expected {wanted!r}, got {metadata.get(key)!r:.200}")
        if (
            stored.shape != expected
            or stored.num_blocks != 1
            or stored.nbytes != self._layout.resolve(expected, 1).nbytes
            or len(stored.blocks) != 1
        ):
            raise BindError(f"{stored.path}: expected one block, {expected}, got {stored.shape}")
        words = metadata.get("store.digests", "").split(" ")
        if len(words) != expected.nh or not all(map(_DIGEST.fullmatch, words)):
            raise BindError(f"{stored.path}: store.digests: expected {expected.nh}, got {metadata.get('store.digests')!r:.200}")
        return stored, [int(word, 16) for word in words]

    # ---- the limit -------------------------------------------------------------------------------------------------

    def wrote(self, nbytes: int) -> None:
        """Count written bytes.  If there are many, remove the least recently used files."""
        if self.most_bytes is None:
            return
        with self._guard:
            self._written += nbytes
            if self._written < max(self.most_bytes // 64, 1):
                return
            self._written = 0
        self.trim()

    def trim(self) -> int:
        """Remove the least recently used units, of any content, until the folder is below its limit.

        Returns the removed bytes.  Only one process at a time does this; the others continue.
        """
        if self.most_bytes is None:
            return 0
        with alone(self.folder) as is_alone:
            if not is_alone:
                return 0
            contents = (one for one in folders_of(self.folder) if described(one) is not None)  # others may belong to anybody
            units = by_use(unit for one in contents for unit in units_of(one, clear=True))
            total = sum(unit.nbytes for unit in units)
            if total <= self.most_bytes:
                return 0
            removed = 0
            for unit in units:
                if total - removed <= self.most_bytes - self.most_bytes // 16:
                    break
                removed += remove(unit)
            return removed


def touch(path: Path, first: int) -> None:
    """Mark a unit as used now.  The last units of a sequence are removed first, as they are useless without the others."""
    now = time.time() - first * 1e-3
    with contextlib.suppress(OSError):
        os.utime(path, (now, now))


# ---- folders of any content ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Whether no other process removes files of this folder; true as well on a file system without locks."""
    with contextlib.ExitStack() as stack:
        is_alone = True
        try:
            # Whatever has this name is not waited for, and no link is followed.
            lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_alone = False
        except OSError:
            pass  # several processes may do it at once, and remove more
        yield is_alone


class Unit(NamedTuple):
    """A unit on the disk: time of its last use, bytes of its files, and its folder."""

    used: float
    nbytes: int
    path: str


def by_use(units: Iterable[Unit]) -> list[Unit]:
    """Units in the order in which they are removed: the least recently used first.

    A time in the future is that of a clock that was wrong, and says nothing.  Such units come first: else they would stay for
    years, and all others would go in their place.
    """
    latest = time.time() + _LOST_SECONDS  # clocks of machines differ a little
    return sorted(units, key=lambda unit: (unit.used <= latest, unit))


def folders_of(folder: Path) -> list[str]:
    """The folders of contents in a folder, sorted."""
    return sorted(one.path for one in _folders(_files(folder)))


#: Called with a path below the folder of a content, and why its units are not known.
Problem = Callable[[Path, KvbmError | OSError], object]


def units_of(content: str, clear: bool = False, problem: Problem = lambda *_: None) -> Iterator[Unit]:
    """The units in the folder of a content.

    With `clear`, what ended processes have left is removed.  `problem` is told of each folder that cannot be read, is a link,
    or lies where no engine looks for it: its units are left out.
    """
    inside = _files(content, problem)
    if clear:
        _clear(inside)
    for home in _homes(content, inside, problem):
        used, nbytes, files, is_unit = 0.0, 0, _files(home.path, problem), False
        for file in files:
            with contextlib.suppress(OSError):
                if _PART.fullmatch(file.name):
                    found = file.stat(follow_symlinks=False)
                    used, nbytes, is_unit = max(used, found.st_mtime), nbytes + found.st_size, True
        if is_unit:
            yield Unit(used, nbytes, home.path)
        if clear:
            _clear(files)
        if clear and not files and _is_lost(home):
            with contextlib.suppress(OSError):  # another process writes to it again
                Path(home.path).rmdir()


def _homes(content: str | Path, inside: Sequence[os.DirEntry[str]], problem: Problem) -> Iterator[os.DirEntry[str]]:
    """The folders of units, in folders that are named by the first two digits of their keys."""
    is_own = _KEY.fullmatch(Path(content).name)  # earlier versions had other names
    for some in inside:
        if not _PREFIX.fullmatch(some.name):
            continue
        for home in (one for one in _files(some.path, problem) if _KEY.fullmatch(one.name)) if _is_folder(some, problem) else ():
            if home.name[:2] != some.name and is_own:
                problem(Path(home.path), BindError(f"{home.path}: expected it in {home.name[:2]}, where engines look for it"))
            elif _is_folder(home, problem):
                yield home


def _is_folder(entry: os.DirEntry[str], problem: Problem) -> bool:
    if entry.is_symlink():
        why = f"{entry.path}: expected a folder, got a link: what engines write through it counts nowhere"
        problem(Path(entry.path), BindError(why))
    return entry.is_dir(follow_symlinks=False)


def old_units_of(content: str, problem: Problem = lambda *_: None) -> Iterator[Unit]:
    """The pages of SGLang in the folder of an earlier version: one file each, without a folder of their own."""
    for file in _files(content, problem):
        with contextlib.suppress(OSError):
            if _PAGE.fullmatch(file.name):
                found = file.stat(follow_symlinks=False)
                yield Unit(found.st_mtime, found.st_size, file.path)


def forget(content: Path) -> None:
    """Remove the description of a content and its folders, if no units are left that others could not find without it."""
    problems: list[Path] = []
    left = [*units_of(str(content), problem=lambda path, _: problems.append(path)), *old_units_of(str(content))]
    if left or problems:
        return
    with contextlib.suppress(OSError):
        (content / _DESCRIPTION).unlink()
    for path in [*(Path(one.path) for one in _folders(_files(content))), content]:
        with contextlib.suppress(OSError):
            path.rmdir()


def remove(unit: Unit) -> int:
    """Remove the files of a unit.  Returns their bytes, without those of files that cannot be removed."""
    removed = 0
    if _PAGE.fullmatch(Path(unit.path).name):
        with contextlib.suppress(OSError):
            Path(unit.path).unlink()
            removed = unit.nbytes
        return removed
    for file in _files(unit.path):
        if _PART.fullmatch(file.name):
            with contextlib.suppress(OSError):  # it may belong to another user: continue with the next one
                nbytes = file.stat(follow_symlinks=False).st_size
                Path(file.path).unlink()
                removed += nbytes
    with contextlib.suppress(OSError):
        Path(unit.path).rmdir()
    return removed


@dataclass(frozen=True)
class Described:
    """What the folder of a content says of itself."""

    title: str  # name of the model
    fields: dict[str, Any]  # the content, with the model in place of its key; empty if the folder is of another rule
    problem: str  # why its units are not found under the rule of this version; empty if they are
    #: Not another rule: the description was changed, or cannot be read.  Engines may use the units all the same.
    is_damaged: bool = False


def described(path: str | Path) -> Described | None:
    """What a folder says of itself; None if it is not the folder of a content.  Nothing in it is trusted.

    A folder that is named like one of this version and does not describe itself is a damaged one, unless it is empty.
    """
    try:
        found = _described(path)
    except FileNotFoundError as error:
        found = None if next(_homes(path, _files(path), lambda *_: None), None) is None else _damaged(error)
    except (OSError, ValueError, RecursionError) as error:
        found = _damaged(error)
    is_unknown = found is not None and found.is_damaged and not found.title  # it may belong to anybody
    return None if is_unknown and not _KEY.fullmatch(Path(path).name) else found


def _damaged(why: object) -> Described:
    return Described("", {}, f"its content.json cannot be read ({printable(str(why), 200)})", is_damaged=True)


def _described(path: str | Path) -> Described | None:
    number = os.open(Path(path) / _DESCRIPTION, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    with open(number, "rb") as file:  # noqa: PTH123  (a descriptor)
        found = json.loads(file.read(_MOST_BYTES))
    if not isinstance(found, dict) or not isinstance(found.get("title"), str):
        return _damaged("it has no title")
    title, fields = found["title"], found.get("content")
    if "model_fields" in found:
        return Described(title, {}, "it was written by an earlier version of kvbm, which named units in another way")
    if not isinstance(fields, dict) or not isinstance(fields.get("rule"), str):
        return _damaged("it has no content, or one without a rule")
    if fields["rule"] != RULE:
        return Described(title, {}, f"its names follow the rule {fields['rule']!r:.60}, and this version of kvbm has {RULE!r}")
    model = found.get("model")
    if key_of_json(fields) != Path(path).name or not isinstance(model, dict) or key_of_json(model) != fields.get("model"):
        why = "its content.json was changed: it does not describe the folder of this name"
        return Described(title, {}, why, is_damaged=True)
    return Described(title, {**fields, "model": model}, "")


def _files(folder: str | Path, problem: Problem = lambda *_: None) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except (FileNotFoundError, NotADirectoryError):  # it was removed meanwhile
        return []
    except OSError as error:
        problem(Path(folder), error)
        return []


def _folders(files: Sequence[os.DirEntry[str]]) -> list[os.DirEntry[str]]:
    return [file for file in files if file.is_dir(follow_symlinks=False)]


def _is_lost(entry: os.DirEntry[str]) -> bool:
    """True if a file was not changed for so long that its process must have ended."""
    try:
        return time.time() - entry.stat(follow_symlinks=False).st_mtime > _LOST_SECONDS
    except OSError:
        return False


def _clear(files: Sequence[os.DirEntry[str]]) -> None:
    """Remove incomplete files of processes that were killed."""
    for file in files:
        if file.name.endswith(".tmp") and _is_lost(file):
            with contextlib.suppress(OSError):
                Path(file.path).unlink()
