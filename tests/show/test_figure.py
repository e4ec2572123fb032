"""Pictures of layouts and copies: they show elements at their addresses, nothing overlaps, and bad files are refused."""

from __future__ import annotations

import functools
import html as markup
import io
import itertools
import math
import re
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

import kvbm
from few import few
from kvbm.cli.app import main
from kvbm.errors import MissingPackageError, SpecError
from kvbm.layout import spec
from kvbm.show import figure as picture
from kvbm.show import html as gallery
from kvbm.show import plan_figure
from kvbm.show import text as draw
from kvbm.show.contents import Cell, sections
from kvbm.show.elements import element_at, loop_axes
from kvbm.show.facts import address_lines, axis_rows

matplotlib = pytest.importorskip("matplotlib")

GALLERY = Path(__file__).resolve().parents[2] / "docs" / "gallery"
SMALL = "nl=2,no=2,nh=4,nt=16,hd=32,dtype=float8_e4m3fn"

#: What no shipped layout has: padding outside and inside, K and V in one allocation, every size one.
MORE = {
    "padded": 'title: a $x^2$ & <b>\norder: "[l] b o t h d"\npitch: {b: "round_up(2*nt*nh*hd*es, 4096)+16384 B", h: hd+16}\n',
    "together": 'order: {k: "b l o h d/16B t d%16B", v: "b l o h d t"}\n',
    "fused": 'order: "[o] (l h)/2 b t (l h)%2 d"\n',
    "gaps": 'order: "[o] b l h <x y z>"\npitch: {h: "4096 B"}\naxes: {s: hd//16}\nplanes: {x: {order: t d, dtype: int4, '
    "offset: 32, pitch: {t: 96 B}}, y: {order: t, dtype: float32, offset: 36 + hd//2, pitch: {t: 96 B}}, "
    "z: {order: s, dtype: uint8, offset: nt*96 + 40, shared: t}}\n",
    "apart": 'order: "[l <x y> o] b h"\nplanes: {x: {order: t d, dtype: int8, pitch: {t: 192}}, y: {dtype: float64, shared: t}}\n',
    "halves": 'order: "[b] l o h <x y>"\nplanes: {x: {order: {k: t d, v: d t}, dtype: int8}, y: {order: t, dtype: int16}}\n',
    "<script>alert(1)</script> & co": 'title: "</svg><script>"\norder: "[b l o] {t h d}"\n',
}


@functools.cache
def distinct() -> dict[str, kvbm.Layout]:
    """One name per meaning."""
    found: dict[str, kvbm.Layout] = {}
    for name in kvbm.layouts():
        found.setdefault(kvbm.load(name).fingerprint, kvbm.load(name))
    return {layout.name: layout for layout in found.values()} | {n: spec.parse(t, name=n) for n, t in MORE.items()}


def resolved(name: str, shape: str | None = None, num_blocks: int = 1024):  # type: ignore[no-untyped-def]
    text = shape or spec.example_shape(distinct()[name])
    assert text, name
    return distinct()[name].resolve(kvbm.load_shape(text), num_blocks)


def small(name: str):  # type: ignore[no-untyped-def]
    """At small sizes, or at its usual ones if it is not legal at these."""
    try:
        return resolved(name, SMALL, 3)
    except kvbm.LayoutError:
        return resolved(name, None, 3)


def rows(resolved):  # type: ignore[no-untyped-def]
    return [list(section.rows) for section in sections(resolved)]


PLAIN = [name for name, layout in distinct().items() if not layout.planes]
PLANAR = [name for name, layout in distinct().items() if layout.planes]


@functools.lru_cache(maxsize=8)
def figure(name: str):  # type: ignore[no-untyped-def]
    return picture.draw_layout(resolved(name))


def plan(src: str, dst: str, shape: str = "llama-3.1-8b"):  # type: ignore[no-untyped-def]
    return kvbm.plan(kvbm.load(src), kvbm.load(dst), kvbm.load_shape(shape))


def boxes(drawn):  # type: ignore[no-untyped-def]
    """The patches with labels; labels of matplotlib itself begin with an underscore."""
    return [patch for patch in drawn.axes[0].patches if not patch.get_label().startswith("_") and patch.get_label()]


def texts(drawn) -> list[str]:  # type: ignore[no-untyped-def]
    return [text.get_text().replace("\N{NO-BREAK SPACE}", " ") for text in drawn.axes[0].texts if text.get_text()]


