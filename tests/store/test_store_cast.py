"""Files whose values are cast: every byte of them, what their metadata say, and who may read them.

Expected bytes come from `casting`, whose oracles share no code with kvbm, and files are read by the parser below.
"""

from __future__ import annotations

import json
import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import casting
import kvbm
from casting import Given, Scales, Side, Sizes, cast_of, header, tensors
from kvbm import store
from kvbm.layout import spec

E4M3 = "float8_e4m3fn"
GQA, MLA = (2, 2, 3, 4, 64), (2, 1, 1, 4, 576)

#: Quantised layout, plain layout, sizes, dtype, scale of the caller (None: "amax"), and what the file says of the cast planes.
CASES: tuple[tuple[str, Any, Sizes, str, float | None, dict[str, str]], ...] = (
    ("record/per_token_head_fp8_planes", "nhd", GQA, "bfloat16", None,
     {"data": "float8_e4m3fn, one float32 for each token and head (64 elements), from bfloat16"}),
    ("vllm/per_token_head_int8", "vllm/LBHNC", GQA, "float16", None,
     {"data": "int8, one float32 for each token and head (64 elements), from float16"}),
    ("record/mxfp8_tensors", "universal", GQA, "float32", None,
     {"data": "float8_e4m3fn, one float8_e8m0fnu for each token, head and 32 elements along d, from float32"}),
    ("vllm/nvfp4", "nhd", GQA, "bfloat16", None,
     {"data": "float4_e2m1fn, one float8_e4m3fn for each token, head and 16 elements along d, from bfloat16"}),
    ("record/nvfp4_universal", "hnd", GQA, "float32", 0.0271,
     {"data": "float4_e2m1fn, one float8_e4m3fn for each token, head and 16 elements along d, times 0.0271, from float32"}),
    ("vllm/fp8_ds_mla", "record/mla_joined", MLA, "bfloat16", None,
     {"latent": "float8_e4m3fn, one float32 for each token and 128 elements along c, from bfloat16"}),
)  # fmt: skip


def sides(case: tuple[Any, ...], *, quantises: bool, blocks: tuple[int, int] = (5, 3)) -> tuple[Side, Side]:
    """Source and destination of a copy; the destination is zero, as padding of files is."""
    name, other, sizes, dtype, *_ = case
    both = [(other, dtype), (name, "bfloat16")]
    (a, a_type), (b, b_type) = both if quantises else both[::-1]
    src, dst = Side(a, sizes, a_type, blocks[0], seed=3), Side(b, sizes, b_type, blocks[1], dst=True)
    dst.put(np.zeros_like(dst.before))
    return src, dst


def as_bytes(side: Side, buffer: np.ndarray) -> list[bytes]:
    """The bytes of a side's arrays, if its memory held these."""
    side.put(buffer)
    return [np.ascontiguousarray(array).tobytes() for array in side.pool.arrays]


def expected(src: Side, dst: Side, ids: list[int], scale: Scales) -> list[bytes]:
    return as_bytes(dst, casting.expected(src, dst, ids, range(len(ids)), scale))


def held(pool: Any) -> list[bytes]:
    return [np.ascontiguousarray(array).tobytes() for array in pool.arrays]


IDS = [4, 0, 2]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_save_quantises_and_load_dequantises(tmp_path: Path, case: tuple[Any, ...]) -> None:
    scale, said = case[4:]
    path, back = tmp_path / "in", tmp_path / "back"
    src, dst = sides(case, quantises=True)
    store.save(path, src.pool, IDS, layout=dst.layout, cast=cast_of(scale))
    want = expected(src, dst, IDS, scale)
    assert tensors(path) == want and src.untouched
    stored = store.read(path)
    assert {plane: str(one) for plane, one in stored.casts.items()} == said
    assert stored.metadata["kvbm.format"] == ("1" if scale is None else "2")
    assert stored.digests is not None and np.array_equal(stored.digests.blocks, dst.pool.digest())
    assert store.verify(path) == []
    # And back: by load, and by convert into another file.
    for ids in ([2, 0, 1], [1]):
        here, there = sides(case, quantises=False, blocks=(3, len(ids)))
        here.put(dst.after.copy())
        want = expected(here, there, ids, scale)
        given: list[Any] = ["amax"] if scale is None else ["amax", kvbm.Scale(scale)]
        for cast in given:
            got = store.load(path, ids, layout=there.layout, cast=cast)
            assert got.shape == there.shape and held(got) == want
        made = store.convert(path, back, there.layout, ids, cast="amax", force=True)
        assert tensors(back) == want and made.metadata["kvbm.format"] == "1" and made.shape == there.shape
        assert {(one.dtype, one.before, one.scale) for one in made.casts.values()} == {
            (case[3], said[plane].partition(",")[0], None) for plane in said
        }
        assert np.array_equal(made.digests.blocks, store.load(back).digest()) and store.verify(back) == []
    # A file of the same blocks that was not cast has other digests, and is quantised to the same bits.
    store.save(tmp_path / "plain", src.pool, IDS)
    assert not set(store.read(tmp_path / "plain").digests.blocks) & set(stored.digests.blocks)
    store.convert(tmp_path / "plain", tmp_path / "again", dst.layout, cast=cast_of(scale))
    assert (tmp_path / "again").read_bytes() == path.read_bytes()
    got = store.load(tmp_path / "plain", layout=dst.layout, cast=cast_of(scale))
    assert held(got) == tensors(path)


