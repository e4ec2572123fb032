"""A folder of KV-cache contents that are found by their tokens, for any tp and block size; nothing of vLLM is imported.

A sequence is cut into units of a fixed number of tokens.  What a unit is called follows from its tokens and all before them, so
engines with other blocks and other ranks find what one has stored.  A file holds the heads of a rank, and a digest of each.  A unit
is there once its files hold all heads.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ... import spec as layouts
from ...cache import replacing
from ...errors import BindError
from ...shapes import BlockShape
from ...store import Digests, read
from ...store.file import Stored, framed

__all__ = ["LAYOUT", "Chain", "Content", "KvbmTier", "Part", "cover", "key_of_files", "touch"]

#: In names and in the metadata of files; another number where a file of one version must not be found by another.
VERSION = "1"

#: How elements lie in the files.
LAYOUT = "universal"

#: Files of a model: all that weights are read from.
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")

#: A file without its name for so many seconds belongs to a process that is no more.
_LOST_SECONDS = 3600.0

_NAME = re.compile(r"[0-9a-f]{64}")
_PART = re.compile(r"heads-([0-9]{1,6})-([0-9]{1,6})\.safetensors")


@dataclass(frozen=True)
class Content:
    """What the units of one kind hold; what differs in any of it is never found.

    Attributes
    ----------
    model : str
        Which weights and which configuration computed it: `key_of_files`, or what the operator calls it.
    title : str
        What people call the model; it says nothing.
    layers : tuple of int
        The layers' numbers in the model.
    shape : BlockShape
        Of a unit of the whole model: all KV heads, and the tokens of a unit.
    """

    model: str
    title: str
    layers: tuple[int, ...]
    shape: BlockShape

    @property
    def told(self) -> dict[str, Any]:
        """All of it, as JSON has it."""
        layout = layouts.load(LAYOUT)
        return {
            "version": VERSION, "model": self.model, "layers": list(self.layers), "shape": asdict(self.shape),
            "layout": layout.order_text, "fingerprint": layout.fingerprint,
        }  # fmt: skip

    @property
    def key(self) -> str:
        """A number of all of it, in hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.told, sort_keys=True).encode()).hexdigest()

    @property
    def folder(self) -> str:
        """Name of the folder that holds such units: the model's, for people, and the beginning of the key."""
        title = re.sub(r"[^A-Za-z0-9._-]+", "_", self.title.rstrip("/").rpartition("/")[2]).strip("._")[:60]
        return f"{title or 'model'}-{self.key[:24]}"