def indices(extent: int) -> list[int]:
    return list(range(extent)) if extent <= 8 else [0, 1, 2, extent - 1]


# ---- a layout is drawn where it lies -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLAIN)
def test_rows_begin_where_the_addresses_say(name: str) -> None:
    """Each member of each level, computed from coordinates alone."""
    for each in (resolved(name), small(name)):
        _, *cascades = rows(each)
        assert len(cascades) == len(each.orders)
        for o, cascade in enumerate(cascades):
            levels = [piece for piece in reversed(each.orders[o]) if not piece.table and piece.extent > 1]
            assert [row.term for row in cascade] == [str(piece.term) for piece in levels]
            is_half = any(piece.table and piece.term.axes == ("o",) for piece in each.orders[o])
            for row, piece in zip(cascade, levels, strict=True):
                assert (row.extent, row.step) == (piece.extent, piece.stride)
                cells = [cell for cell in row.cells if isinstance(cell, Cell)]
                for index, cell in zip([0] if row.opaque else indices(piece.extent), cells, strict=True):
                    at = {"o": o if is_half else 0}
                    rest = index * piece.divisor
                    for axis in reversed(piece.term.axes):
                        rest, at[axis] = divmod(rest, each.sizes[axis])
                    assert cell.start == each.address(at.pop("b", 0), **at)[1], (row.term, index)
                    assert row.opaque or cell.nbytes + cell.padding == piece.stride
                left_out = sum(cell for cell in row.cells if isinstance(cell, int))
                assert row.opaque or left_out == piece.extent - len(cells)
                is_half = is_half or piece.term.axes == ("o",)  # rows below show the half that is opened


@pytest.mark.parametrize("name", PLANAR)
def test_rows_of_planes_begin_where_the_addresses_say(name: str) -> None:
    """Common rows begin at the record's first element, and each plane's rows at its own elements."""
    for each in (resolved(name), small(name)):
        _, *further = sections(each)
        if each.record:
            shared, *further = further
            *cascade, record = shared.rows
            outer = [str(term) for term in each.layout.orders[0].inner[:-1]]
            assert [row.term for row in cascade] == [term for term in outer if _extent(each.parts[0], term) > 1]
            for row in cascade:
                _follows(each.parts[0], row, {}, -each.parts[0].bases[0][0])
            assert all(
                c.nbytes == each.record for c in (cascade[-1].cells if cascade else ()) if isinstance(c, Cell)
            ) or (_extent(each.parts[0], outer[-1]) == 1)
            _is_the_record(each, record)
        assert [(s.plane, s.half) for s in further] == [
            (number, o if len(part.orders) == 2 else None)
            for number, part in enumerate(each.parts)
            for o in range(len(part.orders))
        ]
        for section in further:
            part = each.parts[section.plane]
            around = len(each.layout.orders[0].inner) - 1 if each.record else 0
            own = [p for p in reversed(part.pieces(section.half or 0)) if not p.table][around:]
            assert [row.term for row in section.rows] == [str(piece.term) for piece in own if piece.extent > 1]
            assert section.title.startswith(f"Inside: {part.plane}") and part.shape.dtype in section.about
            in_table = any(piece.table and piece.term.axes == ("o",) for piece in part.pieces())
            at = {} if in_table and not section.half else {"o": section.half or 0}
            for row in section.rows:
                assert {cell.plane for cell in row.cells if isinstance(cell, Cell)} == {section.plane}
                _follows(part, row, at, 0)


def _extent(part, term: str) -> int:  # type: ignore[no-untyped-def]
    return next(piece.extent for piece in part.orders[0] if str(piece.term) == term)


def _follows(part, row, at: dict[str, int], shift: int) -> None:  # type: ignore[no-untyped-def]
    """Require that a row's members are at the addresses of the elements with these indices."""
    piece = next(p for p in part.pieces(at.get("o", 0)) if str(p.term) == row.term and p.extent > 1)
    cells = [cell for cell in row.cells if isinstance(cell, Cell)]
    assert (row.extent, row.step) == (piece.extent, piece.stride)
    for index, cell in zip(indices(piece.extent), cells, strict=True):
        rest, here = index * piece.divisor, dict(at)
        for axis in reversed(piece.term.axes):
            rest, here[axis] = divmod(rest, part.sizes[axis])
        assert cell.start == part.address(here.pop("b", 0), **here)[1] + shift, (row.term, index)
        assert cell.nbytes + cell.padding == piece.stride
    assert sum(cell for cell in row.cells if isinstance(cell, int)) == piece.extent - len(cells)


