"""Copy blocks to files, from files, and between files, and verify them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import _core
from .._arguments import flag, quoted, require_a
from ..copy.transfer import convert as convert_blocks
from ..errors import BindError, DigestError, printable
from ..layout import spec
from ..layout.layout import Layout
from ..layout.scales import QUANTISED
from ..layout.spec import as_layout
from ..memory.streams import framework_of, framework_stream
from ..planner.cast import Cast, Scale, as_cast
from ..pool.pool import Pool
from ..system.machine import device_of, host_beside
from .casting import CAST, Casting, require_planes, require_told, text_of
from .digests import DIGEST, Damage, Digests, Kinds, blocks_of, damages
from .file import FORMATS, KEPT, Stored, made, opened, read, require_texts
from .open_file import path_of
from .reading import Source

if TYPE_CHECKING:
    from ..layout.resolved import Resolved
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

#: Called as ``progress(done_bytes, total_bytes)``.
Progress = Callable[[int, int], None]


# ---- the layout of a file --------------------------------------------------------------------------------------------


def layout_of(stored: Stored) -> Layout:
    """The shipped layout that a file names.

    Raises
    ------
    BindError
        The file names no layout, names one that is not shipped, or has no fingerprint for the name.
    """
    require_a(Stored, "stored", stored, "what kvbm.store.read returns")
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
    layout = None if src_layout is None else as_layout(src_layout, "src_layout")
    stored = given if isinstance(given, Stored) else read(path_of(name, given))
    most = _READ_BYTES if str(device) == "cpu" else _STEP_BYTES  # a GPU waits for each step
    source = stored.source(layout or layout_of(stored), shape, num_blocks, is_told=True)
    return stored, _Reader(source, stored.formats, most)


class _Reader:
    """Some blocks of a file in memory, in the file's layout; `most` bytes are read at a time.

    `pool` has room for two steps, so that some blocks are read while others are used.
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


def _require_progress(progress: Any) -> None:
    require_a((Callable, type(None)), "progress", progress, "a function of two numbers of bytes")  # type: ignore[arg-type]


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


def _mover(src: Pool, dst: Pool, step: int, stream: Any = None, cast: Scale | None = None) -> _Move:
    """A function that copies up to `step` blocks and waits for them: between a file and a GPU through pinned memory.

    A GPU casts: the blocks of the file cross PCIe.
    """
    if src.device == dst.device == "cpu":
        return lambda ids, into: convert_blocks(src, dst, ids, into, cast=cast)
    far, file = (src, dst) if dst.device == "cpu" else (dst, src)
    device = device_of(far.device)
    near = Pool.allocate(file.layout, file.shape, step, host_beside(far.device))
    near.formats = file.formats
    here = list(range(step))

    def move(ids: Sequence[int], into: Sequence[int]) -> None:
        some = here[: len(ids)]
        if far is src:
            convert_blocks(src, near, ids, some, stream=stream, cast=cast)
            _core.synchronize(device, _core.stream_handle(stream))
            convert_blocks(near, dst, some, into)
        else:
            convert_blocks(src, near, ids, some)
            convert_blocks(near, dst, some, into, stream=stream, cast=cast)
            _core.synchronize(device, _core.stream_handle(stream))

    return move


def _copy(
    src: _Side, dst: _Side, move: _Move, *, verify: bool, rows: Digests | None = None, casts: bool = False,
    stream: Any = None, progress: Progress | None = None,
) -> None:  # fmt: skip
    """Copy all of `src.names` to blocks 0, 1, 2, … of `dst`.  Compare digests, and store those of the source in `rows`.

    The stored digests of the source are compared with those of the destination: this covers the file, the read and the copy.  If
    they differ, the cause is searched for afterwards.  A cast changes the bits: then they are compared with those of the source as
    it was read, and `rows` gets the digests of the destination.
    """
    # The source is digested if the destination's layout has no digests.
    sides = (src,) if casts else (dst, src)
    judged = next((side for side in sides if Kinds.of(side.pool.resolved).blocks), None)
    is_direct = src.direct and not casts and (src.known is not None or rows is None)
    with contextlib.closing(src.steps(progress, dst.pool if is_direct else None)) as steps:
        for at, ids in steps:
            known = None
            if src.known is not None:
                known = src.known.take(at)
            elif rows is not None and not casts:
                known = Digests.of(src.pool, ids, kinds=rows.kinds, stream=src.stream(stream))
                rows.put(at, known)
            if not is_direct:
                move(ids, list(at))
            if rows is not None and casts:
                rows.put(at, Digests.of(dst.pool, list(at), kinds=rows.kinds))
            if not verify or known is None or judged is None:
                continue
            there = (ids, src.stream(stream)) if judged is src else (list(at), dst.stream())
            wrong = judged.pool.digest(there[0], stream=there[1]) != known.blocks
            bad = np.flatnonzero(wrong | known.torn())
            if bad.size:
                break
        else:
            return
    _refuse(src, None if casts else dst, known.take(bad.tolist()), [at[row] for row in bad], stream)


