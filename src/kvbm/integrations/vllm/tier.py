"""A folder of KV-cache contents with names from their tokens, for any tp and block size.  vLLM is not imported.

A sequence is cut into units of a fixed number of tokens.  The name of a unit is a hash of its tokens and all tokens before them, so
engines with other block sizes and ranks find the same units.  A file holds the heads of a rank, and a digest of each head.  A unit
is complete when its files hold all heads.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ...errors import BindError
from ...layout import spec as layouts
from ...layout.layout import Layout
from ...layout.shapes import BlockShape
from ...store import Digests, Stored
from ...store.file import framed, opened
from ...store.open_file import Opened
from ...system.cache import replacing
from ..host_values import HostValues
from ..identity import describe, neighbours

__all__ = ["LAYOUT", "Chain", "Content", "KvbmTier", "Part", "cover", "touch"]

#: Part of names and of the metadata of files.  It changes if files of one version must not be found by another.
VERSION = "1"

#: Order of elements in the files, if values are the engine's.
LAYOUT = "universal"

#: A temporary file that was not changed for so many seconds belongs to a process that has ended.
_LOST_SECONDS = 3600.0

#: The fields of a model of which only the key is known.
_NO_FIELDS: Mapping[str, Any] = {}

_NAME = re.compile(r"[0-9a-f]{64}")
_DIGEST = re.compile(r"[0-9a-f]{16}")
_PART = re.compile(r"heads-([0-9]{1,6})-([0-9]{1,6})\.safetensors")


@dataclass(frozen=True)
class Content:
    """The contents of units of one kind.  Units are found only by an equal content.

    Attributes
    ----------
    model : str
        Key of the weights and the configuration: `kvbm.integrations.identity.key_of`.
    title : str
        Name of the model for readers; it is not part of the key.
    layers : tuple of int
        The layers' numbers in the model.
    shape : BlockShape
        Shape of a unit of the whole model: all KV heads, and the tokens of a unit.
    values : HostValues, optional
        The units have quantised values.
    """

    model: str
    title: str
    layers: tuple[int, ...]
    shape: BlockShape
    values: HostValues | None = None

    @property
    def layout(self) -> Layout:
        """The order of elements in files: heads outermost."""
        return layouts.load(LAYOUT) if self.values is None else self.values.layout

    @property
    def values_text(self) -> str:
        """What quantised values are; empty for the engine's own."""
        return "" if self.values is None else self.values.text(self.shape.dtype)

    @property
    def fields(self) -> dict[str, Any]:
        """The content as an object for JSON."""
        layout, values = self.layout, self.values_text
        return {
            "version": VERSION, "model": self.model, "layers": list(self.layers), "shape": asdict(self.shape),
            "layout": layout.order_text, "fingerprint": layout.fingerprint, **({"values": values} if values else {}),
        }  # fmt: skip

    @property
    def key(self) -> str:
        """A hash of the content, in hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.fields, sort_keys=True).encode()).hexdigest()

    @property
    def folder(self) -> str:
        """Name of the folder for such units: the beginning of the key, without the title, which may differ."""
        return self.key[:24]


class Chain:
    """Names of a sequence's units: each a SHA-256 of the unit's tokens and of the name before it.

    Parameters
    ----------
    unit : int
        Tokens of a unit.
    tokens : sequence of int
        Tokens of the sequence; it may grow.
    salt : str
        Sequences with different salts have different names.

    Examples
    --------
    >>> one, other = Chain(2, [5, 6, 7, 8, 9]), Chain(2, [5, 6, 7, 8])
    >>> one.names(0, 4) == other.names(0, 4), len(one.names(2, 4)), one.names(2, 4)[0] in one.names(0, 2)
    (True, 1, False)
    """

    def __init__(self, unit: int, tokens: Sequence[int], salt: str = "") -> None:
        self.unit = unit
        self._tokens = tokens
        self._last = hashlib.sha256(f"kvbm tier {VERSION}, {unit} tokens\0{salt}".encode(errors="surrogatepass")).digest()
        self._names: list[str] = []

    @property
    def whole(self) -> int:
        """Number of tokens in whole units."""
        return len(self._tokens) // self.unit * self.unit

    def names(self, first: int, last: int) -> tuple[str, ...]:
        """Names of the units of tokens `first` to `last` (exclusive); both are multiples of a unit.

        Raises
        ------
        BindError
            The range does not begin or end at a unit, or is beyond the sequence.
        """
        if first % self.unit or last % self.unit or not 0 <= first <= last <= len(self._tokens):
            raise BindError(
                f"tier: expected tokens of {len(self._tokens)}, in whole units of {self.unit}, got {first} to {last}"
            )
        for at in range(len(self._names) * self.unit, last, self.unit):
            packed = struct.pack(f"<{self.unit}q", *self._tokens[at : at + self.unit])
            self._last = hashlib.sha256(self._last + packed).digest()
            self._names.append(self._last.hex())
        return tuple(self._names[first // self.unit : last // self.unit])


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


class KvbmTier:
    """A folder of units of one content.  Any number of processes may read and write it at the same time.

    Parameters
    ----------
    folder : Path
        The folder.  It may hold units of other contents, each kind in its own subfolder.
    content : Content
        The content of the units.
    most_bytes : int
        Limit of the bytes of all files in the folder.  Above it, the least recently used units are removed.  Each process checks
        this after it has written 1/64 of the limit, so each process may exceed it by that much.

    Notes
    -----
    The disk is not accessed before something is read or written.  Call `make` to check the folder early.
    """

    def __init__(self, folder: Path, content: Content, most_bytes: int) -> None:
        self.folder, self.content, self.most_bytes = folder, content, most_bytes
        self.root = folder / content.folder
        self._key, self._root, self._layout = content.key, str(self.root), content.layout
        self._written = most_bytes  # others may have written before: check on the first write
        self._guard = threading.Lock()

    def make(self, model: Mapping[str, Any] = _NO_FIELDS) -> list[str]:
        """Create the folder, with a file that describes its content.

        Parameters
        ----------
        model : mapping
            The fields of which `Content.model` is the key.

        Returns
        -------
        list of str
            Other folders with units of a model of this title that are not used, and the fields that differ.

        Raises
        ------
        BindError
            The folder cannot be created or written.
        """
        try:
            describe(self.root, self.content.title, model, self.content.fields)
        except OSError as error:
            raise BindError(f"folder: expected a writable folder, got {self.folder} ({error})") from None
        return neighbours(self.root, self.content.title, model)

    def home(self, name: str) -> Path:
        """The folder of a unit."""
        return self.root / name[:2] / name

    def parts(self, name: str) -> list[Part]:
        """The files of a unit."""
        try:
            found = os.listdir(f"{self._root}/{name[:2]}/{name}")  # noqa: PTH208  (the scheduler waits for it)
        except OSError:
            return []
        matches = [_PART.fullmatch(one) for one in found]
        return [Part(int(match[1]), int(match[2]) + 1) for match in matches if match]

    def holds(self, name: str) -> bool:
        """True if files hold all heads of a unit.  The contents of the files are checked when they are read."""
        return cover(self.parts(name), 0, self.content.shape.nh) is not None

    def drop(self, name: str, part: Part, place: tuple[int, int] | None = None) -> None:
        """Remove a wrong file; with its `Opened.place`, only if it still has its name."""
        path = self.home(name) / part.name
        with contextlib.suppress(OSError):
            found = path.stat()
            if place in (None, (found.st_dev, found.st_ino)):
                path.unlink()

    # ---- files -----------------------------------------------------------------------------------------------------

    def write(self, name: str, part: Part, first: int, row: npt.NDArray[Any], block: int, heads: Sequence[int]) -> int:
        """Write a file.  It gets its name when it is complete.

        Parameters
        ----------
        name : str
            Name of the unit.
        part : Part
            The heads of the file.
        first : int
            Position of the unit's first token.
        row : array
            The heads, shape ``(nh, nl, no, nt, hd)``; of quantised values ``(nh, nl, no, bytes)``.
        block : int
            Their digest at position 0, as in files of `kvbm.store`.
        heads : sequence of int
            The digest of each head, at its place in the model and the sequence.

        Returns
        -------
        int
            Bytes of the file.

        Raises
        ------
        OSError
            The disk is full, or the folder is not writable.
        """
        shape = replace(self.content.shape, nh=part.last - part.first)
        metadata = {
            "tier.content": self._key, "tier.unit": name, "tier.heads": f"{part.first}-{part.last - 1}",
            "tier.digests": " ".join(f"{digest:016x}" for digest in heads),
            **({"tier.values": values} if (values := self.content.values_text) else {}),
        }  # fmt: skip
        start = framed(self._layout, shape, 1, Digests(np.array([block], np.uint64)), metadata)
        data = row.reshape(-1).view(np.uint8)
        path = self.home(name) / part.name
        with replacing(path) as temporary, temporary.open("wb", buffering=0) as file:
            for piece in (memoryview(start), data.data):
                while len(piece):
                    piece = piece[file.write(piece) :]
        touch(path, first)
        self.wrote(len(start) + data.nbytes)
        return len(start) + data.nbytes

    def open(self, name: str, part: Part) -> tuple[Stored, list[int]]:
        """An open file with its header, and the digests of its heads.

        Raises
        ------
        BindError
            The file is cut short, or its contents do not fit its name.  It is removed.
        """
        file = Opened(self.home(name) / part.name)
        try:
            return self._checked(opened(file), name, part)
        except BindError:
            self.drop(name, part, file.place)
            raise

    def _checked(self, stored: Stored, name: str, part: Part) -> tuple[Stored, list[int]]:
        metadata, expected = stored.metadata, replace(self.content.shape, nh=part.last - part.first)
        for key, wanted in (
            ("kvbm.fingerprint", self._layout.fingerprint), ("tier.content", self._key), ("tier.unit", name),
            ("tier.heads", f"{part.first}-{part.last - 1}"),
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
        words = metadata.get("tier.digests", "").split(" ")
        if len(words) != expected.nh or not all(map(_DIGEST.fullmatch, words)):
            raise BindError(
                f"{stored.path}: tier.digests: expected {expected.nh}, got {metadata.get('tier.digests')!r:.200}"
            )
        return stored, [int(word, 16) for word in words]

    # ---- the limit -------------------------------------------------------------------------------------------------

    def wrote(self, nbytes: int) -> None:
        """Count written bytes.  If there are many, remove the least recently used files."""
        with self._guard:
            self._written += nbytes
            if self._written < max(self.most_bytes // 64, 1):
                return
            self._written = 0
        self.trim()

    def trim(self) -> int:
        """Remove the least recently used units, of any content, until the folder is below its limit.

        Only one process at a time does this; the others continue.

        Returns
        -------
        int
            Number of removed bytes.
        """
        with contextlib.ExitStack() as stack:
            try:
                lock = stack.enter_context((self.folder / ".lock").open("ab"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return 0
            except OSError:
                pass  # a file system without locks: several processes may do it at once, and remove more
            units = sorted(_units(self.folder), key=lambda unit: unit[0])
            total = sum(nbytes for _, nbytes, _ in units)
            if total <= self.most_bytes:
                return 0
            removed = 0
            for _, _, path in units:
                if total - removed <= self.most_bytes - self.most_bytes // 16:
                    break
                for file in _files(path):
                    if _PART.fullmatch(file.name):
                        with contextlib.suppress(OSError):  # it may belong to another user: continue with the next one
                            nbytes = file.stat().st_size
                            Path(file.path).unlink()
                            removed += nbytes
                with contextlib.suppress(OSError):
                    Path(path).rmdir()
            return removed


def touch(path: Path, first: int) -> None:
    """Mark a unit as used now.  The last units of a sequence are removed first, as they are useless without the others."""
    now = time.time() - first * 1e-3
    with contextlib.suppress(OSError):
        os.utime(path, (now, now))


def _files(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
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


def _units(folder: Path) -> Iterator[tuple[float, int, str]]:
    """Yield for each unit: time of last use, bytes, folder.  Incomplete files of ended processes are removed."""
    for content in _folders(_files(folder)):
        inside = _files(content.path)
        _clear(inside)
        homes = (home for some in _folders(inside) for home in _folders(_files(some.path)) if _NAME.fullmatch(home.name))
        for home in homes:
            used, nbytes, files = 0.0, 0, _files(home.path)
            for file in files:
                with contextlib.suppress(OSError):
                    if _PART.fullmatch(file.name):
                        found = file.stat()
                        used, nbytes = max(used, found.st_mtime), nbytes + found.st_size
            if nbytes:
                yield used, nbytes, home.path
            _clear(files)
            if not files and _is_lost(home):
                with contextlib.suppress(OSError):  # another process writes to it again
                    Path(home.path).rmdir()