def _is_the_record(each, row) -> None:  # type: ignore[no-untyped-def]
    """Require that every byte of the first record is shown once, with the plane at its address, in runs as long as possible."""
    owner = [-1] * each.record
    for number, part in enumerate(each.parts):
        around = {axis for term in each.layout.orders[0].terms if not term.planes for axis in term.axes}
        own = sorted(
            {axis for order in part.layout.planes[number].orders for t in order.terms for axis in t.axes} - around
        )
        for values in itertools.product(*(range(part.sizes[axis]) for axis in own)):
            start = part.address(0, **dict(zip(own, values, strict=True)))[1]
            for byte in range(start, start + part.shape.itemsize):
                assert owner[byte] in (-1, number)
                owner[byte] = number
    runs = [(number, len(list(group))) for number, group in itertools.groupby(owner)]
    starts = list(itertools.accumulate((length for _, length in runs), initial=0))
    want = [(starts[n], runs[n][1], runs[n][0]) for n in range(len(runs)) if runs[n][0] >= 0]
    cells = [cell for cell in row.cells if isinstance(cell, Cell)]
    got = [(cell.start, cell.nbytes, cell.plane) for cell in cells]
    skipped = sum(cell for cell in row.cells if isinstance(cell, int))
    assert row.is_record and row.step == each.record and row.extent == len(want) == len(got) + skipped
    before = next((n for n, cell in enumerate(row.cells) if isinstance(cell, int)), len(got))
    assert got == want[:before] + want[len(want) - len(got) + before :]
    for cell, (start, nbytes, _) in zip(cells, got, strict=True):
        after = min((to for to, *_ in want if to > start), default=each.record)
        assert cell.padding == after - start - nbytes and cell.label == each.parts[cell.plane].plane


@pytest.mark.parametrize("name", PLANAR)
def test_the_table_of_planes(name: str) -> None:
    """Every drawn array is the allocation of its entry; the first and the last of each plane are drawn."""
    each = resolved(name, num_blocks=3)
    row = sections(each)[0].rows[0]
    cells = [cell for cell in row.cells if isinstance(cell, Cell)]
    everything = each.allocations
    assert row.extent == len(everything)
    for cell in cells:
        said = everything[cell.start].label.replace("o=0", "K").replace("o=1", "V").replace("=", "")
        assert cell.label in (said, said or "all of it") and cell.nbytes == everything[cell.start].nbytes
        if each.has_separate_planes:
            assert cell.label.split()[0] == each.parts[cell.plane].plane
    if each.has_separate_planes:
        assert {cell.plane for cell in cells} == set(range(len(each.parts)))
        for number, part in enumerate(each.parts):
            mine = [n for n, allocation in enumerate(everything) if allocation.label.split()[0] == part.plane]
            assert {mine[0], mine[-1]} <= {cell.start for cell in cells if cell.plane == number and cell.half is None}


@pytest.mark.parametrize(
    ("name", "shape"), [("record/nvfp4_tensors", "nl=1,no=2,nh=1,nt=1,hd=32"), ("apart", "nl=3,no=1,nh=1,nt=16,hd=64")]
)
def test_the_table_of_planes_where_an_axis_has_one_member(name: str, shape: str) -> None:
    each = resolved(name, shape, 2)
    for cell in sections(each)[0].rows[0].members:
        allocation = each.allocations[cell.start]
        assert cell.nbytes == allocation.nbytes and cell.label.split()[0] == allocation.label.split()[0]
        index = re.search(r"l=(\d+)", allocation.label)
        assert each.shape.nl == 1 or (index and f"l{index[1]}" in cell.label)
        assert each.parts[cell.plane or 0].plane == cell.label.split()[0]
    starts = [cell.start for cell in sections(each)[0].rows[0].members]
    entries = [n for n, allocation in enumerate(each.allocations) if allocation.label.startswith(each.parts[0].plane)]
    assert [n for n in starts if n in entries] == sorted({entries[0], *entries[1:2], entries[-1]})


