"""Pools in safetensors files: one tensor per allocation, with the layout in the metadata.

A file holds the tensors ``alloc_00000``, ``alloc_00001``, … in the order of the layout's table, after those of digests.  Records
are tensors of bytes; planes in separate arrays have their own dtypes.  Any safetensors reader can open the file.
``docs/reference/file-format.md`` describes it, and its metadata.

The header is read and written here instead of by the ``safetensors`` package, which has no bfloat16 or fp8 for NumPy.  Blocks are
read some at a time, and written to a mapped file, so pools larger than the memory can be converted.  A file that is read is opened
once: header, digests and blocks are of one file, even if another one gets its name meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import json
import math
import mmap
import os
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._arguments import flag, number, quoted, require_a
from ..errors import BindError, LayoutError, printable
from ..layout.loops import loops_of
from ..layout.shapes import ITEMSIZE, PACKED, BlockShape, as_shape
from ..layout.spec import as_layout
from ..planner.cast import Cast, as_cast
from ..system.cache import replacing
from .casting import CAST, CastFrom, needs_scale, notes_of, require_planes, require_scales, require_told
from .digests import DIGEST, PARTS, Digests, Kinds
from .header import MAX_HEADER, MAX_METADATA, MIN_ENTRY, Entry, parsed_header, parsed_object
from .open_file import Opened, mapped, path_of
from .reading import Source

if TYPE_CHECKING:
    from ..layout.layout import Layout
    from ..layout.resolved import Allocation, Resolved
    from ..pool.pool import Pool

#: The format of files, and that of files whose codes need a scale of the metadata.
FORMAT, SCALED = "1", "2"
#: Metadata of the formats of arrays (`Stored.formats`).
FORMATS = "kvbm.formats"
#: Metadata of kvbm that a file copied from a file keeps.
KEPT = (FORMATS, CAST)
_ALIGN = 4096  # the first tensor starts at a page, so that the kernels can use their widest words
_NUMBER = re.compile("[0-9]{1,18}")
_CODES = {
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float4_e2m1fn": "F4",
    "int8": "I8", "uint8": "U8", "int16": "I16", "uint16": "U16",
    "int32": "I32", "uint32": "U32", "int64": "I64", "uint64": "U64", "bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A safetensors file that is open, and its header, checked: every tensor lies inside the file, and no two overlap.

    The file stays open as long as this object exists.  So header, digests and blocks are of one file, also if another file gets its
    name meanwhile.  It is a context manager: `close` closes the file, and keeps the header.

    Attributes
    ----------
    path : Path
        The path from which the file was opened.
    metadata : mapping of str to str
        The ``__metadata__`` of the file.
    tensors : mapping of str to Entry
        The tensors, in the order of their bytes.
    """

    path: Path
    metadata: Mapping[str, str]
    tensors: Mapping[str, Entry]
    file: Opened = field(repr=False, compare=False)

    def close(self) -> None:
        """Close the file.  Mapped pools stay valid.  A second call does nothing."""
        self.file.close()

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def layout_name(self) -> str | None:
        """The layout's name when the file was written; None if the file does not contain it."""
        return self.metadata.get("kvbm.layout")

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the file's layout; None if the file does not contain it."""
        return self.metadata.get("kvbm.fingerprint")

    @property
    def shape(self) -> BlockShape | None:
        """The block shape; None if the file does not contain it."""
        text = self.metadata.get("kvbm.shape")
        if text is None:
            return None
        try:
            return BlockShape(**parsed_object(text))
        except (TypeError, ValueError) as error:
            raise BindError(
                f"{self.path}: metadata 'kvbm.shape' is not a block shape: {quoted(text)} ({printable(str(error), 500)})"
            ) from None

    @property
    def formats(self) -> dict[str, str]:
        """Plane → dtype of the saved arrays, where the shape says no more than bytes; most often empty."""
        text = self.metadata.get(FORMATS, "{}")
        try:
            found = parsed_object(text)
            if not all(isinstance(one, str) and one in ITEMSIZE for one in found.values()):
                raise ValueError("expected names of dtypes")
        except ValueError as error:
            raise BindError(f"{self.path}: metadata {FORMATS!r}: {printable(str(error))}, got {quoted(text)}") from None
        return found

    @functools.cached_property
    def casts(self) -> dict[str, CastFrom]:
        """Plane (empty without planes) → how its values were cast before they were written; empty if none were.

        Raises
        ------
        BindError
            The metadata say nothing that is possible.
        """
        found = notes_of(self.path, self.metadata.get(CAST, "{}"))
        if self.metadata.get("kvbm.format") == SCALED and not needs_scale(found.values()):
            raise BindError(
                f"{self.path}: kvbm.format is {SCALED!r}: expected a scale in metadata {CAST!r}, got "
                f"{quoted(self.metadata.get(CAST))}"
            )
        return found

    @property
    def num_blocks(self) -> int | None:
        """The number of blocks; None if the file does not contain it."""
        text = self.metadata.get("kvbm.num_blocks")
        if text is None:
            return None
        if _NUMBER.fullmatch(text) is None:
            raise BindError(f"{self.path}: metadata 'kvbm.num_blocks': expected a number, got {quoted(text)}")
        return int(text)

    @property
    def blocks(self) -> Mapping[str, Entry]:
        """The tensors that hold blocks: all except the digests."""
        return {name: entry for name, entry in self.tensors.items() if name not in PARTS.values()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that hold blocks."""
        return sum(entry.end - entry.begin for entry in self.blocks.values())

    @functools.cached_property
    def digests(self) -> Digests | None:
        """The digests that are stored with the blocks; None if the file has none.

        Raises
        ------
        BindError
            The digests have another version, or do not fit the file's blocks.
        """
        version = self.metadata.get("kvbm.digest")
        if version is None and not any(name in self.tensors for name in PARTS.values()):
            return None
        if version != DIGEST:
            raise BindError(
                f"{self.path}: kvbm.digest is {quoted(version, 60)}; this version of kvbm reads {DIGEST!r} (to convert the blocks "
                "without digests, pass --no-verify or verify=False)"
            )
        if self.shape is None or self.num_blocks is None:
            raise BindError(f"{self.path}: the file has digests, but no shape or number of blocks; save it again")
        found: dict[str, np.ndarray[Any, np.dtype[np.uint64]]] = {}
        for kind, sizes in Digests.sizes(self.shape, self.num_blocks).items():
            entry = self.tensors.get(PARTS[kind])
            if entry is None and kind != "blocks":
                continue
            if entry is None or (entry.dtype, entry.shape) != (_DIGEST_CODE, sizes):
                got = "none" if entry is None else f"{printable(entry.dtype, 60)} {quoted(list(entry.shape))}"
                raise BindError(f"{self.path}: tensor {PARTS[kind]!r}: expected {_DIGEST_CODE} {list(sizes)}, got {got}")
            raw = np.empty(sizes, "<u8")
            self.file.fill(raw.data, entry.begin)
            found[kind] = raw.astype(np.uint64, copy=False)
        return Digests(**found)

    def pool(
        self,
        layout: Layout | str | Path,
        shape: BlockShape | str | None = None,
        num_blocks: int | None = None,
        *,
        cast: Cast = None,
    ) -> Pool:
        """Map the file's tensors into memory, read-only, and bind them to a layout.

        Parameters
        ----------
        layout : Layout, str or Path
            The layout of the file, its name, or the path of its file.  If the file has a fingerprint, it must be that of `layout`.
        shape : BlockShape or str, optional
            Needed if the file does not contain it.  If it does, both must agree.
        num_blocks : int, optional
            Needed only if neither the file nor its size gives the number.
        cast : kvbm.Scale, optional
            For a file whose values were cast with scales that are not 1: the same scales.  The pool has the codes of the file.

        Returns
        -------
        Pool
            A read-only pool on the mapped file.

        Raises
        ------
        BindError
            The file has another layout or shape, its tensors do not fit the layout, another program has cut it, or its codes need
            scales that `cast` does not name.
        NotEnoughMemoryError
            The process has no room to map the file.

        Notes
        -----
        Access to a mapped file ends the process (SIGBUS) if another program has cut the file meanwhile.  No writer of kvbm does:
        each makes a new file, and the old one stays as it was for those that have opened it.  `kvbm.store.load` reads the file
        instead, and raises an error.
        """
        scale = as_cast(cast)
        source, offsets = self._source(layout, shape, num_blocks)
        require_told(self.path, self.casts, scale, source.shape)
        pool = _bind(source.layout, source.shape, source.resolved, self.file.map(), offsets)
        pool.formats = self.formats
        return pool

    def source(
        self,
        layout: Layout | str | Path,
        shape: BlockShape | str | None = None,
        num_blocks: int | None = None,
        *,
        is_told: bool = False,
    ) -> Source:
        """As `pool`, to read blocks instead of mapping them.  With `is_told` the caller looks at `casts` itself."""
        found = self._source(layout, shape, num_blocks)[0]
        if not flag("is_told", is_told):
            require_told(self.path, self.casts, None, found.shape)
        return found

    def _source(
        self, layout: Layout | str | Path, shape: BlockShape | str | None, num_blocks: int | None
    ) -> tuple[Source, list[int]]:
        layout = as_layout(layout)
        shape = None if shape is None else as_shape(shape)
        num_blocks = None if num_blocks is None else number("num_blocks", num_blocks, 0)
        shape, num_blocks = self._agree(layout, shape, num_blocks)
        try:
            resolved = layout.resolve(shape, num_blocks)
        except LayoutError as error:  # most often caused by the shape in the file
            raise BindError(f"{self.path}: {error}") from None
        offsets = self._check_tensors(layout, resolved)
        held = {access.plane: access.dtype for access in resolved.section.accesses}
        for plane, note in self.casts.items():
            if held.get(plane) != note.dtype:
                raise BindError(
                    f"{self.path}: metadata {CAST!r}: plane {quoted(plane, 60)} of {note.dtype}: the layout has "
                    f"{held.get(plane, 'no such plane')}"
                )
        require_planes(self.path, self.casts, layout)
        require_scales(self.path, self.casts, shape)
        return Source(self.file, layout, shape, resolved, offsets), offsets

    def require_format(self) -> None:
        """Raise `BindError` if this version of kvbm does not read the format."""
        version = self.metadata.get("kvbm.format", FORMAT)
        if version not in (FORMAT, SCALED):
            raise BindError(
                f"{self.path}: kvbm.format is {quoted(version, 60)}; this version of kvbm reads {FORMAT!r} and {SCALED!r}"
            )

    def _agree(self, layout: Layout, shape: BlockShape | None, num_blocks: int | None) -> tuple[BlockShape, int]:
        """Shape and number of blocks, from the caller or from the file; `BindError` if they disagree."""
        self.require_format()
        if self.fingerprint is not None and self.fingerprint != layout.fingerprint:
            raise BindError(
                f"{self.path}: the file is in layout {quoted(self.layout_name or '?')} "
                f"({printable(self.metadata.get('kvbm.order', '?'), 500)}, fingerprint {printable(self.fingerprint, 60)}), "
                f"not in {layout.name!r} ({layout.order_text}, fingerprint {layout.fingerprint})"
            )
        if self.shape is not None and shape is not None and not layout.same_blocks(self.shape, shape):
            is_same = replace(shape, dtype=self.shape.dtype) == self.shape
            dtypes = "; kvbm.store.load changes the dtype, with cast= and dtype=" if is_same else ""
            raise BindError(f"{self.path}: the file's shape is {self.shape}, not {shape}{dtypes}")
        shape = self.shape or shape
        if shape is None:
            raise BindError(f"{self.path}: the file does not contain the shape of its blocks: pass a shape (--shape; shape=)")
        if self.num_blocks is not None and num_blocks is not None and self.num_blocks != num_blocks:
            raise BindError(f"{self.path}: the file holds {self.num_blocks} blocks, not {num_blocks}")
        num_blocks = self.num_blocks if num_blocks is None else num_blocks
        if num_blocks is None:
            each = layout.resolve(shape, 1).block_bytes
            num_blocks = self.nbytes // each
            sizes = [layout.resolve(shape, n).nbytes for n in (num_blocks - 1, num_blocks) if n > 0]
            if not sizes or sizes[-1] != self.nbytes or (sizes[0] == self.nbytes and len(sizes) > 1):
                raise BindError(
                    f"{self.path}: {self.nbytes:,} bytes are not a multiple of the {each:,} bytes of a block in "
                    f"layout {layout.name!r}: check the shape, or pass the number of blocks if the layout has padding"
                )
        return shape, num_blocks

    def _check_tensors(self, layout: Layout, resolved: Resolved) -> list[int]:
        """Check that every tensor is as the layout expects, and return each allocation's offset in the file."""
        # There may be far more than the file has bytes: check the count before listing them.
        count = resolved.table_size
        missing = next((name for name in map(_name, range(count)) if name not in self.tensors), None)
        if missing is not None:
            names = [printable(name, 60) for name in list(self.tensors)[:3]]
            have = ", ".join(names) + (", …" if len(self.tensors) > 3 else "")
            raise BindError(
                f"{self.path}: no tensor {missing!r}; layout {layout.name!r} expects {count:,}, {_name(0)!r} "
                f"to {_name(count - 1)!r} in table order (the file has {len(self.tensors)}: {have})"
            )
        if len(self.blocks) > count:
            known = set(map(_name, range(count)))
            extra = next(name for name in self.blocks if name not in known)
            raise BindError(f"{self.path}: tensor {quoted(extra)} is one too many: layout {layout.name!r} has {count}")
        offsets = []
        for index, allocation in enumerate(resolved.allocations):
            name = _name(index)
            entry, expected = self.tensors[name], _entry(allocation)
            if (entry.dtype, entry.shape) != expected:
                raise BindError(
                    f"{self.path}: tensor {name!r} ({allocation.label or 'the only one'}): expected {expected[0]} "
                    f"{list(expected[1])} (axes {' '.join(allocation.axes)}), got {printable(entry.dtype, 60)} "
                    f"{quoted(list(entry.shape))}"
                )
            offsets.append(entry.begin)
        return offsets


def read(path: str | os.PathLike[str]) -> Stored:
    """Open a safetensors file, and read and check its header.

    Parameters
    ----------
    path : path
        The file.  Only its header is read.  It stays open as long as the result exists.

    Returns
    -------
    Stored
        The open file and its header.

    Raises
    ------
    BindError
        The file is not a safetensors file, or is cut short.
    """
    return opened(Opened(path_of("path", path)))


def opened(file: Opened) -> Stored:
    """As `read`, for a file that is open."""
    path, size = file.path, file.size
    start = bytearray(8)
    if size >= 8:
        file.fill(start, 0)
    length = struct.unpack("<Q", start)[0] if size >= 8 else MAX_HEADER + 1
    if length > MAX_HEADER or 8 + length > size:
        raise BindError(f"{path}: not a safetensors file, or cut short inside its header ({size:,} bytes)")
    text = bytearray(length)
    file.fill(text, 8)
    try:
        metadata, entries = parsed_header(text, 8 + length)
    except ValueError as error:
        raise BindError(f"{path}: not a safetensors file: its header does not parse ({printable(str(error), 500)})") from None
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    end = 8 + length
    for name, entry in entries.items():
        bits = _BITS.get(entry.dtype)
        bytes_ = entry.end - entry.begin
        if entry.begin != end or bytes_ < 0 or (bits and math.prod(entry.shape) * bits != bytes_ * 8):
            raise BindError(
                f"{path}: tensor {quoted(name)}: {printable(entry.dtype, 60)} {quoted(list(entry.shape))} at bytes "
                f"{entry.begin:,} to {entry.end:,} of the file; expected "
                f"{-(-math.prod(entry.shape) * (bits or 0) // 8):,} bytes from {end:,} on"
            )
        end = entry.end
    if end != size:
        raise BindError(f"{path}: expected {end:,} bytes, as its header says, got {size:,}: cut short, or still being written")
    return Stored(path, metadata, entries, file)


@contextlib.contextmanager
def create(
    path: str | os.PathLike[str],
    layout: Layout | str | Path,
    shape: BlockShape | str,
    num_blocks: int,
    *,
    digests: bool | Digests = True,
    metadata: Mapping[str, str] | None = None,
    force: bool = False,
) -> Iterator[Pool]:
    """Create a file and map it as a pool to write into.  It is a context manager.

    While the ``with`` block runs, the file has a temporary name in the same folder.  When the block ends, the file is flushed to
    the disk and gets its name.  If the block raises an exception, the file is removed.  If `path` is a symlink, its target is
    written.

    Parameters
    ----------
    path : path
        The file to write.
    layout, shape, num_blocks
        Layout, block shape and number of blocks of the pool.
    digests : bool or Digests
        True: when the block ends, digests of the pool's contents are computed and stored, if the layout has digests.
        A `Digests` object: its values at the end of the block are stored.
    metadata : mapping of str to str, optional
        Further metadata.  Keys that begin with ``kvbm.`` are reserved and ignored.
    force : bool
        Replace an existing file and keep its permissions.  Only regular files are replaced: never a device or a FIFO.

    Yields
    ------
    Pool
        A pool in the file, filled with zeros, padding included.

    Raises
    ------
    FileExistsError
        The file exists and `force` is False, also if another process created it meanwhile; or it is not a regular file.
    OSError
        The disk is full.  It is raised before anything is copied.

    Examples
    --------
    >>> with store.create("blocks.safetensors", kvbm.load("universal"), pool.shape, pool.num_blocks) as out:
    ...     kvbm.convert(pool, out)  # doctest: +SKIP
    """
    require_texts(metadata)
    own = {key: text for key, text in (metadata or {}).items() if key != CAST}  # of another file: this one has other values
    with made(path, layout, shape, num_blocks, digests=digests, metadata=own, force=force) as (pool, _):
        yield pool


@contextlib.contextmanager
def made(
    path: str | os.PathLike[str],
    layout: Layout | str | Path,
    shape: BlockShape | str,
    num_blocks: int,
    *,
    digests: bool | Digests = True,
    metadata: Mapping[str, str] | None = None,
    force: bool = False,
) -> Iterator[tuple[Pool, Opened]]:
    """As `create`; the metadata may say how values were cast.

    It also yields the open file, which stays the one that was written whatever gets its name afterwards.
    """
    path, num_blocks = path_of("path", path), number("num_blocks", num_blocks, 0)
    require_texts(metadata)
    metadata = metadata or {}
    layout, shape, force = as_layout(layout), as_shape(shape), flag("force", force)
    kinds_of_digests = (bool, np.bool_, Digests)
    require_a(kinds_of_digests, "digests", digests, "True, False, or the kvbm.store.Digests of the blocks")
    resolved = layout.resolve(shape, num_blocks)
    if isinstance(digests, Digests):
        digests.require(shape, num_blocks)
    if resolved.table_size * MIN_ENTRY > MAX_HEADER:
        raise BindError(
            f"layout {layout.name!r} has {resolved.table_size:,} allocations for {num_blocks:,} blocks, more than a "
            "safetensors header holds: store them in a layout with 'b' outside the brackets, such as 'vllm/LBHNC'"
        )
    kinds = digests.kinds if isinstance(digests, Digests) else Kinds.of(resolved) if digests else Kinds()
    header, offsets = _header(layout, shape, resolved, kinds, metadata)
    size = min(offsets) + resolved.nbytes
    folder = Path(os.path.realpath(path)).parent  # that of a symlink's target
    if not folder.is_dir():  # do not create a folder for a mistyped path
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(folder))
    mode = path.stat().st_mode & 0o777 if force and path.exists() else 0o666  # a private file stays private
    with replacing(path, new=not force, durable=True, mode=mode) as part:
        with part.open("rb+") as file:
            _reserve(file.fileno(), size, path)
            file.write(header)
            file.flush()
            pages = mapped(file.fileno(), size, path)
            own = Opened(path, os.open(part, os.O_RDONLY | os.O_CLOEXEC))
        pool = _bind(layout, shape, resolved, pages, offsets)
        yield pool, own
        if kinds.blocks:
            known = digests if isinstance(digests, Digests) else Digests.of(pool, kinds=kinds)
            begin = min(offsets) - kinds.nbytes(shape, num_blocks)
            for array in known.arrays():
                pages[begin : begin + array.nbytes] = array.astype("<u8").tobytes()
                begin += array.nbytes
        pages.flush()