# ---- scales that no plane holds --------------------------------------------------------------------------------------

#: dtype before, dtype in the file, scale.
CONSTANT = (("bfloat16", E4M3, 0.5), ("float32", "float8_e5m2", 3.0), ("float16", "int8", 0.37), ("bfloat16", "int8", 1.0))


def constant(path: Path, before: str, dtype: str, scale: float) -> tuple[Side, list[bytes]]:
    """A file of codes with a scale of the caller, its source, and its expected tensors."""
    src, dst = Side("nhd", GQA, before, 5, seed=4), Side("universal", GQA, dtype, 3, dst=True)
    store.save(path, src.pool, IDS, layout="universal", dtype=dtype, cast=kvbm.Scale(scale))
    return dst, expected(src, dst, IDS, scale)


@pytest.mark.parametrize(("before", "dtype", "scale"), CONSTANT)
def test_a_scale_of_the_caller_is_in_the_file(tmp_path: Path, before: str, dtype: str, scale: float) -> None:
    path, scale = tmp_path / "in", float(np.float32(scale))
    codes, want = constant(path, before, dtype, scale)
    assert tensors(path) == want
    metadata = header(path)["__metadata__"]
    assert metadata["kvbm.format"] == ("1" if scale == 1 else "2")
    assert json.loads(metadata["kvbm.cast"]) == {"": {"dtype": dtype, "from": before, "scale": scale}}
    here, there = Side("universal", GQA, dtype, 3), Side("hnd", GQA, before, 3, dst=True)
    here.put(codes.after.copy())
    values = expected(here, there, [2, 1, 0], scale)
    for cast in ("amax", kvbm.Scale(scale)):
        got = store.load(path, [2, 1, 0], layout="hnd", cast=cast)
        assert held(got) == values and got.shape.dtype == before
        store.convert(path, tmp_path / "out", "hnd", [2, 1, 0], cast=cast, force=True)
        assert tensors(tmp_path / "out") == values and header(tmp_path / "out")["__metadata__"]["kvbm.format"] == "1"
    # The codes themselves, for a caller who names the scale.
    assert held(store.load(path, cast=kvbm.Scale(scale), dtype=dtype)) == want
    assert held(store.read(path).pool("universal", cast=kvbm.Scale(scale))) == want
    # Every copy of the codes keeps their scale.
    store.convert(path, tmp_path / "moved", "vllm/LBHNC")
    store.convert(tmp_path / "moved", tmp_path / "codes", "universal", cast=kvbm.Scale(scale), dtype=dtype)
    assert (tmp_path / "codes").read_bytes() == path.read_bytes()
    store.convert(path, path, "universal", verify=False, force=True)
    assert (tmp_path / "codes").read_bytes() == path.read_bytes()
    store.save(tmp_path / "bare", store.load(path, cast=kvbm.Scale(scale), dtype=dtype), digests=False)
    assert "kvbm.cast" not in header(tmp_path / "bare")["__metadata__"], "a pool has no scale"