def _refuse(src: _Side, dst: _Side | None, known: Digests, rows: Sequence[int], stream: Any) -> None:
    """Raise a `DigestError` that says where blocks are wrong: in the source, or after the copy if that has the same bits."""
    names = [src.names[row] for row in rows]
    title, found = src.title, []
    if src.known is not None and Kinds.of(src.pool.resolved).blocks:
        found = damages(known, src.pool, src.blocks(names), names, src.stream(stream))
    if not found and dst is not None:
        title, found = f"{src.title} → {dst.title}", damages(known, dst.pool, rows, names, dst.stream())
    if not found:  # memory or disk returned other bytes the second time
        raise DigestError(f"{title}: block {names[0]} was wrong, and was right when it was read again", pairs=tuple(names))
    more = f"; and {len(found) - 1} more of the blocks that were compared" if len(found) > 1 else ""
    raise DigestError(f"{title}: {found[0]}{more}", pairs=tuple(one.block for one in found))


def _other_dtype(what: str, shape: BlockShape, dtype: str | None, scale: Scale | None) -> BlockShape:
    """The shape with another dtype, if there is a cast."""
    if dtype is None:
        return shape
    other = replace(shape, dtype=dtype)
    if scale is None and other != shape:
        raise BindError(
            f"dtype: {what} is {shape.dtype}, and only a cast makes it {other.dtype}: pass cast='amax' (--cast amax), or "
            "cast=kvbm.Scale(1.0) (--cast 1) for planes without scales"
        )
    return other


def _digests_of(stored: Stored, ids: Sequence[int]) -> Digests | None:
    return None if stored.digests is None else stored.digests.take(ids)


# ---- public functions ------------------------------------------------------------------------------------------------


