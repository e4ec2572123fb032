"""Digests: the place of each cell in the model's order (its key), and the parameters of kernels for it.

``docs/reference/digest.md`` defines digests.  Keys are planned as a third side of a copy: an address map into imaginary memory
with `CELL` bytes per cell, in the order p (the token's position), plane, l, o, h, the layout's extra axes, d.  A new
plane of a layout file needs no code here; a new format of scales begins in ``layout/scales.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .._arguments import quoted, whole, wholes
from ..errors import LayoutError, MissingKernelError, PlanError
from ..layout.address_map import Access, Step, normal
from ..layout.region import Section, canonical
from ..layout.shapes import LIMIT
from ..planner.cast import DIGESTED_CASTS, GROUP_MODES, ITEM, CastPart, Scale, bits_of
from ..planner.kernel_forms import MAX_PARTS, Form, form_of
from ..planner.loopnest import Id, Mode, Part
from ..planner.lowering import CellParams, Launch, cast_launch
from ..planner.plan import between

#: Bytes of the largest cell, and of every cell in the map of keys.
CELL = 16

#: Inside a chunk, kernels have key strides of 32 bits.
_KEY_LIMIT = 1 << 32


@dataclass(frozen=True)
class Keys:
    """The keys of a section's cells: the address map to keys times `CELL`, and the keys per token of the whole model.

    For each plane, `rows` has its name, the axis of its rows, and elements per cell; `cells` has the place of its first cell,
    and bytes per cell.
    """

    section: Section
    lanes: int
    rows: tuple[tuple[str, str, int], ...]
    cells: tuple[tuple[int, int], ...]

    def cell_at(self, offset: int) -> int:
        """Bytes of the cell at an offset of the map; 0 if no cell begins there."""
        key, inside = divmod(offset, CELL)
        return 0 if inside else next(cell for first, cell in reversed(self.cells) if first <= key % self.lanes)

    @property
    def count(self) -> int:
        """Number of cells per id."""
        sizes = {plane: cell for (plane, *_), (_, cell) in zip(self.rows, self.cells, strict=True)}
        return sum(access.nbytes // sizes[access.plane] for access in self.section.accesses)

    def of_planes(self, names: Sequence[str]) -> Keys:
        """The keys of some planes."""
        return replace(self, section=self.section.of_planes(names))

    def select(self, axis: str, coordinates: range | tuple[int, ...]) -> Keys:
        """The keys of some coordinates of an axis.  Along rows, they must be whole cells."""
        planes = {access.plane for access in self.section.accesses}
        for plane, along, count in self.rows:
            if axis == along and plane in planes and not _are_whole(coordinates, count):
                raise LayoutError(
                    f"axis '{axis}': a cell of rows{f' of {plane!r}' if plane else ''} is {count} elements: expected whole cells, "
                    f"got {coordinates}"
                )
        return replace(self, section=self.section.select(axis, coordinates))


def _are_whole(coordinates: range | tuple[int, ...], count: int) -> bool:
    """True if coordinates consist of consecutive groups of `count`, each beginning at a multiple of `count`."""
    firsts = coordinates[::count]
    return not any(first % count for first in firsts) and tuple(coordinates) == tuple(
        first + i for first in firsts for i in range(count)
    )


@dataclass(frozen=True)
class Model:
    """The part of a model that a pool holds, for digests that are comparable between ranks.

    Attributes
    ----------
    layers, heads : range or tuple of int, optional
        The model's numbers of the layers and heads that the pool holds, in the pool's order.  Default: all.
    nl, nh : int, optional
        Number of layers and of heads of the model.  Required together with `layers` and `heads`.
    """

    layers: range | Sequence[int] | None = None
    heads: range | Sequence[int] | None = None
    nl: int | None = None
    nh: int | None = None

    def __post_init__(self) -> None:
        for name, convert in (("layers", _coordinates), ("heads", _coordinates), ("nl", whole), ("nh", whole)):
            given = getattr(self, name)
            found = None if given is None else convert(given)
            if found is None and given is not None:
                what = "an integer" if convert is whole else "a range, or a list of integers"
                raise PlanError(f"Model: {name}: expected {what}, got {quoted(given)}")
            object.__setattr__(self, name, found)

    def axes(self) -> Iterator[tuple[str, range | tuple[int, ...], int]]:
        """Yield axis, coordinates, and the model's number of coordinates."""
        for axis, held, count in (("l", self.layers, self.nl), ("h", self.heads, self.nh)):
            if (held is None) != (count is None):
                raise LayoutError(f"axis '{axis}': expected its coordinates and how many the model has, got one of them")
            if held is not None and count is not None:
                held = _coordinates(held) or ()
                ends = (held[0], held[-1]) if isinstance(held, range) and held else held
                if not 0 < count < LIMIT:
                    raise LayoutError(f"axis '{axis}': expected a model of 1 to {LIMIT - 1}, got {count}")
                if not ends or min(ends) < 0 or max(ends) >= count:
                    raise LayoutError(f"axis '{axis}': expected coordinates from 0 to {count - 1}, got {quoted(held)}")
                if isinstance(held, tuple) and len(set(held)) < len(held):
                    raise LayoutError(f"axis '{axis}': expected each coordinate once, got {quoted(held)}")
                yield axis, held, count