def test_codes_without_their_scale_are_refused(tmp_path: Path) -> None:
    """Red: with kvbm.format 1, a version that knows no casts reads 0.5 times the values."""
    path, out = tmp_path / "in", tmp_path / "out"
    constant(path, "bfloat16", E4M3, 0.5)
    tensor = tmp_path / "nvfp4"
    src, dst = sides(CASES[4], quantises=True)
    store.save(tensor, src.pool, layout=dst.layout, cast=kvbm.Scale(0.5))
    stored = store.read(path)
    told = r"holds \S+ codes of \S+ values, to be multiplied by 0.5, .* pass cast='amax' .* pass cast=kvbm.Scale\(0.5\)"
    other = r"cast with Scale\(0.5\), so Scale\(0.25\) would give other values; pass cast='amax'"
    for call, words in (
        (lambda: store.load(path), told),
        (lambda: store.load(path, layout="hnd"), told),
        (lambda: store.load(path, dtype=E4M3, cast="amax"), told),
        (lambda: store.load(path, cast=kvbm.Scale(0.25)), other),
        (lambda: store.load(path, dtype=E4M3, cast=kvbm.Scale(0.25)), other),
        (lambda: store.load(path, cast=kvbm.Scale(1)), r"cast with Scale\(0.5\), so Scale\(1.0\)"),
        (lambda: store.convert(path, out, "hnd", cast=kvbm.Scale(0.25)), other),
        (lambda: stored.pool("universal"), told),
        (lambda: stored.pool("universal", cast="amax"), told),
        (lambda: stored.pool("universal", cast=kvbm.Scale(0.25)), other),
        (lambda: stored.source("universal"), told),
        (lambda: store.load(tensor), told),
        (lambda: store.load(tensor, layout="nhd", cast=kvbm.Scale(0.25)), f"plane 'data' was {other}"),
    ):
        with pytest.raises(kvbm.BindError, match=words):
            call()
    assert not out.exists()
    store.save(tensor, src.pool, layout=dst.layout, cast="amax", force=True)
    with pytest.raises(kvbm.BindError, match=r"cast with Scale\(1.0\), so Scale\(0.5\) would"):
        store.load(tensor, layout="nhd", cast=kvbm.Scale(0.5))
    assert store.load(tensor).layout == dst.layout, "scales that are in the file are enough"


#: Scales of three layers, and a file that they are for: quantised layout, dtype, plane.
BY_LAYER = (
    (Given((0.5, 0.01, 3.0)), "universal", E4M3, ""),
    (Given((0.5, 0.01, 3.0), (0.25, 0.02, 7.0)), "vllm/LBHNC", "int8", ""),
    (Given(0.5, (0.25, 0.02, 7.0)), "record/nvfp4_universal", "bfloat16", "data"),
)


@pytest.mark.parametrize(("given", "layout", "dtype", "plane"), BY_LAYER)
def test_scales_by_layer_are_in_the_file(tmp_path: Path, given: Given, layout: str, dtype: str, plane: str) -> None:
    sizes, path = (3, 2, 2, 4, 64), tmp_path / "in"
    src, dst = Side("nhd", sizes, "bfloat16", 5, seed=4), Side(layout, sizes, dtype, 3, dst=True)
    dst.put(np.zeros_like(dst.before))
    options = {"dtype": dtype} if not plane else {}
    store.save(path, src.pool, IDS, layout=layout, cast=given.cast, **options)
    want = expected(src, dst, IDS, given)
    metadata = header(path)["__metadata__"]
    assert tensors(path) == want and metadata["kvbm.format"] == "2"
    numbers = [[float(np.float32(one)) for one in np.atleast_1d(of)] for of in (given.k, given.v) if of is not None]
    said = [one if len(one) > 1 else one[0] for one in numbers]
    assert json.loads(metadata["kvbm.cast"])[plane]["scale"] == (said[0] if given.v is None else {"k": said[0], "v": said[1]})
    found, flat = store.read(path).casts[plane], [one for of in numbers for one in of]
    assert found.scale == given.cast
    assert f", times {len(flat)} scales from {min(flat):g} to {max(flat):g}, from bfloat16" in str(found)
    here, there = Side(layout, sizes, dtype, 3), Side("hnd", sizes, "bfloat16", 2, dst=True)
    here.put(dst.after.copy())
    values = expected(here, there, [2, 1], given)
    same = kvbm.Scale(k=[given.of(n, 0) for n in range(3)], v=[given.of(n, 1) for n in range(3)])
    for cast in ("amax", given.cast, same):
        assert held(store.load(path, [2, 1], layout="hnd", cast=cast)) == values
        store.convert(path, tmp_path / "out", "hnd", [2, 1], cast=cast, force=True)
        assert tensors(tmp_path / "out") == values and header(tmp_path / "out")["__metadata__"]["kvbm.format"] == "1"
        # The codes, and copies of them.
        if cast != "amax":
            assert held(store.load(path, cast=cast, **options)) == want
            assert held(store.read(path).pool(layout, cast=cast)) == want
            store.convert(path, tmp_path / "codes", layout, cast=cast, force=True, **options)
            assert (tmp_path / "codes").read_bytes() == path.read_bytes()
    told = r"to be multiplied by \d scales from .*, pass cast=kvbm.store.read\(path\).casts\['\w*'\].scale"
    layers = "expected one number for each of 3 layers, got "
    others = [
        (kvbm.Scale(k=[given.of(n, 0) for n in range(3)], v=[*(given.of(n, 1) for n in range(2)), 9.0]),
         "would give other values in .*layer 2; pass cast='amax'"),
        (kvbm.Scale(given.of(0, 0)), "would give other values in "),
        (kvbm.Scale([given.of(n, 0) for n in range(2)]), f"{layers}2"),
        (kvbm.Scale([given.of(n % 3, 0) for n in range(4)]), f"{layers}4"),
        (None, told),
    ]  # fmt: skip
    for cast, words in others:
        calls: list[Any] = [partial(store.load, path, **options), partial(store.read(path).pool, layout)]
        if cast is not None:
            calls += [partial(store.load, path, layout="hnd"), partial(store.convert, path, tmp_path / "none", "hnd")]
        for call in calls:
            with pytest.raises(kvbm.BindError, match=words):
                call(cast=cast)
    with pytest.raises(kvbm.PlanError, match="expected one number for each of the 3 layers of the destination, got 2"):
        store.save(tmp_path / "none", src.pool, layout=layout, cast=kvbm.Scale([1.0, 2.0]), **options)
    assert not (tmp_path / "none").exists()


