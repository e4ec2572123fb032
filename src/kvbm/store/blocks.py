"""Blocks to files, from files, and from file to file, verified on the way; and what of a file is not as it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .. import _core, spec
from ..errors import BindError, DigestError
from ..pool import Pool
from ..streams import framework_of, framework_stream
from ..transfer import convert as convert_blocks
from .arguments import FLAG, LAYOUT, PROGRESS, Kind, blocks_of, path_of, require
from .digests import DIGEST, Damage, Digests, Kinds, damages
from .file import Stored, create, read

if TYPE_CHECKING:
    from ..layout import Layout
    from ..shapes import BlockShape

__all__ = ["add_digests", "convert", "digest", "layout_of", "load", "save", "verify"]

_STEP_BYTES = 64 << 20  # between two reports of progress

_Path = str | os.PathLike[str]

_POOL = Kind(Pool, "a kvbm.Pool", "; to save a section, copy it into a pool of its own with kvbm.convert")
_STORED = Kind(Stored, "what kvbm.store.read returns")

#: Called as ``progress(done_bytes, total_bytes)``.
Progress = Callable[[int, int], None]


# ---- what a file is in -----------------------------------------------------------------------------------------------


def layout_of(stored: Stored) -> Layout:
    """The shipped layout that a file says it is in.

    Parameters
    ----------
    stored : Stored
        What `read` gave.

    Raises
    ------
    BindError
        The file names none, or one that is not shipped; a name without a fingerprint is not believed.
    """
    require(_STORED, stored=stored)
    name = stored.layout_name
    if name is None:
        raise BindError(f"{stored.path}: the file does not say which layout it is in: give it (--from; source=)")
    if stored.fingerprint is None:
        raise BindError(
            f"{stored.path}: the file names layout {name!r:.200}, without the fingerprint that says which one that was when it was "
            "written: give it (--from; source=) if you trust the name"
        )
    if (layout := spec.load_shipped(name)) is None:
        raise BindError(
            f"{stored.path}: the file is in layout {name!r:.200} ({stored.metadata.get('kvbm.order', '?'):.200}), which is not a "
            "shipped one: give its .yaml file (--from; source=kvbm.load(FILE))"
        )
    return layout


def _open(path: _Path, source: Layout | None, shape: BlockShape | None, num_blocks: int | None) -> tuple[Stored, Pool]:
    stored = read(path)
    return stored, stored.pool(layout_of(stored) if source is None else source, shape, num_blocks)


def _chosen(title: object, blocks: Sequence[int] | None, num_blocks: int) -> Sequence[int]:
    """The blocks that are meant, each once."""
    if blocks is None:
        return range(num_blocks)
    found = blocks_of(title, blocks, num_blocks)
    if not found or len(set(found)) != len(found):
        raise BindError(f"{title}: expected one block or more, each block once, got {found!r:.200}")
    return found


def _steps(pool: Pool, count: int, progress: Progress | None) -> Iterator[range]:
    """Rows of so many blocks, a step at a time; what was done of them is reported after each."""
    each = pool.resolved.block_bytes
    step = _step(pool, count)
    for first in range(0, count, step):
        rows = range(first, min(first + step, count))
        yield rows
        if progress is not None:
            progress(rows.stop * each, count * each)


def _step(pool: Pool, count: int) -> int:
    return max(1, min(_STEP_BYTES // pool.resolved.block_bytes, count))


# ---- copies ----------------------------------------------------------------------------------------------------------


class _Side(NamedTuple):
    """A side of a copy."""

    pool: Pool
    title: str  # a file, or what else errors call it
    names: Sequence[int]  # of its blocks, by row
    known: Digests | None = None  # what its blocks had, by row

    def stream(self, given: Any = None) -> Any:
        """The stream of its own work; None on the CPU.  `BindError` for one that is given there."""
        if self.pool.device == "cpu":
            if given is not None:
                raise BindError("stream: the pool is on the CPU, where all is done when the call returns; leave stream out")
            return None
        if given is None and framework_of(self.pool.arrays[0]) in ("torch", "cupy"):
            return framework_stream(framework_of(self.pool.arrays[0]), self.device)
        return 0 if given is None else given

    @property
    def device(self) -> int:
        return int(self.pool.device.partition(":")[2])


_Move = Callable[[Sequence[int], Sequence[int]], None]


def _mover(src: Pool, dst: Pool, step: int, stream: Any = None) -> _Move:
    """Copies of up to `step` blocks that are done when the call returns: between a file and a GPU through pinned memory."""
    if src.device == dst.device == "cpu":
        return lambda ids, into: convert_blocks(src, dst, ids, into)
    far = src if dst.device == "cpu" else dst
    device = int(far.device.partition(":")[2])
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
    """Copy all of `src.names` to blocks 0, 1, 2, … of `dst`; compare digests of both, and note those of the source in `rows`.

    What is compared is what the source's blocks had and what the destination's have: that covers the file, the reading of it and
    the copy.  Which of these was wrong is looked for when something was.
    """
    # The source's, where the destination's layout has no digests.
    judged = next((side for side in (dst, src) if Kinds.of(side.pool.resolved).blocks), None)
    for at in _steps(src.pool, len(src.names), progress):
        ids = [src.names[row] for row in at]
        known = None
        if src.known is not None:
            known = src.known.take(at)
        elif rows is not None:
            known = Digests.of(src.pool, ids, kinds=rows.kinds, stream=src.stream(stream))
            rows.put(at, known)
        move(ids, list(at))
        if not verify or known is None or judged is None:
            continue
        there = (ids, src.stream(stream)) if judged is src else (list(at), dst.stream())
        wrong = judged.pool.digest(there[0], stream=there[1]) != known.blocks
        bad = np.flatnonzero(wrong | known.torn())
        if bad.size:
            _refuse(src, dst, known.take(bad.tolist()), [at[row] for row in bad], stream)


def _refuse(src: _Side, dst: _Side, known: Digests, rows: Sequence[int], stream: Any) -> None:
    """Raise what says where blocks went wrong: in the source, or on the way."""
    names = [src.names[row] for row in rows]
    title, found = src.title, []
    if src.known is not None and Kinds.of(src.pool.resolved).blocks:
        found = damages(known, src.pool, names, stream=src.stream(stream))
    if not found:
        title, found = f"{src.title} → {dst.title}", damages(known, dst.pool, rows, names, dst.stream())
    if not found:  # memory or disk that gives other bytes each time
        raise DigestError(
            f"{title}: block {names[0]} was wrong, and was not when it was read again", pairs=tuple(names)
        )
    more = f"; and {len(found) - 1} more of the blocks that were compared" if len(found) > 1 else ""
    raise DigestError(f"{title}: {found[0]}{more}", pairs=tuple(one.block for one in found))


def _digests_of(stored: Stored, ids: Sequence[int]) -> Digests | None:
    return None if stored.digests is None else stored.digests.take(ids)


# ---- what users call -------------------------------------------------------------------------------------------------


def save(
    path: _Path,
    pool: Pool,
    ids: Sequence[int] | None = None,
    *,
    layout: Layout | None = None,
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
        The file.  It appears whole, and on the disk, or not at all; one that is replaced stays as it is until then.
    pool : Pool
        On the CPU, or on a GPU.
    ids : sequence of int, optional
        Blocks ``0, 1, 2, …`` of the file are these of the pool; all if not given.
    layout : Layout, optional
        Of the file; the pool's if not given.
    digests : bool
        Store digests of the pool's blocks, and compare those of the file with them before it gets its name.
    metadata : mapping of str to str, optional
        Further metadata of the file.
    force : bool
        Replace a file that is there.
    stream : optional
        Stream of a GPU's pool; its framework's current one if not given.  The call waits for it.
    progress : callable, optional
        Called as ``progress(done_bytes, total_bytes)``.

    Raises
    ------
    FileExistsError
        The file is there and `force` is not set.
    BindError, PlanError
        A section of a pool; ids that there are not; a layout to which there is no copy.
    DigestError
        What lies in the file is not what lies in the pool.
    OSError
        The disk is full.  Nothing is left behind.

    Examples
    --------
    >>> store.save("blocks.safetensors", pool, [7, 3], layout=kvbm.load("universal"))  # doctest: +SKIP
    """
    require(_POOL, pool=pool)
    require(LAYOUT, layout=layout, optional=True)
    require(PROGRESS, progress=progress, optional=True)
    require(FLAG, digests=digests)
    names = _chosen("ids", ids, pool.num_blocks)
    kinds = Kinds.of(pool.resolved) if digests else Kinds()
    rows = Digests.zeros(pool.shape, len(names), kinds) if kinds.blocks else None
    layout = pool.layout if layout is None else layout
    with create(
        path, layout, pool.shape, len(names), digests=digests if rows is None else rows, metadata=metadata, force=force
    ) as made:
        src, dst = _Side(pool, repr(pool), names), _Side(made, str(path), range(len(names)))
        own = src.stream(stream)
        move = _mover(pool, made, _step(pool, len(names)), own)
        _copy(src, dst, move, rows=rows, verify=digests, stream=own, progress=progress)


