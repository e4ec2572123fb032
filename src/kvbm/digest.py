"""Digests: where each cell stands in the model's own order, and what kernels are told of it.

``docs/digest.md`` defines the number.  Keys are planned as one more side of a copy: an address map into imaginary memory, in which
each cell takes `CELL` bytes, in the order p (the token's position), plane, l, o, h, the layout's own axes, d.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any, NamedTuple

from .access import Access, Step, normal
from .errors import LayoutError, PlanError
from .lower import Launch
from .nest import MAX_PARTS, Form, Id, Mode, Part, form_of
from .planner import between
from .section import Section, canonical
from .shapes import LIMIT

__all__ = ["CELL", "Keys", "Model", "Told", "alike", "alone", "fused", "keys_of", "require_model"]

#: Bytes of the largest cell, and what each takes in the map of keys.
CELL = 16

#: Inside a chunk kernels step through keys with 32 bits.
_KEY_LIMIT = 1 << 32


@dataclass(frozen=True)
class Keys:
    """The keys of a section's cells.

    Attributes
    ----------
    section : Section
        The address map: keys times `CELL`.
    lanes : int
        Keys a token of the whole model.
    rows : tuple of (str, str, int)
        Of each plane: the axis along which its rows go, and elements a cell.
    cells : tuple of (int, int)
        Of each plane: the place of its first cell, and bytes a cell.
    """

    section: Section
    lanes: int
    rows: tuple[tuple[str, str, int], ...]
    cells: tuple[tuple[int, int], ...]

    def cell_at(self, offset: int) -> int:
        """Bytes of the cell at an offset of the map; 0 where none begins."""
        key, inside = divmod(offset, CELL)
        return 0 if inside else next(cell for first, cell in reversed(self.cells) if first <= key % self.lanes)

    def of_planes(self, names: Sequence[str]) -> Keys:
        """Those of some planes."""
        return replace(self, section=self.section.of_planes(names))

    def select(self, axis: str, coordinates: range | tuple[int, ...]) -> Keys:
        """Those of some coordinates of an axis: of rows, whole cells."""
        planes = {access.plane for access in self.section.accesses}
        for plane, along, count in self.rows:
            if axis == along and plane in planes and not _are_whole(coordinates, count):
                raise LayoutError(
                    f"axis '{axis}': a cell of rows{f' of {plane!r}' if plane else ''} is {count} elements: expected whole cells, "
                    f"got {coordinates}"
                )
        return replace(self, section=self.section.select(axis, coordinates))


def _are_whole(coordinates: range | tuple[int, ...], count: int) -> bool:
    """Whether coordinates are pieces of `count`, each in order and from a multiple of that on."""
    firsts = coordinates[::count]
    return not any(first % count for first in firsts) and tuple(coordinates) == tuple(
        first + i for first in firsts for i in range(count)
    )


class Told(NamedTuple):
    """What a kernel is told of a part's cells, besides its loops.

    Attributes
    ----------
    first : int
        Key of the first one at position 0.
    outer, inner : tuple of int
        Keys that the modes step.
    steps : tuple of int
        Bytes that each binary digit of a word's number in its cell steps, fastest first.
    word : int
        Bytes of a word; 0: the kernel's own, and a cell is one.
    along_b : bool
        Tiles: cells are the words of the destination.
    """

    first: int
    outer: tuple[int, ...]
    inner: tuple[int, ...]
    steps: tuple[int, ...] = ()
    word: int = 0
    along_b: bool = False


@dataclass(frozen=True)
class Model:
    """What a pool holds of a whole model, where it does not hold all of it.

    Attributes
    ----------
    layers, heads : range or tuple of int, optional
        Numbers in the model of the layers and of the heads that the pool holds, in the pool's order; all if not given.
    nl, nh : int, optional
        How many the model has.
    """

    layers: range | Sequence[int] | None = None
    heads: range | Sequence[int] | None = None
    nl: int | None = None
    nh: int | None = None

    def __post_init__(self) -> None:
        for name, convert in (("layers", _coordinates), ("heads", _coordinates), ("nl", index), ("nh", index)):
            given = getattr(self, name)
            try:
                found = None if given is None else convert(given)
            except TypeError:
                what = "an integer" if convert is index else "a range, or a list of integers"
                raise PlanError(f"Model: {name}: expected {what}, got {given!r:.200}") from None
            object.__setattr__(self, name, found)

    def axes(self) -> Iterator[tuple[str, range | tuple[int, ...], int]]:
        """Axis, coordinates, and how many the model has."""
        for axis, held, count in (("l", self.layers, self.nl), ("h", self.heads, self.nh)):
            if (held is None) != (count is None):
                raise LayoutError(
                    f"axis '{axis}': expected its coordinates and how many the model has, got one of them"
                )
            if held is not None and count is not None:
                held = _coordinates(held)
                ends = (held[0], held[-1]) if isinstance(held, range) and held else held
                if not 0 < count < LIMIT:
                    raise LayoutError(f"axis '{axis}': expected a model of 1 to {LIMIT - 1}, got {count}")
                if not ends or min(ends) < 0 or max(ends) >= count:
                    raise LayoutError(f"axis '{axis}': expected coordinates from 0 to {count - 1}, got {held!r:.200}")
                if isinstance(held, tuple) and len(set(held)) < len(held):
                    raise LayoutError(f"axis '{axis}': expected each coordinate once, got {held!r:.200}")
                yield axis, held, count


def _coordinates(given: Any) -> range | tuple[int, ...]:
    return given if isinstance(given, range) else tuple(map(index, given))


def require_model(given: Any) -> None:
    """Raise `PlanError` for what is no model."""
    if given is not None and not isinstance(given, Model):
        raise PlanError(f"model: expected a kvbm.Model, got {given!r:.200}")


#: Coordinates of an axis, or names of planes where it is empty.
Choice = tuple[str, Any]


def keys_of(whole: Section, model: Model | None = None, choices: Iterable[Choice] = ()) -> Keys:
    """The keys of what a pool holds, or of some of it.

    Parameters
    ----------
    whole : Section
        All of a pool.
    model : Model, optional
        What the pool holds of a whole model.
    choices : iterable of (str, coordinates)
        What was chosen of the pool, one after the other.

    Raises
    ------
    PlanError
        Elements that share a byte along another axis than the last of their plane; a model that does not fit the pool.
    """
    require_model(model)
    try:
        keys = _keys_of_all(whole, model)
        for axis, chosen in choices:
            keys = keys.select(axis, chosen) if axis else keys.of_planes(chosen)
    except LayoutError as error:
        raise PlanError(f"a digest: {error}") from None
    return keys


def _keys_of_all(whole: Section, model: Model | None) -> Keys:
    chosen = list(model.axes()) if model else []
    counts = {axis: count for axis, _, count in chosen}
    for axis, held, _ in chosen:
        if axis not in whole.layout.present:
            raise LayoutError(f"axis '{axis}': {whole.layout.name} has no such axis; leave it out of the model")
        if len(held) != whole.size(axis):
            raise LayoutError(f"axis '{axis}': the pool holds {whole.size(axis)}, and its model says {len(held)} of it")
    planes = {access.plane: access for access in reversed(whole.accesses)}
    rows = {name: _Row.of(access, _sizes(whole, access, counts)) for name, access in sorted(planes.items())}
    lanes = sum(row.lanes for row in rows.values())
    made, first, cells = {}, 0, []
    for name, row in rows.items():
        made[name] = row.access(planes[name], first, lanes)
        cells.append((first, row.cell))
        first += row.lanes
    accesses = tuple(made[name] for name in dict.fromkeys(access.plane for access in whole.accesses))
    told = tuple((name, row.axis, row.cell * planes[name].pack // planes[name].itemsize) for name, row in rows.items())
    keys = Keys(replace(whole, accesses=accesses, record=False), lanes, told, tuple(cells))
    for axis, held, count in chosen:
        if count > 1:
            keys = keys.select(axis, held)
    return keys


def _sizes(whole: Section, access: Access, model: Mapping[str, int]) -> dict[str, int]:
    """Extents of a plane's axes in the whole model, where a pool may hold one coordinate."""
    planes = [plane for plane in whole.layout.planes if plane.name == access.plane]
    orders = [*whole.layout.orders, *(order for plane in planes for order in plane.orders)]
    own = {axis for order in orders for term in order.terms if not term.planes for axis in term.axes}
    own -= {axis for plane in planes for axis in plane.shared}
    return dict(access.sizes) | {axis: count for axis, count in model.items() if axis in own}