def test_as_many_scales_as_a_copy_takes(tmp_path: Path) -> None:
    """Red: metadata of more than 4,096 characters were refused."""
    sizes = (256, 2, 1, 1, 16)
    of = [float(np.float32(one)) for one in np.random.default_rng(1).uniform(0.01, 1, 512)]
    given = Given(tuple(of[:256]), tuple(of[256:]))
    src, dst = Side("nhd", sizes, "bfloat16", 1), Side("nhd", sizes, E4M3, 1, dst=True)
    store.save(tmp_path / "in", src.pool, dtype=E4M3, cast=given.cast)
    want = expected(src, dst, [0], given)
    assert tensors(tmp_path / "in") == want and store.read(tmp_path / "in").casts[""].scale == given.cast
    with pytest.raises(kvbm.BindError, match="in V of layer 255; pass") as error:
        store.load(tmp_path / "in", dtype=E4M3, cast=kvbm.Scale(k=given.k, v=[*of[256:511], 2.0]))
    assert len(str(error.value)) < 1500


def test_a_file_that_another_program_has_quantised(tmp_path: Path) -> None:
    """It says nothing of a scale, so the caller's is used."""
    src, dst = Side("universal", GQA, E4M3, 3), Side("nhd", GQA, "float32", 3, dst=True)
    store.save(tmp_path / "in", src.pool)
    for scale in (0.5, 0.25):
        got = store.load(tmp_path / "in", layout="nhd", cast=kvbm.Scale(scale), dtype="float32")
        assert held(got) == expected(src, dst, [0, 1, 2], scale)
    with pytest.raises(kvbm.PlanError, match="no plane of scales takes part"):
        store.load(tmp_path / "in", layout="nhd", cast="amax", dtype="float32")


def test_wider_and_narrower_values(tmp_path: Path) -> None:
    src, dst = Side("nhd", GQA, "float32", 3), Side("hnd", GQA, "bfloat16", 3, dst=True)
    store.save(tmp_path / "in", src.pool, layout="hnd", dtype="bfloat16", cast=kvbm.Scale(1.0))
    assert tensors(tmp_path / "in") == expected(src, dst, [0, 1, 2], 1.0)
    stored = store.read(tmp_path / "in")
    assert str(stored.casts[""]) == "bfloat16, from float32" and stored.metadata["kvbm.format"] == "1"
    assert held(store.load(tmp_path / "in")) == tensors(tmp_path / "in")
    with pytest.raises(kvbm.PlanError, match=r"values of float32 would be divided by it, and readers of bfloat16 do not mult"):
        store.save(tmp_path / "out", src.pool, layout="hnd", dtype="bfloat16", cast=kvbm.Scale(0.5))
    assert not (tmp_path / "out").exists()


def test_a_reader_of_other_values_is_told_of_cast(tmp_path: Path) -> None:
    src, dst = sides(CASES[0], quantises=True)
    path = tmp_path / "in"
    store.save(path, src.pool, layout=dst.layout, cast="amax")
    store.save(tmp_path / "codes", src.pool, dtype=E4M3, cast=kvbm.Scale(1.0))
    for call, words in (
        (lambda: store.load(path, layout="nhd"), "expected the same planes on both sides; cast='amax' .* quantises, or deq"),
        (lambda: store.convert(path, tmp_path / "out", "nhd"), "expected the same planes on both sides; cast='amax'"),
        (lambda: store.load(tmp_path / "codes", layout="nhd", dtype="bfloat16"), "only a cast makes it bfloat16: pass cast="),
        (lambda: store.load(tmp_path / "codes", shape=str(src.shape)), "file's shape is .*; kvbm.store.load changes the dtype"),
        (lambda: store.save(tmp_path / "out", src.pool, dtype=E4M3), "only a cast makes it float8_e4m3fn: pass cast="),
        (lambda: store.save(tmp_path / "out", src.pool, layout=dst.layout), "the same planes on both sides; cast='amax'"),
        (lambda: store.save(tmp_path / "out", src.pool, dtype="f7", cast="amax"), "shape: dtype"),
        (lambda: store.save(tmp_path / "out", src.pool, cast="max"), "cast: expected 'amax' or a kvbm.Scale, got 'max'"),
        (lambda: store.save(tmp_path / "out", src.pool, dtype=E4M3, cast="amax"), "no plane of scales takes part"),
        (lambda: store.load(path, layout="record/mxfp8_tensors", cast="amax"), "float32 in the source, float8_e8m0fnu in"),
    ):
        with pytest.raises(kvbm.KvbmError, match=words):
            call()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["codes", "in"], "nothing is left"