def _coordinates(given: Any) -> range | tuple[int, ...] | None:
    """A range, or integers; None for anything else."""
    return given if isinstance(given, range) else wholes(given)


def require_model(given: Any) -> None:
    """Raise `PlanError` unless the argument is a Model or None."""
    if given is not None and not isinstance(given, Model):
        raise PlanError(f"model: expected a kvbm.Model, got {quoted(given)}")


#: An axis and its coordinates, or an empty text and names of planes.
Selection = tuple[str, Any]


def keys_of(whole: Section, model: Model | None = None, choices: Iterable[Selection] = ()) -> Keys:
    """The keys of a pool's cells, or of a part of them: `choices` are the selections, axis and coordinates, in their order.

    Raises `PlanError` if elements share a byte along an axis that is not the last of their plane, or the model does not fit the
    pool.
    """
    require_model(model)
    choices = list(choices)
    try:
        held = list(model.axes()) if model else []
        keys = _keys_of_all(whole, held)
        # Planes first: a plane that is left out need not have the model's axes.
        for axis, names in choices:
            if not axis:
                keys = keys.of_planes(names)
        for axis, coordinates, count in held:
            _require_own(keys.section, axis, coordinates, count)
            if count > 1:
                keys = keys.select(axis, coordinates)
        for axis, chosen in choices:
            if axis:
                keys = keys.select(axis, chosen)
    except LayoutError as error:
        raise PlanError(f"a digest: {error}") from None
    return keys


