"""Find where the blocks of two pools differ: compare digests of layers, K and V, heads and tokens, each within the rest.

Each step digests all slices along one axis on both sides, so it reads the remaining region once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .. import _core
from .._arguments import quoted
from ..digest.cells import CELL, Keys
from ..errors import BindError, KvbmError, LayoutError, PlanError
from ..layout.region import canonical
from ..memory.streams import framework_of, framework_stream
from ..planner.plan import between
from ..pool.digester import Digester
from ..pool.pool import Pool, part_of
from ..pool.section import PoolSection

#: Most pairs that are examined, regions per pair, and slices that are digested on each side.
MOST_PAIRS, MOST_REGIONS, MOST_DIGESTS = 16, 8, 8192

#: The per-thread default stream: the blocks are complete before it is used.
_STREAM = 2

#: The same limits for the message of an error.
_TOLD_PAIRS, _TOLD_DIGESTS = 4, 4096

_NAMES = {"l": "layer", "h": "head", "t": "token", "d": "element"}

_Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Region:
    """A product of coordinates in which the two blocks of a pair differ."""

    planes: tuple[str, ...]  # names of the planes; one empty name if the layout has none
    #: Axis → coordinates of the source; tokens count from the pair's position.  For the axis of a row: the elements of
    #: the cells that differ in some of the rows.
    at: Mapping[str, tuple[int, ...]]
    complete: frozenset[str]  # axes of which the region has all compared coordinates
    #: True if each row of the product differs.  False if only some differ; no row outside of all regions does.
    exact: bool = True
    #: Axes along which places were not distinguished, as their order is unspecified, such as opaque groups.
    unresolved: tuple[str, ...] = ()

    def __str__(self) -> str:
        texts = [f"plane{'s' if len(self.planes) > 1 else ''} {', '.join(self.planes)}"] if any(self.planes) else []
        last = max((axis for axis in self.at if axis not in "loht"), key=canonical, default="")
        for axis, coordinates in self.at.items():
            whole = axis in self.complete
            if axis == "o":
                texts.append(" and ".join("KV"[o] if o < 2 else str(o) for o in coordinates))
            elif not (whole and axis == last):
                name = _NAMES.get(axis, f"'{axis}'") + ("s" if axis in _NAMES and len(coordinates) > 1 else "")
                texts.append(f"all {name}" if whole and len(coordinates) > 1 else f"{name} {_ranges(coordinates)}")
        if self.unresolved:
            texts.append(f"somewhere along {' '.join(self.unresolved)}")
        return ("" if self.exact else "within ") + (", ".join(texts) or "all of it")


@dataclass(frozen=True)
class Mismatch:
    """A pair of blocks that differ."""

    pair: int  # position of the pair in the batch
    #: Ids of the block or unit in the source and in the destination.
    src: int
    dst: int
    regions: tuple[Region, ...]  # disjoint regions; empty if both were equal again when they were examined


@dataclass(frozen=True)
class Differences:
    """The pairs of blocks that differ, and the places.  It is false and has length 0 if no pair differs.

    Attributes
    ----------
    pairs : tuple of int
        Positions in the batch of all pairs that differ.
    found : tuple of Mismatch
        The places, for the first of these pairs.
    ids : tuple of str
        What the ids of the source and of the destination count: ``"block"`` or ``"unit"``.
    notes : tuple of str
        What could not be distinguished, and why.

    Examples
    --------
    >>> print(kvbm.testing.locate(engine_pool, storage_pool, [7, 3], [0, 1]))  # doctest: +SKIP
    pair 1 (block 3 → block 1): layers 4–5, V, head 2, tokens 8–15
    """

    pairs: tuple[int, ...] = ()
    found: tuple[Mismatch, ...] = ()
    ids: tuple[str, str] = ("block", "block")
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.pairs)

    def __str__(self) -> str:
        lines = []
        for one in self.found:
            where = "; ".join(map(str, one.regions)) or "nothing any more: it changed while it was looked into"
            lines.append(f"pair {one.pair} ({self.ids[0]} {one.src} → {self.ids[1]} {one.dst}): {where}")
        if more := self.pairs[len(self.found) :]:
            lines.append(f"and {len(more)} more: pair{'s' if len(more) > 1 else ''} {_ranges(more)}")
        return "\n".join([*lines, *self.notes]) or "no difference"


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers: ``0–3, 8``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(a) if a == b else f"{a}–{b}" for a, b in runs[:12]]
    return ", ".join(texts) + (f", … ({len(numbers)} in all)" if len(runs) > len(texts) else "")


def locate(
    src_pool: Pool | PoolSection, dst_pool: Pool | PoolSection, src_ids: Any = None, dst_ids: Any = None, *,
    tokens: Any = None, stream: Any = None,
) -> Differences:  # fmt: skip
    """Find the smallest regions in which blocks differ, in any two layouts.  It compares digests, with a few reads of the blocks.

    It compares whole blocks first.  In those that differ it compares planes, layers, K and V, heads and tokens, each within the
    remaining region.  At last it compares each row of this region, and pieces of up to 16 bytes along the rows.

    Parameters
    ----------
    src_pool, dst_pool : Pool or PoolSection
        Each in host memory or on a GPU, with the same coordinates on both sides, as for a copy.
    src_ids, dst_ids : optional
        Pairs of blocks or units, as for `Transfer.copy`.  Ids on a GPU are copied to the host.
    tokens : int, sequence of int, array or tensor, optional
        The position of each pair's first token in its sequence.  The result then has positions instead of tokens of a block.
    stream : optional
        The stream that wrote the blocks; the call waits for it.  Default: the current streams of the frameworks.  No copy may be
        writing to pools on the CPU.

    Returns
    -------
    Differences
        False if the blocks are equal.  Its text names the places; `Differences.found` has the coordinates, for the first 16 pairs
        and up to 8 regions each.

    Raises
    ------
    PlanError
        There is no copy between the pools, or a layout has no digests.
    BindError
        The ids do not fit.

    Notes
    -----
    A region that is a product of layers, K and V, heads and tokens is found exactly.  Several are found as disjoint products.  If
    there are too many rows to compare one by one (some thousands, tokens not counted), the result says ``within`` a product.
    Places inside an opaque group are not distinguished.

    Examples
    --------
    >>> import numpy as np
    >>> import kvbm
    >>> shape = kvbm.BlockShape(nl=4, no=2, nh=2, nt=16, hd=8, dtype="float32")
    >>> src, dst = (kvbm.Pool.allocate(kvbm.load(name), shape, 4) for name in ("universal", "operational_nhd"))
    >>> for array in src.arrays:
    ...     array[...] = 1.5
    >>> kvbm.convert(src, dst)
    >>> dst.arrays[3][2, 1, 4:8] = 0  # block 3, layer 2, V, four tokens
    >>> print(locate(src, dst))
    pair 3 (block 3 → block 3): layer 2, V, all heads, tokens 4–7
    """
    src, dst = part_of(src_pool, "source"), part_of(dst_pool, "destination")
    return _located(src, dst, src_ids, dst_ids, tokens, stream)


def _located(
    src: PoolSection, dst: PoolSection, src_ids: Any, dst_ids: Any, tokens: Any, stream: Any,
    most_pairs: int = MOST_PAIRS, most_digests: int = MOST_DIGESTS,
) -> Differences:  # fmt: skip
    title = f"{src.pool.layout.name} → {dst.pool.layout.name}"
    between(src.of, dst.of, title)  # raises an error for different coordinates
    for part in (src, dst):
        part.pool.require_open()
    given = _core.Pairs(on_host(src_ids), on_host(dst_ids), src.num_ids, dst.num_ids)
    ids = np.array(given.ids(), np.int32).reshape(2, -1)
    count = ids.shape[1]
    try:
        starts = np.atleast_1d(np.asarray(0 if tokens is None else on_host(tokens)))
    except (TypeError, ValueError):  # rows of different lengths
        starts = np.zeros((0, 0))
    if starts.dtype.kind not in "iu" or starts.shape not in ((1,), (count,)) or (starts < 0).any():
        raise BindError(
            f"tokens: expected {count} integers from 0 on, the position of each pair's first token, got {quoted(tokens)}"
        )
    starts = np.broadcast_to(starts, (count,))
    _wait(stream, src, dst)
    kept = np.flatnonzero((ids >= 0).all(axis=0))
    search = _Search(ids, most_digests)
    whole = _Slice(src, dst, src.keys())
    wrong = kept[search.differ(whole, kept)]
    if not wrong.size:
        return Differences()
    some = wrong[:most_pairs]
    regions: dict[int, list[Region]] = {int(pair): [] for pair in some}
    names = list(dict.fromkeys(access.plane for access in src.of.accesses))
    for name in names:
        plane = whole.of_plane(name) if len(names) > 1 else whole
        pairs = some[search.differ(plane, some)] if len(names) > 1 else some
        for pair, region in search.regions(plane, name, pairs) if pairs.size else ():
            start = int(starts[pair])
            at = {axis: tuple(start + c for c in each) if axis == "t" else each for axis, each in region.at.items()}
            _add(regions[int(pair)], replace(region, at=at))
    found = [Mismatch(pair, int(ids[0, pair]), int(ids[1, pair]), tuple(each)) for pair, each in regions.items()]
    counted = ["unit" if part.of.units > 1 else "block" for part in (src, dst)]
    return Differences(
        tuple(map(int, wrong)), tuple(found), (counted[0], counted[1]), tuple(dict.fromkeys(search.notes))
    )


def where_different(
    src: PoolSection, dst: PoolSection, pairs: _core.Pairs, layers: range | tuple[range, range] | None,
    wrong: Sequence[int],
) -> str:  # fmt: skip
    """A text on where pairs of a finished copy differ, for an error.  `wrong`: the pairs with different digests."""
    src_ids, dst_ids = pairs.ids()
    if src_ids is None or dst_ids is None:
        return (
            "where they differ cannot be told: block ids are on the device; kvbm.testing.locate takes them from there"
        )
    try:
        if layers is not None:
            ours, theirs = layers if isinstance(layers, tuple) else (layers, layers)
            src, dst = src.section(l=ours), dst.section(l=theirs)
        some = set(wrong[:_TOLD_PAIRS])
        ids = [[one if pair in some else -1 for pair, one in enumerate(side)] for side in (src_ids, dst_ids)]
        stream = None if src.pool.device == dst.pool.device == "cpu" else _STREAM
        found = _located(src, dst, ids[0], ids[1], None, stream, most_digests=_TOLD_DIGESTS)
    except KvbmError as error:
        return f"where they differ cannot be told: {error}"
    if not found:
        return (
            "the blocks are equal now: the source was written while the copy ran, or one of them has been written since"
        )
    more = len(wrong) - len(some)
    return f"{found}\nand {more} more pairs" if more else str(found)


def on_host(ids: Any) -> Any:
    """Ids or positions, copied from a GPU to the host."""
    for name in ("cpu", "get"):  # torch, CuPy
        if hasattr(ids, "__cuda_array_interface__") and hasattr(ids, name):
            return getattr(ids, name)()
    return ids


def _wait(stream: Any, *parts: PoolSection) -> None:
    """Wait for a stream, or for the current streams of the frameworks."""
    for place in dict.fromkeys(part.pool.device for part in parts):
        if place != "cpu":
            device = int(place.partition(":")[2])
            frameworks = {framework_of(part.pool.arrays[0]) for part in parts if part.pool.device == place}
            for one in [stream] if stream is not None else [framework_stream(name, device) for name in frameworks]:
                _core.synchronize(device, _core.stream_handle(one))
        elif stream is not None and all(part.pool.device == "cpu" for part in parts):
            raise BindError("stream: the pools are on the CPU; leave stream out")


def _add(regions: list[Region], new: Region) -> None:
    """Add a region.  Planes that differ at the same places share a region."""
    for index, one in enumerate(regions):
        if replace(one, planes=()) == replace(new, planes=()):
            regions[index] = replace(one, planes=(*one.planes, *new.planes))
            return
    regions.append(new)


class _Slice(NamedTuple):
    """The same coordinates of both sides.  Their keys only have to be equal, as the digests are not shown."""

    src: PoolSection
    dst: PoolSection
    keys: Keys

    def of_plane(self, name: str) -> _Slice:
        return _Slice(self.src.section(planes=name), self.dst.section(planes=name), self.keys.of_planes([name]))

    def select(self, axis: str, coordinates: Sequence[int]) -> _Slice:
        src, dst = (_chosen(side, axis, coordinates) for side in (self.src, self.dst))
        return _Slice(src, dst, self.keys.select(axis, range(len(coordinates))))

    def sizes(self) -> dict[str, int]:
        """Axes with more than one coordinate, and their numbers of coordinates."""
        axes = {axis for access in self.src.of.accesses for axis, _ in access.sizes}
        axes |= {axis for axis, _ in self.src.of.chosen}
        counts = {axis: self.src.of.count(axis) for axis in sorted(axes, key=canonical)}
        return {axis: count for axis, count in counts.items() if count > 1}

    def fixed(self) -> dict[str, tuple[int, ...]]:
        """Axes of which one of several coordinates was selected."""
        plane, pool = self.src.of.accesses[0].plane, self.src.pool
        axes = {axis for access in pool.resolved.section.accesses if access.plane == plane for axis, _ in access.sizes}
        return {axis: tuple(self.numbers(axis)) for axis in axes if self.src.of.count(axis) == 1}

    def numbers(self, axis: str) -> Sequence[int]:
        """The coordinates in the source's pool."""
        numbers: Sequence[int] = range(self.src.pool.resolved.section.size(axis))
        for name, chosen in self.src.choices:
            if name == axis:
                numbers = [numbers[i] for i in chosen]
        return numbers