def test_a_cast_of_equal_formats_is_a_copy(tmp_path: Path) -> None:
    """It is compared, and has the digests of its source, as every copy."""
    src, dst = sides(CASES[5], quantises=True)
    store.save(tmp_path / "in", src.pool, layout=dst.layout, cast="amax")
    made = store.convert(tmp_path / "in", tmp_path / "out", "record/mla_fp8_planes", cast="amax")
    assert made.casts == store.read(tmp_path / "in").casts and made.casts["latent"].before == "bfloat16"
    assert np.array_equal(made.digests.blocks, store.read(tmp_path / "in").digests.blocks)
    store.save(tmp_path / "plain", src.pool, cast="amax")
    assert tensors(tmp_path / "plain") == held(src.pool) and not store.read(tmp_path / "plain").casts


def test_planes_that_are_cast_one_after_the_other(tmp_path: Path) -> None:
    """What is copied keeps its scale; one scale holds for all planes of a file."""
    dtypes = ("", ""), (E4M3, ""), (E4M3, E4M3)
    layouts = [
        casting.planar(
            "[<> b] l o", casting.plane("x", one, "t h d", "d", 64), casting.plane("y", other, "h t d", "d", 64), scales=()
        )
        for one, other in dtypes
    ]
    a, b, c = (Side(layout, GQA, "bfloat16", 3, seed=2) for layout in layouts)
    one, two = tmp_path / "one", tmp_path / "two"
    store.save(one, a.pool, layout=b.layout, cast=kvbm.Scale(0.5))
    with pytest.raises(kvbm.BindError, match=r"plane 'x' was cast with Scale\(0.5\)"):
        store.convert(one, two, c.layout, src_layout=b.layout, cast=kvbm.Scale(0.25))
    with pytest.raises(kvbm.PlanError, match=r"Scale\(0.5\) of the file would also quantise planes without scales"):
        store.convert(one, two, c.layout, src_layout=b.layout, cast="amax")
    assert not two.exists()
    made = store.convert(one, two, c.layout, src_layout=b.layout, cast=kvbm.Scale([0.5, 0.5]))  # the same for both layers
    assert {plane: note.scale for plane, note in made.casts.items()} == dict.fromkeys("xy", kvbm.Scale(0.5))
    assert tensors(two) == expected(a, c, [0, 1, 2], 0.5)
    back = Side(layouts[0], GQA, "bfloat16", 3, dst=True)
    want = as_bytes(back, casting.expected(c, back, range(3), range(3), 0.5, source=c.after.copy()))
    assert held(store.load(two, src_layout=c.layout, layout=back.layout, cast="amax")) == want
    assert store.read(one).casts.keys() == {"x"} and str(store.read(two).casts["y"]) == f"{E4M3}, times 0.5, from bfloat16"


@pytest.mark.parametrize("nvfp4", [False, True])
def test_the_scale_of_one_plane_is_not_taken_for_another(tmp_path: Path, nvfp4: bool) -> None:
    """Red: `amax` multiplied planes that were copied into the file by the scale with which others were cast."""
    code = "float4_e2m1fn" if nvfp4 else E4M3

    def layout(one: str, other: str) -> Any:
        dtypes = {"x": one, "y": other}
        planes = [f"  {name}: {{order: h t d, dtype: {dtype}}}" for name, dtype in dtypes.items()]
        if nvfp4:
            own = f"{{order: h t s, dtype: {E4M3}, scales: "
            planes += [f"  {name}s: {own}{name}}}" for name, dtype in dtypes.items() if dtype == code]
        names = " ".join(line.split(":")[0].strip() for line in planes)
        axes = "axes: {s: hd//16}" if nvfp4 and code in (one, other) else "axes: {}"
        return spec.parse("\n".join([f'order: "[<{names}> b] l o"', axes, "planes:", *planes]), name=f"{one}, {other}")

    wide = "bfloat16"
    mixed, quantised, plain, half = layout(wide, code), layout(code, code), layout(wide, wide), layout(code, wide)
    path = tmp_path / "in"
    store.save(path, kvbm.Pool.allocate(mixed, kvbm.BlockShape(*GQA), 2), layout=quantised, cast=kvbm.Scale(0.5))
    assert store.read(path).casts.keys() == {"x"}
    words = r"plane 'y': the file names no scale of its values, and Scale\(0.5\) is that of others; pass cast=Scale\(0.5\)"
    for to in (plain, half):
        with pytest.raises(kvbm.PlanError, match=words):
            store.load(path, src_layout=quantised, layout=to, cast="amax")
        with pytest.raises(kvbm.PlanError, match=words):
            store.convert(path, tmp_path / "out", to, src_layout=quantised, cast="amax")
    assert not (tmp_path / "out").exists()
    store.load(path, src_layout=quantised, layout=plain, cast=kvbm.Scale(0.5))  # the caller says so