def test_table_shows_the_allocations() -> None:
    ((row,), *_) = rows(resolved("dynamo/stacked_nhd", num_blocks=10))
    everything = resolved("dynamo/stacked_nhd", num_blocks=10).allocations
    cells = [cell for cell in row.cells if isinstance(cell, Cell)]
    assert [cell.start for cell in cells] == [0, 1, 63, 64, 639], "the first and last of block 0, the first of block 1"
    for cell in cells:
        wanted = everything[cell.start].label.replace("o=0", "K").replace("o=1", "V").replace("=", "")
        assert cell.label == wanted and cell.nbytes == everything[cell.start].nbytes
        assert cell.half == "KV".index(wanted[-1])
    assert row.blocks == ((0, 3, "block 0"), (4, 4, "block 1"))


@pytest.mark.parametrize("name", ["dynamo/stacked_nhd", "lmcache/KV_T2D", "dynamo/universal"])
def test_table_of_one_block(name: str) -> None:
    """Without a second block there is no bracket: the first allocations and the last are drawn."""
    each = resolved(name, num_blocks=1)
    ((row,), *_) = rows(each)
    starts = [cell.start for cell in row.cells if isinstance(cell, Cell)]
    count = each.table_size
    assert starts == (list(range(count)) if count <= 5 else [0, 1, 2, count - 1]) and not row.blocks


@pytest.mark.parametrize("name", ["dynamo/stacked_nhd", "dynamo/universal", "apart"])
def test_a_picture_of_many_blocks_lists_no_table(name: str) -> None:
    ((row,), *_) = rows(resolved(name, num_blocks=10**11))
    assert row.extent == resolved(name, num_blocks=10**11).table_size


@pytest.mark.parametrize("width", [40, 50])
@pytest.mark.parametrize("name", MORE)
def test_narrow_terminals(name: str, width: int) -> None:
    """Boxes are as narrow as the terminal; tables are not cut: each word is there as in a wide terminal."""

    def shown(width: int) -> str:
        console = Console(file=io.StringIO(), width=width)
        draw.show(console, resolved(name))
        return str(console.file.getvalue())  # type: ignore[attr-defined]

    lines = shown(width).splitlines()
    assert lines and max(map(len, (line for line in lines if re.match("  [╭│╰]", line)))) <= width
    assert max(map(len, lines)) <= 80
    for row in axis_rows(resolved(name)):
        assert {word for cell in row for word in cell.split()} <= set(" ".join(lines).split()), row


@pytest.mark.parametrize("name", few(distinct(), 16))
def test_boxes_and_texts(name: str) -> None:
    """Both checks on the same drawing, as drawing is slow."""
    boxes_are_the_rows(name)
    texts_are_whole_and_apart(name)


def boxes_are_the_rows(name: str) -> None:
    """A box per member, in order, without overlaps; if no member is omitted, positions are to scale."""
    drawn = boxes(figure(name))
    wanted = [
        (f"{row.term} {cell.label} @{cell.start} +{cell.nbytes}", row, cell)
        for cascade in rows(resolved(name))
        for row in cascade
        for cell in row.cells
        if isinstance(cell, Cell)
    ]
    members = [box for box in drawn if not box.get_label().startswith("padding")]
    assert [box.get_label() for box in members] == [label for label, _, _ in wanted]
    by_row: dict[float, list] = {}  # type: ignore[type-arg]
    for box, (_, row, cell) in zip(members, wanted, strict=True):
        by_row.setdefault(box.get_y(), []).append((box, row, cell))
    assert len(by_row) == sum(map(len, rows(resolved(name))))
    for found in by_row.values():
        for (box, *_), (after, *_) in itertools.pairwise(found):
            assert box.get_x() + box.get_width() <= after.get_x() + 1e-9
        row = found[0][1]
        if len(row.cells) == row.extent > 1 and "[" not in row.term and not row.is_record:
            scale = (found[1][0].get_x() - found[0][0].get_x()) / row.step
            for box, _, cell in found:
                assert math.isclose(
                    box.get_x() - found[0][0].get_x(), (cell.start - found[0][2].start) * scale, abs_tol=1e-9
                )
    ends = {box.get_y(): box.get_x() + box.get_width() for box in drawn}
    assert len({round(end, 6) for end in ends.values()}) == 1, "all rows end in one line"
    halves = {(box.get_facecolor()) for box, (_, _, cell) in zip(members, wanted, strict=True) if cell.half == 0}
    others = {(box.get_facecolor()) for box, (_, _, cell) in zip(members, wanted, strict=True) if cell.half == 1}
    assert len(halves) <= 1 and len(others) <= 1 and not halves & others, "K has one colour and V another"
    colours = [
        {
            box.get_facecolor()
            for box, (_, _, cell) in zip(members, wanted, strict=True)
            if cell.plane == number and cell.half is None
        }
        for number in range(len(resolved(name).parts))
    ]
    assert all(len(some) == 1 for some in colours), "a plane has one colour"
    assert len(set().union(*colours, halves, others)) == len(colours) + len(halves) + len(others), "of its own"
    gaps = [box.get_hatch() for box in drawn if box.get_label().startswith("padding")]
    between = [cell for _, row, cell in wanted if cell.padding and row.between]
    assert all(gaps) and sum(hatch == "...." for hatch in gaps) == len(between)


