"""From two layouts to a copy: common refinement, normal form, class, word, kernel.

Everything here is arithmetic on strides.  No code depends on the name of a layout.  Two pairs of layouts with the same normal
form use the same kernel, so a new layout is as fast as a shipped one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from .._arguments import quoted, whole
from .._shown import Shown
from ..errors import LayoutError, MissingKernelError, PlanError
from ..layout.address_map import Access, Step
from ..layout.layout import Layout
from ..layout.loops import refine
from ..layout.region import Section, pieces
from ..layout.scales import group_of
from ..layout.shapes import BlockShape, as_shape
from ..layout.spec import as_layout
from .cast import (
    GROUP_MODES,
    PLAIN,
    Cast,
    CastPart,
    Scale,
    as_cast,
    cast_part,
    is_one,
    layers_of,
    of_layers,
    paired,
    require_sizes,
    scaled_side,
    table_of,
)
from .join import gathered, in_step, rejoined
from .kernel_forms import MAX_INNER, MAX_OUTER, WIDEST, Form
from .loopnest import Id, Mode, Part
from .lowering import Launch, launches


@dataclass(frozen=True)
class Plan(Shown):
    """The copy of blocks of one layout into blocks of another.  Printing a plan shows its loop nest.

    Attributes
    ----------
    src, dst : Section
        The copied part of each side: all of a block, a range of layers, or packed slots.
    parts : tuple of Part
        One part; two parts if K and V have different orders; one or two per plane.  A plane of scales belongs to the part of the
        elements that are cast.
    cast : Scale, optional
        The values of a cast are quantised or dequantised.
    """

    src: Section
    dst: Section
    parts: tuple[Part, ...]
    cast: Scale | None = None

    @property
    def shape(self) -> BlockShape:
        return self.src.shape

    @cached_property
    def casts(self) -> tuple[CastPart, ...]:
        """The parts whose values change their format."""
        return tuple(part for part in self.parts if isinstance(part, CastPart))

    @property
    def nbytes(self) -> int:
        """Bytes per block.  Each is read once and written once.  Of elements that are cast, those of the smaller side."""
        return sum(part.nbytes for part in self.parts)

    @property
    def kind(self) -> str:
        """``copy``, ``rows``, ``tile`` or ``cast``; for example ``tile+rows`` if K and V differ."""
        return "+".join(dict.fromkeys(part.kind for part in self.parts))

    @property
    def title(self) -> str:
        return f"{self.src.layout.name} → {self.dst.layout.name}"

    def forms(self, src_alignment: int = WIDEST, dst_alignment: int = WIDEST) -> tuple[Form, ...]:
        """One kernel form per part, for base addresses that are multiples of the alignments (bytes)."""
        return tuple(part.form(src_alignment, dst_alignment) for part in self.parts)

    def launches(self, src_alignment: int = WIDEST, dst_alignment: int = WIDEST, *, pages: bool = True) -> list[Launch]:
        """The launches if every kernel is built (`lowering.launches`).  The alignments of the base addresses are in bytes."""
        return launches(self.parts, (src_alignment, dst_alignment), planes=bool(self.src.layout.planes), pages=pages)

    def kernels(self, alignment: int = WIDEST) -> list[str]:
        """Names of the kernels, for base addresses that are multiples of `alignment` bytes."""
        found = whole(alignment)
        if found is None or found < 1:
            raise PlanError(f"alignment: expected bytes, a number from 1 on, got {quoted(alignment)}")
        return [launch.name for launch in self.launches(found, found)]

    def fit(self) -> Plan:
        """The same copy, in parts that have no more modes than kernels support (`Part.fit`)."""
        return replace(self, parts=tuple(piece for part in self.parts for piece in part.fit(part.kind)))

    def staged(self, *, gathers: bool) -> tuple[Plan, Plan]:
        """The same copy in two steps, through memory that holds packed blocks in the order of the far side.

        The far side is the destination if it `gathers`: blocks are packed, then moved; else they are moved, then
        unpacked.  The step on the far side copies runs as long as those of that side.
        """
        slot = (self.dst if gathers else self.src).packed()
        casts = (self.cast, None) if gathers else (None, self.cast)
        return between(self.src, slot, self.title, cast=casts[0]), between(slot, self.dst, self.title, cast=casts[1])

    def flat(self, src_step: int | None, dst_step: int | None) -> Plan:
        """The plan for pools with equal steps between allocations: strides replace tables.  None: no equal steps on that side."""
        folded = [part.fold(src_step, dst_step) for part in self.parts]
        parts = [Part.of((*p.inner, *p.outer), p.start, (p.src_id, p.dst_id), p.label) for p in folded]
        return Plan(self.src, self.dst, gathered(parts))

    def __repr__(self) -> str:
        return f"Plan({self.title}, {self.shape}, kind={self.kind})"

    def __str__(self) -> str:
        lines = [f"{self.title}   {self.shape}"]
        if self._of_planes:
            lines.append(f"{' and '.join(self.kernels())}: {'one after the other' if self.casts else _PAGEWISE}")
        for part in self.parts:
            form = part.form(WIDEST, WIDEST)
            name = f"words of {form.element or form.word} B" if self._of_planes and not isinstance(part, CastPart) else form.name
            lines.append(f"{part.label}{'  ' if part.label else ''}{name}: {_CLASS[part.kind]}")
            lines.extend(_loops(part, form))
        return "\n".join(lines)

    @property
    def _of_planes(self) -> bool:
        """True if several planes are copied: they may share kernels."""
        return bool(self.src.layout.planes) and len(self.parts) > 1

    def explain(self, *, on_host: bool = False) -> str:
        """The plan in sentences: which bytes stay together, which move, the word size, the kernel, and why.

        With `on_host`, in the words of a copy that the CPU runs.
        """
        paragraphs = [
            f"{self.src.layout.name} ({self.src.layout.order_text}) becomes "
            f"{self.dst.layout.name} ({self.dst.layout.order_text}): {size_text(self.nbytes)} per "
            f"{'unit' if max(self.src.units, self.dst.units) > 1 else 'block'}."
        ]
        for number, (part, form) in enumerate(zip(self.parts, self.forms(), strict=True), 1):
            if isinstance(part, CastPart):
                paragraphs.append(_cast_text(part, form))
                continue
            label = part.label or (f"part {number}" if len(self.parts) > 1 else "")
            who = f"In {label}, every" if label else "Every"
            steps = " and ".join(
                f"{side} table picks one of {math.prod(m.extent for m in modes)} allocations per block"
                for side, modes in (
                    ("the source's", [m for m in part.outer if m.src_table]),
                    ("the destination's", [m for m in part.outer if m.dst_table]),
                )
                if modes
            )
            if part.kind == "copy":
                text = f"{who} chunk of {size_text(part.run_bytes)} stays as it is: a plain copy."
            elif part.kind == "rows":
                loops = len(part.inner) - 1
                text = (
                    f"{who} run of {size_text(part.run_bytes)} stays together and "
                    f"{f'{loops} loops reorder' if loops > 1 else 'one loop reorders'} the runs of a "
                    f"chunk of {size_text(part.chunk_bytes)}"
                    f"{'.' if on_host else ': neighbouring threads read and write neighbouring words of a run.'}"
                )
            else:
                assert part.spans is not None
                a, b = part.spans
                text = (
                    f"{who} {size_text(part.run_bytes)} move by themselves: the source goes on along an axis of {a.extent}, the "
                    f"destination along one of {b.extent}."
                )
                if not self._of_planes and on_host:
                    text += " The CPU copies one tile of both after the other, and prefetches the next one."
                    if form.word > form.element:
                        text += " 16-byte words of elements are turned on the stack."
                elif not self._of_planes:
                    turned = ", 16-byte words of elements in registers" if form.word > form.element else ""
                    text += f" A tile of both is turned in shared memory{turned}, so that both sides move whole lines."
            if steps:
                text += f" {steps[0].upper()}{steps[1:]}."
            narrow = (
                "" if form.word == WIDEST else f" (16 is ruled out by the run or a stride: {_narrowing(part, form)})"
            )
            if not self._of_planes:
                text += f" With aligned bases words are {form.word} bytes{narrow}; kernel {form.name}."
            paragraphs.append(text + _fitted(part))
        if self._of_planes:
            runs = [(run.kernel[0].kind, run.name) for run in self.launches()]
            paragraphs += [f"{_OF_PLANES[kind]}: {name}." for kind, name in runs if kind != "cast"]
        elif len(self.parts) == 2 and self.cast is None:
            paragraphs.append("Both go in one launch where the joined kernel is built, else in one launch each.")
        return "\n".join(paragraphs)


_PAGEWISE = "the planes of one page, then the next page's"

#: How a kernel copies planes.
_OF_PLANES = {
    "copy": "One plane of a page is a plain copy",
    "rows": "One plane of a page is copied row by row",
    "tile": "One plane of a page is turned in tiles",
    "record": "Planes of one page are copied side by side, row by row, then the next page's",
    "page_in": "On a GPU pages are read as one stream into shared memory, where their planes are taken apart",
    "page_out": "On a GPU pages are put together in shared memory and written as one stream",
}


def _fitted(part: Part) -> str:
    """How the plan deals with more modes than a kernel supports."""
    text = (
        f" Kernels have at most {MAX_OUTER} modes that pick a chunk and {MAX_INNER} inside, and this copy {len(part.outer)} and "
        f"{len(part.inner)}: "
    )
    try:
        pieces = part.fit(part.kind)
    except MissingKernelError as error:
        return f"{text}{error}."
    if pieces[1:]:
        return f"{text}the shortest are peeled off, which takes {len(pieces)} launches."
    return f"{text}the slowest pick chunks instead." if pieces[0] is not part else ""


_CLASS = {"copy": "plain copy", "rows": "rows in another order", "tile": "transposed tiles", "cast": "values in another format"}


def _given(part: CastPart, whose: str) -> str:
    """The scales of the caller in words."""
    if len(part.given) == 1:
        return f"the scale {part.given[0]:g} of the {whose}"
    return f"{len(part.given)} scales of the {whose}, {min(part.given):g} to {max(part.given):g}"


def _relative(part: CastPart) -> str:
    return f", relative to {_given(part, 'tensor')}" if part.formats[2] == "float8_e4m3fn" else ""


def cast_text(part: CastPart) -> str:
    """What a cast does, without a full stop."""
    src, dst, scale = part.formats
    who = f"In {part.label}, values" if part.label else "Values"
    if not scale:
        how = f"with {_given(part, 'caller')}"
    elif part.quantises:
        how = f"each group of {part.group} with a {scale} scale from its largest value{_relative(part)}, to nearest, ties to even"
    else:
        how = f"each group of {part.group} with its {scale} scale{_relative(part)}"
    return f"{who} change from {src} to {dst}, {how}"


def _cast_text(part: CastPart, form: Form) -> str:
    wide = "" if form.element == 8 else ", element by element: they are not contiguous and aligned, or the formats are rare"
    return f"{cast_text(part)}; kernel {form.name}{wide}."


def _narrowing(part: Part, form: Form) -> str:
    if form.kind == "tile":
        return f"{form.element}-byte elements in rows that are no multiple of 16 bytes"
    return f"run of {part.run_bytes} B, strides " + ", ".join(
        str(m)
        for m in dict.fromkeys(s for mode in (*part.inner[1:], *part.outer) for s in (mode.src, mode.dst) if s % WIDEST)
    )


def _loops(part: Part, form: Form) -> Iterator[str]:
    """The loop nest, slowest first."""

    def side(table: int, stride: int) -> str:
        return " ".join(filter(None, (f"table+{table}" if table else "", f"+{stride} B" if stride else ""))) or "-"

    yield f"  {'for each':<22}{'times':>10}   {'source':<24}destination"
    ids = [side(of.entries, of.nbytes) for of in (part.src_id, part.dst_id)]
    what = "pair of unit ids" if part.src_id.units or part.dst_id.units else "pair of block ids"
    yield f"  {what:<22}{'':>10}   {ids[0]:<24}{ids[1]}"
    for extent, nbytes in reversed(part.src_id.units):
        yield f"  {'  unit of the source':<22}{extent:>10}   {side(0, nbytes):<24}-"
    for extent, nbytes in reversed(part.dst_id.units):
        yield f"  {'  unit of the dest.':<22}{extent:>10}   {'-':<24}{side(0, nbytes)}"
    for mode in reversed(part.outer):
        yield f"  {'chunk':<22}{mode.extent:>10}   {side(mode.src_table, mode.src):<24}{side(mode.dst_table, mode.dst)}"
    if isinstance(part, CastPart):
        loops = part.arguments(form)[2]
        for number, (extent, src, dst) in reversed([*enumerate(loops)]):
            if extent > 1 or number == 0:
                inside = f"    {form.element} elements" if number == 0 else "    part of a group"
                what = inside if number < GROUP_MODES else "  group"
                yield f"  {what:<22}{extent:>10}   {side(0, src):<24}{side(0, dst)}"
    else:
        for mode in reversed(part.inner[1:]):
            yield f"  {'  row':<22}{mode.extent:>10}   {side(0, mode.src):<24}{side(0, mode.dst)}"
        run = part.run_bytes // (form.element or form.word)
        word = form.element or form.word
        yield f"  {f'    word of {word} B':<22}{run:>10}   {side(0, word):<24}{side(0, word)}"
    if any((part.src_offset, part.dst_offset, part.src_table_offset, part.dst_table_offset)):
        start = side(part.src_table_offset, part.src_offset), side(part.dst_table_offset, part.dst_offset)
        yield f"  {'starting at':<22}{'':>10}   {start[0]:<24}{start[1]}"


def count_text(number: int, noun: str) -> str:
    """``1 block``, ``2 blocks``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def size_text(count: int) -> str:
    """A number of bytes with a unit: ``5 MiB``."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"


@runtime_checkable
class _Part(Protocol):
    """A section of a pool."""

    @property
    def of(self) -> Section: ...


@runtime_checkable
class _Bound(Protocol):
    """A pool."""

    @property
    def whole(self) -> _Part: ...


#: Objects that have a layout and a shape.
Meant = _Part | _Bound


def _meant(given: object) -> Section:
    if isinstance(given, _Part):
        return given.of
    if isinstance(given, _Bound):
        return given.whole.of
    raise PlanError(f"plan: expected a layout, a pool or a section of one, got {type(given).__name__}")


# ---- making a plan -------------------------------------------------------------------------------------------------


def plan(
    src: Layout | str | Path | Meant, dst: Layout | str | Path | Meant,
    shape: BlockShape | str | tuple[BlockShape | str, BlockShape | str] | None = None, *,
    num_blocks: int | tuple[int, int] = 1024, layers: range | tuple[range, range] | None = None, cast: Cast = None,
) -> Plan:  # fmt: skip
    """Plan the copy of blocks from one layout to another.

    Parameters
    ----------
    src, dst : Layout, str, Path, Pool or PoolSection
        Source and destination.  A layout may be given by its name or the path of its file.
    shape : BlockShape, str, or a pair of them
        Sizes of a block, or their text; only for layouts, as pools have their own shape.  A pair is (source, destination), for
        sides that hold different layers.
    num_blocks : int or (int, int)
        Blocks of each pool, or (source, destination).  It matters only for layouts with an axis slower than ``b``: their strides
        depend on it.
    layers : range or (range, range), optional
        The layers to copy, or those of (source, destination).  Default: all.
    cast : {"amax"} or kvbm.Scale, optional
        Values change their format, as for `kvbm.Transfer`.

    Returns
    -------
    Plan
        The plan.  Print it, or call `Plan.explain`.

    Raises
    ------
    LayoutError
        A layout is not legal for the shape.
    PlanError
        The two layouts have different axes, have no common refinement, or need the order inside an opaque group.

    Examples
    --------
    >>> from kvbm import BlockShape, load, plan
    >>> plan(load("nhd"), load("universal"), BlockShape(nl=80, no=2, nh=8, nt=16, hd=128)).kind
    'rows'
    """
    src, dst = (as_layout(side) if isinstance(side, str | Path) else side for side in (src, dst))
    if not isinstance(src, Layout) or not isinstance(dst, Layout):
        if shape is not None or isinstance(src, Layout) or isinstance(dst, Layout):
            raise PlanError("plan: expected two layouts and a shape, or two pools or sections without a shape")
        here, there = (_meant(side) for side in (src, dst))
        return between_layers(here, there, f"{here.layout.name} → {there.layout.name}", layers, as_cast(cast))
    if shape is None:
        raise PlanError(f"{src.name} → {dst.name}: shape: expected a BlockShape or its text, or one for each side, got none")
    title = f"{src.name} → {dst.name}"
    shapes = tuple(as_shape(one, f"{title}: shape") for one in _both(shape, f"{title}: shape"))
    counts = [whole(one) or 0 for one in _both(num_blocks, f"{title}: num_blocks")]
    if min(counts) < 1:
        raise PlanError(f"{title}: num_blocks: expected a number from 1 on, or one for each side, got {quoted(num_blocks)}")
    here, there = src.resolve(shapes[0], counts[0]).section, dst.resolve(shapes[1], counts[1]).section
    return between_layers(here, there, title, layers, as_cast(cast))


def _both(given: Any, what: str) -> tuple[Any, Any]:
    """One value for each side."""
    if not isinstance(given, tuple | list):
        return given, given
    if len(given) != 2:
        raise PlanError(f"{what}: expected one, or one for each side, got {quoted(given)}")
    return given[0], given[1]


def _windows(title: str, counts: tuple[int, int], layers: object) -> tuple[range, range]:
    """The layers on each side."""
    given = (layers, layers) if isinstance(layers, range) else layers if isinstance(layers, tuple) else ()
    sides = [side for side in given if isinstance(side, range) and side.step == 1]
    if len(given) != 2 or len(sides) != 2:
        raise PlanError(f"{title}: layers: expected range(first, last) or a tuple of two of them, got {quoted(layers)}")
    for side, count, where in zip(sides, counts, ("source", "destination"), strict=True):
        if not 0 <= side.start < side.stop <= count:
            raise PlanError(f"{title}: layers: expected a range within 0 to {count} of the {where}, got {side}")
    if len(sides[0]) != len(sides[1]):
        raise PlanError(
            f"{title}: layers: expected as many in the source as in the destination, got {sides[0]} and {sides[1]}"
        )
    return sides[0], sides[1]


def between(src: Section, dst: Section, title: str, keys: Section | None = None, cast: Scale | None = None) -> Plan:
    """Plan the copy between two sections.

    With `keys` (`kvbm.digest.cells`) the loops are also refined for the keys, and have strides in keys.  Then each axis of
    the sections must be one loop.  With `cast` planes of different formats are cast.
    """
    casts: list[CastPart] = []
    try:
        parts: list[Part] = []
        if cast is not None:
            _require_scales(title, src, dst, cast)
        for here, there, at in pieces(src, dst):
            if cast is not None:
                here, there, found = _casts(title, here, there, cast, at, keys)
                casts += found
            if here.accesses:
                parts += _parts(title, here, there, keys)
    except LayoutError as error:
        raise PlanError(f"{title}: {error}") from None
    if src.chosen or dst.chosen:
        parts = in_step(parts)
    if cast is not None and not is_one(cast) and casts and all(part.formats[2] not in ("", "float8_e4m3fn") for part in casts):
        raise PlanError(
            f"{title}: {cast}: every plane that is cast has scales of its own, which no scale of the caller multiplies; pass "
            "cast='amax'"
        )
    made = Plan(src, dst, (*parts, *casts), cast)
    moved = [sum(part.side_bytes[side] for part in made.parts) for side in (0, 1)]
    if moved != [src.block_bytes, dst.block_bytes]:  # every rule above must keep this true
        raise PlanError(
            f"{title}: the plan reads {moved[0]} bytes per block and writes {moved[1]}, the source holds {src.block_bytes} and the "
            f"destination {dst.block_bytes}: this is a defect of kvbm; please report both layouts and the shape"
        )
    return made


def _casts(
    title: str, src: Section, dst: Section, cast: Scale, at: Mapping[str, range], keys: Section | None = None
) -> tuple[Section, Section, list[CastPart]]:
    """The loop nests of the planes that are cast, and the two sections without these planes.

    `at`: where the sections are in those that are copied, along axes that were divided.  `keys`: of the quantised side.
    """
    of_keys = {access.plane: access for access in keys.accesses} if keys else {}
    sides = [{plane: _maps_of(side, plane) for plane in _plane_names(side)} for side in (src, dst)]
    scales = [scales_of(side) for side in (src, dst)]
    made: list[CastPart] = []
    done: tuple[set[str], set[str]] = (set(), set())
    for ours, theirs in value_pairs(src, dst):
        here, there = sides[0][ours], sides[1][theirs]
        formats = here[0].dtype, there[0].dtype
        own = scales[0].get(ours), scales[1].get(theirs)
        if formats[0] == formats[1]:
            continue  # a copy
        scaled = scaled_side(title, ours or theirs, formats, own, cast)
        done[0].update(filter(None, (ours, own[0])) if ours else [ours])
        done[1].update(filter(None, (theirs, own[1])) if theirs else [theirs])
        group = of_scales = None
        if scaled is not None:
            name = own[scaled]
            assert name is not None
            of_scales, data = sides[scaled][name], sides[scaled][(ours, theirs)[scaled]]
            group = group_of(data[0].plane, dict(data[0].sizes), name, dict(of_scales[0].sizes))
        maps = [one for one in (here, there, of_scales) if one]
        if group and "o" in group.whole and any(len(one) > 1 for one in maps):
            raise PlanError(
                f"{title}: plane {ours or theirs!r}: K and V share scales and have different orders, so no loop goes through a "
                "group; convert in two steps, through a layout in which K and V have one order"
            )
        require_sizes(title, here[0], there[0])
        sizes = dict(here[0].sizes)
        layers = at.get("l", range(src.count("l")))
        for o in range(src.shape.no) if any(len(one) > 1 for one in maps) else (None,):
            halves = at.get("o", range(src.count("o"))) if o is None else (o,)
            multiplies = of_scales is None or of_scales[0].dtype == "float8_e4m3fn"
            given = table_of(cast, layers, halves) if multiplies else ((1.0,), {})
            if shared := [_SHARED[axis] for axis in given[1] if axis not in sizes]:
                raise PlanError(
                    f"{title}: plane {ours or theirs!r} has one element for {' and '.join(shared)}, and {cast} different numbers; "
                    "expected the same for them"
                )
            found = [_half(title, one, o) for one in maps]
            quantised = (ours, theirs)[formats[0] in PLAIN]
            names = (quantised, of_scales[0].plane) if of_scales else (quantised,)
            if keys and (quantised not in of_keys or of_keys[quantised].dtype in PLAIN):
                raise PlanError(f"{title}: planes are cast in both directions, and digests are those of one side")
            their_keys = [_half(title, (of_keys[name],), o) if keys else None for name in names]
            made.append(
                cast_part(
                    title, found[0], found[1], found[2] if of_scales else None, group, given, o, (their_keys[0], their_keys[-1])
                )
            )
    rest = [
        replace(side, accesses=tuple(access for access in side.accesses if access.plane not in gone))
        for side, gone in zip((src, dst), done, strict=True)
    ]
    if bool(rest[0].accesses) != bool(rest[1].accesses):
        where, other = (src, dst) if rest[0].accesses else (dst, src)
        left = ", ".join(repr(access.plane) for access in (*rest[0].accesses, *rest[1].accesses))
        raise PlanError(
            f"{title}: {where.layout.name} has the planes {left}, which {other.layout.name} lacks; expected the same planes on "
            "both sides, apart from scales (`scales:` of a plane in the layout file)"
        )
    return rest[0], rest[1], made


#: Axes that scales of the caller differ along.
_SHARED = {"l": "all layers", "o": "K and V"}


def scales_of(section: Section) -> dict[str, str]:
    """Plane of a section → plane of its scales, if both are in the section."""
    names = _plane_names(section)
    return {data: scale for scale, data in section.layout.scales.items() if scale in names and data in names}


def value_pairs(src: Section, dst: Section) -> list[tuple[str, str]]:
    """The planes of values that a cast copies into each other."""
    return paired([_plane_names(side) for side in (src, dst)], [scales_of(side) for side in (src, dst)])


def _numbered(title: str, src: Section, dst: Section, cast: Scale) -> int:
    """The side whose layers, and K and V, the scales of the caller belong to: 0 the source, 1 the destination."""
    formats = [(_maps_of(src, ours)[0].dtype, _maps_of(dst, theirs)[0].dtype) for ours, theirs in value_pairs(src, dst)]
    sides = {int(one in PLAIN) for one, other in formats if one != other}
    if len(sides) > 1:
        raise PlanError(f"{title}: {cast}: planes are cast in both directions; expected one number for all layers, and for K and V")
    return sides.pop() if sides else 1


def _require_scales(title: str, src: Section, dst: Section, cast: Scale) -> None:
    """Raise `PlanError` if the scales of the caller are not those of the layers, or of K and V, that are copied."""
    if layers_of(cast) is None and cast.k is None:
        return
    number = _numbered(title, src, dst, cast)
    side, name = (src, dst)[number], ("source", "destination")[number]
    count, halves = side.count("l"), side.count("o")
    if layers_of(cast) not in (None, count):
        raise PlanError(f"{title}: {cast}: expected one number for each of the {count} layers of the {name}, got {layers_of(cast)}")
    if cast.k is not None and (halves != 2 or "o" in dict(side.chosen)):
        what = "V before K" if halves == 2 else "only one of K and V" if side.shape.no == 2 else "no K and V of their own"
        raise PlanError(
            f"{title}: {cast}: the {name} has {what}; expected Scale(x), where x is a number, or one for each layer"
        )


def _plane_names(section: Section) -> list[str]:
    return list(dict.fromkeys(access.plane for access in section.accesses))


def _maps_of(section: Section, plane: str) -> _Maps:
    return tuple(access for access in section.accesses if access.plane == plane)


def joined(plans: Sequence[Plan]) -> Plan:
    """Join copies with the same list of ids into one plan.  Parts at equal distances become one part."""
    return Plan(plans[0].src, plans[0].dst, tuple(in_step([part for made in plans for part in made.parts])))


def between_layers(
    src: Section, dst: Section, title: str, layers: range | tuple[range, range] | None, cast: Scale | None = None
) -> Plan:
    """`between` for some layers of the sections; plans are cached."""
    if layers is not None:
        ours, theirs = _windows(title, (src.count("l"), dst.count("l")), layers)
        if cast is not None and layers_of(cast) is not None:
            _require_scales(title, src, dst, cast)
            cast = of_layers(cast, (ours, theirs)[_numbered(title, src, dst, cast)])
        src, dst = src.select("l", ours), dst.select("l", theirs)
    names = (src.layout.name, dst.layout.name)
    if cast is None:
        return _cached(src, dst, title, *names)
    # Layouts that differ only in what they declare of scales are equal.
    return _cached(src, dst, title, *names, *map(repr, (src.layout.scales, dst.layout.scales)), cast=cast)


@functools.lru_cache(maxsize=1024)
def _cached(src: Section, dst: Section, title: str, *_names: str, cast: Scale | None = None) -> Plan:
    """`between`.  Layouts with the same meaning are equal; their names are in the key, so that a plan has those of its call."""
    return between(src, dst, title, cast=cast)


def _parts(title: str, src: Section, dst: Section, keys: Section | None = None) -> tuple[Part, ...]:
    """The loop nests of two sections.  Each axis of a section is one loop."""
    planes = _planes(title, src, dst)
    separate = any(len(side) == 2 for pair in planes for side in pair)
    of_keys = {access.plane: (access,) for access in keys.accesses} if keys else {}
    parts = []
    for here, there in planes:
        halves: Sequence[int | None] = range(src.shape.no) if separate else (None,)
        key_halves = [_half(title, of_keys[here[0].plane], o) if keys else None for o in halves]
        parts.append(
            [
                _part(title, (src, _half(title, here, o)), (dst, _half(title, there, o)), o, key)
                for o, key in zip(halves, key_halves, strict=True)
            ]
        )
    joined = [rejoined(halves) for halves in parts]
    # If K and V of one plane differ, they are planned separately in all planes, so that all planes have the same loops.
    kept = parts if any(len(halves) > 1 for halves in joined) else joined
    return gathered([part for halves in kept for part in halves])


#: A plane's maps on one side: one, or K's and V's.
_Maps = tuple[Access, ...]


def _planes(title: str, src: Section, dst: Section) -> list[tuple[_Maps, _Maps]]:
    """The maps of each plane on both sides.  A layout without planes has one plane."""
    sides: list[dict[str, _Maps]] = []
    for side in (src, dst):
        by_plane: dict[str, _Maps] = {}
        for access in side.accesses:
            by_plane[access.plane] = (*by_plane.get(access.plane, ()), access)
        sides.append(by_plane)
    sources, destinations = sides
    for here, there, where in ((sources, destinations, src), (destinations, sources, dst)):
        only = [name for name in here if name not in there]
        if only:
            what = "has no planes" if only == [""] else f"has a plane '{only[0]}'"
            raise PlanError(
                f"{title}: {where.layout.name} {what}, and the other side has "
                f"{', '.join(repr(name) for name in there) if '' not in there else 'none'}; expected the same planes on both sides"
                + ("; cast='amax' (--cast amax) quantises, or dequantises" if src.layout.scales or dst.layout.scales else "")
            )
    for name, ours in sources.items():
        theirs = destinations[name]
        if ours[0].dtype != theirs[0].dtype:
            plane = f"plane '{name}': " if name else ""
            raise PlanError(
                f"{title}: {plane}{ours[0].dtype} in the source, {theirs[0].dtype} in the destination; a copy "
                "converts no dtype, unless it is told to by cast= (--cast)"
            )
    pairs = [(maps, destinations[name]) for name, maps in sources.items()]
    for ours, theirs in pairs:
        _require_same_axes(title, ours[0], theirs[0])
    return pairs


def _require_same_axes(title: str, src: Access, dst: Access) -> None:
    if src.sizes == dst.sizes:
        return
    ours, theirs = dict(src.sizes), dict(dst.sizes)
    for here, there, where in ((ours, theirs, "source"), (theirs, ours, "destination")):
        only = here.keys() - there.keys()
        if only:
            raise PlanError(f"{title}: axes {only} only in the {where}; the other side has one coordinate, or none")
    for axis in ours.keys() & theirs.keys():
        if ours[axis] != theirs[axis]:
            raise PlanError(f"{title}: axis '{axis}': {ours[axis]} in the source, {theirs[axis]} in the destination")


def _half(title: str, maps: _Maps, o: int | None) -> Access:
    """The map of K (0) or V (1) alone, or of both."""
    if o is None:
        return maps[0]
    try:
        return maps[min(o, len(maps) - 1)].fix("o", o)
    except LayoutError as error:
        raise PlanError(f"{title}: on one side K and V have different orders, and on the other {error}") from None


def _part(title: str, src: _Side, dst: _Side, half: int | None, key: Access | None = None) -> Part:
    """The loop nest of the whole block, or of one half (0 = K, 1 = V)."""
    here, there = src[1], dst[1]
    if not _is_plain(here) or not _is_plain(there):
        here, there = _in_one_form(title, src, dst)
    if here.packed != there.packed:
        raise PlanError(
            f"{title}: axis '{' '.join(here.packed)}': {here.pack} elements of {here.dtype} share a byte on one side only, and "
            f"along '{' '.join(there.packed)}' on the other, so a copy would have to split bytes"
        )
    keys = (key,) if key else ()
    modes = [*_modes(title, here, there, *keys), Mode(here.itemsize, 1, 1, key=len(keys))]
    label = " ".join(filter(None, (here.plane, "KV"[half] if half is not None else "")))
    ids = Id(here.block[1], here.block[0], here.units), Id(there.block[1], there.block[0], there.units)
    return Part.of(modes, (here.at, there.at), ids, label, half, key.at[0] if key else 0)


#: One side of a copy, and its address map.
_Side = tuple[Section, Access]


def _is_plain(access: Access) -> bool:
    """True if every step belongs to one axis: no fused or opaque groups."""
    return all(len(step.axes) == 1 and not step.opaque for step in access.steps)


def _in_one_form(title: str, src: _Side, dst: _Side) -> tuple[Access, Access]:
    """Both maps in the same axes: a group that is opaque or fused on one side becomes so on both."""
    sides = [src[1], dst[1]]
    # The largest group first: it includes smaller groups of the other side.
    for step in sorted((s for side in sides for s in side.steps if s.opaque), key=lambda s: (-len(s.axes), s.axes)):
        group = frozenset(step.axes)
        if not any(s.opaque and group == set(s.axes) for side in sides for s in side.steps):
            continue
        for index, (section, other) in enumerate(((src[0], dst[0]), (dst[0], src[0]))):
            whole = sides[index].gather(group)
            if whole is None:
                raise PlanError(
                    f"{title}: {other.layout.name} does not promise the order inside {step}, and {section.layout.name} "
                    f"({section.layout.order_text}) needs it; use a layout with a promised order, such as operational_nhd or "
                    "operational_hnd"
                )
            sides[index] = whole
    for axes in sorted({s.axes for side in sides for s in side.steps if len(s.axes) > 1 and not s.opaque}):
        for index, side in enumerate(sides):
            if not any(step.axes == axes for step in side.steps):
                try:
                    sides[index] = side.fuse(axes)
                except LayoutError as error:
                    raise PlanError(f"{title}: {error}; no common refinement") from None
    return sides[0], sides[1]


def _modes(title: str, *sides: Access) -> Iterator[Mode]:
    """Common refinement of source and destination, and of the keys of a digest if there are some: one mode per loop."""
    groups = [_by_axes(side) for side in sides]
    for axes in groups[0]:
        digits = [group.get(axes, []) for group in groups]
        if not all(digits):
            raise PlanError(f"{title}: axis '{' '.join(axes)}' has steps on one side only; no common refinement")
        try:
            loops = list(refine([[step[1:5] for step in side] for side in digits]))
        except LayoutError:
            splits = ["(" + ",".join(str(step.extent) for step in reversed(side)) + ")" for side in digits]
            raise PlanError(
                f"{title}: splits {' and '.join(splits[:2])} of '{' '.join(axes)}' have no common refinement"
                + (" with a digest's cells" if sides[2:] else "")
            ) from None
        for extent, src, src_table, dst, dst_table, *key in loops:
            yield Mode(extent, src, dst, src_table, dst_table, *key[:1])


def _by_axes(access: Access) -> dict[tuple[str, ...], list[Step]]:
    groups: dict[tuple[str, ...], list[Step]] = {}
    for step in access.steps:
        groups.setdefault(step.axes, []).append(step)
    return groups