def test_scales_of_another_plane_are_not_taken(tmp_path: Path) -> None:
    """Red: a layout with the same fingerprint, and with other `scales:`, gave other values."""

    def layout(code: str, x: str, y: str, name: str) -> Any:
        scales = {"a": x, "b": y} if code else {}
        own = [f"  {plane}: {{order: h t, dtype: float32{f', scales: {of}' if of else ''}}}" for plane, of in scales.items()]
        planes = [f"  {plane}: {{order: h t d{f', dtype: {code}' if code else ''}}}" for plane in "xy"]
        return spec.parse("\n".join([f'order: "[<x y{" a b" if code else ""}> b] l o"', "planes:", *planes, *own]), name=name)

    wide, none = layout("", "", "", "wide"), layout(E4M3, "", "", "none")
    right, swapped = layout(E4M3, "x", "y", "right"), layout(E4M3, "y", "x", "swapped")
    assert right.fingerprint == swapped.fingerprint == none.fingerprint
    path, out, src = tmp_path / "in", tmp_path / "out", kvbm.Pool.allocate(wide, kvbm.BlockShape(*GQA), 2)
    for number, array in enumerate(src.arrays, 1):
        array[...] = number
    store.save(path, src, layout=right, cast="amax")
    assert {plane: note.scale_plane for plane, note in store.read(path).casts.items()} == {"x": "a", "y": "b"}
    assert held(store.load(path, src_layout=right, layout=wide, cast="amax")) == held(src)
    for other, says in ((swapped, "'b'"), (none, "no plane")):
        words = rf"plane 'x' was cast with its scales in plane 'a', and layout '{other.name}' has them in .*{says}: expected"
        for call in (
            partial(store.load, path, src_layout=other, layout=wide, cast="amax"),
            partial(store.load, path, src_layout=other),
            partial(store.load, path, src_layout=right, layout=other),
            partial(store.read(path).pool, other),
            partial(store.convert, path, out, other, src_layout=right),
            partial(store.convert, path, out, other, src_layout=right, cast="amax"),
            partial(store.verify, path, src_layout=other),
        ):
            with pytest.raises(kvbm.BindError, match=words):
                call()
    assert not out.exists()
    # Constant scales, and a layout that takes a plane that was copied for theirs.
    mixed = kvbm.Pool.allocate(layout("bfloat16", "", "", "mixed"), src.shape, 2)
    store.save(tmp_path / "codes", mixed, layout=none, cast=kvbm.Scale(0.5))
    with pytest.raises(kvbm.BindError, match="'x' was cast with its scales in no plane, and layout 'right' has them in plane 'a'"):
        store.load(tmp_path / "codes", src_layout=right, layout=mixed.layout, cast="amax")
    store.load(tmp_path / "codes", src_layout=none, layout=mixed.layout, cast="amax")
    # A file of an earlier version does not say it.
    old = json.loads(store.read(path).metadata["kvbm.cast"])
    old = {plane: {key: one for key, one in note.items() if key != "scale_plane"} for plane, note in old.items()}
    before = rewritten(path, tmp_path / "old", cast=json.dumps(old))
    assert held(store.load(before, src_layout=right, layout=wide, cast="amax")) == held(src)
    store.load(before, src_layout=swapped, layout=wide, cast="amax")


def test_formats_of_planes_that_are_copied_are_kept(tmp_path: Path) -> None:
    around, raw = "[<> b] l o", casting.plane("raw", "uint8", "t", shared="h")
    wide = casting.planar(around, casting.plane("data", "", "t h d", "d", 64), raw, scales=())
    narrow = casting.planar(
        around, casting.plane("data", E4M3, "t h d", "d", 64), casting.plane("scale", "float32", "t h"), raw
    )
    src, dst = Side(wide, GQA, "bfloat16", 3), Side(narrow, GQA, "bfloat16", 3, dst=True)
    src.pool.formats = {"raw": "float8_e5m2"}
    path = tmp_path / "in"
    store.save(path, src.pool, layout=dst.layout, cast="amax")
    assert tensors(path) == expected(src, dst, [0, 1, 2], None) and store.read(path).formats == {"raw": "float8_e5m2"}
    for layout in (src.layout, dst.layout):
        got = store.load(path, src_layout=dst.layout, layout=layout, cast="amax")
        assert got.formats == {"raw": "float8_e5m2"}
    src.pool.formats = {"data": "float16"}
    with pytest.raises(kvbm.DTypeError, match="plane 'data' of the source is declared as bfloat16, and its arrays are float16"):
        store.save(tmp_path / "out", src.pool, layout=dst.layout, cast="amax")
    assert not (tmp_path / "out").exists()