def _keys_of_all(whole: Section, held: Iterable[tuple[str, Sequence[int], int]]) -> Keys:
    """The keys of a pool's cells, which has all coordinates of the model's axes."""
    counts = {}
    for axis, coordinates, count in held:
        if len(coordinates) != whole.size(axis):
            raise LayoutError(
                f"axis '{axis}': expected a model with the pool's {whole.size(axis)} coordinates, got {len(coordinates)}"
            )
        counts[axis] = count
    planes = {access.plane: access for access in reversed(whole.accesses)}
    rows = {name: _Row.of(access, _sizes(whole, access, counts)) for name, access in sorted(planes.items())}
    lanes = sum(row.lanes for row in rows.values())
    made, first, cells = {}, 0, []
    for name, row in rows.items():
        made[name] = row.access(planes[name], first, lanes)
        cells.append((first, row.cell))
        first += row.lanes
    accesses = tuple(made[name] for name in dict.fromkeys(access.plane for access in whole.accesses))
    row_axes = tuple((name, row.axis, row.cell * planes[name].pack // planes[name].itemsize) for name, row in rows.items())
    return Keys(replace(whole, accesses=accesses, record=False), lanes, row_axes, tuple(cells))


def _require_own(section: Section, axis: str, held: Sequence[int], count: int) -> None:
    """Raise `LayoutError` if a pool holds a part of an axis along which a plane has a single value: no part of it is the value."""
    for access in section.accesses:
        if axis in _shared_axes(section, access.plane) and (len(held) < count or tuple(held) != tuple(range(count))):
            raise LayoutError(
                f"axis '{axis}': plane '{access.plane}' of {section.layout.name} has one element for all of it; expected a pool "
                f"with all {count} in their order, or a section without that plane, got {quoted(held)}"
            )


def _sizes(whole: Section, access: Access, model: Mapping[str, int]) -> dict[str, int]:
    """Extents of a plane's axes in the whole model; the pool may hold only one coordinate, and then no order needs the axis."""
    shared = _shared_axes(whole, access.plane)
    return dict(access.sizes) | {axis: count for axis, count in model.items() if axis not in shared}


def _shared_axes(section: Section, plane: str) -> tuple[str, ...]:
    """The axes along which a plane has a single value."""
    return next((one.shared for one in section.layout.planes if one.name == plane), ())


class _Row(NamedTuple):
    """The cells of a plane's rows."""

    axes: tuple[str, ...]  # without t and the axis of the row, slowest first
    sizes: Mapping[str, int]
    axis: str  # axis of a row; empty: a row is one element
    low: int  # elements that share a byte
    cell: int  # bytes
    cells: int  # a row

    @classmethod
    def of(cls, access: Access, sizes: Mapping[str, int]) -> _Row:
        order = sorted((axis for axis, size in sizes.items() if size > 1 and axis != "t"), key=canonical)
        axis = order[-1] if order and order[-1] not in ("l", "o", "h") else ""
        packed = access.packed[-1:] if access.pack > 1 else ()
        if access.pack > 1 and packed != (axis,) and not set(access.packed) > {axis}:
            raise LayoutError(
                f"plane '{access.plane}': elements share a byte along '{' '.join(access.packed)}', and a digest's cells lie along "
                f"'{axis or 'no axis'}'"
            )
        nbytes = access.itemsize * sizes.get(axis, access.pack) // access.pack
        cell = math.gcd(nbytes, CELL)
        axes = tuple(name for name in order if name != axis)
        return cls(axes, sizes, axis, access.pack, cell, nbytes // cell)

    @property
    def lanes(self) -> int:
        """Cells per token."""
        return math.prod(self.sizes[axis] for axis in self.axes) * self.cells

    def access(self, of: Access, first: int, lanes: int) -> Access:
        steps = []
        if self.axis:
            inside = self.cell * of.pack // of.itemsize
            steps.append(Step((self.axis,), self.low, inside // self.low, of.itemsize, 0))
            steps.append(Step((self.axis,), inside, self.cells, CELL, 0))
        held = self.cells
        for axis in reversed(self.axes):
            steps.append(Step((axis,), 1, self.sizes[axis], held * CELL, 0))
            held *= self.sizes[axis]
        steps.append(Step(("t",), 1, self.sizes.get("t", 1), lanes * CELL, 0))
        packed = (self.axis,) if of.pack > 1 else ()
        sizes = tuple(sorted((axis, size) for axis, size in self.sizes.items() if size > 1))
        return replace(of, half=None, sizes=sizes, packed=packed).place(first * CELL, 0, steps)


def formal(section: Section) -> Section:
    """The section with the order of the keys inside its opaque groups.

    Two layouts with the same opaque group hold the same bytes in it, so they have the same digest.
    """
    return replace(section, accesses=tuple(map(_formal, section.accesses)))


def alike(src: Section, dst: Section) -> tuple[Section, Section]:
    """Two sides of a copy in the coordinates of its source.

    An opaque group of one side is copied unchanged.  So on both sides its elements have the order of the source; if the group is
    opaque in the source, they have the order of the keys.
    """
    made = []
    for access in dst.accesses:
        ours = [one for one in src.accesses if one.plane == access.plane]
        if access.half is not None:  # K and V have different orders on one side
            ours = [one for one in ours if one.half == access.half] or ours
        made += [replace(_alike(one, access), half=one.half if access.half is None else access.half) for one in ours]
    return formal(src), formal(replace(dst, accesses=tuple(made)))


def _alike(src: Access, dst: Access) -> Access:
    for opaque in (step for step in src.steps if step.opaque):
        dst = dst.gather(frozenset(opaque.axes)) or dst
    known = {step.axes for step in src.steps if step.opaque}
    for group in [step for step in dst.steps if step.opaque and step.axes not in known]:
        inside = [step for step in src.steps if set(step.axes) <= set(group.axes)]
        packed = src.packed if set(dst.packed) == set(group.axes) else dst.packed
        dst = replace(dst, packed=packed, steps=normal([*(step for step in dst.steps if step != group), *inside]))
    return dst


def _formal(access: Access) -> Access:
    opaque = [step for step in access.steps if step.opaque]
    if not opaque:
        return access
    sizes, packed = dict(access.sizes), access.packed
    steps = [step for step in access.steps if not step.opaque]
    for group in opaque:
        order, held = sorted(group.axes, key=canonical), group.nbytes
        if access.pack > 1 and set(packed) == set(group.axes):
            packed = (order[-1],)
        for axis in reversed(order):
            low = access.pack if packed == (axis,) else 1
            steps.append(Step((axis,), low, sizes[axis] // low, held, 0))
            held *= sizes[axis] // low
        if held != group.nbytes * group.extent:
            raise LayoutError(f"expected all of {group} in a digest, as its order is unspecified, got a part of it")
    return replace(access, packed=packed, steps=normal(steps))


# ---- launches ------------------------------------------------------------------------------------------------------


def alone(
    section: Section, keys: Keys, alignment: int, title: str, *, turns: bool = False
) -> list[tuple[Launch, list[CellParams]]]:
    """The launches that digest a section, and their parameters for its cells.  `keys` are of the same coordinates.

    `alignment` is that of every base address (bytes).  With `turns`, words with elements of several cells are read and
    transposed: on a GPU this is faster than gathering each cell.  Raises `PlanError` if the elements of a cell are in several
    arrays.
    """
    made = between(formal(section), keys.section, title)
    cells = [
        _of_cells(piece, keys.cell_at(piece.dst_offset), alignment, title) for part in made.parts for piece in _by_cells(part)
    ]
    ready = [(piece, word, steps) for part, word, steps in cells for piece in part.fit("rows")]
    return [_launch_alone(*one, _neighbours(*one, alignment) if turns else None) for one in ready]


def _launch_alone(
    part: Part, word: int, steps: tuple[int, ...], neighbours: Mode | None
) -> tuple[Launch, list[CellParams]]:
    """The launch of a part; with squares of elements if neighbouring cells allow it."""
    element, params = 0, _cell_params(part, steps, word)
    if neighbours is not None:
        element, side = word, CELL // word
        squares = part.inner[0]._replace(extent=neighbours.extent // side * CELL)
        part = replace(part, inner=(squares, *(mode for mode in part.inner[1:] if mode is not neighbours)))
        params = _cell_params(part, steps, word)
        params = params._replace(inner=(neighbours.key // CELL * side, *params.inner[1:]))
    kernel = (form_of("digest", len(part.outer), len(part.inner), element, CELL if element else word),)
    work = ((part, form_of("rows", len(part.outer), len(part.inner), 0, CELL)),)
    return Launch(kernel, work, kernel), [params]


def _neighbours(part: Part, word: int, steps: tuple[int, ...], alignment: int) -> Mode | None:
    """The mode between cells along which elements are contiguous, if these form whole words of 16 bytes."""
    side = CELL // word
    if word > 4 or side != 1 << len(steps) or part.inner[0].extent != CELL:
        return None
    for mode in part.inner[1:]:
        rest = [other.src for other in (*part.inner[1:], *part.outer) if other is not mode]
        aligned = math.gcd(alignment, part.src_offset, *part.src_id.steps, *steps, *rest) % CELL == 0
        if (mode.src, mode.src_table) == (word, 0) and mode.extent % side == 0 and aligned:
            return mode if mode.key // CELL * side < _KEY_LIMIT else None
    return None


def _by_cells(part: Part) -> Iterator[Part]:
    """Split a part of contiguous planes if the rows of its last plane are smaller than a cell."""
    run, over = part.inner[0], part.run_bytes % CELL
    if part.run_bytes > CELL and over:
        held = part.run_bytes - over
        yield replace(part, inner=(run._replace(extent=held), *part.inner[1:]))
        part = replace(
            part, src_offset=part.src_offset + held, dst_offset=part.dst_offset + held, key=part.key + held * run.key,
            inner=(run._replace(extent=over), *part.inner[1:]),
        )  # fmt: skip
    yield part


def _of_cells(part: Part, whole: int, alignment: int, title: str) -> tuple[Part, int, tuple[int, ...]]:
    """A copy into the map of keys as loops over cells of `whole` bytes; the word that reads them; the strides of its words."""
    run = part.run_bytes
    modes = list(_at_cells(map(_keyed, part.inner[1:])))
    outer = list(_at_cells(map(_keyed, part.outer)))
    inside = sorted((mode for mode in (*modes, *outer) if mode.key < CELL), key=lambda mode: mode.key)
    if any(mode.src_table or mode.src >= _KEY_LIMIT for mode in inside):
        raise PlanError(f"{title}: a digest's cells of up to {CELL} bytes of a row lie in several arrays")
    if not 0 < whole == _cell_bytes((_keyed(part.inner[0]), *modes, *outer)):
        raise PlanError(
            f"{title}: the layout parts rows at other elements than a digest's cells of up to {CELL} bytes: no common refinement"
        )
    strides = [mode.src for mode in (*modes, *outer)]
    word = math.gcd(min(run, CELL), alignment, part.src_offset, *part.src_id.steps, *strides)
    word &= -word
    steps, at = [], word
    while at < min(run, CELL):
        steps.append(at)
        at *= 2
    for mode in inside:
        steps += [mode.src << bit for bit in range(mode.extent.bit_length() - 1)]
    row = Mode(max(run, CELL), 1, 1, 0, 0, 1)
    return (
        replace(
            part,
            dst_offset=0,
            dst_table_offset=0,
            dst_id=Id(0, 0),
            key=part.dst_offset,
            # The order of a sum does not matter: use that of memory, so that neighbouring threads read neighbouring words.
            inner=(row, *sorted((mode for mode in modes if mode.key >= CELL), key=lambda mode: mode.src)),
            outer=tuple(mode for mode in outer if mode.key >= CELL),
        ),
        word,
        tuple(steps),
    )


def _cell_bytes(modes: Iterable[Mode]) -> int:
    """Bytes of the cells that loops go through; 0 if they do not go through whole cells of one size.

    A cell has `CELL` keys, and its bytes have the first of them.  So the loops inside a cell must form one run of keys from 0 on,
    and all others must step whole cells.  All loops of a part count, also its run.
    """
    held = 1
    for mode in sorted(_at_cells(mode for mode in modes if mode.extent > 1), key=lambda mode: mode.key):
        if mode.key == held < CELL:
            held *= mode.extent
        elif mode.key < CELL or mode.key % CELL:
            return 0
    return held if CELL % held == 0 else 0


def _at_cells(modes: Iterable[Mode]) -> Iterator[Mode]:
    """Split modes at the ends of cells: elements of a cell and consecutive cells may have been merged."""
    for mode in modes:
        count = CELL // mode.key if mode.key else 0
        if 1 < count < mode.extent and mode.extent % count == 0 and mode.key * count == CELL:
            inside, mode = mode.split(count)
            yield inside
        yield mode


def _keyed(mode: Mode) -> Mode:
    """A mode of a copy into the map of keys, as one of the source with keys."""
    return Mode(mode.extent, mode.src, 0, mode.src_table, 0, mode.dst)


def _cell_params(part: Part, steps: tuple[int, ...] = (), word: int = 0) -> CellParams:
    keys = [mode.key // CELL for mode in (*part.outer, *part.inner)]
    reach = sum((mode.extent - 1) * mode.key for mode in part.inner)
    if max(keys, default=0) >= _KEY_LIMIT or reach >= _KEY_LIMIT * CELL:
        raise PlanError(f"a digest of a part with keys beyond 32 bits: expected fewer layers or tokens per block, got {part.inner}")
    count = len(part.outer)
    return CellParams(part.key // CELL, tuple(keys[:count]), (1, *keys[count + 1 :]), steps, word)


def fused(
    src: Section,
    dst: Section,
    keys: Keys,
    alignments: tuple[int, int],
    title: str,
    cast: Scale | None = None,
    *,
    sm_limited: bool = False,
) -> list[tuple[Launch, list[CellParams]]] | str:
    """The launches that copy and digest at once, or the reason why there are none.

    `sm_limited`: by kernels that accept a limit of multiprocessors.

    Each word that such a kernel copies is a cell of ``docs/reference/digest.md``, at least on one side.  This is proved: the
    loops of each part go through whole cells, the kernel's word has the size of the plane's cells (`_require_cells`), and there
    are as many words as the section has cells.  The keys of a cast are those of its quantised side.
    """
    if src.chosen or dst.chosen or keys.section.chosen:
        return "some coordinates are selected one by one"
    work = []
    try:
        made = between(*(alike(src, dst) if cast is None else (src, dst)), title, keys.section, cast)
        casts = [_fused_cast(part, alignments, keys) for part in made.casts]
        for rest in (piece for whole in made.parts if not isinstance(whole, CastPart) for piece in _by_cells(whole)):
            pieces = rest.fit(rest.form(*alignments).kind)
            work += [(piece, *_fused_form(piece, piece.form(*alignments), keys)) for piece in pieces]
    except (LayoutError, PlanError, MissingKernelError) as error:
        return str(error)
    words = sum(part.nbytes // form.word for part, form, _ in work) + sum(_cells_of_cast(part, keys) for part in made.casts)
    if words != keys.count:  # what is required of each part must keep this true
        return f"{words} words are copied, and there are {keys.count} cells"
    if not sm_limited:
        return [*_shared(work), *casts]
    if any(form.kind == "tile" for _, form, _ in work):
        return "kernels with a limit of multiprocessors do not digest what they transpose"
    limited = [(part, replace(form, sm_limited=True, sums=False), params) for part, form, params in work]
    return [*((Launch((form,), ((part, form),), (form,)), [params]) for part, form, params in limited), *casts]


def _fused_cast(part: CastPart, alignments: tuple[int, int], keys: Keys) -> tuple[Launch, list[CellParams]]:
    """The launch that casts a part and digests the quantised side, and the keys of its elements and scales.

    The keys of its inner modes count bytes: `CELL` for each cell.  Each thread of a warp has an item of eight elements, of two
    neighbouring groups, and several threads share a cell.  So consecutive items of a group must be consecutive parts of whole
    cells, and so must be the scales of consecutive groups, else a `PlanError` is raised.
    """
    launch = cast_launch(part, alignments)
    if launch.kernel[0].values not in DIGESTED_CASTS:
        formats = " to ".join(part.formats[:2])
        raise PlanError(f"casts of {formats}, or of elements that are not contiguous, do not digest")
    launch = launch._replace(kernel=(replace(launch.kernel[0], sums=True),))
    item = ITEM * bits_of(part.formats[part.quantises]) // 8  # bytes of eight codes
    run, *more = part.inner
    count = run.extent * part.element // ITEM  # items of a run
    width = max(2, 1 << (part.group // ITEM - 1).bit_length())  # threads of a group
    whole, groups = CELL // item, more[2:]
    if (run.key * ITEM // part.element, keys.cell_at(part.key)) != (item, CELL) or width > 32:
        raise PlanError("groups of a cast are not rows of whole cells")
    if count % whole == 0:
        others = [*more, *part.outer]
    elif (count, part.group, whole) == (2, 16, 4) and groups and groups[0].key == 2 * item and groups[0].extent % 2 == 0:
        others = [*more[:2], groups[0].split(2)[1], *groups[1:], *part.outer]  # two groups are a cell
    else:
        raise PlanError("cells have elements of several groups")
    params = [_cast_params(part, others, run._replace(key=item))]
    if part.scales is not None:
        params.append(_scale_params(part.scales, 2 * (32 // width), keys))
    return launch, params


def _scale_params(part: CastPart, most: int, keys: Keys) -> CellParams:
    """The keys of the scales of a cast.  `most`: groups of a warp, which adds up the cells of their scales."""
    code, cell = bits_of(part.formats[2]) // 8, keys.cell_at(part.key)
    count = cell // code  # scales of a cell
    if not 0 < count <= most:
        raise PlanError(f"cells of {cell} bytes have scales of more groups than a warp casts")
    others, steps = [*part.inner, *part.outer], [code << bit for bit in range(count.bit_length() - 1)]
    if count > 1:
        groups = part.inner[GROUP_MODES] if len(part.inner) > GROUP_MODES else part.inner[0]
        if groups.key != code or groups.extent % count:
            raise PlanError("scales of a cell are not those of consecutive groups")
        others = [*part.inner[:GROUP_MODES], groups.split(count)[1], *part.inner[GROUP_MODES + 1 :], *part.outer]
    return _cast_params(part, others, part.inner[0])._replace(steps=tuple(steps))


def _cast_params(part: CastPart, others: Iterable[Mode], run: Mode) -> CellParams:
    """The keys of the modes of a part, with the first as `run`.  The keys of `others` must be those of whole cells."""
    if part.key % CELL or any(mode.key % CELL for mode in others if mode.extent > 1):
        raise PlanError("elements of a cell lie apart")
    outer, inner = (tuple(mode.key for mode in some) for some in (part.outer, part.inner))
    if max(outer, default=0) >= _KEY_LIMIT * CELL or sum((mode.extent - 1) * mode.key for mode in part.inner) >= _KEY_LIMIT:
        raise PlanError("keys of a cast go beyond 32 bits")
    return CellParams(part.key // CELL, tuple(key // CELL for key in outer), (run.key, *inner[1:]))


def _cells_of_cast(part: CastPart, keys: Keys) -> int:
    """Number of cells of a block that a cast reads or stores."""
    count = part.elements * bits_of(part.formats[part.quantises]) // 8 // CELL
    if part.scales is not None:
        count += part.elements // part.group * bits_of(part.formats[2]) // 8 // keys.cell_at(part.scales.key)
    return count


def _shared(work: Sequence[tuple[Part, Form, CellParams]]) -> Iterator[tuple[Launch, list[CellParams]]]:
    """Launches of parts with digests: rows share launches of records, tiles of K and V share one launch.

    Without digests: `planner.lowering._of_records`.
    """
    tiles, rows = ([one for one in work if (one[1].kind == "tile") == is_tile] for is_tile in (True, False))
    tiles.sort(key=lambda one: -one[1].element)
    for first in range(0, len(tiles), 2):
        some = tiles[first : first + 2]
        kernel = tuple(form for _, form, _ in some)
        yield Launch(kernel, tuple((part, form) for part, form, _ in some), kernel), [params for *_, params in some]
    for first in range(0, len(rows), MAX_PARTS):
        some = rows[first : first + MAX_PARTS]
        kernel = (some[0][1],)
        if len(some) > 1:
            outer, inner = max(form.outer for _, form, _ in some), max(form.inner for _, form, _ in some)
            kernel = (Form("record", outer, inner, 0, 0, sums=True),)
        yield Launch(kernel, tuple((part, form) for part, form, _ in some), kernel), [params for *_, params in some]


def _fused_form(part: Part, form: Form, keys: Keys) -> tuple[Form, CellParams]:
    """The kernel that copies and digests a part, and its parameters; `PlanError` if the words that it would copy are no cells."""
    if form.kind == "tile":
        return _fused_tile(part, form, keys)
    _require_cells(part, form, keys, ())
    return Form("rows", len(part.outer), len(part.inner), 0, form.word, sums=True), _cell_params(part)


def _fused_tile(part: Part, form: Form, keys: Keys) -> tuple[Form, CellParams]:
    """The same for a tile: the words of one side are cells, or each element is a cell."""
    assert part.spans is not None
    behind, spans = 0, part.spans
    if form.element == form.word:
        _require_cells(part, form, keys, ())
        steps = [span.key // CELL for span in spans]
    else:
        behind = int(spans[1].key < CELL)
        _require_cells(part, form, keys, spans[behind : behind + 1])
        steps = [1 if side == behind else span.key // CELL for side, span in enumerate(spans)]
    rest = tuple(mode for mode in part.inner[1:] if not any(mode is span for span in spans))
    kernel = Form("tile", len(part.outer), len(rest), form.element, form.word, sums=True)
    params = _cell_params(part)  # of all modes, as all of them must fit 32 bits
    return kernel, _cell_params(replace(part, inner=(part.inner[0], *rest)))._replace(
        first=params.first, inner=(*steps, *(mode.key // CELL for mode in rest)), along_b=bool(behind)
    )


def _require_cells(part: Part, form: Form, keys: Keys, along: Sequence[Mode]) -> None:
    """Raise `PlanError` unless each word that a kernel copies is one cell: words go along the run, then along the mode `along`."""
    cell, held = keys.cell_at(part.key), _cell_bytes((*part.inner, *part.outer))
    if not held or _cell_bytes((part.inner[0], *along)) != held:
        raise PlanError("elements of a cell lie apart on both sides")
    if not form.word == held == cell:
        raise PlanError(f"cells of {cell} bytes are copied in words of {form.word}")
    if form.word == 1 and any(mode.src == mode.dst == 1 for mode in part.inner[1:]):
        raise PlanError("cells of one byte lie side by side, so a copy without digests moves wider words, and is faster")
