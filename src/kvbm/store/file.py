"""Pools in files: safetensors, one tensor an allocation, with the layout that they are in written beside them.

A file holds the tensors ``alloc_00000``, ``alloc_00001``, … in the order of the layout's table, and says in its
metadata what they mean: ``kvbm.layout`` (name), ``kvbm.order``, ``kvbm.fingerprint``, ``kvbm.shape`` (JSON),
``kvbm.num_blocks``, ``kvbm.format`` and, for layouts of several planes, ``kvbm.planes`` (JSON: dtype, and first byte in the
record or tensors). Records are tensors of bytes; planes in arrays of their own have their dtypes. Digests are tensors before
them. Any safetensors reader opens it; ``docs/files.md`` is about the format.

The header is read and written here rather than by the ``safetensors`` package: both directions are memory-mapped, so
that a pool larger than the memory is converted from file to file; and NumPy has no bfloat16 or fp8 that the package
could return.
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
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ..cache import replacing
from ..errors import BindError, LayoutError
from ..shapes import ITEMSIZE, PACKED, BlockShape
from ..spans import merge_steps
from .arguments import FLAG, LAYOUT, SHAPE, TEXTS, Kind, number_of, path_of, require
from .digests import DIGEST, PARTS, Digests, Kinds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ..layout import Layout
    from ..pool import Pool
    from ..resolved import Allocation, Resolved

FORMAT = "1"
_ALIGN = 4096  # where the first tensor starts: a page, so that the kernels can use their widest words
_MAX_HEADER = 100_000_000  # the safetensors format's own limit
_MIN_ENTRY = 100  # bytes that one tensor takes in it, more or less
_DIGESTS = Kind((*FLAG.types, Digests), "True, False, or the kvbm.store.Digests of the blocks")
_MAX_DIGITS, _MAX_DIMENSIONS = 18, 64  # of a number, of a tensor: beyond what any file has
_CODES = {
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float4_e2m1fn": "F4",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "bool": "BOOL",
}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file's header: what it is, and where its bytes lie in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class Stored:
    """A safetensors file's header, checked: every tensor lies inside the file and none overlaps another.

    Attributes
    ----------
    path : Path
        The file.
    metadata : mapping of str to str
        Its ``__metadata__``.
    tensors : mapping of str to Entry
        Its tensors, in the order of their bytes.
    """

    path: Path
    metadata: Mapping[str, str]
    tensors: Mapping[str, Entry]

    @property
    def layout_name(self) -> str | None:
        """The layout's name when the file was written, or None where the file does not say."""
        return self.metadata.get("kvbm.layout")

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the layout that the file is in, or None where the file does not say."""
        return self.metadata.get("kvbm.fingerprint")

    @property
    def shape(self) -> BlockShape | None:
        """The block shape, or None where the file does not say."""
        text = self.metadata.get("kvbm.shape")
        if text is None:
            return None
        try:
            return BlockShape(**_parsed(text))
        except (TypeError, ValueError) as error:
            raise BindError(
                f"{self.path}: metadata 'kvbm.shape' is not a block shape: {text!r:.200} ({error!s:.500})"
            ) from None

    @property
    def num_blocks(self) -> int | None:
        """The number of blocks, or None where the file does not say."""
        text = self.metadata.get("kvbm.num_blocks")
        if text is None:
            return None
        if not text.isdecimal() or len(text) > _MAX_DIGITS:
            raise BindError(f"{self.path}: metadata 'kvbm.num_blocks': expected a number, got {text!r:.200}")
        return int(text)

    @property
    def blocks(self) -> Mapping[str, Entry]:
        """The tensors that hold blocks: all but those of digests."""
        return {name: entry for name, entry in self.tensors.items() if name not in PARTS.values()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that hold blocks."""
        return sum(entry.end - entry.begin for entry in self.blocks.values())

    @functools.cached_property
    def digests(self) -> Digests | None:
        """The digests that were stored with the blocks, or None where the file has none.

        Raises
        ------
        BindError
            Digests of another version, or that are not of the file's blocks.
        """
        version = self.metadata.get("kvbm.digest")
        if version is None and not any(name in self.tensors for name in PARTS.values()):
            return None
        if version != DIGEST:
            raise BindError(
                f"{self.path}: kvbm.digest is {version!r:.60}; this version of kvbm knows {DIGEST!r} (to convert the blocks "
                "without them: --no-verify, or verify=False)"
            )
        if self.shape is None or self.num_blocks is None:
            raise BindError(f"{self.path}: the file has digests, and does not say its shape and its number of blocks")
        found: dict[str, np.ndarray[Any, np.dtype[np.uint64]]] = {}
        for kind, sizes in Digests.sizes(self.shape, self.num_blocks).items():
            entry = self.tensors.get(PARTS[kind])
            if entry is None and kind != "blocks":
                continue
            if entry is None or (entry.dtype, entry.shape) != (_DIGEST_CODE, sizes):
                got = "none" if entry is None else f"{entry.dtype:.60} {list(entry.shape)!r:.200}"
                raise BindError(
                    f"{self.path}: tensor {PARTS[kind]!r}: expected {_DIGEST_CODE} {list(sizes)}, got {got}"
                )
            raw = np.fromfile(self.path, "<u8", math.prod(sizes), offset=entry.begin)
            if raw.size != math.prod(sizes):
                raise BindError(f"{self.path}: cut short since its header was read")
            found[kind] = raw.astype(np.uint64).reshape(sizes)
        return Digests(**found)

    def pool(self, layout: Layout, shape: BlockShape | None = None, num_blocks: int | None = None) -> Pool:
        """Map the file's tensors into memory, read-only, and bind them to a layout.

        Parameters
        ----------
        layout : Layout
            The layout that the file is in. Where the file carries a fingerprint, the two must agree.
        shape : BlockShape, optional
            Needed where the file does not carry one; where it does, the two must agree.
        num_blocks : int, optional
            Needed only where neither the file nor its size tells.

        Returns
        -------
        Pool

        Raises
        ------
        BindError
            The file is in another layout, of another shape, or its tensors are not what the layout says.
        """
        require(LAYOUT, layout=layout)
        require(SHAPE, shape=shape, optional=True)
        num_blocks = None if num_blocks is None else number_of("num_blocks", num_blocks)
        shape, num_blocks = self._agree(layout, shape, num_blocks)
        try:
            resolved = layout.resolve(shape, num_blocks)
        except LayoutError as error:  # the file's own shape, most often
            raise BindError(f"{self.path}: {error}") from None
        offsets = self._check_tensors(layout, resolved)
        with self.path.open("rb") as file:
            pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return _bind(layout, shape, resolved, pages, offsets)

    def _agree(self, layout: Layout, shape: BlockShape | None, num_blocks: int | None) -> tuple[BlockShape, int]:
        """Settle shape and number of blocks between the caller and the file; refuse where they disagree."""
        version = self.metadata.get("kvbm.format", FORMAT)
        if version != FORMAT:
            raise BindError(f"{self.path}: kvbm.format is {version!r:.60}; this version of kvbm reads {FORMAT!r}")
        if self.fingerprint is not None and self.fingerprint != layout.fingerprint:
            raise BindError(
                f"{self.path}: the file is in layout {self.layout_name or '?'!r:.200} "
                f"({self.metadata.get('kvbm.order', '?'):.500}, fingerprint {self.fingerprint:.60}), "
                f"not in {layout.name!r} ({layout.order_text}, fingerprint {layout.fingerprint})"
            )
        if self.shape is not None and shape is not None and self.shape != shape:
            raise BindError(f"{self.path}: the file's shape is {self.shape}, not {shape}")
        shape = self.shape or shape
        if shape is None:
            raise BindError(f"{self.path}: the file does not say which shape its blocks have: give a shape")
        if self.num_blocks is not None and num_blocks is not None and self.num_blocks != num_blocks:
            raise BindError(f"{self.path}: the file holds {self.num_blocks} blocks, not {num_blocks}")
        num_blocks = self.num_blocks if num_blocks is None else num_blocks
        if num_blocks is None:
            each = layout.resolve(shape, 1).block_bytes
            num_blocks = self.nbytes // each
            if num_blocks == 0 or layout.resolve(shape, num_blocks).nbytes != self.nbytes:
                raise BindError(
                    f"{self.path}: {self.nbytes:,} bytes are no whole number of blocks of {each:,} bytes in "
                    f"layout {layout.name!r}: check the shape, or give the number of blocks if the layout has padding"
                )
        return shape, num_blocks

    def _check_tensors(self, layout: Layout, resolved: Resolved) -> list[int]:
        """Return each allocation's offset in the file, once every tensor is what the layout expects."""
        count = (
            resolved.table_size
        )  # there may be far more than the file has bytes: they are not listed before that is known
        missing = next((name for name in map(_name, range(count)) if name not in self.tensors), None)
        if missing is not None:
            names = [f"{name:.60}" for name in list(self.tensors)[:3]]
            have = ", ".join(names) + (", …" if len(self.tensors) > 3 else "")
            raise BindError(
                f"{self.path}: no tensor {missing!r}; layout {layout.name!r} expects {count:,}, {_name(0)!r} "
                f"to {_name(count - 1)!r} in table order (the file has {len(self.tensors)}: {have})"
            )
        if len(self.blocks) > count:
            known = set(map(_name, range(count)))
            extra = next(name for name in self.blocks if name not in known)
            raise BindError(f"{self.path}: tensor {extra!r:.200} is one too many: layout {layout.name!r} has {count}")
        offsets = []
        for index, allocation in enumerate(resolved.allocations):
            name = _name(index)
            entry, expected = self.tensors[name], _entry(allocation)
            if (entry.dtype, entry.shape) != expected:
                raise BindError(
                    f"{self.path}: tensor {name!r} ({allocation.label or 'the only one'}): expected {expected[0]} "
                    f"{list(expected[1])} (axes {' '.join(allocation.axes)}), got {entry.dtype:.60} {list(entry.shape)!r:.200}"
                )
            offsets.append(entry.begin)
        return offsets


