"""Formats of one byte: two typed arrays never exchange bits without a word; a dtype that no plane uses means nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvbm
import kvbm.numpy
from kvbm import DTypeError, Placement, PlanError, Pool, Span, Transfer, reshard, store, wire
from kvbm.reshard import Endpoint

#: Arrays of one byte: bytes, and formats.
RAW = ("uint8", "int8", "V1")
TYPED = ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "bool")
SIZES = "nl=2,no=2,nh=4,nt=16,hd=8"
PLACE = Placement("tp1", model=kvbm.load_shape(f"{SIZES},dtype=uint8"), name="a")
#: Layouts with the planes that the layout in `RECORD` packs into one array.
PLANES = """order: "[<data scale> l] b t h"
planes: {data: {order: "o d", dtype: uint8}, scale: {order: "o", dtype: float32}}
"""
RECORD = """order: "[l] b t h <data scale>"
planes: {data: {order: "o d", dtype: uint8}, scale: {order: "o", dtype: float32}}
"""


def dtype_of(name: str) -> Any:
    return np.dtype(getattr(ml_dtypes, name, name))


def arrays(layout: Any, name: str, shape: str = f"{SIZES},dtype=uint8", blocks: int = 3) -> list[np.ndarray]:
    """Arrays of a pool with values of all kinds; those of one byte have this dtype."""
    made = kvbm.load(layout).resolve(shape, blocks) if isinstance(layout, str) else layout.resolve(shape, blocks)
    kinds = [made.kinds[kind] for kind in made.kind_of_entry]
    return [np.zeros(k.shape, dtype_of(name) if k.itemsize == 1 else k.dtype) for k in kinds]


def ways(tmp_path: Path) -> dict[str, Callable[[Pool, Pool], Any]]:
    """Every conversion from one pool into another."""

    def files(src: Pool, dst: Pool) -> None:
        store.save(tmp_path / "a", src, force=True)
        store.convert(tmp_path / "a", tmp_path / "b", "universal", force=True)
        kvbm.convert(store.load(tmp_path / "a"), dst)
        kvbm.convert(store.load(tmp_path / "b"), dst)

    def mapped(src: Pool, dst: Pool) -> None:
        store.save(tmp_path / "a", src, force=True)
        kvbm.convert(store.read(tmp_path / "a").pool("vllm/flash_attn_nhd"), dst)

    def bridge(src: Pool, dst: Pool) -> None:
        kvbm.numpy.convert_(list(src.arrays), list(dst.arrays), src.layout, dst.layout, f"{SIZES},dtype=uint8")

    def local(src: Pool, dst: Pool) -> None:
        copy = reshard.Local(reshard.plan(PLACE, PLACE), [src], [dst])
        copy(Span([1], range(16)), Span([0], range(16)))

    def link(src: Pool, dst: Pool) -> None:
        hub = wire.Hub()
        ends = [
            Endpoint(name, PLACE, 0, pool, wire=wire.memory(name, hub), chunk_bytes=1 << 16, ring_bytes=1 << 20)
            for name, pool in (("a", src), ("b", dst))
        ]
        try:
            ends[0].meet([ends[1].card()])
            ends[1].meet([ends[0].card()])
        finally:
            for end in ends:
                end.close()

    return {
        "convert": kvbm.convert,
        "sections": lambda src, dst: kvbm.convert(src.section(h=[0]), dst.section(h=[1])),
        "units": lambda src, dst: kvbm.convert(src.units(4), dst.units(4)),
        "Transfer": lambda src, dst: Transfer(src, dst).copy([0], [1]),
        "verify": lambda src, dst: Transfer(src, dst, verify=True).copy([0], [1]).synchronize(),
        "Local": local, "link": link, "files": files, "mapped": mapped, "numpy": bridge,
    }  # fmt: skip


@pytest.mark.slow
def test_two_formats_are_refused_by_every_way_and_bytes_by_none(tmp_path: Path) -> None:
    src_name, dst_name, shape = "vllm/flash_attn_nhd", "universal", f"{SIZES},dtype=uint8"
    for (way, copy), (a, b) in itertools.product(ways(tmp_path).items(), itertools.product((*RAW[:2], *TYPED[:3]), repeat=2)):
        src, dst = Pool(src_name, shape, arrays(src_name, a)), Pool(dst_name, shape, arrays(dst_name, b))
        for one in src.arrays:
            one.view(np.uint8)[...] = 0x3C
        if a in TYPED and b in TYPED and a != b:
            with pytest.raises(DTypeError, match=rf"source's arrays are {a}, the destination's {b}.*\.view\(torch\.uint8\)"):
                copy(src, dst)
            assert not any(one.view(np.uint8).any() for one in dst.arrays), (way, a, b)
            # The way out that the message names works.
            copy(Pool(src_name, shape, [one.view("uint8") for one in src.arrays]), dst)
        else:
            copy(src, dst)
        assert way == "link" or any(one.view(np.uint8).any() for one in dst.arrays), (way, a, b)


def test_every_array_of_one_byte_by_every_other() -> None:
    """Also bool and raw bytes, and shapes of int8: what one pool holds, and what two pools exchange."""
    for shape, a, b in itertools.product(("uint8", "int8"), (*RAW, *TYPED), (*RAW, *TYPED)):
        src, dst = (Pool("nhd", f"{SIZES},dtype={shape}", arrays("nhd", name)) for name in (a, b))
        assert src.formats == ({"": a} if a in TYPED else {})
        if a in TYPED and b in TYPED and a != b:
            with pytest.raises(DTypeError):
                kvbm.convert(src, dst)
        else:
            kvbm.convert(src, dst)
    # Where the shape says the format, an array says nothing more.
    assert not Pool("nhd", f"{SIZES},dtype=float8_e4m3fn", arrays("nhd", "float8_e4m3fn")).formats


def test_wider_arrays_have_one_format_only() -> None:
    """Integers hold the bits of dtypes that NumPy does not have.  So a shape's integers are never another dtype's bits."""
    for name in ("uint16", "int16"):
        for other in ("bfloat16", "float16", "int16", "uint16"):
            given = [np.zeros(a.shape, dtype_of(other)) for a in Pool.allocate("nhd", f"{SIZES},dtype={name}", 2).arrays]
            if other == name:
                assert not Pool("nhd", f"{SIZES},dtype={name}", given).formats
            else:
                with pytest.raises(DTypeError):
                    Pool("nhd", f"{SIZES},dtype={name}", given)


def test_two_formats_of_one_plane_are_refused() -> None:
    layouts = [kvbm.layout.spec.parse(text, name=name) for text, name in ((PLANES, "apart"), (RECORD, "record"))]
    shape = f"{SIZES},dtype=bfloat16"
    for one, other in itertools.product(layouts, repeat=2):
        for a, b in itertools.product((*RAW[:2], *TYPED[:2]), repeat=2):
            src, dst = Pool(one, shape, arrays(one, a, shape)), Pool(other, shape, arrays(other, b, shape))
            if a in TYPED and b in TYPED and a != b:
                with pytest.raises(DTypeError, match=f"source's arrays are {a}, the destination's {b}"):
                    kvbm.convert(src, dst)
                kvbm.convert(src.section(planes="scale"), dst.section(planes="scale")) if one is other is layouts[0] else None
            else:
                kvbm.convert(src, dst)
    mixed = arrays(layouts[0], "float8_e4m3fn", shape)
    mixed[1] = mixed[1].view(ml_dtypes.float8_e5m2)
    with pytest.raises(DTypeError, match=r"apart.*plane 'data': arrays of float8_e4m3fn and of float8_e5m2"):
        Pool(layouts[0], shape, mixed)


def test_two_formats_in_torch() -> None:
    torch = pytest.importorskip("torch")
    import kvbm.torch

    shape = f"{SIZES},dtype=uint8"
    formats = [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2]
    for a, b in itertools.product(formats, repeat=2):
        src = [torch.full(x.shape, 0x3C, dtype=torch.uint8).view(a) for x in arrays("nhd", "uint8")]
        dst = [torch.zeros(x.shape, dtype=torch.uint8).view(b) for x in arrays("universal", "uint8")]
        if {a, b} == {torch.float8_e4m3fn, torch.float8_e5m2}:
            with pytest.raises(DTypeError, match=r"source's arrays are float8_.*\.view\(torch\.uint8\)"):
                kvbm.torch.convert_(src, dst, "nhd", "universal", shape)
            assert not any(one.view(torch.uint8).any() for one in dst)
        else:
            kvbm.torch.convert_(src, dst, "nhd", "universal", shape)
            assert all((one.view(torch.uint8) == 0x3C).all() for one in dst)


def test_two_formats_of_a_plane_in_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import kvbm.torch

    paths = [tmp_path / f"{name}.yaml" for name in ("apart", "record")]
    for path, text in zip(paths, (PLANES, RECORD), strict=True):
        path.write_text(text)
    shape = f"{SIZES},dtype=bfloat16"
    for one, other in itertools.product(paths, repeat=2):
        for a, b in itertools.product([torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2], repeat=2):
            src, dst = ([torch.from_numpy(x) for x in arrays(kvbm.load(p), "uint8", shape)] for p in (one, other))
            src, dst = ([x.view(d) if x.dtype == torch.uint8 else x for x in side] for side, d in ((src, a), (dst, b)))
            if a != b and torch.uint8 not in (a, b):
                with pytest.raises(DTypeError, match=r"convert_: .*source's arrays are float8_"):
                    kvbm.torch.convert_(src, dst, str(one), str(other), shape)
            else:
                kvbm.torch.convert_(src, dst, str(one), str(other), shape)


# ---- a dtype that no plane uses --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_dtype_of_the_shape_that_no_plane_uses_means_nothing(tmp_path: Path) -> None:
    shapes = [f"nl=3,no=1,nh=1,nt=64,hd=576,dtype={name}" for name in ("bfloat16", "uint8")]
    rng = np.random.default_rng(5)
    for (one, src_shape), (other, dst_shape) in itertools.product(
        itertools.product(("vllm/fp8_ds_mla", "record/mla_fp8_tensors", "record/mla_fp8_pages"), shapes), repeat=2
    ):
        src, dst = Pool.allocate(one, src_shape, 3), Pool.allocate(other, dst_shape, 4)
        for array in src.arrays:
            array.view(np.uint8)[...] = rng.integers(0, 256, array.view(np.uint8).shape, np.uint8)
        kvbm.convert(src, dst, [0, 2], [3, 1])
        assert np.array_equal(src.digest([0, 2]), dst.digest([3, 1]))
        Transfer(src, dst, verify=True).copy([1], [0]).synchronize()
        assert src.digest([1]) == dst.digest([0])
        places = [Placement("tp1", model=kvbm.load_shape(text), name=text[-4:]) for text in (src_shape, dst_shape)]
        for clear in (False, True):
            copy = reshard.Local(reshard.plan(*places), [src], [dst])
            copy(Span([2, 1], range(128)), Span([0, 3], range(128)), clear_tail=clear)
        assert np.array_equal(src.digest([2, 1]), dst.digest([0, 3]))
        if one == "vllm/fp8_ds_mla":  # a pool of either shape stands for a rank of either placement
            reshard.Local(reshard.plan(places[0], places[0]), [src], [Pool.allocate(one, dst_shape, 4)])
            store.save(tmp_path / "a", src, force=True)
            assert store.load(tmp_path / "a", shape=dst_shape).num_blocks == 3


def test_a_dtype_of_the_shape_that_a_plane_uses_is_compared() -> None:
    src, dst = (Pool.allocate("nhd", f"{SIZES},dtype={name}", 2) for name in ("bfloat16", "float16"))
    with pytest.raises(DTypeError, match="the source holds bfloat16, the destination float16"):
        kvbm.convert(src, dst)
    # Placements do not know layouts: models of bytes may be of records, which the pools show.
    raw = Placement("tp1", model=kvbm.load_shape(f"{SIZES},dtype=uint8"), name="b")
    typed = Placement("tp1", model=kvbm.load_shape(f"{SIZES},dtype=bfloat16"), name="c")
    made = reshard.plan(raw, typed)
    with pytest.raises(PlanError, match="uint8 in the source, bfloat16 in the destination; a copy converts no dtype"):
        reshard.Local(made, [Pool.allocate("nhd", raw.shape(0), 2)], [src])
    with pytest.raises(PlanError, match="dtype: bfloat16 in one model, float16 in the other"):
        reshard.plan(typed, Placement("tp1", model=kvbm.load_shape(f"{SIZES},dtype=float16"), name="d"))