# ---- the file ----------------------------------------------------------------------------------------------------------


def rewritten(path: Path, into: Path, **metadata: str | None) -> Path:
    """The file with other metadata."""
    raw, found = path.read_bytes(), header(path)
    body = raw[8 + struct.unpack("<Q", raw[:8])[0] :]
    found["__metadata__"].update({f"kvbm.{key}": text for key, text in metadata.items()})
    found["__metadata__"] = {key: text for key, text in found["__metadata__"].items() if text is not None}
    text = json.dumps(found).encode()
    into.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return into


NOTE = {"dtype": E4M3, "from": "bfloat16", "scale": 0.5}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cast": None}, "kvbm.format is '2': expected a scale in metadata 'kvbm.cast', got None"),
        ({"cast": "{}"}, "kvbm.format is '2': expected a scale"),
        ({"cast": json.dumps({"": NOTE | {"scale": 1.0}})}, "kvbm.format is '2': expected a scale"),
        ({"format": "3"}, "kvbm.format is '3'; this version of kvbm reads '1' and '2'"),
        ({"cast": json.dumps({"x": NOTE})}, "metadata 'kvbm.cast': plane 'x' of float8_e4m3fn: the layout has no such plane"),
        ({"cast": json.dumps({"": NOTE | {"dtype": "int8"}})}, "plane '' of int8: the layout has float8_e4m3fn"),
        *(
            ({"cast": text if isinstance(text, str) else json.dumps({"": text})}, "metadata 'kvbm.cast': ")
            for text in (
                "[]", "7", "{", "x" * 5000, 7, [], {}, NOTE | {"dtype": "f7"}, NOTE | {"from": None}, NOTE | {"from": ["bfloat16"]},
                NOTE | {"scales": 7}, NOTE | {"dtype": {}}, NOTE | {"scale_plane": 7}, NOTE | {"scale_plane": []},
                *(NOTE | {"scale": one} for one in (
                    "0.5", 0, -1, True, 0.1, 1e300, [0.5], [0.5, 0.1], [0.5, True], [[0.5, 0.5]], [], {}, {"k": 0.5},
                    {"k": 0.5, "v": None}, {"k": 0.5, "v": 0.5, "w": 1}, {"k": [0.5] * 3, "v": 0.5},
                )),
                '{"": {"dtype": "float8_e4m3fn", "from": "bfloat16", "scale": NaN}}',
            )
        ),
        ({"format": "1"}, "to be multiplied by 0.5"),
    ],
    ids=lambda one: str(one)[:60],
)  # fmt: skip
def test_metadata_that_say_nothing_possible(tmp_path: Path, change: dict[str, str | None], words: str) -> None:
    constant(tmp_path / "good", "bfloat16", E4M3, 0.5)
    path = rewritten(tmp_path / "good", tmp_path / "in", **change)
    with pytest.raises(kvbm.BindError, match=words) as error:
        store.load(path)
    assert str(path) in str(error.value) and len(str(error.value)) < 1000 and str(error.value).isprintable()


def test_metadata_of_the_caller_say_nothing_of_casts(tmp_path: Path) -> None:
    constant(tmp_path / "in", "bfloat16", E4M3, 0.5)
    stored = store.read(tmp_path / "in")
    src = Side("universal", GQA, "bfloat16", 3)
    store.save(tmp_path / "out", src.pool, metadata=stored.metadata)
    with store.create(tmp_path / "made", "universal", src.shape, 3, metadata=stored.metadata) as pool:
        kvbm.convert(src.pool, pool)
    for name in ("out", "made"):
        assert not store.read(tmp_path / name).casts and header(tmp_path / name)["__metadata__"]["kvbm.format"] == "1"
        assert held(store.load(tmp_path / name)) == held(src.pool)