def read(path: str | os.PathLike[str]) -> Stored:
    """Read and check the header of a safetensors file.

    Parameters
    ----------
    path : path
        The file. Nothing but its header is read.

    Returns
    -------
    Stored

    Raises
    ------
    BindError
        The file is not safetensors, or is cut short.
    """
    path = path_of("path", path)
    if path.exists() and not path.is_file():  # to open a FIFO would be to wait for its writer
        raise BindError(f"{path}: expected a regular file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER + 1
        if length > _MAX_HEADER or 8 + length > size:
            raise BindError(f"{path}: not a safetensors file, or cut short inside its header ({size:,} bytes)")
        text = file.read(length)
    try:
        header = _parsed(text)
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("__metadata__: expected texts")
        for one in itertools.chain(metadata, metadata.values(), header):
            one.encode()  # half a character, as JSON may have one, is none
        entries = {name: _read_entry(tensor, 8 + length) for name, tensor in header.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        why = f"no key {error}" if isinstance(error, KeyError) else error
        raise BindError(f"{path}: not a safetensors file: its header does not parse ({why!s:.500})") from None
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))
    end = 8 + length
    for name, entry in entries.items():
        bits = _BITS.get(entry.dtype)
        bytes_ = entry.end - entry.begin
        if entry.begin != end or bytes_ < 0 or (bits and math.prod(entry.shape) * bits != bytes_ * 8):
            raise BindError(
                f"{path}: tensor {name!r:.200}: {entry.dtype:.60} {list(entry.shape)!r:.200} at bytes {entry.begin:,} to "
                f"{entry.end:,} of the file; expected {-(-math.prod(entry.shape) * (bits or 0) // 8):,} bytes from {end:,} on"
            )
        end = entry.end
    if end != size:
        raise BindError(f"{path}: {size:,} bytes long, its header says {end:,}: cut short, or still being written")
    return Stored(path, metadata, entries)