def save(
    path: _Path,
    pool: Pool,
    ids: Sequence[int] | None = None,
    *,
    layout: _Layout | None = None,
    cast: Cast = None,
    dtype: str | None = None,
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
    cast : {"amax"} or kvbm.Scale, optional
        Change the format of values, as for `kvbm.Transfer`.  The file says what was cast, and keeps the scales of a `kvbm.Scale`.
    dtype : str, optional
        With `cast`: dtype of the file's blocks, where the layout does not say it.  Default: that of the pool.
    digests : bool
        Store digests of the pool's blocks.  Before the file gets its name, its blocks are compared with them.  With a cast they
        are those of the blocks that were written, and nothing is compared.
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
    require_a(Pool, "pool", pool, "a kvbm.Pool (a section can be copied into a new pool with kvbm.convert)")
    _require_progress(progress)
    digests = flag("digests", digests)
    names = _chosen("ids", ids, pool.num_blocks)
    layout = pool.layout if layout is None else as_layout(layout)
    require_texts(metadata)
    scale = as_cast(cast)
    shape = _other_dtype("the pool", pool.shape, dtype, scale)
    resolved, casting = layout.resolve(shape, len(names)), Casting(None, {})
    if scale is not None:
        casting = Casting.of(f"{pool.layout.name} → {path}", pool.resolved.section, resolved.section, scale, {})
    casts = casting.scale is not None
    kinds = Kinds.of(resolved if casts else pool.resolved) if digests else Kinds()
    rows = Digests.zeros(shape, len(names), kinds) if kinds.blocks else None
    known = {key: text for key, text in (metadata or {}).items() if key not in KEPT}
    known |= _kept(casting, pool.formats)
    with made(
        path, layout, shape, len(names), digests=digests if rows is None else rows, metadata=known, force=force
    ) as (into, _):
        src, dst = _Side(pool, repr(pool), names), _Side(into, str(path), range(len(names)))
        own = src.stream(stream)
        move = _mover(pool, into, _step(pool.resolved.block_bytes, len(names)), own, casting.scale)
        _copy(src, dst, move, rows=rows, verify=digests, casts=casts, stream=own, progress=progress)


def _kept(casting: Casting, formats: Mapping[str, str]) -> dict[str, str]:
    """Metadata of the formats of arrays, and of casts."""
    return ({FORMATS: json.dumps(formats)} if formats else {}) | ({CAST: text_of(casting.notes)} if casting.notes else {})


def load(
    path: _File,
    ids: Sequence[int] | None = None,
    *,
    layout: _Layout | None = None,
    src_layout: _Layout | None = None,
    shape: BlockShape | str | None = None,
    num_blocks: int | None = None,
    cast: Cast = None,
    dtype: str | None = None,
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
    cast : {"amax"} or kvbm.Scale, optional
        Change the format of values, as for `kvbm.Transfer`.  ``"amax"`` uses the scales that the file names, if it was written
        with a `kvbm.Scale`.  Other scales than those are an error, and so is no `cast` if they are not 1.
    dtype : str, optional
        With `cast`: dtype of the pool's blocks, where the layout does not say it.  Default: for a file that was quantised, the
        dtype before; else that of the file.
    device : str
        As for `Pool.allocate`.
    verify : bool
        Compare the blocks with the file's digests, if it has any: of a cast, the blocks before it.
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
    _require_progress(progress)
    verify = flag("verify", verify)
    wanted = None if layout is None else as_layout(layout)
    stored, reader = _open(path, src_layout, shape, num_blocks, device=device)
    source, told = reader.source, as_cast(cast)
    names = _chosen(stored.path, ids, source.num_blocks)
    shape = _other_dtype(str(stored.path), source.shape, _before(stored, dtype, told), told)
    into = (wanted or source.layout).resolve(shape, len(names))
    casting = _casting(stored, source, into, told)
    require_told(stored.path, casting.notes, told, source.shape)
    pool = Pool.allocate(into.layout, into.shape, len(names), device)
    known = _digests_of(stored, names) if verify else None
    src = _Side(reader.pool, str(stored.path), names, known, reader, reader.reads_into(pool))
    dst = _Side(pool, repr(pool), range(len(names)))
    move = _mover(reader.pool, pool, min(reader.step, len(names)), dst.stream(), casting.scale)
    _copy(src, dst, move, verify=verify, casts=casting.scale is not None, progress=progress)
    pool.formats = stored.formats
    return pool


def _before(stored: Stored, dtype: str | None, told: Scale | None) -> str | None:
    """The dtype of the caller; else that before the file was quantised, if its values are cast now."""
    before = {note.before for note in stored.casts.values() if note.dtype in QUANTISED} if told else set()
    return before.pop() if dtype is None and len(before) == 1 else dtype


def _casting(stored: Stored, source: Source, into: Resolved, told: Scale | None) -> Casting:
    """The cast of a copy out of a file."""
    title, made = f"{stored.path} → {into.layout.name}", Casting(None, stored.casts)
    if told is not None:
        made = Casting.of(title, source.resolved.section, into.section, told, stored.casts)
    require_planes(title, made.notes, into.layout)
    return made


def convert(
    src: _File,
    dst: _Path,
    layout: _Layout,
    ids: Sequence[int] | None = None,
    *,
    src_layout: _Layout | None = None,
    shape: BlockShape | str | None = None,
    num_blocks: int | None = None,
    cast: Cast = None,
    dtype: str | None = None,
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
    cast, dtype
        As for `load`.  `dst` says what was cast, as a file of `save` does.
    device : str
        The device that converts: ``"cpu"`` or ``"cuda:N"``.
    verify : bool
        Compare digests of the written blocks with the digests stored in `src`; if it has none, with digests of the blocks read.
        `dst` gets these digests.  False: nothing is compared, and `dst` gets digests only if `src` has them.  With a cast, the
        blocks that were read are compared, and `dst` gets digests of what was written; with False it gets none.
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
    layout = as_layout(layout)
    _require_progress(progress)
    verify = flag("verify", verify)
    stored, reader = _open(src, src_layout, shape, num_blocks, "src", device)
    source, is_in_place, told = reader.source, stored.file.is_at(dst), as_cast(cast)
    if not is_in_place and dst.exists() and os.path.realpath(dst) == os.path.realpath(stored.path):
        raise BindError(f"{dst}: another file took its place since it was read; the new file is kept: read it again")
    names = _chosen(stored.path, ids, source.num_blocks)
    resolved = layout.resolve(_other_dtype(str(stored.path), source.shape, _before(stored, dtype, told), told), len(names))
    casting = _casting(stored, source, resolved, told)
    casts, has_digests = casting.scale is not None, Kinds.of(resolved)
    known = _digests_of(stored, names) if verify or (stored.metadata.get("kvbm.digest") == DIGEST and not casts) else None
    kinds = has_digests if casts else Kinds.of(source.resolved)
    rows = Digests.zeros(resolved.shape, len(names), kinds) if verify and (casts or known is None) and kinds.blocks else None
    write = (has_digests.blocks and (rows if casts else known or rows)) or False
    step = min(reader.step, len(names))
    metadata = {key: text for key, text in stored.metadata.items() if key not in KEPT} | _kept(casting, stored.formats)
    with made(dst, layout, resolved.shape, len(names), digests=write, metadata=metadata, force=force) as (into, file):
        sides = _Side(reader.pool, str(stored.path), names, known, reader), _Side(into, str(dst), range(len(names)))
        far = reader.pool, into, step
        move = _by_way_of(device, *far, casting.scale) if str(device) != "cpu" else _mover(*far, cast=casting.scale)
        _copy(*sides, move, rows=rows, verify=verify, casts=casts, progress=progress)
        if is_in_place and not stored.file.is_at(dst):
            raise BindError(f"{dst}: another file took its place while it was converted; the new file is kept: convert it again")
    return opened(file)


def _by_way_of(device: str, src: Pool, dst: Pool, step: int, cast: Scale | None) -> _Move:
    """A function that copies blocks from file to file and converts them on a GPU."""
    far = Pool.allocate(dst.layout, dst.shape, step, device)
    there, back = _mover(src, far, step, 0, cast), _mover(far, dst, step, 0)
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
    _require_progress(progress)
    given = None if src_layout is None else as_layout(src_layout, "src_layout")
    stored = path if isinstance(path, Stored) else read(path)
    if stored.digests is None:
        raise BindError(f"{stored.path}: the file has no digests: `kvbm digest --write` adds those of its current contents")
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
    _require_progress(progress)
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