def load(
    path: _Path,
    ids: Sequence[int] | None = None,
    *,
    layout: Layout | None = None,
    source: Layout | None = None,
    shape: BlockShape | None = None,
    num_blocks: int | None = None,
    device: str = "cpu",
    verify: bool = True,
    progress: Progress | None = None,
) -> Pool:
    """Read blocks of a file into memory.

    Parameters
    ----------
    path : path
        The file.
    ids : sequence of int, optional
        Blocks ``0, 1, 2, …`` of the pool are these of the file; all if not given.
    layout : Layout, optional
        Of the pool; the file's if not given.
    source : Layout, optional
        Of the file, where it is not a shipped one or the file does not say.
    shape, num_blocks : optional
        Of the file, where it does not say.
    device : str
        As for `Pool.allocate`.
    verify : bool
        Compare what was read with the file's digests, where it has some.
    progress : callable, optional
        Called as ``progress(done_bytes, total_bytes)``.

    Returns
    -------
    Pool
        On memory of its own.  To map the file instead of reading it: ``read(path).pool(layout)``.

    Raises
    ------
    DigestError
        A block is not what it was; the message names file, block, layers and tokens.
    BindError
        No such file of blocks; ids that there are not.

    Examples
    --------
    >>> pool = store.load("blocks.safetensors", [3], layout=kvbm.load("nhd"), device="cuda:0")  # doctest: +SKIP
    """
    require(LAYOUT, layout=layout, source=source, optional=True)
    require(PROGRESS, progress=progress, optional=True)
    require(FLAG, verify=verify)
    stored, mapped = _open(path, source, shape, num_blocks)
    names = _chosen(stored.path, ids, mapped.num_blocks)
    pool = Pool.allocate(mapped.layout if layout is None else layout, mapped.shape, len(names), device)
    known = _digests_of(stored, names) if verify else None
    src, dst = _Side(mapped, str(stored.path), names, known), _Side(pool, repr(pool), range(len(names)))
    move = _mover(mapped, pool, _step(mapped, len(names)), dst.stream())
    _copy(src, dst, move, verify=verify, progress=progress)
    return pool