class _Row(NamedTuple):
    """The cells of a plane's rows."""

    axes: tuple[str, ...]  # besides t and the row's own, slowest first
    sizes: Mapping[str, int]
    axis: str  # along which a row goes; empty: it is one element
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
        """Cells a token."""
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
    """The section with an order inside its opaque groups: that of the keys.

    Two layouts with one opaque group hold the same bytes in it, and so have the same digest.
    """
    return replace(section, accesses=tuple(map(_formal, section.accesses)))


def alike(src: Section, dst: Section) -> tuple[Section, Section]:
    """Two sides of a copy in the coordinates of its source.

    Where one side promises no order inside a group, the group moves as it lies: on both sides its elements are then those of the
    source's order, or of the keys' where the source has none.
    """
    made = []
    for access in dst.accesses:
        ours = [one for one in src.accesses if one.plane == access.plane]
        if access.half is not None:  # K and V have orders of their own on one side: that is also where they differ
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
            raise LayoutError(f"a digest of a part of {group}, of which the order is not promised")
    return replace(access, packed=packed, steps=normal(steps))


# ---- what kernels do -----------------------------------------------------------------------------------------------


def alone(
    section: Section, keys: Keys, alignment: int, title: str, *, turns: bool = False
) -> list[tuple[Launch, list[Told]]]:
    """The launches that digest a section, and what they are told of its cells.

    Parameters
    ----------
    section : Section
    keys : Keys
        Of the same coordinates.
    alignment : int
        What divides every base address.
    title : str
        For errors.
    turns : bool
        Read words of elements that belong to as many cells, and turn them: on a GPU that is faster than to gather a cell.

    Raises
    ------
    PlanError
        Cells of which the elements lie in several arrays.
    """
    made = between(formal(section), keys.section, title)
    cells = [
        _of_cells(piece, keys.cell_at(piece.dst_offset), alignment, title) for part in made.parts for piece in _by_cells(part)
    ]
    ready = [(piece, word, steps) for part, word, steps in cells for piece in part.fit("rows")]
    return [_launch_alone(*one, _neighbours(*one, alignment) if turns else None) for one in ready]