def require_texts(metadata: Any) -> None:
    """Raise `BindError` unless the metadata of a caller are None or a mapping."""
    require_a((Mapping, type(None)), "metadata", metadata, "texts by name")


def framed(layout: Layout, shape: BlockShape, num_blocks: int, digests: Digests, metadata: Mapping[str, str]) -> bytes:
    """The bytes of a file before its blocks.  Followed by the blocks they are a file that `read` accepts.

    It is for writers of many small files that hold their blocks in one piece.  `create` maps a pool into the file instead.

    Raises `BindError` if the layout has several allocations or padding, or the digests do not fit the blocks.
    """
    resolved = layout.resolve(shape, num_blocks)
    digests.require(shape, num_blocks)
    if resolved.table_size != 1 or resolved.nbytes != num_blocks * resolved.block_bytes:
        raise BindError(
            f"{layout.name}: expected one allocation of {num_blocks * resolved.block_bytes:,} bytes, without padding, got "
            f"{resolved.table_size:,} of {resolved.nbytes:,} bytes"
        )
    start, _ = _header(layout, shape, resolved, digests.kinds, metadata)
    return start + b"".join(array.astype("<u8").tobytes() for array in digests.arrays())


#: Digests are unsigned 64-bit integers, which not every reader supports.
_DIGEST_CODE = "I64"

