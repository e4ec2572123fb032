"""Copy blocks to files, from files, and between files, and verify them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import _core
from .._arguments import quoted
from ..copy.transfer import convert as convert_blocks
from ..errors import BindError, DigestError, printable
from ..layout import spec
from ..layout.layout import Layout
from ..memory.streams import framework_of, framework_stream
from ..pool.pool import Pool
from ..system.machine import device_of
from .arguments import FLAG, PROGRESS, TEXTS, Kind, blocks_of, path_of, require
from .arguments import layout_of as given_layout
from .digests import DIGEST, Damage, Digests, Kinds, damages
from .file import FORMATS, Stored, create, made, opened, read
from .reading import Source

if TYPE_CHECKING:
    from ..layout.shapes import BlockShape

__all__ = ["add_digests", "convert", "digest", "layout_of", "load", "save", "verify"]

_STEP_BYTES = 64 << 20  # between two reports of progress

#: Bytes of a file that are read at a time on the CPU: they are still in its cache when they are converted and digested.
_READ_BYTES = 8 << 20

_Path = str | os.PathLike[str]

#: A file: its path, or what `read` returns.
_File = _Path | Stored

#: A layout, or its name or file.
_Layout = Layout | str | Path

_POOL = Kind(Pool, "a kvbm.Pool", "; to save a section, copy it into a new pool with kvbm.convert")
_STORED = Kind(Stored, "what kvbm.store.read returns")

#: Called as ``progress(done_bytes, total_bytes)``.
Progress = Callable[[int, int], None]


# ---- the layout of a file --------------------------------------------------------------------------------------------


def layout_of(stored: Stored) -> Layout:
    """The shipped layout that a file names.

    Parameters
    ----------
    stored : Stored
        The header, from `read`.

    Raises
    ------
    BindError
        The file names no layout, names one that is not shipped, or has no fingerprint for the name.
    """
    require(_STORED, stored=stored)
    name = stored.layout_name
    if name is None:
        raise BindError(
            f"{stored.path}: the file does not name its layout: pass the layout where the file is read (--from; src_layout=)"
        )
    if stored.fingerprint is None:
        raise BindError(
            f"{stored.path}: the file names layout {quoted(name)} without a fingerprint, so the layout may have changed since: "
            "pass the layout where the file is read (--from; src_layout=) if you trust the name"
        )
    if (layout := spec.load_shipped(name)) is None:
        raise BindError(
            f"{stored.path}: the file is in layout {quoted(name)} ({printable(stored.metadata.get('kvbm.order', '?'))}), which is "
            "not a shipped layout: pass its .yaml file where the file is read (--from; src_layout=FILE)"
        )
    return layout


def _open(
    given: _File, src_layout: _Layout | None, shape: BlockShape | str | None = None, num_blocks: int | None = None,
    name: str = "path", device: str = "cpu",
) -> tuple[Stored, _Reader]:  # fmt: skip
    layout = None if src_layout is None else given_layout("src_layout", src_layout)
    stored = given if isinstance(given, Stored) else read(path_of(name, given))
    most = _READ_BYTES if str(device) == "cpu" else _STEP_BYTES  # a GPU waits for each step
    return stored, _Reader(stored.source(layout or layout_of(stored), shape, num_blocks), stored.formats, most)


class _Reader:
    """Some blocks of a file in memory, in the file's layout.

    Parameters
    ----------
    source : Source
        The file.
    formats : dict of str to str
        As `Stored.formats`.
    most : int
        Bytes to read at a time.

    Attributes
    ----------
    pool : Pool
        The memory: for two times as many blocks, so that some are read while others are used.
    """

    def __init__(self, source: Source, formats: dict[str, str], most: int = _READ_BYTES) -> None:
        self.source, self._formats = source, formats
        self.step = max(1, min(most // source.resolved.block_bytes, source.num_blocks))
        self._slots = min(2 * self.step, source.num_blocks)
        is_alike = source.same_inside(source.layout.resolve(source.shape, self._slots))
        self._all = not is_alike  # else block ids are those of the file; memory that is not touched costs nothing
        self._pool: Pool | None = None

    @property
    def pool(self) -> Pool:
        if self._pool is None:
            self._pool = Pool.allocate(
                self.source.layout, self.source.shape, self.source.num_blocks if self._all else self._slots
            )
            self._pool.formats = self._formats
        return self._pool

    def read(self, ids: Sequence[int]) -> Sequence[int]:
        """Read at most `step` blocks; return their ids in `pool`.  What `steps` has read is lost."""
        rows = ids if self._all else range(len(ids))
        self.source.fill(self.pool, ids, rows)
        return list(rows)

    def steps(
        self, names: Sequence[int], progress: Progress | None, into: Pool | None = None
    ) -> Generator[tuple[range, Sequence[int]], None, None]:
        """Read blocks in steps, each while the caller uses those of the step before.

        Yields the rows of a step, and the ids of its blocks in `pool`, until the next step; or in `into`, where they are the rows.
        No thread reads any more when the iterator ends or is closed: close it before the memory is used for something else.
        """
        each = self.source.resolved.block_bytes

        def places(at: range) -> Sequence[int]:
            if into is not None:
                return at
            if self._all:
                return [names[row] for row in at]
            first = at.start // self.step % 2 * self.step
            return range(first, first + len(at))

        with self.source.reading(self.pool if into is None else into) as begin:

            def begun(at: range, *, now: bool = False) -> Callable[[], None]:
                return begin([names[row] for row in at], places(at), now=now)

            wait = begun(range(min(self.step, len(names))), now=True)
            for at in _steps(each, len(names), progress, self.step):
                wait()
                if after := range(at.stop, min(at.stop + self.step, len(names))):
                    wait = begun(after)
                yield at, list(places(at))

    def reads_into(self, pool: Pool) -> bool:
        """True if the file's blocks are those of a pool byte by byte."""
        source = self.source
        return pool.device == "cpu" and (pool.layout, pool.shape) == (source.layout, source.shape) and (
            source.same_inside(pool.resolved)
        )