def texts_are_whole_and_apart(name: str) -> None:
    """Axes, order and address are legible: present, inside the picture, and not overlapping."""
    drawn, each = figure(name), resolved(name)
    said = texts(drawn)
    for part, o in [(plane, o) for plane in each.planes for o in range(len(plane.orders))]:
        order = part.orders[o]
        assert set(address_lines(part, o, 108)) <= set(said)
        assert {str(piece.term) for piece in order if piece.extent > 1 and not piece.table} <= set(said)
    assert any(str(order) in line for order in each.layout.orders for line in said)
    for part in each.parts:
        assert any(line.startswith(f"plane {part.plane}: ") and part.shape.dtype in line for line in said)
    assert all(any(line.startswith(f"scales of {data}: one ") for line in said) for data in each.layout.scales.values())
    _nothing_overlaps(drawn)


def _nothing_overlaps(drawn) -> None:  # type: ignore[no-untyped-def]
    renderer = drawn.canvas.get_renderer()
    places = [(t.get_text(), t.get_window_extent(renderer)) for t in drawn.axes[0].texts if t.get_text().strip()]
    for text, place in places:
        assert place.x0 >= 0 and place.y0 >= 0 and place.x1 <= drawn.bbox.width and place.y1 <= drawn.bbox.height, text
    for (one, a), (other, b) in itertools.combinations(places, 2):
        apart = a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1.5 or b.y1 <= a.y0 + 1.5
        assert apart, (one, other)


@pytest.mark.slow  # 0.5 s
def test_padding_and_opaque_groups_are_hatched() -> None:
    padded = [box for box in boxes(figure("padded")) if box.get_label().startswith("padding")]
    assert [box.get_label() for box in padded] == ["padding +8192"] * 4 + ["padding +32"] * 8
    assert all(box.get_hatch() for box in padded)
    (group,) = [box for box in boxes(figure("operational")) if box.get_label().startswith("{t h d}")]
    assert group.get_hatch() and any("not promised" in text for text in texts(figure("operational")))


@pytest.mark.slow  # 0.6 s
def test_what_lies_between_the_elements_of_a_plane() -> None:
    """Bytes of other planes are dotted, and not called padding."""

    def between(name: str) -> set[tuple[str, str]]:
        each = resolved(name)
        rows = [(section, row) for section in sections(each) if section.plane is not None for row in section.rows]
        return {
            (each.parts[section.plane].plane, row.term)
            for section, row in rows
            if row.between and any(isinstance(cell, Cell) and cell.padding for cell in row.cells)
        }

    assert between("vllm/deepseek_v4") == {("latent", "t"), ("rope", "t")}
    assert between("gaps") == {("x", "t"), ("y", "t")} and between("apart") == between("vllm/fp8_ds_mla") == set()
    hatches = [box.get_hatch() for box in boxes(figure("vllm/deepseek_v4")) if box.get_label() == "padding +64"]
    assert hatches == ["/////"] * 4, "of a page"
    assert {box.get_hatch() for box in boxes(figure("vllm/deepseek_v4")) if box.get_label() == "padding +448"} == {
        "...."
    }


@pytest.mark.parametrize("name", [name for name in PLANAR if re.search(r"of \d+ bytes", distinct()[name].title)])
def test_records_are_drawn_at_the_size_that_their_title_says(name: str) -> None:
    assert re.search(r"of (\d+) bytes", distinct()[name].title)[1] == str(resolved(name).record)  # type: ignore[index]


def test_k_and_v_alternate_as_they_do() -> None:
    """The stripe below a member that contains both."""
    turns = {row.term: row.turns for row in rows(resolved("dynamo/universal"))[1]}
    assert turns == {"h": 64, "l": 2, "o": 0, "t": 0, "d": 0}