def convert(
    source: _Path,
    target: _Path,
    layout: Layout,
    ids: Sequence[int] | None = None,
    *,
    source_layout: Layout | None = None,
    shape: BlockShape | None = None,
    num_blocks: int | None = None,
    device: str = "cpu",
    verify: bool = True,
    force: bool = False,
    progress: Progress | None = None,
) -> Stored:
    """Make a file of a file, in another layout.

    Parameters
    ----------
    source, target : path
        Files; both are memory-mapped.  They may be one file if `force` is set.
    layout : Layout
        Of `target`.
    ids : sequence of int, optional
        Blocks ``0, 1, 2, …`` of `target` are these of `source`; all if not given.
    source_layout, shape, num_blocks : optional
        Of `source`, where it does not say.
    device : str
        Where to convert: ``"cpu"`` or ``"cuda:N"``.
    verify : bool
        Compare the digests of what was written with the stored ones, or with those of what was read where `source` has none.
        `target` gets these digests.  If not set nothing is compared, and `target` gets digests only where `source` has some.
    force : bool
        Replace `target` if it is there.
    progress : callable, optional
        Called as ``progress(done_bytes, total_bytes)``.

    Returns
    -------
    Stored
        The header of `target`.

    Raises
    ------
    DigestError
        A block of `source` is not what it was, or the copy is wrong; `target` is as before.
    BindError, PlanError, FileExistsError, OSError
        As for `load` and `save`.
    """
    source, target = path_of("source", source), path_of("target", target)
    require(LAYOUT, layout=layout)
    require(LAYOUT, source_layout=source_layout, optional=True)
    require(PROGRESS, progress=progress, optional=True)
    require(FLAG, verify=verify)
    stored, mapped = _open(source, source_layout, shape, num_blocks)
    names = _chosen(stored.path, ids, mapped.num_blocks)
    known = _digests_of(stored, names) if verify or stored.metadata.get("kvbm.digest") == DIGEST else None
    kinds = Kinds.of(mapped.resolved)
    rows = Digests.zeros(mapped.shape, len(names), kinds) if verify and known is None and kinds.blocks else None
    has_digests = Kinds.of(layout.resolve(mapped.shape, len(names))).blocks
    write = (has_digests and (known or rows)) or False
    step = _step(mapped, len(names))
    with create(target, layout, mapped.shape, len(names), digests=write, metadata=stored.metadata, force=force) as made:
        src = _Side(mapped, str(stored.path), names, known)
        dst = _Side(made, str(target), range(len(names)))
        move = _mover(mapped, made, step) if str(device) == "cpu" else _by_way_of(device, mapped, made, step)
        _copy(src, dst, move, rows=rows, verify=verify, progress=progress)
    return read(target)