class _OverError(Exception):
    """The limit of digests is reached."""


class _Search:
    """Comparisons of slices of some pairs."""

    def __init__(self, ids: npt.NDArray[np.int32], most: int) -> None:
        self.ids, self.left = ids, most
        self.notes: list[str] = []

    # ---- digests ---------------------------------------------------------------------------------------------------

    def differ(self, held: _Slice, pairs: npt.NDArray[np.intp]) -> _Flags:
        """Mask of the pairs that differ."""
        flags: _Flags = self._each(held, "", [()], pairs)[0]
        return flags

    def _each(self, held: _Slice, axis: str, pieces: Sequence[Sequence[int]], pairs: npt.NDArray[np.intp]) -> _Flags:
        """Mask of the pairs that differ, for each piece of an axis: ``[pieces, pairs]``."""
        keys = held.keys.select(axis, range(len(pieces[0]))) if axis else held.keys
        src, dst = (
            self._digests(part, axis, pieces, keys, ids[pairs])
            for part, ids in zip((held.src, held.dst), self.ids, strict=True)
        )
        return np.asarray(src != dst)

    def _digests(
        self, part: PoolSection, axis: str, pieces: Sequence[Sequence[int]], keys: Keys, ids: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.uint64]:
        tokens = _by_token(part) if axis == "t" else None
        if tokens is not None:  # all of them by one kernel
            self._count(1)
            wide = (ids.astype(np.int64) * part.tokens + np.array(pieces)).reshape(-1)
            return _digest(tokens, keys, wide).reshape(len(pieces), -1)
        self._count(len(pieces))
        parts = [_chosen(part, axis, each) for each in pieces] if axis else [part]
        return np.stack([_digest(each, keys, ids) for each in parts])

    def _count(self, digests: int) -> None:
        if digests > self.left:
            raise _OverError
        self.left -= digests

    # ---- from all of a plane to regions ----------------------------------------------------------------------------

    def regions(self, held: _Slice, plane: str, pairs: npt.NDArray[np.intp]) -> Iterator[tuple[int, Region]]:
        """Yield pairs and their regions."""
        sizes = held.sizes()
        row = max((axis for axis in sizes if axis not in "loht"), key=canonical, default="")
        axes: list[str] = []
        flags: list[_Flags] = []
        over: list[str] = []
        unresolved: list[str] = []
        narrow = held
        for axis in (name for name in sizes if name != row):
            try:
                wrong = self._each(narrow, axis, [(c,) for c in range(sizes[axis])], pairs)
                if not wrong.any():  # it is being written at the same time
                    return
                if not wrong.any(axis=1).all():
                    narrow = narrow.select(axis, np.flatnonzero(wrong.any(axis=1)).tolist())
            except (LayoutError, PlanError) as error:
                self.notes.append(f"axis '{axis}' is not looked into: {error}")
                unresolved.append(axis)
                continue
            except _OverError:
                over.append(axis)
                continue
            axes.append(axis)
            flags.append(wrong)
        groups: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for index in range(len(pairs)):
            product = tuple(tuple(np.flatnonzero(wrong[:, index]).tolist()) for wrong in flags)
            if all(product):
                groups.setdefault(product, []).append(index)
        found: dict[tuple[tuple[tuple[int, ...], ...], bool], list[int]] = {}
        for product, members in groups.items():
            for index, box, exact in self._boxes(held, axes, product, pairs[members]):
                found.setdefault((box, exact and not over), []).append(members[index])
        for (box, exact), members in found.items():
            at = {axis: tuple(held.numbers(axis)[c] for c in each) for axis, each in zip(axes, box, strict=True)}
            at |= {axis: tuple(held.numbers(axis)) for axis in over} | held.fixed()
            complete = frozenset(axis for axis, each in at.items() if len(each) == sizes.get(axis, 1))
            at = {axis: at[axis] for axis in sorted(at, key=canonical)}
            region = Region((plane,), at, complete, exact, tuple(unresolved))
            for index, elements in zip(members, self._elements(held, row, axes, box, pairs[members]), strict=True):
                more = {row: elements} if elements else {}
                full = {row} if len(elements) == sizes.get(row) else set()
                yield int(pairs[index]), replace(region, at={**region.at, **more}, complete=region.complete | full)

    def _boxes(
        self, held: _Slice, axes: Sequence[str], product: tuple[tuple[int, ...], ...], pairs: npt.NDArray[np.intp]
    ) -> Iterator[tuple[int, tuple[tuple[int, ...], ...], bool]]:
        """For pairs with errors in the same product: pair, coordinates, and True if all of them are wrong."""
        # Tokens last: one kernel digests all of them.
        order = sorted((i for i, each in enumerate(product) if len(each) > 1), key=lambda i: axes[i] == "t")
        if len(order) < 2:
            yield from ((index, product, True) for index in range(len(pairs)))
            return
        try:
            last = order[-1]
            loops = math.prod(len(product[i]) for i in order[:-1])
            batched = axes[last] == "t" and all(_by_token(part) is not None for part in (held.src, held.dst))
            if 2 * loops * (1 if batched else len(product[last])) > self.left:
                raise _OverError
            fixed = held
            for i, each in enumerate(product):
                if i not in order:
                    fixed = fixed.select(axes[i], each)
            wrong = self._grid(fixed, [(axes[i], product[i]) for i in order], pairs)
        except (_OverError, LayoutError, PlanError):
            yield from ((index, product, False) for index in range(len(pairs)))
            return
        for index in range(len(pairs)):
            for chosen, exact in _products(wrong[..., index], MOST_REGIONS):
                box = list(product)
                for i, which in zip(order, chosen, strict=True):
                    box[i] = tuple(product[i][c] for c in which)
                yield index, tuple(box), exact

    def _grid(self, held: _Slice, axes: Sequence[tuple[str, tuple[int, ...]]], pairs: npt.NDArray[np.intp]) -> _Flags:
        """Mask of the cells of a product that differ: one dimension per axis, then the pairs."""
        (axis, coordinates), *rest = axes
        if not rest:
            return self._each(held, axis, [(c,) for c in coordinates], pairs)
        return np.stack([self._grid(held.select(axis, (c,)), rest, pairs) for c in coordinates])

    def _elements(
        self, held: _Slice, row: str, axes: Sequence[str], box: tuple[tuple[int, ...], ...], pairs: npt.NDArray[np.intp]
    ) -> list[tuple[int, ...]]:
        """The elements of the rows that differ, in units of cells; empty if cells do not show it."""
        nothing: list[tuple[int, ...]] = [()] * len(pairs)
        if not row:
            return nothing
        access, size = held.src.of.accesses[0], held.src.of.count(row)
        count = math.gcd(access.itemsize * size // access.pack, CELL) * access.pack // access.itemsize
        try:
            for axis, each in zip(axes, box, strict=True):
                held = held.select(axis, each)
            wrong = self._each(held, row, [range(c, c + count) for c in range(0, size, count)], pairs)
        except (_OverError, LayoutError, PlanError):
            return nothing
        numbers = held.numbers(row)
        return [
            tuple(numbers[i] for i in np.flatnonzero(np.repeat(wrong[:, p], count)).tolist()) for p in range(len(pairs))
        ]


def _chosen(part: PoolSection, axis: str, coordinates: Sequence[int]) -> PoolSection:
    which: dict[str, Any] = {axis: tuple(coordinates)}
    return part.section(**which)


def _by_token(part: PoolSection) -> PoolSection | None:
    """The part with ids of tokens, if the layout has equal steps between tokens; else None."""
    try:
        return part.units(1)
    except PlanError:
        return None


def _digest(part: PoolSection, keys: Keys, ids: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    made = Digester(part, keys)
    found: Any = made.digest(part.pool, ids, 0, None, None if made.device < 0 else _STREAM, None)
    return np.asarray(found)


# ---- flags as products ---------------------------------------------------------------------------------------------


def _products(wrong: _Flags, most: int) -> Iterator[tuple[tuple[tuple[int, ...], ...], bool]]:
    """Disjoint products that cover the flags that are set.  If more than `most` are needed, the last one covers the rest."""
    left = wrong.copy()
    for number in range(most):
        if not left.any():
            return
        if number == most - 1:
            others = [tuple(a for a in range(left.ndim) if a != axis) for axis in range(left.ndim)]
            box = [np.flatnonzero(left.any(axis=other)).tolist() for other in others]
            yield tuple(map(tuple, box)), bool(left[np.ix_(*box)].all())
            return
        seed = [[int(c)] for c in np.argwhere(left)[0]]
        orders = itertools.islice(itertools.permutations(range(left.ndim)), 24)
        grown = [_grown(left, seed, order) for order in orders]
        best = max(grown, key=lambda box: math.prod(map(len, box)))
        left[np.ix_(*best)] = False
        yield tuple(map(tuple, best)), True


def _grown(wrong: _Flags, seed: Sequence[list[int]], order: Sequence[int]) -> list[list[int]]:
    """The largest product around a cell, extended along one axis after the other."""
    box = list(seed)
    for axis in order:
        box[axis] = list(range(wrong.shape[axis]))
        others = tuple(a for a in range(wrong.ndim) if a != axis)
        box[axis] = np.flatnonzero(wrong[np.ix_(*box)].all(axis=others)).tolist()
    return box
