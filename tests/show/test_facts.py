"""What `kvbm show`, pictures and the gallery say of a layout, against every address of a block."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

import kvbm
from kvbm.errors import LayoutError
from kvbm.layout.resolved import Resolved
from kvbm.layout.spec import example_shape, layouts_dir, load_dir, parse
from kvbm.show import facts

#: Sets of axes that the pictures hold, and some more.
HELD = [(), ("l",), ("o",), ("l", "o"), ("t",), ("h",), ("l", "o", "t"), ("l", "o", "h"), ("l", "o", "h", "t"), ("d",), ("h", "t")]

MIXED = [
    'order: {k: "[l] b h o d t", v: "[l] b h o t d"}',
    'order: {k: "[l] b o h d t", v: "[l] b o t h d"}',
    'order: {k: "b l h o d t", v: "b l h o t d"}',
    'order: {k: "[l] b h o d t", v: "[l] b h o t d"}\npitch: {h: 2 * nt * hd + 8}',
    'order: {k: "[l] b h o d t", v: "[l] b h o t d"}\npitch: {o: nt * hd + 8}',
    'order: {k: "[b l] o h d t", v: "[b l] o h t d"}',
    'order: {k: "[o l] b h d t", v: "[o l] b h t d"}',
]


def counted(part: Resolved, fixed: tuple[str, ...], o: int | None) -> tuple[int, set[int]]:
    """Number and sizes of the maximal runs of block 0, with every held axis at 0; of K or V alone, or of both."""
    size = part.shape.itemsize
    axes = [axis for axis in part.extents if axis != "o" and axis not in fixed]
    index = dict(zip(axes, np.ix_(*(np.arange(part.extents[axis]) for axis in axes)), strict=True))
    places = []
    for half in range(part.sizes.get("o", 1)) if o is None else (o,):
        at = {"o": half} if "o" in part.sizes else {}
        entry, offset = part.address(0, **index, **at)
        places.append((np.asarray(entry, np.int64) * (1 << 40) + np.asarray(offset)).ravel())
    starts = np.unique(np.concatenate(places))
    cuts = np.flatnonzero(np.diff(starts) != size)
    counts = np.diff(np.concatenate([[-1], cuts, [starts.size - 1]]))
    return counts.size, set((counts * size).tolist())


def said(text: str) -> list[tuple[str, int, int]]:
    """``K 512 × 4 KiB, V …`` as names, numbers and bytes."""
    units = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}
    found = re.findall(r"(?:(\w+) )?(?:([KV]) )?([\d,]+) × ([\d.,]+) (B|KiB|MiB)", text)
    return [
        (half or (name if name in ("K", "V") else ""), int(count.replace(",", "")), int(float(many.replace(",", "")) * units[unit]))
        for name, half, count, many, unit in found
    ]


def small(layout: kvbm.Layout) -> list[kvbm.BlockShape]:
    example = kvbm.load_shape(example_shape(layout) or "nl=2,no=2,nh=2,nt=4,hd=8")
    found = []
    for no, (nl, nh, nt, hd) in itertools.product(
        (2, 1), ((3, 2, 4, 16), (2, 1, 8, 16), (1, 3, 16, 32), (2, 2, 16, 128), (2, 2, 1, 16), (2, 1, 64, 128))
    ):
        shape = kvbm.BlockShape(nl, no, nh, nt, hd, example.dtype)
        try:
            layout.resolve(shape, 2)
        except LayoutError:
            continue
        found.append(shape)
        if len(found) == 3:
            break
    return found


def test_runs_are_those_of_every_address() -> None:
    checked = 0
    own = [parse(text, f"m{n}", f"m{n}") for n, text in enumerate(MIXED)]
    for layout in {one.fingerprint: one for one in [*load_dir(layouts_dir()), *own]}.values():
        for shape in small(layout):
            resolved = layout.resolve(shape, 2)
            if len(resolved.planes) > 1:
                continue  # planes are counted one by one, or as whole records
            part = resolved.planes[0]
            if part.block_bytes > 40_000:
                continue
            for fixed in HELD:
                text = facts.runs(resolved, fixed)
                if "×" not in text:
                    continue
                for half, count, nbytes in said(text):
                    o = 0 if "o" in fixed and not half else {"K": 0, "V": 1}.get(half)
                    assert counted(part, fixed, o) == (count, {nbytes}), (layout.name, layout.order_text, str(shape), fixed, text)
                    checked += 1
    assert checked > 500


def test_k_and_v_of_other_orders_in_one_allocation_are_one_run_where_they_meet() -> None:
    resolved = kvbm.load("vllm/cpu_vec").resolve(kvbm.load_shape("llama-3.1-8b"), 1024)
    assert facts.one_block(resolved) == "32 runs of 64 KiB, each contiguous"
    assert facts.runs(resolved, ("o",)) == "256 × 4 KiB"
    shape = kvbm.load_shape("llama-3.1-8b")
    for name in ("vllm/cpu_vec", "nhd", "universal"):
        found = said(facts.runs(kvbm.load(name).resolve(shape, 8), ()))
        assert sum(count * nbytes for _, count, nbytes in found) == shape.nbytes


@pytest.mark.parametrize(
    ("meant", "sizes", "said"),
    [
        ("record/per_token_head_fp8_planes", "", "one float32 for each token and head (128 elements)"),
        ("vllm/nvfp4", "", "one float8_e4m3fn for each token, head and 16 elements along d"),
        ("vllm/fp8_ds_mla", ",no=1,nh=1,hd=576", "one float32 for each token and 128 elements along c"),
        (("[b] l o", "t h d", "t", "h"), "", "one float32 for each token (1,024 elements)"),
        (("[b] l o", "t h d", "", "h t"), "", "one float32 for each layer (16,384 elements)"),
        (("[b] l", "o t h d", "t", "o h"), "", "one float32 for each token, for K and V together (2,048 elements)"),
        (("[b]", "l o t h d", "", "l o t h"), "",
         "one float32 for each block, for all layers and K and V together (65,536 elements)"),
        (("[b] l o", "t h d", "h d", "t"), "", "one float32 for each head and d (16 elements)"),
        (("[b] l o", "t h d", "t h", ""), ",nh=1,nt=1", "one float32 for each layer (128 elements)"),
    ],
)  # fmt: skip
def test_what_has_one_scale_is_said(meant: str | tuple[str, ...], sizes: str, said: str) -> None:
    if isinstance(meant, str):
        layout = kvbm.load(meant)
    else:
        around, data, scale, shared = meant
        planes = (
            f'{{order: "{data}", dtype: int8}}',
            f'{{order: "{scale}", dtype: float32, scales: x, shared: "{shared}"}}',
        )
        text = f'order: "{around} <x s>"\nplanes: {{x: {planes[0]}, s: {planes[1]}}}\n'
        layout = parse(text.replace(', shared: ""', "").replace('order: "", ', ""), "mine", "mine")
    resolved = layout.resolve(kvbm.load_shape(f"llama-3.1-8b,nl=2{sizes}"), 2)
    (line,) = facts.scale_lines(resolved)
    assert line == (f"scales of {next(iter(layout.scales.values()))}", said)
    assert line in facts.facts(resolved)


def test_a_file_sends_nothing_to_the_terminal() -> None:
    """Red: a title or the name of an engine could move the cursor, or change the title of the window."""
    layout = parse('title: "\\e]0;x\\a"\norder: "[l] b o t h d"\nused_by: ["a\\e[2Jb"]\n', "mine", "mine")
    said = facts.facts(layout.resolve(kvbm.load_shape("llama-3.1-8b,nl=2"), 2))
    assert {name for name, _ in said} >= {"title", "used by"}
    assert all(text.isprintable() for _, text in said), said