def _parsed(text: str | bytes) -> dict[str, Any]:
    """A JSON object, or a ValueError that says why there is none."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is no JSON")

    try:
        value = json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got a {type(value).__name__}")
    return value


def _read_entry(said: Any, start: int) -> Entry:
    """A tensor of a header; ValueError, TypeError or KeyError where it is none."""
    dtype, shape, (begin, end) = said["dtype"], said["shape"], said["data_offsets"]
    if not isinstance(dtype, str):
        raise ValueError(f"dtype: expected a text, got {dtype!r:.60}")
    dtype.encode()
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
        raise ValueError(f"shape: expected a list of at most {_MAX_DIMENSIONS} sizes, got {shape!r:.60}")
    for number in (*shape, begin, end):
        if type(number) is not int or not 0 <= number < 10**_MAX_DIGITS:
            raise ValueError(
                f"shape and data_offsets: expected integers of at most {_MAX_DIGITS} digits, got {number!r:.60}"
            )
    return Entry(dtype, tuple(shape), start + begin, start + end)


@contextlib.contextmanager
def create(
    path: str | os.PathLike[str],
    layout: Layout,
    shape: BlockShape,
    num_blocks: int,
    *,
    digests: bool | Digests = True,
    metadata: Mapping[str, str] | None = None,
    force: bool = False,
) -> Iterator[Pool]:
    """Write a file through a pool that lies in it: a context manager.

    The file appears under its name only when the block ends without an exception, whole and on the disk; until then it
    has a temporary name beside it, which is removed on failure.  A symlink is followed: its target is written.

    Parameters
    ----------
    path : path
        The file to write.
    layout, shape, num_blocks
        The pool to make room for.
    digests : bool or Digests
        Whether digests are stored, of what the pool holds when the block ends; a layout that has none is stored without.
        Digests that are known are stored as they are when the block ends.
    metadata : mapping of str to str, optional
        Further metadata; keys that begin with ``kvbm.`` are kvbm's own and left out.
    force : bool
        Replace a file that is already there; its permissions stay.  What is no regular file (a device, a FIFO) is never replaced.

    Yields
    ------
    Pool
        Zeros at first, padding included; whatever is copied into it is in the file.

    Raises
    ------
    FileExistsError
        The file is there and `force` is not set, also where another process was quicker; it is no regular file.
    OSError
        The disk is full: before anything is copied, not in the middle.

    Examples
    --------
    >>> with store.create("blocks.safetensors", kvbm.load("universal"), pool.shape, pool.num_blocks) as out:
    ...     kvbm.convert(pool, out)  # doctest: +SKIP
    """
    path, num_blocks = path_of("path", path), number_of("num_blocks", num_blocks)
    metadata = {} if metadata is None else metadata
    require(LAYOUT, layout=layout)
    require(SHAPE, shape=shape)
    require(TEXTS, metadata=metadata)
    require(FLAG, force=force)
    require(_DIGESTS, digests=digests)
    resolved = layout.resolve(shape, num_blocks)
    if isinstance(digests, Digests):
        digests.require(shape, num_blocks)
    if resolved.table_size * _MIN_ENTRY > _MAX_HEADER:
        raise BindError(
            f"layout {layout.name!r} has {resolved.table_size:,} allocations for {num_blocks:,} blocks, more than a "
            "safetensors header holds: store them in a layout with 'b' outside the brackets, such as 'vllm/LBHNC'"
        )
    kinds = digests.kinds if isinstance(digests, Digests) else Kinds.of(resolved) if digests else Kinds()
    header, offsets = _header(layout, shape, resolved, kinds, metadata)
    size = min(offsets) + resolved.nbytes
    folder = Path(os.path.realpath(path)).parent  # of what a symlink leads to
    if not folder.is_dir():  # a typing error makes no folders
        raise FileNotFoundError(errno.ENOENT, "no such folder", str(folder))
    mode = path.stat().st_mode & 0o777 if force and path.exists() else 0o666  # what was private stays so
    with replacing(path, new=not force, durable=True, mode=mode) as part:
        with part.open("rb+") as file:
            _reserve(file.fileno(), size, path)
            file.write(header)
            file.flush()
            pages = mmap.mmap(file.fileno(), size)
        pool = _bind(layout, shape, resolved, pages, offsets)
        yield pool
        if kinds.blocks:
            known = digests if isinstance(digests, Digests) else Digests.of(pool, kinds=kinds)
            begin = min(offsets) - kinds.nbytes(shape, num_blocks)
            for array in known.arrays():
                pages[begin : begin + array.nbytes] = array.astype("<u8").tobytes()
                begin += array.nbytes
        pages.flush()


def framed(layout: Layout, shape: BlockShape, num_blocks: int, digests: Digests, metadata: Mapping[str, str]) -> bytes:
    """What stands in a file before its blocks: with them behind it, it is one that `read` reads.

    For those who write many small files, and hold their blocks in one piece: `create` lets a pool lie in the file.

    Parameters
    ----------
    layout : Layout
        Of one allocation, without padding, for so many blocks.
    shape, num_blocks, metadata
        As for `create`.
    digests : Digests
        Of the blocks.

    Raises
    ------
    BindError
        A layout with several allocations, or with padding; digests of other blocks.
    """
    resolved = layout.resolve(shape, num_blocks)
    digests.require(shape, num_blocks)
    if resolved.table_size != 1 or resolved.nbytes != num_blocks * shape.nbytes:
        raise BindError(
            f"{layout.name}: expected one allocation of {num_blocks * shape.nbytes:,} bytes, without padding, got "
            f"{resolved.table_size:,} of {resolved.nbytes:,} bytes"
        )
    start, _ = _header(layout, shape, resolved, digests.kinds, metadata)
    return start + b"".join(array.astype("<u8").tobytes() for array in digests.arrays())


#: Digests are 64 bits without a sign; not every reader has such integers.
_DIGEST_CODE = "I64"

#: Bits an element.
_BITS = {code: ITEMSIZE[dtype] * 8 // PACKED.get(dtype, 1) for dtype, code in _CODES.items()}


def _name(index: int) -> str:
    return f"alloc_{index:05d}"


def _entry(allocation: Allocation) -> tuple[str, tuple[int, ...]]:
    """How a header describes an allocation: bytes if it has padding, as safetensors knows no strides, or a dtype without code."""
    sizes, size = tuple(allocation.shape), allocation.itemsize
    if (merge_steps(sizes, allocation.strides) or [(1, size)]) != [(allocation.nbytes / size, size)]:
        return "U8", (allocation.nbytes,)
    if allocation.dtype not in _CODES:  # integers of four bits; the metadata say what the bytes are
        return "U8", sizes
    # A tensor of four bits counts elements, and an allocation the bytes that two of them share.
    pack = PACKED.get(allocation.dtype, 1)
    return _CODES[allocation.dtype], (*sizes[:-1], sizes[-1] * pack) if pack > 1 else sizes


def _header(
    layout: Layout, shape: BlockShape, resolved: Resolved, kinds: Kinds, further: Mapping[str, str]
) -> tuple[bytes, list[int]]:
    """Return the file's first bytes, so many that blocks begin at a page, and each allocation's offset in the file."""
    for one in itertools.chain.from_iterable(dict(further).items()):
        try:
            one.encode()
        except (AttributeError, UnicodeEncodeError):
            raise BindError(f"metadata: expected texts by name, got {one!r:.200}") from None
    metadata = {key: text for key, text in further.items() if not key.startswith("kvbm.")} | {
        "kvbm.format": FORMAT,
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
                    "table" if resolved.apart else "byte": part.bases[0][resolved.apart],
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
    # Wide dtypes first: then each tensor starts at a multiple of its item, which some readers need.
    for index, allocation in sorted(enumerate(allocations), key=lambda item: -item[1].itemsize):
        code, sizes = _entry(allocation)
        header[_name(index)] = {"dtype": code, "shape": sizes, "data_offsets": (end, end + allocation.nbytes)}
        offsets[index] = end
        end += allocation.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text) + before) % _ALIGN)
    if len(text) > _MAX_HEADER:
        raise BindError(f"metadata: a safetensors header holds {_MAX_HEADER:,} bytes, and this one would have {len(text):,}")
    start = 8 + len(text)
    return struct.pack("<Q", len(text)) + text, [start + offset for offset in offsets]


def _reserve(fd: int, size: int, path: str | os.PathLike[str]) -> None:
    """Take the disk space now: writing to a mapped page that the disk has no room for would kill the process."""
    try:
        try:
            os.posix_fallocate(fd, 0, size)
        except (AttributeError, OSError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            zeros = bytes(1 << 20)
            for begin in range(0, size, len(zeros)):
                wanted = min(len(zeros), size - begin)
                if os.pwrite(fd, zeros[:wanted], begin) != wanted:  # the next write would say why
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from None
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({size:,} bytes wanted)", str(path)) from None


def _bind(layout: Layout, shape: BlockShape, resolved: Resolved, pages: mmap.mmap, offsets: Sequence[int]) -> Pool:
    from ..arrays import numpy_dtype
    from ..pool import Pool

    arrays: list[np.ndarray[Any, Any]] = [
        np.ndarray(allocation.shape, numpy_dtype(allocation.dtype), pages, offset, allocation.strides)
        for allocation, offset in zip(resolved.allocations, offsets, strict=True)
    ]
    return Pool(layout, shape, arrays, num_blocks=resolved.num_blocks)