def _launch_alone(
    part: Part, word: int, steps: tuple[int, ...], neighbours: Mode | None
) -> tuple[Launch, list[Told]]:
    """The launch of a part, in squares of elements where cells have such neighbours."""
    element, told = 0, _told(part, steps, word)
    if neighbours is not None:
        element, side = word, CELL // word
        squares = part.inner[0]._replace(extent=neighbours.extent // side * CELL)
        part = replace(part, inner=(squares, *(mode for mode in part.inner[1:] if mode is not neighbours)))
        told = _told(part, steps, word)
        told = told._replace(inner=(neighbours.key // CELL * side, *told.inner[1:]))
    kernel = (form_of("digest", len(part.outer), len(part.inner), element, CELL if element else word),)
    work = ((part, form_of("rows", len(part.outer), len(part.inner), 0, CELL)),)
    return Launch(kernel, work, kernel), [told]


def _neighbours(part: Part, word: int, steps: tuple[int, ...], alignment: int) -> Mode | None:
    """The mode from cell to cell along which elements of cells lie side by side, if these make whole words of 16 bytes."""
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
    """Planes that go on in each other are one part; a last one whose rows are smaller than a cell is a part of its own."""
    run, over = part.inner[0], part.run_bytes % CELL
    if part.run_bytes > CELL and over:
        held = part.run_bytes - over
        yield replace(part, inner=(run._replace(extent=held), *part.inner[1:]))
        part = replace(
            part,
            src_offset=part.src_offset + held,
            dst_offset=part.dst_offset + held,
            key=part.key + held * run.key,
            inner=(run._replace(extent=over), *part.inner[1:]),
        )
    yield part


def _of_cells(part: Part, whole: int, alignment: int, title: str) -> tuple[Part, int, tuple[int, ...]]:
    """A copy into the map of keys as loops over cells of `whole` bytes, the word that reads them, and where its words lie."""
    run = part.run_bytes
    part = replace(part, inner=(part.inner[0], *_at_cells(part.inner[1:])), outer=tuple(_at_cells(part.outer)))
    inside = [mode for mode in (*part.inner[1:], *part.outer) if mode.dst < CELL]
    if any(mode.src_table or mode.src >= _KEY_LIMIT for mode in inside):
        raise PlanError(f"{title}: a digest's cells of up to {CELL} bytes of a row lie in several arrays")
    loops = [mode for mode in (*part.inner[1:], *part.outer) if mode.dst >= CELL]
    cell = min(run, CELL)
    for mode in sorted(inside, key=lambda mode: mode.dst):
        cell = cell * mode.extent if mode.dst == cell else 0
    if cell != whole or any(mode.dst % CELL for mode in loops):
        raise PlanError(
            f"{title}: the layout parts rows at other elements than a digest's cells of up to {CELL} bytes: no common refinement"
        )
    strides = [mode.src for mode in (*inside, *loops)]
    word = math.gcd(min(run, CELL), alignment, part.src_offset, *part.src_id.steps, *strides)
    word &= -word
    steps, at = [], word
    while at < min(run, CELL):
        steps.append(at)
        at *= 2
    for mode in sorted(inside, key=lambda mode: mode.dst):
        steps += [mode.src << bit for bit in range(mode.extent.bit_length() - 1)]
    row = Mode(max(run, CELL), 1, 1, 0, 0, 1)
    return (
        replace(
            part,
            dst_offset=0,
            dst_table_offset=0,
            dst_id=Id(0, 0),
            key=part.dst_offset,
            # A sum has no order: memory's, so that neighbours are read by neighbours.
            inner=(row, *sorted((_keyed(mode) for mode in part.inner[1:] if mode.dst >= CELL), key=lambda mode: mode.src)),
            outer=tuple(_keyed(mode) for mode in part.outer if mode.dst >= CELL),
        ),
        word,
        tuple(steps),
    )


def _at_cells(modes: Sequence[Mode]) -> Iterator[Mode]:
    """Modes that end where cells do: elements of a cell, and cells that follow each other, may have been one."""
    for mode in modes:
        count = CELL // mode.dst if mode.dst else 0
        if 1 < count < mode.extent and mode.extent % count == 0 and mode.dst * count == CELL:
            yield mode._replace(extent=count)
            mode = Mode(mode.extent // count, mode.src * count, CELL, mode.src_table * count)
        yield mode


def _keyed(mode: Mode) -> Mode:
    return Mode(mode.extent, mode.src, 0, mode.src_table, 0, mode.dst)


def _told(part: Part, steps: tuple[int, ...] = (), word: int = 0) -> Told:
    keys = [mode.key // CELL for mode in (*part.outer, *part.inner)]
    if (
        max(keys, default=0) >= _KEY_LIMIT
        or sum((mode.extent - 1) * mode.key for mode in part.inner[1:]) >= _KEY_LIMIT * CELL
    ):
        raise PlanError(
            f"a digest of a part with keys beyond 32 bits: expected fewer layers or tokens a block, got {part.inner}"
        )
    count = len(part.outer)
    return Told(part.key // CELL, tuple(keys[:count]), (1, *keys[count + 1 :]), steps, word)


def fused(
    src: Section, dst: Section, keys: Keys, alignments: tuple[int, int], title: str
) -> list[tuple[Launch, list[Told]]] | str:
    """The launches that copy and digest what they read, or why there are none.

    Each word that such a kernel moves is a cell, on one side at least.
    """
    if src.chosen or dst.chosen or keys.section.chosen:
        return "some coordinates are chosen one by one"
    try:
        made = between(*alike(src, dst), title, keys.section)
    except (LayoutError, PlanError) as error:
        return str(error)
    work = []
    for part in (piece for whole in made.parts for piece in _by_cells(whole)):
        form = part.form(*alignments)
        for piece in part.fit(form.kind):
            made_of = _fused_form(piece, piece.form(*alignments))
            if isinstance(made_of, str):
                return made_of
            work.append((piece, *made_of))
    return list(_shared(work))


def _shared(work: Sequence[tuple[Part, Form, Told]]) -> Iterator[tuple[Launch, list[Told]]]:
    """Launches of parts that are digested: rows share those of records, the tiles of K and V one."""
    tiles, rows = ([one for one in work if (one[1].kind == "tile") == is_tile] for is_tile in (True, False))
    tiles.sort(key=lambda one: -one[1].element)
    for first in range(0, len(tiles), 2):
        some = tiles[first : first + 2]
        kernel = tuple(form for _, form, _ in some)
        yield Launch(kernel, tuple((part, form) for part, form, _ in some), kernel), [told for *_, told in some]
    for first in range(0, len(rows), MAX_PARTS):
        some = rows[first : first + MAX_PARTS]
        kernel = (some[0][1],)
        if len(some) > 1:
            outer, inner = max(form.outer for _, form, _ in some), max(form.inner for _, form, _ in some)
            kernel = (Form("record", outer, inner, 0, 0, sums=True),)
        yield Launch(kernel, tuple((part, form) for part, form, _ in some), kernel), [told for *_, told in some]


def _fused_form(part: Part, form: Form) -> tuple[Form, Told] | str:
    """The kernel that copies a part and digests it, and what it is told; or why there is none."""
    if form.kind == "tile":
        return _fused_tile(part, form)
    run = part.run_bytes
    cell = min(run, CELL)
    if any(mode.key % CELL for mode in (*part.inner[1:], *part.outer)):
        return "elements of a cell lie apart on both sides"
    if form.word != cell or run % cell:
        return f"cells of {cell} bytes move in words of {form.word}"
    return Form("rows", len(part.outer), len(part.inner), 0, form.word, sums=True), _told(part)


def _fused_tile(part: Part, form: Form) -> tuple[Form, Told] | str:
    """The same of a tile: the words of one side are cells, or each element is one."""
    assert part.spans is not None
    rest = [mode for mode in part.inner[1:] if not any(mode is span for span in part.spans)]
    steps = [span.key for span in part.spans]
    if any(mode.key % CELL for mode in (*rest, *part.outer)):
        return "elements of a cell lie apart on both sides"
    if form.element == form.word:
        if any(step % CELL for step in steps) or form.word != CELL:
            return f"cells move in elements of {form.word} bytes"
        behind, keys = 0, [step // CELL for step in steps]
    else:
        sides = [side for side in (0, 1) if steps[side] == form.element and steps[1 - side] % CELL == 0]
        if not sides:
            return "neither side goes on along the cells' own axis"
        behind = sides[0]
        keys = [1 if side == behind else steps[side] // CELL for side in (0, 1)]
    kernel = Form("tile", len(part.outer), len(rest), form.element, form.word, sums=True)
    told = _told(replace(part, inner=(part.inner[0], *rest)))
    return kernel, told._replace(inner=(*keys, *told.inner[1:]), steps=(), word=0, along_b=bool(behind))