def _chosen(title: object, blocks: Sequence[int] | None, num_blocks: int) -> Sequence[int]:
    """The chosen blocks, each once."""
    if blocks is None:
        return range(num_blocks)
    found = blocks_of(title, blocks, num_blocks)
    if not found or len(set(found)) != len(found):
        raise BindError(f"{title}: expected one block or more, each block once, got {quoted(found)}")
    return found


def _steps(each: int, count: int, progress: Progress | None, step: int | None = None) -> Iterator[range]:
    """Rows of `count` blocks of `each` bytes in steps.  `progress` is called after each step."""
    step = _step(each, count) if step is None else step
    for first in range(0, count, step):
        rows = range(first, min(first + step, count))
        yield rows
        if progress is not None:
            progress(rows.stop * each, count * each)


def _step(each: int, count: int) -> int:
    return max(1, min(_STEP_BYTES // each, count))


# ---- copies ----------------------------------------------------------------------------------------------------------


class _Side(NamedTuple):
    """A side of a copy."""

    pool: Pool
    title: str  # its name in messages, such as the path of a file
    names: Sequence[int]  # block numbers, by row
    known: Digests | None = None  # stored digests of its blocks, by row
    reader: _Reader | None = None  # fills the pool, if this is a file
    direct: bool = False  # the reader fills the other side

    def blocks(self, names: Sequence[int]) -> Sequence[int]:
        """Ids of some blocks in the pool; of a file, they are read first."""
        return names if self.reader is None else self.reader.read(names)

    def steps(self, progress: Progress | None, into: Pool | None = None) -> Generator[tuple[range, Sequence[int]], None, None]:
        """Rows of blocks in steps, and their ids in the pool; of a file, they are read, as `_Reader.steps` does."""
        if self.reader is not None:
            yield from self.reader.steps(self.names, progress, into)
            return
        for at in _steps(self.pool.resolved.block_bytes, len(self.names), progress):
            yield at, [self.names[row] for row in at]

    def stream(self, given: Any = None) -> Any:
        """The stream for work on this side; None on the CPU, where a given stream raises `BindError`."""
        if self.pool.device == "cpu":
            if given is not None:
                raise BindError("stream: the pool is on the CPU, where the call waits until all is done; leave stream out")
            return None
        if given is None and framework_of(self.pool.arrays[0]) in ("torch", "cupy"):
            return framework_stream(framework_of(self.pool.arrays[0]), device_of(self.pool.device))
        return 0 if given is None else given


_Move = Callable[[Sequence[int], Sequence[int]], None]


def _mover(src: Pool, dst: Pool, step: int, stream: Any = None) -> _Move:
    """A function that copies up to `step` blocks and waits for them: between a file and a GPU through pinned memory."""
    if src.device == dst.device == "cpu":
        return lambda ids, into: convert_blocks(src, dst, ids, into)
    far = src if dst.device == "cpu" else dst
    device = device_of(far.device)
    near = Pool.allocate(dst.layout if far is src else src.layout, src.shape, step, "pinned")
    here = list(range(step))

    def move(ids: Sequence[int], into: Sequence[int]) -> None:
        some = here[: len(ids)]
        if far is src:
            convert_blocks(src, near, ids, some, stream=stream)
            _core.synchronize(device, _core.stream_handle(stream))
            convert_blocks(near, dst, some, into)
        else:
            convert_blocks(src, near, ids, some)
            convert_blocks(near, dst, some, into, stream=stream)
            _core.synchronize(device, _core.stream_handle(stream))

    return move


def _copy(
    src: _Side,
    dst: _Side,
    move: _Move,
    *,
    verify: bool,
    rows: Digests | None = None,
    stream: Any = None,
    progress: Progress | None = None,
) -> None:
    """Copy all of `src.names` to blocks 0, 1, 2, … of `dst`.  Compare digests, and store those of the source in `rows`.

    The stored digests of the source are compared with those of the destination: this covers the file, the read and the copy.  If
    they differ, the cause is searched for afterwards.
    """
    # The source is digested if the destination's layout has no digests.
    judged = next((side for side in (dst, src) if Kinds.of(side.pool.resolved).blocks), None)
    is_direct = src.direct and (src.known is not None or rows is None)
    with contextlib.closing(src.steps(progress, dst.pool if is_direct else None)) as steps:
        for at, ids in steps:
            known = None
            if src.known is not None:
                known = src.known.take(at)
            elif rows is not None:
                known = Digests.of(src.pool, ids, kinds=rows.kinds, stream=src.stream(stream))
                rows.put(at, known)
            if not is_direct:
                move(ids, list(at))
            if not verify or known is None or judged is None:
                continue
            there = (ids, src.stream(stream)) if judged is src else (list(at), dst.stream())
            wrong = judged.pool.digest(there[0], stream=there[1]) != known.blocks
            bad = np.flatnonzero(wrong | known.torn())
            if bad.size:
                break
        else:
            return
    _refuse(src, dst, known.take(bad.tolist()), [at[row] for row in bad], stream)


def _refuse(src: _Side, dst: _Side, known: Digests, rows: Sequence[int], stream: Any) -> None:
    """Raise a `DigestError` that says where blocks are wrong: in the source, or after the copy."""
    names = [src.names[row] for row in rows]
    title, found = src.title, []
    if src.known is not None and Kinds.of(src.pool.resolved).blocks:
        found = damages(known, src.pool, src.blocks(names), names, src.stream(stream))
    if not found:
        title, found = f"{src.title} → {dst.title}", damages(known, dst.pool, rows, names, dst.stream())
    if not found:  # memory or disk returned other bytes the second time
        raise DigestError(
            f"{title}: block {names[0]} was wrong, and was right when it was read again", pairs=tuple(names)
        )
    more = f"; and {len(found) - 1} more of the blocks that were compared" if len(found) > 1 else ""
    raise DigestError(f"{title}: {found[0]}{more}", pairs=tuple(one.block for one in found))


def _digests_of(stored: Stored, ids: Sequence[int]) -> Digests | None:
    return None if stored.digests is None else stored.digests.take(ids)


# ---- public functions ------------------------------------------------------------------------------------------------


def save(
    path: _Path,
    pool: Pool,
    ids: Sequence[int] | None = None,
    *,
    layout: _Layout | None = None,
    digests: bool = True,
    metadata: Mapping[str, str] | None = None,
    force: bool = False,
    stream: Any = None,
    progress: Progress | None = None,
) -> None:
    """Write blocks of a pool to a file.

    Parameters
    ----------
    path : path
        The file.  It gets its name only when it is complete and on the disk.  Until then an existing file stays unchanged.
    pool : Pool
        On the CPU, or on a GPU.
    ids : sequence of int, optional
        Blocks of the pool.  They become blocks ``0, 1, 2, …`` of the file.  Default: all.
    layout : Layout, str or Path, optional
        Layout of the file.  Default: the layout of the pool.
    digests : bool
        Store digests of the pool's blocks.  Before the file gets its name, its blocks are compared with them.
    metadata : mapping of str to str, optional
        Further metadata of the file.
    force : bool
        Replace an existing file.
    stream : optional
        Stream for a pool on a GPU.  Default: the current stream of its framework.  The call waits for it.
    progress : callable, optional
        Called as ``progress(done_bytes, total_bytes)``.

    Raises
    ------
    FileExistsError
        The file exists and `force` is False.
    BindError
        `pool` is a section, or an id is out of range.
    PlanError
        There is no copy from the pool to `layout`.
    DigestError
        The contents of the file differ from those of the pool.
    OSError
        The disk is full.  The incomplete file is removed.

    Examples
    --------
    >>> store.save("blocks.safetensors", pool, [7, 3], layout=kvbm.load("universal"))  # doctest: +SKIP
    """
    require(_POOL, pool=pool)
    require(PROGRESS, progress=progress, optional=True)
    require(FLAG, digests=digests)
    names = _chosen("ids", ids, pool.num_blocks)
    kinds = Kinds.of(pool.resolved) if digests else Kinds()
    rows = Digests.zeros(pool.shape, len(names), kinds) if kinds.blocks else None
    layout = pool.layout if layout is None else given_layout("layout", layout)
    require(TEXTS, metadata={} if metadata is None else metadata)
    known = {key: text for key, text in (metadata or {}).items() if key != FORMATS}
    known |= {FORMATS: json.dumps(pool.formats)} if pool.formats else {}
    with create(
        path, layout, pool.shape, len(names), digests=digests if rows is None else rows, metadata=known, force=force
    ) as made:
        src, dst = _Side(pool, repr(pool), names), _Side(made, str(path), range(len(names)))
        own = src.stream(stream)
        move = _mover(pool, made, _step(pool.resolved.block_bytes, len(names)), own)
        _copy(src, dst, move, rows=rows, verify=digests, stream=own, progress=progress)


def load(
    path: _File,
    ids: Sequence[int] | None = None,
    *,
    layout: _Layout | None = None,
    src_layout: _Layout | None = None,
    shape: BlockShape | str | None = None,
    num_blocks: int | None = None,
    device: str = "cpu",
    verify: bool = True,
    progress: Progress | None = None,
) -> Pool:
    """Read blocks of a file into memory.

    Parameters
    ----------
    path : path or Stored
        The file, or what `read` returned for it.
    ids : sequence of int, optional
        Blocks of the file.  They become blocks ``0, 1, 2, …`` of the pool.  Default: all.
    layout : Layout, str or Path, optional
        Layout of the pool.  Default: the layout of the file.
    src_layout : Layout, str or Path, optional
        Layout of the file, if the file does not name it or it is not shipped.
    shape, num_blocks : optional
        Block shape and number of blocks of the file, if the file does not contain them.
    device : str
        As for `Pool.allocate`.
    verify : bool
        Compare the blocks with the file's digests, if it has any.
    progress : callable, optional
        Called as ``progress(done_bytes, total_bytes)``.

    Returns
    -------
    Pool
        A pool on new memory.  To map the file instead of reading it, use ``read(path).pool(layout)``.

    Raises
    ------
    DigestError
        A block has changed.  The message names file, block, layers and tokens.
    BindError
        The path is not a file of blocks, an id is out of range, or another program has cut the file while it was read.

    Examples
    --------
    >>> pool = store.load("blocks.safetensors", [3], layout=kvbm.load("nhd"), device="cuda:0")  # doctest: +SKIP
    """
    require(PROGRESS, progress=progress, optional=True)
    require(FLAG, verify=verify)
    wanted = None if layout is None else given_layout("layout", layout)
    stored, reader = _open(path, src_layout, shape, num_blocks, device=device)
    source = reader.source
    names = _chosen(stored.path, ids, source.num_blocks)
    pool = Pool.allocate(wanted or source.layout, source.shape, len(names), device)
    known = _digests_of(stored, names) if verify else None
    src = _Side(reader.pool, str(stored.path), names, known, reader, reader.reads_into(pool))
    dst = _Side(pool, repr(pool), range(len(names)))
    move = _mover(reader.pool, pool, min(reader.step, len(names)), dst.stream())
    _copy(src, dst, move, verify=verify, progress=progress)
    pool.formats = stored.formats
    return pool


def convert(
    src: _File,
    dst: _Path,
    layout: _Layout,
    ids: Sequence[int] | None = None,
    *,
    src_layout: _Layout | None = None,
    shape: BlockShape | str | None = None,
    num_blocks: int | None = None,
    device: str = "cpu",
    verify: bool = True,
    force: bool = False,
    progress: Progress | None = None,
) -> Stored:
    """Convert a file to another layout.

    Parameters
    ----------
    src : path or Stored
        The source, or what `read` returned for it.  Some blocks at a time are read.
    dst : path
        The destination.  It may be the source if `force` is True.
    layout : Layout, str or Path
        Layout of `dst`, its name, or the path of its file.
    ids : sequence of int, optional
        Blocks of `src`.  They become blocks ``0, 1, 2, …`` of `dst`.  Default: all.
    src_layout, shape, num_blocks : optional
        Layout, block shape and number of blocks of `src`, if the file does not contain them.
    device : str
        The device that converts: ``"cpu"`` or ``"cuda:N"``.
    verify : bool
        Compare digests of the written blocks with the digests stored in `src`; if it has none, with digests of the blocks read.
        `dst` gets these digests.  False: nothing is compared, and `dst` gets digests only if `src` has them.
    force : bool
        Replace `dst` if it exists.
    progress : callable, optional
        Called as ``progress(done_bytes, total_bytes)``.

    Returns
    -------
    Stored
        The header of `dst`.

    Raises
    ------
    DigestError
        A block of `src` has changed, or the copy is wrong.  `dst` is unchanged.
    BindError, PlanError, FileExistsError, OSError
        As for `load` and `save`.
    """
    dst = path_of("dst", dst)
    layout = given_layout("layout", layout)
    require(PROGRESS, progress=progress, optional=True)
    require(FLAG, verify=verify)
    stored, reader = _open(src, src_layout, shape, num_blocks, "src", device)
    source, is_in_place = reader.source, stored.file.is_at(dst)
    names = _chosen(stored.path, ids, source.num_blocks)
    known = _digests_of(stored, names) if verify or stored.metadata.get("kvbm.digest") == DIGEST else None
    kinds = Kinds.of(source.resolved)
    rows = Digests.zeros(source.shape, len(names), kinds) if verify and known is None and kinds.blocks else None
    has_digests = Kinds.of(layout.resolve(source.shape, len(names))).blocks
    write = (has_digests and (known or rows)) or False
    step = min(reader.step, len(names))
    with made(dst, layout, source.shape, len(names), digests=write, metadata=stored.metadata, force=force) as (into, file):
        sides = _Side(reader.pool, str(stored.path), names, known, reader), _Side(into, str(dst), range(len(names)))
        on_gpu = str(device) != "cpu"
        move = _by_way_of(device, reader.pool, into, step) if on_gpu else _mover(reader.pool, into, step)
        _copy(*sides, move, rows=rows, verify=verify, progress=progress)
        if is_in_place and not stored.file.is_at(dst):
            raise BindError(f"{dst}: another file took its place while it was converted; the new file is kept: convert it again")
    return opened(file)


def _by_way_of(device: str, src: Pool, dst: Pool, step: int) -> _Move:
    """A function that copies blocks from file to file and converts them on a GPU."""
    far = Pool.allocate(dst.layout, src.shape, step, device)
    there, back = _mover(src, far, step, 0), _mover(far, dst, step, 0)
    here = list(range(step))

    def move(ids: Sequence[int], into: Sequence[int]) -> None:
        there(ids, here[: len(ids)])
        back(here[: len(ids)], into)

    return move


def verify(
    path: _File, ids: Sequence[int] | None = None, *, src_layout: _Layout | None = None, progress: Progress | None = None
) -> list[Damage]:
    """Compare blocks of a file with its digests.

    Parameters
    ----------
    path : path or Stored
        The file, or what `read` returned for it.
    ids : sequence of int, optional
        Blocks to compare.  Default: all.
    src_layout : Layout, str or Path, optional
        Layout of the file, if it is not shipped.
    progress : callable, optional
        Called as ``progress(done_bytes, total_bytes)``.

    Returns
    -------
    list of Damage
        One item per block that has changed; empty if none has.

    Raises
    ------
    BindError
        The file has no digests, or is not a file of blocks.
    """
    require(PROGRESS, progress=progress, optional=True)
    given = None if src_layout is None else given_layout("src_layout", src_layout)
    stored = path if isinstance(path, Stored) else read(path)
    if stored.digests is None:
        raise BindError(
            f"{stored.path}: the file has no digests: `kvbm digest --write` adds those of its current contents"
        )
    _, reader = _open(stored, given)
    names = _chosen(stored.path, ids, reader.source.num_blocks)
    found = []
    with contextlib.closing(reader.steps(names, progress)) as steps:
        for at, there in steps:
            some = [names[row] for row in at]
            known = stored.digests.take(some)
            bad = np.flatnonzero((reader.pool.digest(there) != known.blocks) | known.torn()).tolist()
            if bad:
                wrong = [there[row] for row in bad], [some[row] for row in bad]
                found += damages(known.take(bad), reader.pool, *wrong)
    return found


def digest(
    path: _File,
    ids: Sequence[int] | None = None,
    *,
    src_layout: _Layout | None = None,
    shape: BlockShape | str | None = None,
    num_blocks: int | None = None,
    progress: Progress | None = None,
) -> Digests:
    """Compute the digests of a file's current contents.  Stored digests are not used.

    Parameters
    ----------
    path, ids, src_layout, shape, num_blocks, progress
        As for `load`.

    Returns
    -------
    Digests
        One row per block.

    Raises
    ------
    PlanError
        The layout has no digests.
    """
    require(PROGRESS, progress=progress, optional=True)
    stored, reader = _open(path, src_layout, shape, num_blocks)
    names = _chosen(stored.path, ids, reader.source.num_blocks)
    kinds = _require(reader)
    found = Digests.zeros(reader.source.shape, len(names), kinds)
    with contextlib.closing(reader.steps(names, progress)) as steps:
        for at, there in steps:
            found.put(at, Digests.of(reader.pool, there, kinds=kinds))
    return found


def _require(reader: _Reader) -> Kinds:
    kinds = Kinds.of(reader.source.resolved)
    if not kinds.blocks:
        reader.pool.whole.keys()  # raises with the reason
    return kinds


def add_digests(
    path: _File,
    *,
    src_layout: _Layout | None = None,
    shape: BlockShape | str | None = None,
    num_blocks: int | None = None,
    progress: Progress | None = None,
) -> Stored:
    """Rewrite a file with the digests of its contents.  Padding becomes zeros.

    Parameters
    ----------
    path, src_layout, shape, num_blocks, progress
        As for `load`.

    Returns
    -------
    Stored
        The header of the new file.  It replaces the old file when it is complete.

    Raises
    ------
    BindError
        The file already has digests.
    PlanError
        The layout has no digests.
    """
    stored, reader = _open(path, src_layout, shape, num_blocks)
    if stored.digests is not None:
        raise BindError(f"{stored.path}: the file has digests; `kvbm verify` compares its blocks with them")
    _require(reader)
    layout, shape = reader.source.layout, reader.source.shape
    return convert(
        stored, stored.path, layout, src_layout=layout, shape=shape, num_blocks=num_blocks, force=True, progress=progress
    )
