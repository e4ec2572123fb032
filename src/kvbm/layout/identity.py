"""Finds layouts that are the same, and layouts that could be confused without an error.

One function for each of three different relations:

* `aliases`: equal fingerprints, so the layouts have the same meaning at every shape;
* `same_addresses`: different fingerprints, but at this shape every element has the same address;
* `ambiguous`: the same arrays at this shape, but other addresses inside them.  No check of arrays can distinguish these.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

from ..errors import LayoutError
from .address_map import Access, normal
from .layout import Layout
from .resolved import Resolved, legal
from .shapes import BlockShape, as_shape, numpy_name


def aliases(layouts: Iterable[Layout]) -> list[list[Layout]]:
    """Groups of two or more layouts with one fingerprint.

    >>> from kvbm import load
    >>> [[x.name for x in group] for group in aliases(map(load, ("nhd", "hnd", "dynamo/stacked_nhd")))]
    [['nhd', 'dynamo/stacked_nhd']]
    """
    return [group for group in _by_fingerprint(layouts) if len(group) > 1]


def same_addresses(layouts: Iterable[Layout], shape: BlockShape | str, num_blocks: int = 1024) -> list[list[list[Layout]]]:
    """Groups of layouts whose fingerprints differ, though every element has the same address at this shape.

    For example, an axis of size one can stand anywhere or be left out, or a pitch can equal the size without padding.
    Layouts that are not legal at the shape are left out.  Strides of axes slower than ``b`` depend on `num_blocks`.

    Each group has two or more lists; each list has the layouts of one fingerprint.
    """
    groups: dict[_Places, list[Layout]] = {}
    for layout, resolved in _legal(layouts, shape, num_blocks):
        groups.setdefault(_places(resolved), []).append(layout)
    by_meaning = (_by_fingerprint(group) for group in groups.values())
    return [group for group in by_meaning if len(group) > 1]


def ambiguous(layouts: Iterable[Layout], shape: BlockShape | str, num_blocks: int = 1024) -> list[list[list[Layout]]]:
    """Groups of layouts that accept the same arrays at this shape, but place elements differently in them.

    The number, shapes and strides of their arrays are equal.  A `Pool` accepts such arrays for either layout, so only
    the given name distinguishes the two.  Arrays that several planes share are bytes of any shape, so there only the
    number of bytes is compared.  A small pool can be ambiguous where a large one is not: with two blocks, ``o b`` and
    ``b o`` have one shape.

    Each group has two or more lists; each list has layouts that place all elements alike.

    >>> from kvbm import load, load_shape
    >>> both = load("nhd"), load("hnd")
    >>> ambiguous(both, load_shape("llama-3.1-8b"))
    []
    >>> len(ambiguous(both, load_shape("llama-3.1-8b,nt=8")))
    1
    """
    groups: dict[_Arrays, list[tuple[Layout, Resolved]]] = {}
    records: dict[tuple[int, int], list[tuple[Layout, Resolved]]] = {}
    for layout, resolved in _legal(layouts, shape, num_blocks):
        if resolved.first.is_record:
            records.setdefault((resolved.table_size, resolved.first.nbytes), []).append((layout, resolved))
        else:
            groups.setdefault(_arrays(resolved), []).append((layout, resolved))
    found: list[list[list[Layout]]] = []
    for group in groups.values():
        (_, one), kinds = group[0], group[0][1].kinds
        if len(kinds) == 1 and numpy_name(kinds[0].dtype) == "uint8":
            alike = records.get((one.table_size, kinds[0].nbytes), ())
            group += [it for it in alike if kinds[0].runs in (it[1].first.runs, [(kinds[0].nbytes, 1)])]
    for group in [*groups.values(), *records.values()]:
        if len({layout.fingerprint for layout, _ in group}) > 1:
            meanings: dict[_Places, list[Layout]] = {}
            for layout, resolved in group:
                meanings.setdefault(_places(resolved), []).append(layout)
            names = list(meanings.values())
            if len(meanings) > 1 and not any(all(some in group for some in names) for group in found):
                found.append(names)
    return found


def confusable(
    layouts: Iterable[Layout], shape: BlockShape | str, num_blocks: int = 1024, *, of: Iterable[Layout] | None = None
) -> list[tuple[Layout, int, Layout, int]]:
    """Pairs of layouts, each with its number of blocks, that accept the same arrays at this shape.

    `ambiguous` compares layouts at one number of blocks.  A pool takes the number from the arrays, so arrays of 128
    padded blocks may be 129 blocks of another layout.

    The first layout has `num_blocks` blocks, or the least multiple of it at which the bytes are a whole number of the
    other's blocks.  It is one of `of`, if that is given.  Layouts of one fingerprint count once.
    """
    shape = as_shape(shape)

    @functools.cache
    def at(layout: Layout, blocks: int) -> Resolved | None:
        return legal(layout, shape, blocks)

    def look(resolved: Resolved) -> tuple[object, ...]:
        """What no number of blocks changes."""
        kinds, is_bytes = resolved.kinds, resolved.first.is_record
        dtypes = tuple(numpy_name(kind.dtype) for kind in kinds)
        fits_bytes = len(kinds) == 1 and dtypes[0] == "uint8"
        ranks = () if is_bytes or fits_bytes else tuple(len(kind.shape) for kind in kinds)
        count = 0 if resolved.layout.b_in_table else resolved.table_size
        return (count, dtypes, ranks, bool(resolved.layout.b_in_table))

    groups: dict[tuple[object, ...], list[Layout]] = {}
    for layout in {layout.fingerprint: layout for layout in layouts}.values():
        one = at(layout, 1)
        if one is not None:
            groups.setdefault(look(one), []).append(layout)
    found = []
    wanted = None if of is None else {layout.fingerprint for layout in of}
    for one_layout, other in (pair for group in groups.values() for pair in itertools.permutations(group, 2)):
        if wanted is not None and one_layout.fingerprint not in wanted:
            continue
        sizes = [[at(layout, blocks) for blocks in (2, 3)] for layout in (one_layout, other)]
        if any(resolved is None for pair in sizes for resolved in pair):
            continue
        (a, b), (c, d) = ([_extent(resolved) for resolved in pair if resolved is not None] for pair in sizes)
        mine, theirs = b - a, d - c
        if mine <= 0 or theirs <= 0:
            continue
        step = theirs // math.gcd(mine, theirs)
        blocks = num_blocks if num_blocks % step == 0 else num_blocks * step
        own = at(one_layout, blocks)
        if own is None:
            continue
        held = _extent(own)
        more, rest = divmod(held - c, theirs)
        also = at(other, 2 + more) if not rest and more > -2 else None
        if also is None or 2 + more == blocks or not _accepts(also, own):
            continue
        if _places(own) != _places(also):
            found.append((one_layout, blocks, other, 2 + more))
    return found


def _extent(resolved: Resolved) -> int:
    """What grows with the number of blocks: the number of arrays, or the bytes of the first."""
    return resolved.table_size if resolved.layout.b_in_table else resolved.first.nbytes


def _accepts(one: Resolved, other: Resolved) -> bool:
    """True if a pool of `one` accepts the arrays of `other`, and takes the number of blocks from them."""
    if one.first.is_record:
        if "b" in one.first.axes:
            at, shape = one.first.axes.index("b"), other.first.shape
            if at >= len(shape) or shape[at] != one.num_blocks:
                return False
        mine, theirs = one.first, other.first
        is_dense = theirs.runs in (mine.runs, [(mine.nbytes, 1)])
        return one.table_size == other.table_size and len(other.kinds) == 1 and theirs.itemsize == 1 and is_dense
    return _arrays(one) == _arrays(other)


def _by_fingerprint(layouts: Iterable[Layout]) -> list[list[Layout]]:
    groups: dict[str, list[Layout]] = {}
    for layout in layouts:
        groups.setdefault(layout.fingerprint, []).append(layout)
    return list(groups.values())


def _legal(layouts: Iterable[Layout], shape: BlockShape | str, num_blocks: int) -> Iterable[tuple[Layout, Resolved]]:
    shape = as_shape(shape)
    at_shape = functools.cache(functools.partial(legal, shape=shape, num_blocks=num_blocks))  # aliases are equal
    for layout in layouts:
        if (resolved := at_shape(layout)) is not None:
            yield layout, resolved


# ---- what a pool checks --------------------------------------------------------------------------------------------

_Arrays = tuple[int, tuple[object, ...], tuple[int, ...]]


def _arrays(resolved: Resolved) -> _Arrays:
    """Everything that a check of arrays sees: their number, and the shape, strides and dtype of each."""
    kinds = [
        (
            kind.shape,
            tuple(s if n > 1 else 0 for n, s in zip(kind.shape, kind.strides, strict=True)),
            numpy_name(kind.dtype),
        )
        for kind in resolved.kinds  # the stride of an axis of size one is never used
    ]
    alike = len(set(kinds)) == 1
    return (resolved.table_size, (kinds[0],) if alike else tuple(kinds), () if alike else (*resolved.kind_of_entry,))


# ---- the address of every element ----------------------------------------------------------------------------------

_Places = tuple[Access, ...]


def _places(resolved: Resolved) -> _Places:
    """The address maps of K and of V for every plane.  They are equal if all elements have the same addresses."""
    places = []
    for access in resolved.accesses:
        for half in range(resolved.shape.no) if access.half is None else (access.half,):
            place = _of_half(access, half)
            # All orders inside an opaque group count as equal; a single axis has only one order.
            steps = (
                s._replace(axes=tuple(sorted(s.axes)), opaque=len(s.axes) > 1) if s.opaque else s for s in place.steps
            )
            block = place.block if resolved.num_blocks > 1 else (0, 0)
            packed = tuple(sorted(place.packed))
            places.append(replace(place, half=half, steps=normal(steps), packed=packed, block=block))
    return tuple(places)


def _of_half(access: Access, half: int) -> Access:
    """The map of K or V alone, or of both if axis ``o`` is fused with another axis."""
    try:
        return access.fix("o", half)
    except LayoutError:
        return access