def test_other_readers_see_ordinary_planes(tmp_path: Path, torch: Any) -> None:
    from safetensors import safe_open

    src, dst = sides(CASES[2], quantises=True)
    store.save(tmp_path / "in", src.pool, IDS, layout=dst.layout, cast="amax")
    want = expected(src, dst, IDS, None)
    with safe_open(tmp_path / "in", framework="pt") as file:
        assert json.loads(file.metadata()["kvbm.cast"])["data"]["from"] == "float32"
        for index, (one, whole) in enumerate(zip(dst.pool.resolved.allocations, want, strict=True)):
            found = file.get_tensor(f"alloc_{index:05d}")
            assert found.shape == one.shape and str(found.dtype).removeprefix("torch.") == one.dtype
            assert found.contiguous().view(torch.uint8).numpy().tobytes() == whole


def test_a_changed_file_is_an_error_of_digests(tmp_path: Path) -> None:
    path, out = tmp_path / "in", tmp_path / "out"
    src, dst = sides(CASES[0], quantises=True)
    store.save(path, src.pool, IDS, layout=dst.layout, cast="amax")
    good = path.read_bytes()
    begin = store.read(path).tensors["alloc_00000"].begin
    for at, words in (
        (begin + 5, r"in: block 0: layer 0, token 0: digest 0x"),
        (store.read(path).tensors["kvbm.digests"].begin, "its stored digests were changed"),
    ):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
        for call in (
            lambda: store.load(path, layout="nhd", cast="amax"),
            lambda: store.convert(path, out, "nhd", cast="amax"),
        ):
            with pytest.raises(kvbm.DigestError, match=words):
                call()
        assert not out.exists()
    path.write_bytes(good[: begin + 5] + bytes([good[begin + 5] ^ 1]) + good[begin + 6 :])
    made = store.convert(path, out, "nhd", cast="amax", verify=False)
    assert made.digests is None, "digests of what was not compared would say that it is right"
    assert store.load(path, layout="nhd", cast="amax", verify=False).num_blocks == 3


def test_files_without_digests(tmp_path: Path) -> None:
    src, dst = sides(CASES[0], quantises=True)
    path = tmp_path / "in"
    store.save(path, src.pool, IDS, layout=dst.layout, cast="amax", digests=False)
    assert store.read(path).digests is None and tensors(path) == expected(src, dst, IDS, None)
    made = store.convert(path, tmp_path / "out", "nhd", cast="amax")
    assert np.array_equal(made.digests.blocks, store.load(tmp_path / "out", verify=False).digest())
    known = store.add_digests(path)
    assert np.array_equal(known.digests.blocks, dst.pool.digest()) and known.casts["data"].before == "bfloat16"


def test_many_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_READ_BYTES", "_STEP_BYTES"):
        monkeypatch.setattr(f"kvbm.store.blocks.{name}", 1)
    told: list[tuple[int, int]] = []
    ids = [4, 1, 3, 0, 2]
    src, dst = sides(CASES[1], quantises=True, blocks=(5, 5))
    store.save(tmp_path / "in", src.pool, ids, layout=dst.layout, cast="amax", progress=lambda *both: told.append(both))
    assert tensors(tmp_path / "in") == expected(src, dst, ids, None) and len(told) == 5
    assert np.array_equal(store.read(tmp_path / "in").digests.blocks, dst.pool.digest())
    here, there = sides(CASES[1], quantises=False, blocks=(5, 5))
    here.put(dst.after.copy())
    want = expected(here, there, ids, None)
    assert held(store.load(tmp_path / "in", ids, layout=there.layout, cast="amax")) == want
    store.convert(tmp_path / "in", tmp_path / "in", there.layout, ids, cast="amax", force=True)
    assert tensors(tmp_path / "in") == want and store.verify(tmp_path / "in") == []


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_gpus_write_and_read_the_same_files(tmp_path: Path, case: tuple[Any, ...]) -> None:
    scale = case[4]
    src, dst = sides(case, quantises=True)
    near, far = tmp_path / "near", tmp_path / "far"
    store.save(near, src.pool, IDS, layout=dst.layout, cast=cast_of(scale))
    store.save(tmp_path / "plain", src.pool)
    on_gpu = store.load(tmp_path / "plain", device="cuda:0")
    store.save(far, on_gpu, IDS, layout=dst.layout, cast=cast_of(scale))
    assert far.read_bytes() == near.read_bytes()
    store.convert(tmp_path / "plain", far, dst.layout, IDS, cast=cast_of(scale), device="cuda:0", force=True)
    assert far.read_bytes() == near.read_bytes()
    want = store.load(near, layout=case[1], cast="amax")
    got = store.load(near, layout=case[1], cast="amax", device="cuda:0")
    back = kvbm.Pool.allocate(case[1], want.shape, 3, "pinned")
    kvbm.Transfer(got, back).copy(stream=0).synchronize()
    assert held(back) == held(want)
    for device in ("cpu", "cuda:0"):
        store.convert(near, tmp_path / device, case[1], cast="amax", device=device)
    assert (tmp_path / "cpu").read_bytes() == (tmp_path / "cuda:0").read_bytes()