# ---- a copy --------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # 0.6 s
def test_runs_go_where_the_addresses_say() -> None:
    made = plan("nhd", "universal")
    drawn = plan_figure.draw_plan(made)
    runs = [re.fullmatch(r"(source|destination) (\d+) @(\d+)", box.get_label()) for box in boxes(drawn)]
    found = {(match[1], int(match[2])): int(match[3]) for match in runs if match}
    assert len(found) == 18
    for (side, number), offset in found.items():
        t, h = divmod(number, 8)  # in nhd a run is a head of a token
        where = made.src if side == "source" else made.dst
        assert where.accesses[0].address(0, {"t": t, "h": h})[1] == offset
    arrows = [text for text in drawn.axes[0].texts if getattr(text, "arrow_patch", None) is not None]
    assert len(arrows) == 9
    places = {box.get_label().split(" @")[0]: box for box in boxes(drawn)}
    for arrow in arrows:
        ends = []
        for side, (x, _) in (("source", arrow.xyann), ("destination", arrow.xy)):
            ends += [
                label.split()[1]
                for label, box in places.items()
                if re.fullmatch(side + r" \d+", label) and box.get_x() < x < box.get_x() + box.get_width()
            ]
        assert len(ends) == 2 and ends[0] == ends[1], "an arrow joins a run with itself"


@pytest.mark.parametrize(
    ("src", "dst", "shape"),
    [
        ("nhd", "universal", "llama-3.1-70b"),
        ("nhd", "vllm/paged_attn_v0", "llama-3.1-8b"),
        ("vllm/aiter_shuffle", "vllm/LBHNC", "llama-3.1-8b,dtype=float8_e4m3fn"),
        ("nhd", "operational", "llama-3.1-8b"),
        ("vllm/LBHNC", "universal", "llama-3.1-8b"),
        ("universal", "vllm/flash_attn_nhd", SMALL),
        ("nhd", "hnd", "nl=1,no=1,nh=1,nt=3,hd=5,dtype=float16"),
        ("vllm/mla", "vllm/mla_cross_layer", "deepseek-v3"),
        ("vllm/fp8_ds_mla", "record/mla_fp8_planes", "deepseek-v3"),
        ("vllm/nvfp4", "record/nvfp4_tensors", "llama-3.1-8b"),
        ("sglang/mxfp8", "record/mxfp8_universal", "llama-3.1-8b,nt=128"),
        ("vllm/deepseek_v4", "record/deepseek_v4_planes", "nl=61,no=1,nh=1,nt=64,hd=512"),
    ],
)
@pytest.mark.slow
def test_copies(src: str, dst: str, shape: str) -> None:
    """Kernel and loop nest are next to the runs, and nothing overlaps."""
    made = plan(src, dst, shape)
    drawn = plan_figure.draw_plan(made)
    said = texts(drawn)
    assert set(str(made).splitlines()[1:]) <= set(said) and f"kernel {', '.join(made.kernels())}" in said
    assert all(any(line.startswith(f"{part.label}: ") for line in said) for part in made.parts if part.label)
    _nothing_overlaps(drawn)
    for turn, part in enumerate(made.parts):
        first = [box.get_label() for box in boxes(drawn) if " chunk 0 " in box.get_label()][2 * turn : 2 * turn + 2]
        assert first == [
            f"source chunk 0 @{part.src_table_offset},{part.src_offset}",
            f"destination chunk 0 @{part.dst_table_offset},{part.dst_offset}",
        ]


@pytest.mark.parametrize("name", sorted(distinct()))
def test_an_address_leads_back_to_its_element(name: str) -> None:
    """For elements of every plane; there is no answer if an order is not promised or the element is inside a byte."""
    each = resolved(name)
    random, answered = np.random.default_rng(0), 0
    for access in each.accesses:
        sizes = dict(access.sizes)
        for _ in range(40):
            at = {axis: int(random.integers(extent)) for axis, extent in sizes.items()}
            if access.half is not None:
                at["o"] = access.half
            found = element_at(each.section, *access.address(0, at))
            loose = {axis for step in access.steps if step.opaque for axis in step.axes}
            if loose or (access.pack > 1 and any(at[axis] % access.pack for axis in access.packed)):
                continue
            assert found == {axis: index for axis, index in at.items() if index}, (name, at)
            answered += 1
    assert answered or any(step.opaque for access in each.accesses for step in access.steps)


