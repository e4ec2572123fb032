"""Layouts: properties at every coordinate of random layouts; the shipped layouts; errors."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

import kvbm
import matrix
import oracle
import strategies
from kvbm.layout import spec
from memory import placed

SHAPE = kvbm.BlockShape(nl=3, no=2, nh=4, nt=8, hd=32, dtype="bfloat16")


def block_shape(sizes: strategies.Sizes) -> kvbm.BlockShape:
    return kvbm.BlockShape(nl=sizes.nl, no=sizes.no, nh=sizes.nh, nt=sizes.nt, hd=sizes.hd, dtype=sizes.dtype)


def same_function(resolved: Any, want: oracle.Placed) -> None:
    """Every coordinate: its address is the oracle's, inside its allocation, and no other coordinate's.

    All of them are asked for with arrays, and a hundred one by one.
    """
    entry, offset = want.address(np.arange(want.num_blocks))
    axis = oracle.AXES.index("o")
    for o in range(entry.shape[axis]):  # one per call, if K and V have different orders
        block, *rest = (np.take(each, o, axis) for each in np.indices(entry.shape))
        got = resolved.address(block, **{**dict(zip(oracle.AXES[1:], rest, strict=True)), "o": o})
        for found, wanted in zip(got, (np.take(entry, o, axis), np.take(offset, o, axis)), strict=True):
            assert np.array_equal(np.broadcast_to(found, block.shape), wanted), (o, np.argwhere(found != wanted)[:1])
    limits = np.array([a.nbytes for a in resolved.allocations])
    assert offset.min() >= 0 and (offset + want.itemsize <= limits[entry]).all()
    assert np.unique(np.stack([entry.ravel(), offset.ravel()]), axis=1).shape[1] == entry.size
    for number in range(0, entry.size, max(entry.size // 100, 1)):
        index = tuple(map(int, np.unravel_index(number, entry.shape)))
        one = resolved.address(index[0], **dict(zip(oracle.AXES[1:], index[1:], strict=True)))
        assert one == (int(entry[index]), int(offset[index])) and type(one[1]) is int, (index, one)


def same_allocations(resolved: Any, want: oracle.Placed) -> None:
    assert len(resolved.allocations) == resolved.table_size == len(want.spaces)
    for index, (allocation, space) in enumerate(zip(resolved.allocations, want.spaces, strict=True)):
        assert allocation.shape == space.shape, index
        assert allocation.strides == space.strides, index
        assert allocation.nbytes == space.nbytes, index
        assert len(allocation.axes) == len(allocation.shape)
        if len(want.spaces) > 1:
            assert allocation.label == " ".join(f"{word}={value}" for word, value in space.coords.items())
    assert resolved.nbytes == sum(space.nbytes for space in want.spaces)


@given(strategies.one(limit=700))
@strategies.cases(1200)
def test_laws(drawn: tuple[strategies.Sizes, strategies.Declared]) -> None:
    sizes, declared = drawn
    layout = spec.parse(declared.yaml)
    want = sizes.placed(declared.order)
    if len(want.id_step()) > 1:  # the only reason to refuse one of these
        with pytest.raises(kvbm.LayoutError, match="'b'"):
            layout.resolve(block_shape(sizes), sizes.num_blocks)
        return
    resolved = layout.resolve(block_shape(sizes), sizes.num_blocks)
    same_allocations(resolved, want)
    same_function(resolved, want)


@given(strategies.one(limit=200))
def test_text_and_back(drawn: tuple[strategies.Sizes, strategies.Declared]) -> None:
    """A printed layout is the text that was written, and the fingerprint depends on its meaning."""
    _, declared = drawn
    layout = spec.parse(declared.yaml, file="one.yaml", name="one")
    again = spec.parse("title: other\n" + declared.yaml, file="two.yaml", name="two")
    assert layout.fingerprint == again.fingerprint
    assert layout == again and hash(layout) == hash(again)
    assert len(layout.fingerprint) == 16 and int(layout.fingerprint, 16) >= 0
    if not declared.order.v and not declared.order.pitch:
        assert spec.parse(f'order: "{layout.order_text}"').fingerprint == layout.fingerprint


@pytest.mark.parametrize("name", sorted(matrix.SHIPPED))
def test_shipped_is_what_the_design_says(name: str) -> None:
    layout, order = kvbm.load(name), matrix.SHIPPED[name]
    assert layout.name == name
    for shape, blocks in ((SHAPE, 3), (kvbm.BlockShape(nl=2, no=1, nh=1, nt=2, hd=16, dtype="int8"), 2)):
        want = placed(order, shape, blocks)
        want.check()
        resolved = layout.resolve(shape, blocks)
        same_allocations(resolved, want)
        same_function(resolved, want)
    on_disk = matrix.LAYOUTS / f"{name}.yaml"
    text = oracle.read_yaml(on_disk, name)
    assert (text.k.split(), text.v.split()) == (order.k.split(), order.v.split())


@pytest.mark.parametrize("name", sorted(matrix.orders()))
def test_every_file_is_listed_and_titled(name: str) -> None:
    assert name in kvbm.layouts()
    layout = kvbm.load(name)
    assert layout.title and layout.order_text and layout.file.endswith(f"{Path(name).name}.yaml")
    assert layout.used_by
    shape = kvbm.BlockShape(nl=3, no=1, nh=1, nt=8, hd=32) if matrix.latent(name) else replace(SHAPE, nt=16)
    shape = kvbm.BlockShape(nl=1, no=1, nh=1, nt=128, hd=32) if matrix.scales(name) else shape
    same_allocations(layout.resolve(shape, 2), placed(matrix.orders()[name], shape, 2))


def test_names() -> None:
    names = kvbm.layouts()
    assert names == sorted(set(names))
    assert set(names) == {*matrix.orders(), *matrix.padded(), *matrix.planar()}


def test_fingerprints_differ_by_meaning() -> None:
    prints = {
        name: kvbm.load(name).fingerprint
        for name in (*matrix.SHIPPED, *matrix.further(), *matrix.padded(), *matrix.planar())
    }
    # nhd with blocks of [b l o] and [l o] are two meanings; the catalogue's aliases are left out
    assert len(set(prints.values())) == len(prints)
    assert set(prints.values()) == {kvbm.load(name).fingerprint for name in kvbm.layouts()}


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("[b] l o h t d", "[ b ]  l o h t d", True),
        ("b l o h t d", "b l o t h d", False),
        ("[b l o] t h d", "[b] l o t h d", False),
        ("b l o {t h d}", "b l o t h d", False),
        ("b l o h d/8 t d%8", "b l o h d/16B t d%16B", False),
        ("b l o h d/8 t d%8", "b l o h d/4 t d%4", False),
    ],
)
def test_fingerprint(one: str, other: str, same: bool) -> None:
    a, b = (spec.parse(f'order: "{text}"') for text in (one, other))
    assert (a.fingerprint == b.fingerprint) is same
    assert (a == b) is same


def test_fingerprint_knows_pitch_and_axes() -> None:
    texts = (
        'order: "b l o h t d"',
        'order: "b l o h t d"\npitch: {t: "64 B"}',
        'order: "b l o h t d"\npitch: {t: "64"}',
        'order: "b l o h t d"\npitch: {h: "64 B"}',
        'axes: {g: "2"}\norder: "b l o h t d g"',
        'axes: {g: "3"}\norder: "b l o h t d g"',
        "order: {k: '[l o] b h t d', v: '[l o] b h d t'}",
        "order: {k: '[l o] b h d t', v: '[l o] b h t d'}",
    )
    assert len({spec.parse(text).fingerprint for text in texts}) == len(texts)


def test_pitch_expression() -> None:
    """The record of DeepSeek V4: 584 B per token, pages rounded up to a multiple of 576 B."""
    layout = spec.parse('order: "[l] b o h t d"\npitch: {b: "round_up(nt*584, 576) B"}')
    shape = kvbm.BlockShape(nl=2, no=1, nh=1, nt=64, hd=584, dtype="uint8")
    first = layout.resolve(shape, 3).allocations[0]
    pitch = -(-64 * 584 // 576) * 576
    assert pitch == 37440 and first.nbytes == 3 * pitch
    assert first.strides[0] == pitch
    assert layout.resolve(shape, 3).address(2, l=1, t=63, d=583) == (1, 2 * pitch + 64 * 584 - 1)


def test_pitch_in_elements() -> None:
    layout = spec.parse('order: "b l o h t d"\npitch: {t: 40}')
    allocation = layout.resolve(SHAPE, 2).allocations[0]
    assert dict(zip(allocation.axes, allocation.strides, strict=True))["t"] == 40 * 2


def test_pitch_in_elements_of_four_bits_counts_elements() -> None:
    packed = kvbm.BlockShape(nl=2, no=2, nh=2, nt=4, hd=32, dtype="int4")
    for layout in (
        spec.parse('order: "b l o h t d"\npitch: {t: 40}'),
        spec.parse('order: "b l o h <x y>"\nplanes: {x: {order: t d, dtype: uint4, pitch: {t: 40}}, y: {dtype: int8, shared: t}}'),
    ):
        piece = next(piece for piece in layout.resolve(packed, 2).planes[0].pieces() if piece.term.axes == ("t",))
        assert piece.stride == 40 // 2
    assert kvbm.load("vllm/tpu").resolve(packed, 2).allocations[0].shape[-1] == 16
    assert kvbm.load("vllm/tpu").resolve(packed, 2).nbytes == 2 * 2 * 4 * 2 * 2 * 128 // 2
    with pytest.raises(kvbm.LayoutError, match="pitch of 't': 2 elements share a byte: expected a multiple of 2 elements, got 41"):
        spec.parse('order: "b l o h t d"\npitch: {t: 41}').resolve(packed, 2)


def test_resolved_layouts_can_be_pickled_and_copied() -> None:
    latent = kvbm.load_shape("deepseek-v3,nl=2")
    for resolved in (kvbm.load("universal").resolve(SHAPE, 3), kvbm.load("vllm/fp8_ds_mla").resolve(latent, 3)):
        assert resolved.section is not None  # computed once, and not copied
        for again in (pickle.loads(pickle.dumps(resolved)), copy.deepcopy(resolved), copy.copy(resolved)):
            assert again == resolved and repr(again) == repr(resolved)
            assert again.allocations == resolved.allocations
            with pytest.raises(TypeError):
                again.sizes["l"] = 5


def test_axis_of_size_one_may_be_left_out() -> None:
    layout = spec.parse('order: "[l] b t d"')
    mla = kvbm.BlockShape(nl=2, no=1, nh=1, nt=4, hd=6, dtype="float16")
    same_function(layout.resolve(mla, 2), placed(oracle.Order("[l] b t d"), mla, 2))
    with pytest.raises(kvbm.LayoutError, match=r"'h'|'o'"):
        layout.resolve(SHAPE, 2)


@pytest.mark.parametrize(
    ("order", "match"),
    [
        ("b l o h d/5 t d%5", r"(?s)d/5.*32|32.*d/5"),  # does not divide
        ("b l o h d/24B t d%24B", r"(?s)12.*32|32.*12"),  # 12 elements do not divide 32
        ("b l o h d/3B t d%3B", r"3B.*2-byte|3 bytes.*2"),  # not whole elements
        ("b l o h d/8 t", r"'d'"),  # does not cover
        ("b l o h d%8 t", r"'d'"),
        ("b l o h d/8 t d%4", r"'d'"),
        ("b l o h d/4 t d%8", r"'d'"),  # covers twice
        ("b l o h t", r"'d'"),  # missing
        ("b l h t d", r"'o'"),
    ],
)
def test_not_legal_for_the_shape(order: str, match: str) -> None:
    with pytest.raises((kvbm.LayoutError, kvbm.SpecError), match=match) as info:
        spec.parse(f'title: t\norder: "{order}"', file="here.yaml").resolve(SHAPE, 2)
    assert "here.yaml:2" in str(info.value), "the error names the file and the line"


def test_overlapping_pitch() -> None:
    with pytest.raises(kvbm.LayoutError, match=r"(?s)'t'.*64.*62") as info:
        spec.parse('order: "b l o h t d"\npitch: {t: "62 B"}', file="here.yaml").resolve(SHAPE, 2)
    assert "here.yaml" in str(info.value)


def test_pitch_that_just_fits() -> None:
    layout = spec.parse('order: "b l o h t d"\npitch: {t: "64 B"}')
    assert layout.resolve(SHAPE, 2).allocations[0].nbytes == 2 * SHAPE.nbytes


@pytest.mark.parametrize("blocks", [0, -1])
def test_no_blocks(blocks: int) -> None:
    with pytest.raises(kvbm.LayoutError, match=str(blocks)):
        kvbm.load("nhd").resolve(SHAPE, blocks)


def test_opaque_is_a_run() -> None:
    resolved = kvbm.load("operational").resolve(SHAPE, 2)
    assert resolved.table_size == 2
    assert resolved.allocations[0].nbytes == SHAPE.nbytes
    assert math.prod(resolved.allocations[0].shape) == SHAPE.nbytes // 2


def test_k_and_v_in_one_allocation() -> None:
    order = oracle.Order("[l] b o h d/4 t d%4", "[l] b o h d t")
    layout = spec.parse(f'order:\n  k: "{order.k}"\n  v: "{order.v}"')
    want = placed(order, SHAPE, 2)
    want.check()
    same_function(layout.resolve(SHAPE, 2), want)
    same_allocations(layout.resolve(SHAPE, 2), want)


def test_k_and_v_that_would_overlap() -> None:
    """V's half starts where K's ends only if what is slower than 'o' agrees."""
    layout = spec.parse('order:\n  k: "[l] b o h t d"\n  v: "[l] b h o d t"')
    with pytest.raises(kvbm.LayoutError):
        layout.resolve(SHAPE, 2)


def test_shapes() -> None:
    one = kvbm.load_shape("llama-3.1-70b/tp8")
    assert (one.nl, one.no, one.nh, one.hd) == (80, 2, 1, 128)
    whole = kvbm.load_shape("llama-3.1-70b")
    assert whole.nbytes == 80 * 2 * 8 * whole.nt * 128 * 2
    assert whole.dtype == "bfloat16" and whole.itemsize == 2
    small = kvbm.load_shape("llama-3.1-8b,nt=32,dtype=float8_e4m3fn")
    assert (small.nl, small.nh, small.nt, small.hd, small.dtype) == (32, 8, 32, 128, "float8_e4m3fn")
    free = kvbm.load_shape("nl=2,no=2,nh=4,nt=16,hd=32,dtype=float16")
    assert free == kvbm.BlockShape(nl=2, no=2, nh=4, nt=16, hd=32, dtype="float16")
    assert free.sizes == {"l": 2, "o": 2, "h": 4, "t": 16, "d": 32}
    names = kvbm.shape_names()
    assert "llama-3.1-8b" in names and "llama-3.1-70b" in names
    for name in names:
        kvbm.load_shape(name).sizes  # noqa: B018  (each listed name loads)


@pytest.mark.parametrize("dtype", sorted(oracle.ITEMSIZE))
def test_itemsize(dtype: str) -> None:
    from kvbm.layout.shapes import ITEMSIZE

    assert ITEMSIZE[dtype] == oracle.ITEMSIZE[dtype]
    assert kvbm.BlockShape(nl=1, no=1, nh=1, nt=1, hd=6, dtype=dtype).nbytes == 6 * oracle.ITEMSIZE[dtype]


def test_dtypes_are_these() -> None:
    from kvbm.layout.shapes import ITEMSIZE

    assert set(ITEMSIZE) == {*oracle.ITEMSIZE, *oracle.PAIRED}


@pytest.mark.parametrize("dtype", oracle.PAIRED)
def test_two_elements_share_a_byte(dtype: str) -> None:
    shape = kvbm.BlockShape(nl=3, no=2, nh=1, nt=5, hd=6, dtype=dtype)
    assert (shape.itemsize, shape.pack, shape.nbytes) == (1, 2, 3 * 2 * 5 * 3)


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("llama-9", kvbm.SpecError, r"llama-9.*llama-3\.1-8b"),
        ("llama-3.1-70b/tp3", kvbm.SpecError, r"3"),
        ("llama-3.1-8b,nx=3", kvbm.SpecError, r"nx"),
        ("llama-3.1-8b,nt=0", kvbm.KvbmError, r"nt"),
        ("llama-3.1-8b,nt=-4", kvbm.KvbmError, r"nt"),
        ("llama-3.1-8b,nt=x", kvbm.SpecError, r"nt.*'x'"),
        ("llama-3.1-8b,dtype=float7", kvbm.DTypeError, r"float7"),
        ("nl=2,no=2,nh=4", kvbm.SpecError, r"nt.*hd|hd.*nt"),
        ("", kvbm.SpecError, r"."),
    ],
)
def test_bad_shapes(text: str, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        kvbm.load_shape(text)


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", True])
def test_bad_size(value: Any) -> None:
    with pytest.raises((kvbm.KvbmError, TypeError), match="nh"):
        kvbm.BlockShape(nl=1, no=2, nh=value, nt=2, hd=2)


@pytest.mark.parametrize("given", ["[l] b o t h d", ("[l] b o t h d",), None])
def test_a_text_is_no_layout(given: Any) -> None:
    with pytest.raises(kvbm.SpecError, match=r"Layout: expected a tuple of Order, got .*call kvbm\.load"):
        kvbm.Layout(given)


@pytest.mark.parametrize(("count", "own", "kinds"), [(256, "", 256), (257, "", 257), (128, "kv", 256), (129, "kv", 258)])
def test_planes_with_arrays_of_many_kinds(count: int, own: str, kinds: int) -> None:
    """A table has one byte for the kind of each of its entries.  K and V with orders of their own are two kinds for each plane."""
    orders = "order: {k: t d, v: d t}" if own else "order: t d"
    names = [f"p{i}" for i in range(count)]
    text = f'order: "[l <{" ".join(names)}> o] b"\nplanes:\n' + "".join(f"  {name}: {{{orders}}}\n" for name in names)
    layout, shape = spec.parse(text, "x.yaml"), kvbm.load_shape("nl=2,no=2,nh=1,nt=2,hd=4,dtype=uint8")
    if kinds > 256:
        with pytest.raises(kvbm.LayoutError, match=rf"x.yaml:1: planes with arrays.*most 256 kinds.*got {kinds} of {count}"):
            layout.resolve(shape, 2)
        return
    resolved = layout.resolve(shape, 2)
    turn = [[2 * plane, 2 * plane + 1] if own else [plane, plane] for plane in range(count)]
    assert list(resolved.kind_of_entry) == [kind for _ in range(2) for pair in turn for kind in pair]
    assert len(kvbm.Pool.allocate(layout, shape, 2).arrays) == resolved.table_size == 4 * count
    record = spec.parse(text.replace("[l <", "[l o] b <").replace("> o] b", ">"))
    assert len(record.resolve(shape, 2).kinds) == 1