class Chain:
    """Names of a sequence's units: each a SHA-256 of the unit's tokens and of the name before it.

    Parameters
    ----------
    unit : int
        Tokens of a unit.
    tokens : sequence of int
        Of the sequence; it may grow.
    salt : str
        Sequences with another salt have other names.

    Examples
    --------
    >>> one, other = Chain(2, [5, 6, 7, 8, 9]), Chain(2, [5, 6, 7, 8])
    >>> one.names(0, 4) == other.names(0, 4), len(one.names(2, 4)), one.names(2, 4)[0] in one.names(0, 2)
    (True, 1, False)
    """

    def __init__(self, unit: int, tokens: Sequence[int], salt: str = "") -> None:
        self.unit = unit
        self._tokens = tokens
        self._last = hashlib.sha256(f"kvbm tier {VERSION}, {unit} tokens\0{salt}".encode()).digest()
        self._names: list[str] = []

    @property
    def whole(self) -> int:
        """Tokens that are in whole units."""
        return len(self._tokens) // self.unit * self.unit

    def names(self, first: int, last: int) -> tuple[str, ...]:
        """Of the units that hold tokens `first` to `last` (exclusive), which are multiples of a unit.

        Raises
        ------
        BindError
            Tokens that do not begin or end with a unit, or that there are not.
        """
        if first % self.unit or last % self.unit or not 0 <= first <= last <= len(self._tokens):
            raise BindError(
                f"tier: expected tokens of {len(self._tokens)}, in whole units of {self.unit}, got {first} to {last}"
            )
        for at in range(len(self._names) * self.unit, last, self.unit):
            told = struct.pack(f"<{self.unit}q", *self._tokens[at : at + self.unit])
            self._last = hashlib.sha256(self._last + told).digest()
            self._names.append(self._last.hex())
        return tuple(self._names[first // self.unit : last // self.unit])


class Part(NamedTuple):
    """A file of a unit: the first of the heads that it holds, and the one behind the last."""

    first: int
    last: int

    @property
    def name(self) -> str:
        return f"heads-{self.first}-{self.last - 1}.safetensors"


def cover(parts: Sequence[Part], first: int, last: int) -> list[tuple[Part, int, int]] | None:
    """Which heads to take of which parts so that all of `first` to `last` (exclusive) are taken; None if some are in no part."""
    found = []
    while first < last:
        best = max((part for part in parts if part.first <= first), key=lambda part: part.last, default=None)
        if best is None or best.last <= first:
            return None
        found.append((best, first, min(best.last, last)))
        first = best.last
    return found


class KvbmTier:
    """A folder of units of one content, which any number of processes read and write at once.

    Parameters
    ----------
    folder : Path
        It may hold units of other contents, too, each kind in a folder of its own.
    content : Content
    most_bytes : int
        Bytes of all files in the folder: beyond it the units that were longest not used go.  Each process that writes looks after
        every 64th part of it, so it may be exceeded by so much a process.

    Raises
    ------
    BindError
        The folder cannot be made, or written to.
    """

    def __init__(self, folder: Path, content: Content, most_bytes: int) -> None:
        self.folder, self.content, self.most_bytes = folder, content, most_bytes
        self.root = folder / content.folder
        self._key, self._root, self._layout = content.key, str(self.root), layouts.load(LAYOUT)
        self._written = most_bytes  # by others, before: look at the first occasion
        self._guard = threading.Lock()
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            with replacing(self.root / "content.json") as part:
                part.write_text(json.dumps({"title": content.title, **content.told}, indent=1) + "\n")
        except OSError as error:
            raise BindError(f"folder: expected one that can be written to, got {folder} ({error})") from None

    def home(self, name: str) -> Path:
        """The folder of a unit."""
        return self.root / name[:2] / name

    def parts(self, name: str) -> list[Part]:
        """What files there are of a unit."""
        try:
            found = os.listdir(f"{self._root}/{name[:2]}/{name}")  # noqa: PTH208  (the scheduler waits for it)
        except OSError:
            return []
        matches = [_PART.fullmatch(one) for one in found]
        return [Part(int(match[1]), int(match[2]) + 1) for match in matches if match]

    def holds(self, name: str) -> bool:
        """Whether all heads of a unit are there; what the files hold is looked at when they are read."""
        return cover(self.parts(name), 0, self.content.shape.nh) is not None

    def drop(self, name: str, part: Part) -> None:
        """Remove a file that is not what it should be."""
        with contextlib.suppress(OSError):
            (self.home(name) / part.name).unlink()

    # ---- files -----------------------------------------------------------------------------------------------------

    def write(self, name: str, part: Part, first: int, row: npt.NDArray[Any], block: int, heads: Sequence[int]) -> int:
        """Write a file, which has its name when it is whole.

        Parameters
        ----------
        name : str
            Of the unit.
        part : Part
        first : int
            Position of the unit's first token.
        row : array
            The heads, ``(nh, nl, no, nt, hd)``.
        block : int
            Their digest at position 0, as files of `kvbm.store` have it.
        heads : sequence of int
            The digest of each, at its place in the model and the sequence.

        Returns
        -------
        int
            Bytes of the file.

        Raises
        ------
        OSError
            The disk is full, or the folder is not to be written to.
        """
        shape = replace(self.content.shape, nh=part.last - part.first)
        metadata = {
            "tier.content": self._key, "tier.unit": name, "tier.heads": f"{part.first}-{part.last - 1}",
            "tier.digests": " ".join(f"{digest:016x}" for digest in heads),
        }  # fmt: skip
        start = framed(self._layout, shape, 1, Digests(np.array([block], np.uint64)), metadata)
        data = row.reshape(-1).view(np.uint8)
        path = self.home(name) / part.name
        with replacing(path) as temporary, temporary.open("wb", buffering=0) as file:
            for piece in (memoryview(start), data.data):
                while len(piece):
                    piece = piece[file.write(piece) :]
        touch(path, first)
        return len(start) + data.nbytes

    def open(self, name: str, part: Part) -> tuple[Stored, list[int]]:
        """A file's header, and the digests of its heads.

        Raises
        ------
        BindError
            It is cut short, or holds something else than its name says.
        """
        stored = read(self.home(name) / part.name)
        said, expected = stored.metadata, replace(self.content.shape, nh=part.last - part.first)
        for key, wanted in (
            ("kvbm.fingerprint", self._layout.fingerprint), ("tier.content", self._key), ("tier.unit", name),
            ("tier.heads", f"{part.first}-{part.last - 1}"),
        ):  # fmt: skip
            if said.get(key) != wanted:
                raise BindError(f"{stored.path}: {key}: expected {wanted!r}, got {said.get(key)!r:.200}")
        if (
            stored.shape != expected
            or stored.num_blocks != 1
            or stored.nbytes != expected.nbytes
            or len(stored.blocks) != 1
        ):
            raise BindError(f"{stored.path}: expected one block, {expected}, got {stored.shape}")
        try:
            digests = [int(digest, 16) for digest in said["tier.digests"].split(" ")]
        except (KeyError, ValueError):
            digests = []
        if len(digests) != expected.nh:
            raise BindError(
                f"{stored.path}: tier.digests: expected {expected.nh}, got {said.get('tier.digests')!r:.200}"
            )
        return stored, digests

    # ---- the limit -------------------------------------------------------------------------------------------------

    def wrote(self, nbytes: int) -> None:
        """Tell of bytes that were written; if they are many, files that were longest not used are removed."""
        with self._guard:
            self._written += nbytes
            if self._written < max(self.most_bytes // 64, 1):
                return
            self._written = 0
        self.trim()

    def trim(self) -> int:
        """Remove the units that were longest not used, of any content, until the folder is below its limit.

        One process at a time does; the others go on.

        Returns
        -------
        int
            Bytes that were removed.
        """
        with contextlib.ExitStack() as stack:
            try:
                lock = stack.enter_context((self.folder / ".lock").open("ab"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return 0
            except OSError:
                pass  # a file system without locks: then several look at once, and remove more
            units = sorted(_units(self.folder), key=lambda unit: unit[0])
            total = sum(nbytes for _, nbytes, _ in units)
            if total <= self.most_bytes:
                return 0
            removed = 0
            for _, nbytes, path in units:
                if total - removed <= self.most_bytes - self.most_bytes // 16:
                    break
                for file in _files(path):
                    if _PART.fullmatch(file.name):
                        with contextlib.suppress(OSError):
                            Path(file.path).unlink()
                with contextlib.suppress(OSError):
                    Path(path).rmdir()
                removed += nbytes
            return removed


def touch(path: Path, first: int) -> None:
    """Used now; of a sequence the last units go first, as they are of no use without the others."""
    now = time.time() - first * 1e-3
    with contextlib.suppress(OSError):
        os.utime(path, (now, now))


def _files(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError:
        return []


def _units(folder: Path) -> Iterator[tuple[float, int, str]]:
    """Each unit: when it was used, bytes, its folder.  What a process left behind when it was killed is removed."""
    now = time.time()
    homes = (
        home
        for content in _files(folder) if content.is_dir(follow_symlinks=False)
        for some in _files(content.path) if some.is_dir(follow_symlinks=False)
        for home in _files(some.path) if _NAME.fullmatch(home.name) and home.is_dir(follow_symlinks=False)
    )  # fmt: skip
    for home in homes:
        used, nbytes = 0.0, 0
        for file in _files(home.path):
            try:
                found = file.stat()
            except OSError:
                continue
            if not _PART.fullmatch(file.name):
                if file.name.endswith(".tmp") and now - found.st_mtime > _LOST_SECONDS:
                    with contextlib.suppress(OSError):
                        Path(file.path).unlink()
                continue
            used, nbytes = max(used, found.st_mtime), nbytes + found.st_size
        if nbytes:
            yield used, nbytes, home.path


def key_of_files(folder: Path, more: str) -> str:
    """A number of a model's weights, and of a text: SHA-256 of all bytes of all weight files, in hexadecimal digits.

    Parameters
    ----------
    folder : Path
        Of the model, or a file of weights.
    more : str
        What else has a say in what is computed.

    Raises
    ------
    BindError
        There are no weights.
    """
    files = (
        [folder] if folder.is_file() else sorted(p for p in folder.rglob("*") if p.suffix in _WEIGHTS and p.is_file())
    )
    if not files:
        raise BindError(
            f"model_key: {folder} holds no weights to tell models apart by; expected a name of your own for it"
        )

    def digest(path: Path) -> bytes:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()

    whole = hashlib.sha256(more.encode())
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        for one in threads.map(digest, files):
            whole.update(one)
    return whole.hexdigest()