@pytest.mark.slow  # 0.5 s
def test_runs_and_chunks_have_the_names_of_what_they_hold() -> None:
    """Heads and tokens at both ends of an arrow; the chunks of nhd are named by layer, K and V."""
    made = plan("vllm/flash_attn_nhd", "universal", "llama-3.1-8b")
    said = texts(plan_figure.draw_plan(made))
    assert {"h0 t0", "h1 t0", "h7 t15", "l0", "l31", "K and V", "the same for"} <= set(said)
    (part,) = made.parts
    loops = [*reversed(part.outer), *reversed(part.inner[1:])]
    assert [loop_axes(part, mode, made.src) for mode in loops] == [["l"], ["h"], ["o"], ["t"]]
    turned = plan("nhd", "vllm/paged_attn_v0", "llama-3.1-8b")
    assert loop_axes(turned.parts[1], turned.parts[1].inner[-1], turned.src) == ["h", "d"]


@pytest.mark.slow  # 0.8 s
def test_chunks_that_interleave_are_drawn_in_pieces() -> None:
    """In universal a layer has a piece in every head; each is drawn at its place in the address map."""
    made = plan("vllm/flash_attn_nhd", "universal", "llama-3.1-8b")
    drawn = plan_figure.draw_plan(made)
    labels = [re.fullmatch(r"destination (?:chunk|piece) (\d+) @0,(\d+)", box.get_label()) for box in boxes(drawn)]
    places = [(int(match[1]), int(match[2])) for match in labels if match]
    assert [index for index, _ in places] == [0, 1, 31, 32, 33, 255] and len(set(places)) == 6
    for index, offset in places:
        h, layer = divmod(index, 32)
        assert made.dst.accesses[0].address(0, {"h": h, "l": layer}) == (0, offset)
    dark = [box.get_label() for box in boxes(drawn) if box.get_facecolor() == matplotlib.colors.to_rgba(plan_figure.FILL_OWN)]
    assert [label.split(" @")[0] for label in dark] == ["destination chunk 0", "destination piece 32"]
    assert "chunks interleave" in texts(drawn)
    whole = plan_figure.draw_plan(plan("nhd", "hnd", "llama-3.1-8b"))
    assert not any("piece" in box.get_label() for box in boxes(whole)) and "chunks interleave" not in texts(whole)


@pytest.mark.slow  # 0.6 s
def test_the_page_of_a_plan() -> None:
    made = plan("nhd", "vllm/paged_attn_v0", "llama-3.1-8b")
    page = gallery.plan_page(made)
    assert page.count("<svg") == page.count("</svg>") == 1 and "<script" not in page
    assert not re.search(r"\b(src|href)=.http|@import|<link", page), "it needs no other file"
    assert "<td>l: layer</td>" in page and "1,024</td>" in page and "nhd → vllm/paged_attn_v0" in page
    assert all(f"<p>{markup.escape(line)}</p>" in page for line in made.explain().splitlines())


# ---- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["svg", "png"])
@pytest.mark.slow
def test_the_same_bytes_each_time(tmp_path: Path, suffix: str) -> None:
    paths = [tmp_path / f"{turn}.{suffix}" for turn in range(2)]
    gallery.save(picture.draw_layout(resolved("padded")), paths[0])
    with matplotlib.rc_context({"font.size": 30, "svg.hashsalt": None, "svg.fonttype": "path"}):
        gallery.save(picture.draw_layout(resolved("padded")), paths[1])
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert b"<dc:date>" not in paths[0].read_bytes()


@pytest.mark.parametrize("name", MORE)
@pytest.mark.slow  # 1.6 s
def test_svg_and_page(tmp_path: Path, name: str) -> None:
    """Text stays text; text from a file is escaped."""
    path = tmp_path / "a.svg"
    gallery.save(figure(name), path)
    root = ET.parse(path).getroot()
    said = {
        "".join(node.itertext()).replace("\N{NO-BREAK SPACE}", " ").strip()
        for node in root.iter()
        if node.tag.endswith("}text")
    }
    each = resolved(name)
    parts = [(part, o) for part in each.planes for o in range(len(part.orders))]
    for part, o in parts:
        assert {line.strip() for line in address_lines(part, o, 108)} <= said and name in said
    page = gallery.page(each)
    assert page.count("<svg") == page.count("</svg>") == 1 and "<script" not in page
    assert not re.search(r"\b(src|href)=.http|@import|<link", page), "it needs no other file"
    for part, o in parts:
        for line in address_lines(part, o, 88):
            assert line in page
        for piece in part.orders[o]:
            assert f"{piece.term}</th>" in page and (piece.table or f">{piece.stride:,} B</td>" in page)