#: Bits per element.
_BITS = {code: ITEMSIZE[dtype] * 8 // PACKED.get(dtype, 1) for dtype, code in _CODES.items()}


def _name(index: int) -> str:
    return f"alloc_{index:05d}"


def _entry(allocation: Allocation) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape of an allocation in a header.  Bytes, if it has padding (safetensors has no strides) or its dtype no code."""
    sizes, size = tuple(allocation.shape), allocation.itemsize
    if (loops_of(sizes, allocation.strides) or [(1, size)]) != [(allocation.nbytes / size, size)]:
        return "U8", (allocation.nbytes,)
    if allocation.dtype not in _CODES:  # integers of four bits; the metadata has their dtype
        return "U8", sizes
    # A safetensors tensor of four-bit elements counts elements; an allocation counts bytes, of two elements each.
    pack = PACKED.get(allocation.dtype, 1)
    return _CODES[allocation.dtype], (*sizes[:-1], sizes[-1] * pack) if pack > 1 else sizes


def _header(
    layout: Layout, shape: BlockShape, resolved: Resolved, kinds: Kinds, further: Mapping[str, str]
) -> tuple[bytes, list[int]]:
    """Return the file's bytes before the blocks, padded to a page, and each allocation's offset in the file."""
    for one in itertools.chain.from_iterable(dict(further).items()):
        try:
            one.encode()
        except (AttributeError, UnicodeEncodeError):
            raise BindError(f"metadata: expected texts by name, got {quoted(one)}") from None
    metadata = {key: text for key, text in further.items() if not key.startswith("kvbm.") or key in KEPT} | {
        "kvbm.format": SCALED if needs_scale(notes_of("metadata", further.get(CAST, "{}")).values()) else FORMAT,
        "kvbm.layout": layout.name,
        "kvbm.order": layout.order_text,
        "kvbm.fingerprint": layout.fingerprint,
        "kvbm.shape": json.dumps(asdict(shape)),
        "kvbm.num_blocks": str(resolved.num_blocks),
    }
    if resolved.parts:
        metadata["kvbm.planes"] = json.dumps(
            {
                part.plane: {
                    "dtype": part.shape.dtype,
                    "table" if resolved.has_separate_planes else "byte": part.bases[0][resolved.has_separate_planes],
                }
                for part in resolved.parts
            }
        )
    if kinds.blocks:
        metadata["kvbm.digest"] = DIGEST
    header: dict[str, Any] = {"__metadata__": metadata}
    allocations = resolved.allocations
    offsets, end = [0] * len(allocations), 0
    for kind, sizes in Digests.sizes(shape, resolved.num_blocks).items():
        if getattr(kinds, kind):
            size = 8 * math.prod(sizes)
            header[PARTS[kind]] = {"dtype": _DIGEST_CODE, "shape": sizes, "data_offsets": (end, end + size)}
            end += size
    before = end
    # Wide dtypes first: then each tensor starts at a multiple of its item size, which some readers need.
    for index, allocation in sorted(enumerate(allocations), key=lambda item: -item[1].itemsize):
        code, sizes = _entry(allocation)
        header[_name(index)] = {"dtype": code, "shape": sizes, "data_offsets": (end, end + allocation.nbytes)}
        offsets[index] = end
        end += allocation.nbytes
    if len(json.dumps(metadata)) > MAX_METADATA:
        raise BindError(f"metadata: expected texts of at most {MAX_METADATA:,} characters")
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text) + before) % _ALIGN)
    if len(text) > MAX_HEADER:
        raise BindError(f"metadata: expected a safetensors header of at most {MAX_HEADER:,} bytes, got {len(text):,}")
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, [start + offset for offset in offsets]


def _reserve(fd: int, size: int, path: str | os.PathLike[str]) -> None:
    """Allocate the disk space now: if the disk is full, writing to a mapped page would kill the process."""
    try:
        try:
            os.posix_fallocate(fd, 0, size)
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            zeros = bytes(1 << 20)
            for begin in range(0, size, len(zeros)):
                wanted = min(len(zeros), size - begin)
                if os.pwrite(fd, zeros[:wanted], begin) != wanted:  # the next write raises the reason
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({size:,} bytes wanted)", str(path)) from None


def _bind(layout: Layout, shape: BlockShape, resolved: Resolved, pages: mmap.mmap, offsets: Sequence[int]) -> Pool:
    from ..memory.array_info import array_on
    from ..pool.pool import Pool

    arrays = [
        array_on(pages, allocation, offset) for allocation, offset in zip(resolved.allocations, offsets, strict=True)
    ]
    return Pool(layout, shape, arrays, num_blocks=resolved.num_blocks)