def _by_way_of(device: str, src: Pool, dst: Pool, step: int) -> _Move:
    """Copies from file to file that are converted on a GPU."""
    far = Pool.allocate(dst.layout, src.shape, step, device)
    there, back = _mover(src, far, step, 0), _mover(far, dst, step, 0)
    here = list(range(step))

    def move(ids: Sequence[int], into: Sequence[int]) -> None:
        there(ids, here[: len(ids)])
        back(here[: len(ids)], into)

    return move


def verify(
    path: _Path, ids: Sequence[int] | None = None, *, source: Layout | None = None, progress: Progress | None = None
) -> list[Damage]:
    """Compare blocks of a file with its digests.

    Parameters
    ----------
    path : path
        The file.
    ids : sequence of int, optional
        Blocks to look at; all if not given.
    source : Layout, optional
        Of the file, where it is not a shipped one.
    progress : callable, optional
        Called as ``progress(done_bytes, total_bytes)``.

    Returns
    -------
    list of Damage
        What is not as it was, a block each; empty if all is.

    Raises
    ------
    BindError
        The file has no digests, or is no file of blocks.
    """
    require(LAYOUT, source=source, optional=True)
    require(PROGRESS, progress=progress, optional=True)
    stored = read(path)
    if stored.digests is None:
        raise BindError(
            f"{stored.path}: the file has no digests: `kvbm digest --write` adds those of what it holds now"
        )
    pool = stored.pool(layout_of(stored) if source is None else source)
    names = _chosen(stored.path, ids, pool.num_blocks)
    found = []
    for at in _steps(pool, len(names), progress):
        some = [names[row] for row in at]
        known = stored.digests.take(some)
        bad = np.flatnonzero((pool.digest(some) != known.blocks) | known.torn())
        if bad.size:
            found += damages(known.take(bad.tolist()), pool, [some[row] for row in bad])
    return found


def digest(
    path: _Path,
    ids: Sequence[int] | None = None,
    *,
    source: Layout | None = None,
    shape: BlockShape | None = None,
    num_blocks: int | None = None,
    progress: Progress | None = None,
) -> Digests:
    """Digests of what a file holds, whatever digests are stored in it.

    Parameters
    ----------
    path, ids, source, shape, num_blocks, progress
        As for `load`.

    Returns
    -------
    Digests
        A row a block.

    Raises
    ------
    PlanError
        The layout has no digests.
    """
    require(LAYOUT, source=source, optional=True)
    require(PROGRESS, progress=progress, optional=True)
    _, pool = _open(path, source, shape, num_blocks)
    names = _chosen(path, ids, pool.num_blocks)
    kinds = _require(pool)
    found = Digests.zeros(pool.shape, len(names), kinds)
    for at in _steps(pool, len(names), progress):
        found.put(at, Digests.of(pool, [names[row] for row in at], kinds=kinds))
    return found


def _require(pool: Pool) -> Kinds:
    kinds = Kinds.of(pool.resolved)
    if not kinds.blocks:
        pool.whole.keys()  # raises with the reason
    return kinds


def add_digests(
    path: _Path,
    *,
    source: Layout | None = None,
    shape: BlockShape | None = None,
    num_blocks: int | None = None,
    progress: Progress | None = None,
) -> Stored:
    """Write a file anew with the digests of what it holds.  Padding becomes zeros.

    Parameters
    ----------
    path, source, shape, num_blocks, progress
        As for `load`.

    Returns
    -------
    Stored
        The header of the file, which replaced the old one when it was whole.

    Raises
    ------
    BindError
        The file has digests.
    PlanError
        The layout has none.
    """
    require(LAYOUT, source=source, optional=True)
    stored, pool = _open(path, source, shape, num_blocks)
    if stored.digests is not None:
        raise BindError(f"{stored.path}: the file has digests; `kvbm verify` compares its blocks with them")
    _require(pool)
    return convert(
        path, path, pool.layout, source_layout=source, shape=shape, num_blocks=num_blocks, force=True, progress=progress
    )