def call(*args: str | Path):  # type: ignore[no-untyped-def]
    return CliRunner().invoke(main, [str(a) for a in args], env={"COLUMNS": "200"})


@pytest.mark.slow  # 0.9 s
def test_commands(tmp_path: Path) -> None:
    svg, png, html = (tmp_path / f"a.{suffix}" for suffix in ("svg", "png", "html"))
    done = call("show", "nhd", "--shape", SMALL, "--svg", svg, "--png", png, "--html", html)
    assert done.exit_code == 0 and done.output.split() == [str(svg), str(png), str(html)], done.output
    assert "<svg" in svg.read_text(encoding="utf-8") and png.read_bytes()[:4] == b"\x89PNG"
    assert "<!doctype html>" in html.read_text(encoding="utf-8")
    done = call("plan", "nhd", "universal", "--shape", SMALL, "--svg", tmp_path / "b.svg", "--png", tmp_path / "b.png")
    assert done.exit_code == 0 and (tmp_path / "b.svg").is_file() and (tmp_path / "b.png").is_file()


@pytest.mark.parametrize(
    ("option", "file", "what"),
    [
        ("--svg", "a.png", ".svg"),
        ("--png", "a", ".png"),
        ("--html", "a.svg", ".html"),
        ("--svg", "no/a.svg", "no"),
        ("--svg", "d.svg", "folder"),
    ],
)
def test_bad_files(tmp_path: Path, option: str, file: str, what: str) -> None:
    (tmp_path / "d.svg").mkdir()
    done = call("show", "nhd", "--shape", SMALL, "--png", tmp_path / "good.png", option, tmp_path / file)
    assert done.exit_code == SpecError.exit_code and "expected a file" in done.output and what in done.output
    assert {path.name for path in tmp_path.iterdir()} == {"d.svg"}, "nothing is written"
    with pytest.raises(SpecError, match=r"\.svg or \.png"):
        gallery.save(figure("dynamo/universal"), tmp_path / "a.pdf")


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for args in (
        ("show", "nhd", "--shape", SMALL, "--html", tmp_path / "a.html"),
        ("gallery", "--out", tmp_path / "g"),
    ):
        done = call(*args)
        assert done.exit_code == MissingPackageError.exit_code and "kvbm-layouts[show]" in done.output
    assert not list(tmp_path.rglob("*.*"))
    assert call("show", "nhd", "--shape", SMALL).exit_code == 0, "the terminal's drawing needs none"


# ---- the gallery ---------------------------------------------------------------------------------------------------


@pytest.mark.slow  # 0.6 s
def test_gallery(tmp_path: Path) -> None:
    layouts = [kvbm.load(name) for name in ("dynamo/stacked_nhd", "nhd", "vllm/dsa_indexer", "vllm/mla")]
    written = gallery.gallery(tmp_path / "g", layouts)
    assert [path.name for path in written] == ["nhd.svg", "vllm-dsa_indexer.svg", "vllm-mla.svg", "README.md"], (
        "aliases share a picture"
    )
    text = written[-1].read_text(encoding="utf-8")
    assert "## vllm" in text and "[`dynamo/stacked_nhd`](nhd.svg)" in text and text.count("![") == 3
    with pytest.raises(kvbm.LayoutError, match=r"odd .*no shape is known"):
        gallery.gallery(tmp_path / "h", [spec.parse("order: b l o h t d/7 d%7", name="odd")])


def test_the_gallery_in_the_docs_is_current() -> None:
    """Every shipped name, each with the picture of its layout; `kvbm gallery --out docs/gallery` updates it."""
    index = (GALLERY / "README.md").read_text(encoding="utf-8")
    assert index == gallery.gallery_index(spec.load_dir(spec.layouts_dir()))
    assert set(re.findall(r"\]\(([^)]+)\)", index)) == {path.name for path in GALLERY.glob("*.svg")}
    assert {path.suffix for path in GALLERY.iterdir()} == {".svg", ".md"}
    assert sum(path.stat().st_size for path in GALLERY.iterdir()) <= 4 << 20
    for name, file in re.findall(r"\*\*`(\S+)`\*\*.*\n\n!\[.*\]\((.*)\)", index):
        text = (GALLERY / file).read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")
        layout = kvbm.load(name)
        each = layout.resolve(kvbm.load_shape(spec.example_shape(layout) or ""), 1024)
        for part in each.planes:
            assert all(line in text for o in range(len(part.orders)) for line in address_lines(part, o, 108)), name
