"""Layouts that fit given arrays: the true one is always listed, and no layout that does not fit."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from numpy.lib.stride_tricks import as_strided

import kvbm
import matrix
import oracle
import plane_oracle
from few import in_full
from kvbm.cli.app import main
from kvbm.layout import spec
from kvbm.layout.shapes import numpy_name
from kvbm.matching.declare import described
from kvbm.matching.match import (
    _candidates,
    _linear_map,
    _listed_map,
    _readings,
    _table_axes,
    _ways,
    match_described,
    parse,
)

SHAPE = "nl=2,no=2,nh=4,nt=8,hd=16,dtype=float16"
SQUARE = "nl=2,no=2,nh=8,nt=8,hd=64,dtype=bfloat16"
LATENT = "nl=2,no=1,nh=1,nt=64,hd=576,dtype=bfloat16"
ONES = "nl=1,no=1,nh=1,nt=1,hd=32,dtype=float32"


SHAPES = [SHAPE, SQUARE, LATENT, ONES, "nl=2,no=1,nh=1,nt=64,hd=512"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (name, shape) if shape == (LATENT if matrix.latent(name) else (SHAPE, SQUARE, ONES)[number % 3]) else in_full((name, shape))
        for number, name in enumerate(sorted(matrix.orders()))
        for shape in SHAPES
    ],
)
def test_the_true_layout_is_listed(name: str, shape: str) -> None:
    """Arrays as in the layout, including its gaps; then with reversed axes.  A pool accepts exact fits."""
    try:
        pool = kvbm.Pool.allocate(name, shape, 3)
    except kvbm.LayoutError:
        return
    found = kvbm.match(list(pool.arrays), shape)
    (mine,) = (one for one in found if one.layout == pool.layout)
    assert (mine.fit, mine.num_blocks) == ("exact", 3) and name in mine.names and name in found.names
    for one in found:
        if one.how == mine.how and one.fit == "exact" and "allocation" not in one.how:
            assert kvbm.Pool(one.layout, shape, pool.arrays, num_blocks=one.num_blocks)
    turned = kvbm.match([array.T for array in pool.arrays], shape)
    assert pool.layout in [one.layout for one in turned]


def test_a_permuted_view_is_another_layout() -> None:
    """The engine's HND with NHD's axes: strides differ, and the pool's error names the layout."""
    memory = [np.zeros((2, 3, 4, 8, 16), "float16") for _ in range(2)]
    views = [one.transpose(0, 1, 3, 2, 4) for one in memory]
    found = kvbm.match(views, SHAPE, engine="vllm")
    assert [one.names[0] for one in found if one.fit == "permuted"] == ["vllm/flash_attn_hnd"]
    assert "vllm/flash_attn_nhd" not in found.names
    with pytest.raises(kvbm.BindError, match=r"these strides are those of .*vllm/flash_attn_hnd") as info:
        kvbm.Pool("vllm/flash_attn_nhd", SHAPE, views)
    assert "contiguous" not in str(info.value)


def test_checks_say_where_to_look() -> None:
    """With as many heads as tokens NHD and HND have the same shape: the check names an element with different places."""
    pool = kvbm.Pool.allocate("nhd", SQUARE, 3)
    found = kvbm.match(list(pool.arrays), SQUARE)
    assert {"nhd", "hnd"} <= set(found.names)
    check = next(check for check in found.checks if check.element == "KV head 1")
    places = {name: place for place, names in check.outcomes for name in names}
    assert places["nhd"] == "array 0, index (0, 1, 0)" and places["hnd"] == "array 0, index (1, 0, 0)"
    assert "KV head 1" in str(found)


def test_checks_of_planes() -> None:
    """Records per token and planes per page fill the same arrays: the check names the planes' places for a token."""
    shape = "nl=2,no=1,nh=1,nt=64,hd=576,dtype=bfloat16"
    pool = kvbm.Pool.allocate("vllm/fp8_ds_mla", shape, 3)  # 512 bytes, 4 scales of 4, 64 positions of 2
    found = kvbm.match(list(pool.arrays), shape)
    (check,) = found.checks
    assert check.element == "token 1" and {names[0]: place for place, names in check.outcomes} == {
        "vllm/fp8_ds_mla": "array 0, index (0, 1, 0); its other planes: array 0, index (0, 1, 512), array 0, index (0, 1, 528)",
        "record/mla_fp8_pages": "array 0, index (0, 0, 512); its other planes: "
        f"array 0, index (0, {(64 * 512 + 16) // 656}, {(64 * 512 + 16) % 656}), "
        f"array 0, index (0, {(64 * 528 + 128) // 656}, {(64 * 528 + 128) % 656})",
    }
    shape = "nl=2,no=1,nh=1,nt=64,hd=128,dtype=bfloat16"
    pool = kvbm.Pool.allocate("record/dsa_indexer_tokens", shape, 3)
    (check,) = kvbm.match(list(pool.arrays), shape).checks
    names = {one for _, names in check.outcomes for one in names}
    same = next(names for _, names in check.outcomes if "record/dsa_indexer_tokens" in names)
    assert "vllm/dsa_indexer" in names - set(same) and "record/mla_v41_tokens" in same, "other names of planes, and the same bytes"


def test_one_tensor_and_views_of_one() -> None:
    whole = np.zeros((3, 4, 2, 2, 8, 16), "float16")  # b h l o t d
    (one,) = (one for one in kvbm.match(whole, SHAPE) if "universal" in one.names)
    assert one.num_blocks == 3 and "list(tensor)" in one.how
    layers = list(np.zeros((2, 3, 4, 8, 32), "float16"))  # views of l b h t (o d)
    assert "vllm/LBHNC" not in kvbm.match([layer.copy() for layer in layers], SHAPE).names
    found = kvbm.match(layers, SHAPE)
    assert any("views of one allocation" in one.how for one in found)


@pytest.mark.parametrize(
    "array",
    [np.zeros(()), np.zeros((2, 16, 8))[::-1], np.broadcast_to(np.zeros(8), (4, 8)), np.zeros((0, 4)), np.zeros(7),
     np.zeros((1,) * 32)],
    ids=["no axis", "backwards", "stride 0", "empty", "seven", "32 axes"],
)  # fmt: skip
def test_arrays_that_no_layout_has(array: Any) -> None:
    found = kvbm.match([array.astype("float16") if array.strides == array.astype("float16").strides else array], SHAPE)
    assert len(found) == 0 and found.reason and "No shipped layout fits" in str(found)


def test_refused() -> None:
    with pytest.raises(kvbm.BindError, match="at least one array"):
        kvbm.match([], SHAPE)
    with pytest.raises(kvbm.BindError, match="match: array 1"):
        kvbm.match([np.zeros(3), "x"], SHAPE)
    with pytest.raises(kvbm.SpecError, match=r"engine: expected one of .* Did you mean .*vllm"):
        kvbm.match(np.zeros(3), SHAPE, engine="vlm")
    mixed = [np.zeros((8, 4, 16), "float16"), np.zeros((8, 4, 16), "float32")] * 6
    assert len(kvbm.match(mixed, SHAPE)) == 0


def test_which() -> None:
    def call(*args: str) -> Any:
        return CliRunner().invoke(main, ["which", *args])

    text = call("32x2,1024,16,8,128", "--shape", "llama-3.1-8b")
    assert text.exit_code == 0 and "vllm/flash_attn_nhd" in text.stdout and "1,024 blocks" in text.stdout
    told = json.loads(call("32x2,1024,16,8,128", "--shape", "llama-3.1-8b", "--json", "--engine", "vllm").stdout)
    assert "vllm/flash_attn_nhd" in [name for one in told["candidates"] for name in one["names"]]
    assert call("3x7", "--shape", "llama-3.1-8b").exit_code == kvbm.BindError.exit_code
    records = call("2x8,64,656", "--shape", "deepseek-v3,nl=2", "--dtype", "uint8", "--engine", "vllm")
    assert records.exit_code == 0 and "1. vllm/fp8_ds_mla\n" in records.stdout
    assert call("2x8,64,656", "--shape", "deepseek-v3,nl=2").exit_code == kvbm.BindError.exit_code
    assert call("2x8,64,656", "--dtype", "float7").exit_code == kvbm.DTypeError.exit_code
    for bad in ("", "x", "2x", "1,2:1", "0x3", "1,,2", "9" * 5000):
        assert call(bad, "--shape", "llama-3.1-8b").exit_code == kvbm.SpecError.exit_code, bad


@pytest.mark.parametrize(
    ("array", "mine"),
    [("32x1024,8,16,256", "vllm/LBHNC"), ("32x1024,8,16,256:32768,256,2048,1", "vllm/LBNHC"),
     ("32x1024,8,16,256:1048576,4096,256,1", "vllm/BLHNC"), ("32x1024,8,16,256:1048576,256,2048,1", "vllm/BLNHC"),
     ("32x1024,8,16,256:1048576,131072,256,1", "vllm/BHLNC"), ("32x1024,8,16,256:4096,4194304,256,1", "vllm/LHBNC")],
    ids=["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC", "LHBNC"],
)  # fmt: skip
def test_which_views_of_one_allocation(array: str, mine: str) -> None:
    """Shapes carry no addresses, so the arrays may be views: as vLLM 0.26 and newer hands them out."""
    done = CliRunner().invoke(main, ["which", array, "--shape", "llama-3.1-8b", "--engine", "vllm", "--json"])
    first, *others = json.loads(done.stdout)["candidates"]
    assert first["names"] == [mine] and first["num_blocks"] == 1024
    assert f'Pool.from_vllm(tensors, "{mine}")' in first["how"] and "only if the arrays are views of one" in first["how"]
    own = [one["names"][0].startswith("vllm/") for one in others]
    assert own == sorted(own, reverse=True), "the engine's own names first"
    if mine == "vllm/LBHNC":
        assert not own[-1] and {"vllm/cpu_vec", "vllm/cpu_amx"} <= {name for one in others for name in one["names"]}


def test_latents_first() -> None:
    """Layouts with axes of size 1 for K and V and for the heads fit a latent, too: that of latents is listed before them."""
    found = kvbm.match([np.zeros((3, 1, 64, 576), "uint16") for _ in range(2)], LATENT, engine="vllm")
    assert "or axes of size 1 differ; kvbm.Pool takes views of shape (3, 64, 576) (b t d)" in found[0].how
    assert found[0].names[0] == "vllm/mla" and {"vllm/flash_attn_nhd", "vllm/ascend_nd"} < set(found.names)


@pytest.mark.slow  # half a second
def test_from_vllm_takes_what_is_advised() -> None:
    """Every advice of a call is a call that works, and another order with the same sizes is not advised."""
    torch = pytest.importorskip("torch")
    shape, advised = "nl=3,no=2,nh=8,nt=8,hd=16,dtype=float16", set()
    for order in ("l b h t", "l b t h", "l h b t", "b l h t", "b l t h", "b h l t"):
        sizes = {"l": 3, "b": 5, "h": 8, "t": 8}
        memory = torch.zeros(*(sizes[axis] for axis in order.split()), 32, dtype=torch.float16)
        views = list(memory.permute(*(order.split().index(axis) for axis in "lbht"), 4))
        calls = [one for one in kvbm.match(views, shape) if "from_vllm" in one.how]
        for one in calls:
            assert kvbm.Pool.from_vllm(views, one.names[0]).num_blocks == 5
        name = "vllm/" + order.replace(" ", "").upper().replace("T", "N") + "C"
        assert name in [one.names[0] for one in calls], name
        advised |= {one.names[0] for one in calls if one.layout.order_text.replace(" ", "")[:4] in order.replace(" ", "")}
        copies = [view.clone() for view in views]
        assert name not in kvbm.match(copies, shape).names, "addresses say that they are not views of one allocation"
    assert len(advised) == 6
    with pytest.raises(kvbm.BindError, match=r'expected 6 axes .*Pool.from_vllm\(tensors, "vllm/LBHNC"\).*\(b h t o\*d\)'):
        kvbm.Pool("vllm/LBHNC", shape, views)
    with pytest.raises(
        kvbm.BindError,
        match=r"expected 1 array of 6 axes \(l b h t o d\), got 3, the first of shape \(5, 8\)",
    ):
        kvbm.Pool("vllm/LBHNC", shape, [view[:, :, 0, 0] for view in views])


def test_views_say_what_a_pool_takes() -> None:
    layers = [np.zeros((3, 4, 8, 32), "float16") for _ in range(2)]  # b h t (o d)
    (one,) = (one for one in kvbm.match(layers, SHAPE) if "lmcache/NL_X_NB_NH_BS_TWO_HS" in one.names)
    assert one.how.endswith("kvbm.Pool takes views of shape (3, 4, 8, 2, 16) (b h t o d)")
    assert kvbm.Pool(one.layout, SHAPE, [layer.reshape(3, 4, 8, 2, 16) for layer in layers]).num_blocks == 3
    whole = np.zeros((2, 2, 3, 8, 4, 16), "float16")  # l o b t h d
    (one,) = (one for one in kvbm.match(list(whole), SHAPE) if "flexkv/LAYERFIRST" in one.names)
    assert "takes one view of shape (2, 2, 3, 8, 4, 16) (l o b t h d); the arrays are views" in one.how


@pytest.mark.parametrize(
    ("args", "said"),
    [(["16x2,1024,16,8,128"], "16 arrays, the shape has 32 layers; with nl=16 these fit: dynamo/"),
     (["16x1024,8,16,256", "--engine", "vllm"], "16 arrays, the shape has 32 layers; with nl=16 these fit: vllm/LBHNC, "),
     (["32x2,1024,16,8,64"], "the shape has hd=128 (elements per head); with hd=64 these fit: dynamo/"),
     (["32x2,1024,32,8,128", "--num-blocks", "1024"], "nt=16 (tokens per block); with nt=32"),
     (["28x2,1024,16,4,128"], "28 arrays, the shape has 32 layers, and the shape has nh=8 (KV heads); with nl=28,nh=4 these fit: "),
     (["32x2,1024,16,8,128", "--dtype", "float32"], "the arrays are float32, the shape is bfloat16; with dtype=float32 these")],
    ids=["layers", "views", "head", "tokens", "two values", "dtype"],
)  # fmt: skip
def test_near_misses(args: list[str], said: str) -> None:
    done = CliRunner().invoke(main, ["which", *args, "--shape", "llama-3.1-8b"])
    assert done.exit_code == kvbm.BindError.exit_code
    assert "No shipped layout fits: " in done.stdout and said in done.stdout and "KV_2LTD" not in done.stdout


@pytest.mark.slow  # 0.5 s
@pytest.mark.sanitize
def test_strides_with_a_gap_are_a_pitch(tmp_path: Any) -> None:
    """The advice is a layout file, and a pool takes the arrays with it."""
    shape, strides = "nl=3,no=2,nh=4,nt=16,hd=64,dtype=bfloat16", (25768, 8576, 536, 128, 64, 1)
    array = f"10,3,16,4,2,64:{','.join(map(str, strides))}"
    text = CliRunner().invoke(main, ["which", array, "--shape", shape]).stdout
    assert "The order of vllm/BLNHC fits, with a pitch." in text
    assert text.endswith('\norder: "b l t h o d"\npitch: {t: 536, b: 25768}\n')
    (tmp_path / "mine.yaml").write_text("\n".join(text.splitlines()[-2:]), encoding="utf-8")
    memory = np.zeros(10 * 25768, "uint16")
    view = np.lib.stride_tricks.as_strided(memory, (10, 3, 16, 4, 2, 64), [2 * n for n in strides])
    assert kvbm.Pool(tmp_path / "mine.yaml", shape, view).num_blocks == 10
    overlapping = CliRunner().invoke(main, ["which", "10,3,16,4,2,64:25728,8576,500,128,64,1", "--shape", shape])
    assert "pitch" not in overlapping.stdout


@pytest.mark.parametrize(
    "text",
    ["32x(2, 1024, 16, 8, 128)", "32xtorch.Size([2, 1024, 16, 8, 128])", "32x2,1024,16,8,128:(16777216, 16384, 1024, 128, 1)",
     "32x (2, 1024, 16, 8, 128): (16777216, 16384, 1024, 128, 1)", "32x[2,1024,16,8,128]"],
)  # fmt: skip
def test_arrays_as_torch_prints_them(text: str) -> None:
    shape = kvbm.load_shape("llama-3.1-8b")
    assert parse([text], shape) == parse(["32x2,1024,16,8,128"], shape)
    assert parse(["(1024,)"], shape)[0].shape == (1024,)


def test_engine_is_a_word() -> None:
    """nano-vLLM is not vLLM, and ``vllm/`` is the begin of a name."""
    whole = np.zeros((2, 2, 3, 8, 4, 16), "float16")  # o l b t h d
    assert "nanovllm/kv_cache" in kvbm.match(whole, SHAPE, engine="nanovllm").names
    assert "nanovllm/kv_cache" in kvbm.match(whole, SHAPE, engine="nano-vLLM").names
    assert "nanovllm/kv_cache" not in kvbm.match(whole, SHAPE, engine="vllm").names
    listed = json.loads(CliRunner().invoke(main, ["layouts", "vllm/", "--json"]).stdout)
    assert listed and all(one["name"].startswith("vllm/") for one in listed)
    listed = json.loads(CliRunner().invoke(main, ["layouts", "vllm", "--json"]).stdout)
    assert "nanovllm/kv_cache" in [one["name"] for one in listed]


def test_the_layout_that_was_named_is_not_advised() -> None:
    """With as many heads as tokens its axes fit in another order, too: it is not what the strides say."""
    shape = "nl=5,no=2,nh=8,nt=8,hd=16,dtype=float16"
    torch = pytest.importorskip("torch")
    views = list(torch.zeros(5, 3, 8, 8, 32, dtype=torch.float16))
    with pytest.raises(kvbm.BindError, match="these strides are those of vllm/LBHNC: name that layout"):
        kvbm.Pool.from_vllm(views, "vllm/LBNHC")
    only = np.zeros((3, 5, 2, 8, 8, 16), "float16").transpose(0, 1, 2, 4, 3, 5)
    with pytest.raises(kvbm.BindError) as info:
        kvbm.Pool("trtllm/v1_pool", shape, only)
    assert "those of trtllm/v1_pool" not in str(info.value)


def test_k_and_v_of_two_sizes_in_one_row_are_never_one_head() -> None:
    """K of 192 and V of 128 in rows of 320: the layout of both is named, and how; it binds."""
    arrays = [np.zeros((6, 16, 4, 320), "float16") for _ in range(2)]
    for no in (1, 2):
        shape = f"nl=2,no={no},nh=4,nt=16,hd=192,dtype=float16"
        found = str(kvbm.match(arrays, shape))
        assert "hd=320" not in found
        assert ('as bytes, .view("uint8"), these fit: vllm/diff_kv' if no == 2 else "1. vllm/diff_kv\n") in found
    raw = [array.view(np.uint8) for array in arrays]
    [one] = kvbm.match(raw, shape.replace("no=2", "no=1"))
    assert one.names[0] == "vllm/diff_kv"
    assert kvbm.Pool(one.layout, shape.replace("no=2", "no=1"), raw).num_blocks == 6
    other = kvbm.match([np.zeros((6, 16, 4, 292), "float16")] * 2, "nl=2,no=1,nh=4,nt=16,hd=192,dtype=float16")
    assert "K of 192 and V of 100 side by side" in str(other)


def test_layouts_with_the_same_addresses_are_listed_once() -> None:
    """A latent is a row per token, whatever the places of the axes of one coordinate."""
    shape = "nl=2,no=1,nh=1,nt=16,hd=576,dtype=float16"
    found = kvbm.match([np.zeros((6, 16, 576), "float16") for _ in range(2)], shape)
    assert found[0].fit == "exact" and "vllm/mla" in found[0].names
    lines = str(found).splitlines()
    assert [line for line in lines if line[:2] in ("1.", "2.")] == [f"1. {', '.join(found[0].names)}"]
    assert f"{len(found) - 1} more layouts have the same addresses at this shape" in str(found)


# ---- the law: what is printed binds, and reads right ---------------------------------------------------------------


class Memory:
    """An engine's memory: every element holds its coordinate, all else is noise.  Its arrays are views that were handed out."""

    def __init__(self, placed: Any, shape: kvbm.BlockShape, planar: bool = False) -> None:
        self.placed, self.shape, self.planar = placed, shape, planar
        self.arena = placed.arena() if planar else placed.layout_bytes()
        self.bytes = self.arena.source() if planar else oracle.source_bytes(self.arena, 0)
        self.arrays = []
        for base, space in zip(self.arena.bases, placed.spaces, strict=True):
            if planar:
                one = self.bytes[base : base + space.nbytes].view(numpy_name(space.dtype)).reshape(space.shape)
            else:
                raw = self.bytes[base : base + space.nbytes].view(numpy_name(shape.dtype))
                one = as_strided(raw, space.shape, space.strides)
            self.arrays.append(one)

    def owned(self, arrays: list[Any]) -> Any:
        """Which bytes belong to items of the arrays."""
        mask = np.zeros(self.bytes.size, bool)
        for one in arrays:
            at = one.ctypes.data - self.bytes.ctypes.data
            as_strided(mask[at:], (*one.shape, one.itemsize), (*one.strides, 1))[...] = True
        return mask

    def positions(self, pool: Any, placed: Any) -> dict[str, Any]:
        """Plane → position of each element, if the oracle's layout lies at the addresses of a pool; and its bytes."""
        start = np.asarray(pool.addresses).astype(np.int64) - self.bytes.ctypes.data
        ids = np.arange(placed.num_blocks)
        if isinstance(placed, plane_oracle.Held):
            found = {plane.name: (plane.address(ids), plane.itemsize) for plane in placed.planes}
        else:
            found = {"": (placed.address(ids), placed.itemsize)}
        return {name: (start[entry] + offset, size) for name, ((entry, offset), size) in found.items()}

    def true(self) -> dict[str, Any]:
        ids = np.arange(self.placed.num_blocks)
        if self.planar:
            return {plane.name: (self.arena.of(plane, ids), plane.itemsize) for plane in self.placed.planes}
        return {"": (self.arena.positions(ids), self.placed.itemsize)}


@functools.cache
def judged(name: str, shape: kvbm.BlockShape, num_blocks: int) -> Any:
    """A shipped layout at sizes, by the oracles; None if they do not know it, or it does not fit the shape."""
    try:
        if name in plane_oracle.TABLE:
            if "nvfp4" in name and shape.hd < 64:
                return None  # the formula's tiles have four scales
            sizes = (shape.nl, shape.no, shape.nh, shape.nt, shape.hd, shape.dtype)
            placed: Any = plane_oracle.held(name, sizes, num_blocks)
            resolved = kvbm.load(name).resolve(shape, num_blocks)
            if [one.nbytes for one in placed.tensors] != [resolved.kinds[kind].nbytes for kind in resolved.kind_of_entry]:
                return None  # a formula for the sizes of one model
            if placed.block_bytes != sum(access.nbytes for access in resolved.accesses):
                return None
        elif name == "vllm/tpu":
            row = -(-shape.hd // 128) * 128 * shape.itemsize
            placed = oracle.Placed(oracle.Order("[l] b t h o d", pitch=(("o", row),)), shape.sizes, shape.itemsize, num_blocks)
        elif name in matrix.orders():
            placed = oracle.Placed(matrix.orders()[name], shape.sizes, shape.itemsize, num_blocks)
        else:
            return None
        placed.check()
    except (oracle.IllegalError, kvbm.LayoutError):
        return None
    return placed


def run_printed(code: str, arrays: list[Any], shape: kvbm.BlockShape) -> Any:
    """What the printed Python gives."""
    names = {"kvbm": kvbm, "numpy": np, "shape": shape, "tensors": arrays}
    names |= {"tensor": arrays[0]} if len(arrays) == 1 else {}
    return eval(code, names)


def alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        one[name][1] == other[name][1] and np.array_equal(one[name][0], other[name][0]) for name in one
    )


def obey(memory: Memory, arrays: list[Any], shape: kvbm.BlockShape, name: str = "", *, shipped: bool = True) -> int:
    """Hold the law against everything that is suggested for arrays of a memory; the number of suggestions.

    The true layout of a memory that is not `shipped` need not be among them: a shipped one has the same shapes and strides.
    """
    found = kvbm.match(arrays, shape)
    owned, true, hits, count = memory.owned(arrays), memory.true(), [], 0
    assert sum(map(len, found.alike)) == len(found)
    printed = str(found)
    groups: list[dict[str, Any]] = []
    for group in found.alike:
        assert f"\n   {group[0].code}\n" in printed
        places = []
        for one in group:
            pool = run_printed(one.code, arrays, shape)  # accepted
            assert pool.layout == one.layout and pool.num_blocks == one.num_blocks, one.code
            placed = judged(one.names[0], shape, one.num_blocks)
            if placed is None:
                continue
            place = memory.positions(pool, placed)
            for position, size in place.values():
                for byte in range(size):
                    assert owned[position + byte].all(), f"{one.code}: reads what is not in the arrays"
            places.append(place)
            if alike(place, true):
                hits.append(one)
                reads_right(memory, pool, placed)
            count += 1
        assert all(alike(place, places[0]) for place in places), "listed as the same addresses"
        if places and "{" not in group[0].layout.order_text and not group[0].layout.planes:  # no order, and planes of other dtypes
            assert not any(alike(places[0], other) for other in groups), f"listed twice: {printed}"
            groups.append(places[0])
    assert hits or not shipped, f"{name}: the true layout is not among them: {printed}"
    if name:
        assert any(name in one.names for one in hits), printed
    return count


def reads_right(memory: Memory, pool: Any, placed: Any) -> None:
    """A copy through the pool has every coordinate in its place."""
    other = kvbm.Pool.allocate(pool.layout, pool.shape, pool.num_blocks)
    kvbm.convert(pool, other)
    ids = np.arange(placed.num_blocks)
    arrays = [np.asarray(one) for one in other.arrays]
    flat = [
        as_strided(one.view(np.uint8) if one.ndim else one.reshape(1).view(np.uint8), (space.nbytes,), (1,))
        for one, space in zip(arrays, placed.spaces, strict=True)
    ]
    starts = np.cumsum([0, *(one.size for one in flat)])
    copied = np.concatenate(flat)
    if isinstance(placed, plane_oracle.Held):
        wanted = [(plane.address(ids), plane.itemsize, plane_oracle.coded(plane, ids, 0)) for plane in placed.planes]
    else:
        wanted = [(placed.address(ids), placed.itemsize, oracle.coded(placed, ids, 0))]
    for (entry, offset), size, codes in wanted:
        np.testing.assert_array_equal(oracle.gather(copied, starts[entry] + offset, size), codes)


def split(array: Any, rng: random.Random) -> Any:
    """An axis as two.  A flat array has no axes of the layout, and where it is cut says nothing about them: it stays whole."""
    axis = rng.randrange(array.ndim)
    size = array.shape[axis]
    if array.ndim == 1:
        return array
    if not (divisors := [n for n in range(2, size) if size % n == 0]):
        return array
    n = rng.choice(divisors)
    shape = (*array.shape[:axis], size // n, n, *array.shape[axis + 1 :])
    step = array.strides[axis]
    return as_strided(array, shape, (*array.strides[:axis], step * n, step, *array.strides[axis + 1 :]))


def join(array: Any, rng: random.Random) -> Any:
    inner = range(array.ndim - 1)
    if not (axes := [i for i in inner if array.strides[i] == array.strides[i + 1] * array.shape[i + 1]]):
        return array
    i = rng.choice(axes)
    shape = (*array.shape[:i], array.shape[i] * array.shape[i + 1], *array.shape[i + 2 :])
    return as_strided(array, shape, (*array.strides[:i], *array.strides[i + 1 :]))


def turn(array: Any, rng: random.Random) -> Any:
    return array.transpose(rng.sample(range(array.ndim), array.ndim))


def as_bytes(array: Any, rng: random.Random) -> Any:
    return array.view(np.uint8) if array.ndim and array.strides[-1] == array.itemsize else array


FORMS: dict[str, list[Any]] = {
    "as given": [], "split": [split], "joined": [join], "transposed": [turn], "as bytes": [as_bytes],
    "bytes, transposed": [as_bytes, turn], "joined and transposed": [join, turn],
}  # fmt: skip
LAW_SHAPES = (
    "nl=2,no=2,nh=3,nt=16,hd=32,dtype=bfloat16", "nl=2,no=1,nh=1,nt=16,hd=64,dtype=bfloat16",
    "nl=2,no=2,nh=2,nt=32,hd=64,dtype=float32", "nl=3,no=1,nh=1,nt=64,hd=128,dtype=uint8",
    "nl=2,no=1,nh=4,nt=16,hd=192,dtype=bfloat16", "nl=2,no=1,nh=1,nt=64,hd=576,dtype=bfloat16",
    "nl=2,no=2,nh=4,nt=128,hd=64,dtype=bfloat16",
)  # fmt: skip


def recognised(arrays: list[Any], form: str) -> bool:
    """False for what `kvbm.match` does not know: arrays that are cast or turned in more ways than one."""
    if "bytes" not in form:
        return True
    dtypes, shapes = {one.dtype for one in arrays}, {one.shape for one in arrays}
    return len(dtypes) == 1 and ("transposed" not in form or len(shapes) == 1)


def hold(names: list[str], shapes: tuple[str, ...], forms: list[str]) -> int:
    count = 0
    for name, text in itertools.product(names, shapes):
        shape = kvbm.load_shape(text)
        blocks = 3
        try:
            kvbm.load(name).resolve(shape, blocks)
        except kvbm.LayoutError:
            continue
        placed = judged(name, shape, blocks)
        if placed is None or len(placed.spaces) > 40:
            continue
        memory = Memory(placed, shape, isinstance(placed, plane_oracle.Held))
        for form in forms:
            if not recognised(memory.arrays, form):
                continue
            arrays = memory.arrays
            for step in FORMS[form]:
                seed = f"{name} {text} {form} {step.__name__}"
                arrays = [step(one, random.Random(seed)) for one in arrays]
            with failing_as(f"{name}, {text}, {form}"):
                count += obey(memory, arrays, shape, name)
    return count


@contextlib.contextmanager
def failing_as(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(what)
        raise


@pytest.fixture
def no_other_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """No words about other shapes: half of the time, and no code."""
    monkeypatch.setattr("kvbm.matching.match.near_shapes", lambda *_: [])


@pytest.mark.usefixtures("no_other_shapes")
def test_what_is_printed_binds_and_reads_right() -> None:
    """A spread of the shipped layouts; all of them are in the slow form."""
    names = [name for name in kvbm.layouts() if judged_somewhere(name)]
    assert hold(names[::16], LAW_SHAPES[:1], ["as given", "as bytes"]) > 10
    assert hold(names[4::20], LAW_SHAPES[1:2], ["split", "joined and transposed"]) > 5


@pytest.mark.parametrize("rows", ["t h d", "h t d"])
def test_what_fits_exactly_has_the_order_of_the_array(rows: str) -> None:
    """Red: parts of one array [no, nl, …] were an exact fit of a table [l o], with the layers and K and V of others."""
    shape, count = kvbm.load_shape("nl=5,no=2,nh=4,nt=16,hd=32,dtype=bfloat16"), 0
    for order in itertools.permutations("blo"):
        memory = Memory(oracle.Placed(oracle.Order(f"{' '.join(order)} {rows}"), shape.sizes, shape.itemsize, 3), shape)
        for one in kvbm.match(memory.arrays, shape):
            placed = judged(one.names[0], shape, one.num_blocks)
            if one.fit == "exact" and placed is not None:
                pool = run_printed(one.code, memory.arrays, shape)
                assert alike(memory.positions(pool, placed), memory.true()), (order, one.code)
                count += 1
    assert count > 4


def test_what_is_printed_for_tensors_of_torch_binds_the_same() -> None:
    torch = pytest.importorskip("torch")
    shape, count = kvbm.load_shape(LAW_SHAPES[0]), 0
    for name, form in itertools.product(("universal", "vllm/cpu_vec"), ("as given", "split", "bytes, transposed")):
        memory = Memory(judged(name, shape, 3), shape)
        arrays = memory.arrays
        for step in FORMS[form]:
            arrays = [step(one, random.Random(form)) for one in arrays]
        tensors = [torch.from_numpy(one) for one in arrays]
        for one, other in zip(kvbm.match(tensors, shape), kvbm.match(arrays, shape), strict=True):
            names = {"kvbm": kvbm, "torch": torch, "shape": shape, "tensors": tensors, "tensor": tensors[0]}
            pool = eval(one.code, names)
            assert list(pool.addresses) == list(run_printed(other.code, arrays, shape).addresses), one.code
            count += 1
    assert count > 5


@pytest.mark.slow  # 4 s
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("no_other_shapes")
def test_what_is_printed_binds_and_reads_right_for_every_layout(form: str) -> None:
    """Each layout in one of the seven forms; `-m full` has all of them, at each shape."""
    first, count = list(FORMS).index(form), 0
    for number, name in enumerate(kvbm.layouts()):
        if (first - number) % len(FORMS) == 3:
            count += hold([name], (LAW_SHAPES[(first + number) % len(LAW_SHAPES)],), [form])
    assert count > 15


@pytest.mark.full  # 150 s a form
@pytest.mark.parametrize("form", FORMS)
def test_what_is_printed_binds_and_reads_right_for_every_layout_and_shape(form: str) -> None:
    assert hold(list(kvbm.layouts()), LAW_SHAPES, [form]) > 100


def judged_somewhere(name: str) -> bool:
    return name in plane_oracle.TABLE or name in matrix.orders() or name == "vllm/tpu"


def padded(draws: int, first: int = 0) -> Iterator[tuple[str, oracle.Order, str]]:
    """Latents and heads with rows, tokens and blocks of random pitch."""
    for seed in range(first, first + draws):
        rng = random.Random(seed)
        latent = seed % 3 > 0
        hd, nt = rng.choice((12, 16, 64, 72, 576)), rng.choice((1, 4, 16))
        nh, no, nl = (1, 1, rng.choice((1, 2))) if latent else (rng.choice((1, 2, 4)), rng.choice((1, 2)), 2)
        dtype = rng.choice(("bfloat16", "float16", "float32"))
        size = 4 if dtype == "float32" else 2
        text = f"nl={nl},no={no},nh={nh},nt={nt},hd={hd},dtype={dtype}"
        order = "[l] b t d" if latent else rng.choice(("[l] o b t h d", "[l] b o h t d", "[l] b t h o d", "b l t h o d"))
        pitches, run = [], size
        sizes = {"l": nl, "o": no, "h": nh, "t": nt, "d": hd, "b": 3}
        for axis in reversed(order.replace("[l]", "").split()):
            if sizes[axis] > 1 and axis != "d" and rng.random() < 0.5:
                run += rng.choice((8, 32, 64)) * size
                pitches.append((axis, run))
            run *= sizes[axis]
        yield text, oracle.Order(order, pitch=tuple(pitches)), f"{seed}: {order} {pitches} at {text}"


_MINE = re.compile(r"mine\.yaml, for\n(.+):\n(order: .+\npitch: .+)")


def hold_padded(draws: int) -> int:
    count = 0
    for text, order, what in padded(draws):
        shape = kvbm.load_shape(text)
        placed = oracle.Placed(order, shape.sizes, shape.itemsize, 3)
        memory = Memory(placed, shape)
        for form in ("as given", "split", "transposed"):
            arrays = list(memory.arrays)
            for step in FORMS[form]:
                arrays = [step(one, random.Random(what + form)) for one in arrays]
            with failing_as(f"{what}, {form}"):
                found = kvbm.match(arrays, shape)
                if found:
                    obey(memory, arrays, shape, shipped=False)
                    continue
                owned, places = memory.owned(arrays), []
                for code, mine in _MINE.findall(found.reason):
                    Path("mine.yaml").write_text(mine, encoding="utf-8")
                    pool = run_printed(code, arrays, shape)
                    told = yaml.safe_load(mine)
                    steps = tuple(
                        (axis, int(n.split()[0]) if isinstance(n, str) else n * shape.itemsize)
                        for axis, n in told["pitch"].items()
                    )
                    own = oracle.Placed(oracle.Order(told["order"], pitch=steps), shape.sizes, shape.itemsize, pool.num_blocks)
                    place = memory.positions(pool, own)
                    [(position, size)] = place.values()
                    assert all(owned[position + byte].all() for byte in range(size)), f"{code} reads padding"
                    assert not any(alike(place, other) for other in places), f"listed twice: {found.reason}"
                    places.append(place)
                    if alike(place, memory.true()):
                        reads_right(memory, pool, own)
                assert any(alike(place, memory.true()) for place in places), f"the true one is not among {found.reason}"
                count += len(places)
    return count


@pytest.mark.usefixtures("no_other_shapes")
def test_padded_rows_are_bound_without_their_padding(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert hold_padded(6) > 10


@pytest.mark.parametrize(
    "draws", [pytest.param(15, marks=pytest.mark.slow), pytest.param(120, marks=[pytest.mark.full, pytest.mark.slow])]
)
@pytest.mark.usefixtures("no_other_shapes")
def test_many_padded_rows_are_bound_without_their_padding(tmp_path: Path, monkeypatch: Any, draws: int) -> None:
    monkeypatch.chdir(tmp_path)
    assert hold_padded(draws) > draws


def test_k_192_and_v_128_in_one_row_of_320_are_k_and_v() -> None:
    """In elements, as bytes, or transposed: the layout of both is suggested, and reads K and V."""
    shape = kvbm.load_shape("nl=2,no=1,nh=4,nt=16,hd=192,dtype=bfloat16")
    placed = judged("vllm/diff_kv", shape, 3)
    memory = Memory(placed, shape, planar=True)
    elements = [one.view("uint16") for one in memory.arrays]
    assert elements[0].shape == (3, 16, 4, 320)
    for arrays in (memory.arrays, elements, [one.transpose(0, 2, 1, 3) for one in elements], [one.T for one in elements]):
        assert obey(memory, arrays, shape, "vllm/diff_kv") >= 1
    for wrong in ("nl=2,no=2,nh=4,nt=16,hd=192,dtype=bfloat16", "nl=2,no=2,nh=4,nt=16,hd=160,dtype=bfloat16"):
        assert "hd=320" not in str(kvbm.match(elements, wrong))


def test_a_latent_is_listed_once_whether_as_given_or_as_its_parts() -> None:
    shape = kvbm.load_shape("nl=1,no=1,nh=1,nt=16,hd=576,dtype=float16")
    memory = Memory(judged("vllm/mla", shape, 6), shape)
    for array in (memory.arrays[0], memory.arrays[0][None], memory.arrays[0].reshape(6, 16, 1, 576)):
        assert obey(memory, [array], shape) > 3
        latent, opaque = kvbm.match(array, shape).alike
        assert "vllm/mla" in [name for one in latent for name in one.names]
        assert [one.names for one in opaque] == [("operational",)], "it promises no order"


# ---- extreme sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "shape", "blocks"),
    [
        (["3x1"], "nl=2,no=2,nh=1,nt=8,hd=16,dtype=uint8", 0),
        (["2x1,1"], "nl=2,no=2,nh=1,nt=8,hd=16,dtype=uint8", 0),
        (["2x1,1,1,1"], "nl=2,no=2,nh=1,nt=8,hd=16,dtype=uint8", 0),
        (["2x1,1,1,1"], "nl=1,no=2,nh=1,nt=1,hd=1,dtype=uint8", 1),
        (["3,1,1099511627776,1099511627776"], "nl=2,no=2,nh=2,nt=4,hd=16,dtype=bfloat16", 0),
        (["1099511627776,2,4,16"], "nl=1,no=1,nh=2,nt=4,hd=16,dtype=uint8", 1 << 40),
        (["2,1099511627776,2,4,16"], "nl=1,no=2,nh=2,nt=4,hd=16,dtype=uint8", 1 << 40),
        (["2,1099511627776,2,4,16"], "nl=2,no=2,nh=2,nt=4,hd=16,dtype=uint8", 1 << 39),
        (["1099511627776,2,4,18"], "nl=1,no=1,nh=2,nt=4,hd=16,dtype=uint8", 1 << 41),
        (["1099511627776,2,4,17"], "nl=1,no=1,nh=2,nt=4,hd=16,dtype=uint8", 0),
    ],
)
def test_extreme_sizes(texts: list[str], shape: str, blocks: int) -> None:
    """Arrays of one element, and arrays that no machine has: an answer, in the time and memory of small ones."""
    sizes = kvbm.load_shape(shape)
    found = match_described(parse(texts, sizes), sizes, placed=False)
    assert bool(found) == (blocks > 0) and str(found) and len(str(found)) < 20_000
    assert blocks in [one.num_blocks for one in found] or found.reason


def test_one_element_arrays_as_views_of_one_allocation() -> None:
    shape = kvbm.BlockShape(nl=1, no=1, nh=1, nt=1, hd=1, dtype="float16")
    memory = np.arange(3, dtype="float16")
    found = kvbm.match([memory[i : i + 1] for i in range(3)], shape)
    tensors = [memory[i : i + 1] for i in range(3)]
    assert found.names
    for one in found:
        pool = eval(one.code, {"kvbm": kvbm, "shape": shape, "tensors": tensors, "numpy": np})
        assert pool.num_blocks == 3


LISTS = """
[b l o] t h d
[l] b o t h d
[o l] b t h d
[l o] b h t d
[b] l o h t d
b l o t h d
o l b t h d
l b o h t d
[(l o)] b t h d
[l/2 l%2 o] b t h d
"""
PLANAR = """
[l <x y>] b o h t
[<x y> l] b o h t
[b <x y>] l o h t
[b] l o h t <x y>
"""


def lists() -> Iterator[kvbm.Layout]:
    yield from (spec.parse(f'order: "{order}"', name=order) for order in LISTS.strip().splitlines())
    for order in PLANAR.strip().splitlines():
        yield spec.parse(f'order: "{order}"\nplanes: {{x: {{order: d}}, y: {{order: d}}}}', name=order)
    yield spec.parse('order: {k: "[b o l] t h d", v: "[b o l] h t d"}', name="halves")


def arrays_of_lists(shape: kvbm.BlockShape, turned: bool) -> Iterator[np.ndarray]:
    """For each layout with a list: the list as one array, with neighbouring axes of the list joined in every way."""
    for layout in lists():
        resolved = layout.resolve(shape, 3)
        sizes = {**resolved.sizes, "l/2": 2, "l%2": 2, "(l o)": 8, "<x y>": 2}
        table = [sizes[str(term)] for term in layout.orders[0].table]
        for cuts in itertools.product((False, True), repeat=max(0, len(table) - 1)):
            first = table[:1]
            for extent, cut in zip(table[1:], cuts, strict=True):
                first = [*first, extent] if cut else [*first[:-1], first[-1] * extent]
            if turned:
                n, inner = len(first), resolved.first.shape
                yield np.zeros((*first[::-1], *inner), resolved.first.dtype).transpose(*range(n)[::-1], *range(n, n + len(inner)))
            else:
                yield np.zeros((*first, *resolved.first.shape), resolved.first.dtype)


@pytest.mark.parametrize("turned", [False, True])
def test_addresses_of_parts_are_those_of_their_list(turned: bool) -> None:
    """Maps of parts, which are linear, are equal where the maps that list the address of every part are."""
    shape, seen = kvbm.BlockShape(nl=4, no=2, nh=2, nt=4, hd=8, dtype="float16"), set[str]()
    for given in arrays_of_lists(shape, turned):
        arrays, _ = described("match", given)
        found = list(_candidates(_readings(arrays, True), shape, [[one] for one in lists()], None))
        seen |= {one.candidate.names[0] for one in found if one.reading.name == "unbound"}
        linear, table_axes = [_linear_map(one) for one in found], set[str]().union(*map(_table_axes, found))
        assert None not in linear
        listed = [_listed_map(one, table_axes) for one in found]
        for i, j in itertools.combinations(range(len(found)), 2):
            assert (linear[i] == linear[j]) == (listed[i] == listed[j]), (found[i].candidate.names, found[j].candidate.names)
        for one, (maps, *_) in zip(found, linear, strict=True):  # and they are the addresses of the elements
            for at in itertools.product(range(2), repeat=4):
                coordinates = dict(zip("loht", at, strict=True))
                entry, offset = one.resolved.planes[-1].address(at[1], **coordinates)
                *_, address, steps = next(part for part in reversed(maps) if part[1] in (None, at[1]))
                index = {**coordinates, "b": at[1]}
                far = sum(index.get(step.axes[0], 0) // step.divisor % step.extent * step.nbytes for step in steps)
                assert address + far == one.reading.arrays[int(entry)].address + int(offset)
    assert seen == {one.name for one in lists() if "[" in one.name}


@pytest.mark.parametrize("layout", list(lists()), ids=lambda one: one.name)
def test_the_list_of_views_is_that_of_the_arrays(layout: kvbm.Layout) -> None:
    for nl, nb in itertools.product((2, 4), (1, 3)):
        resolved = layout.resolve(kvbm.BlockShape(nl=nl, no=2, nh=2, nt=4, hd=8, dtype="float16"), nb)
        views = [str(kind) for kind in range(len(resolved.kinds))]
        assert eval(_ways(resolved, views)) == list(resolved.kind_of_entry)


def test_a_corrected_declaration_of_scales_is_matched(tmp_path: Path) -> None:
    """Layouts that differ only in their scales are equal: what is known of one does not hold for the other."""
    text = 'order: "b l o <data scale>"\naxes: {g: 3}\nplanes: {data: {order: t h d, dtype: int8}, scale: {order: t h g, %s}}\n'
    file, shape = tmp_path / "mine.yaml", kvbm.load_shape("nl=2,no=2,nh=2,nt=16,hd=8,dtype=bfloat16")
    file.write_text(text % "dtype: float32, scales: data")  # three scales for eight elements
    arrays = np.zeros((5, 2, 2, 640), "uint8")
    assert not kvbm.match(arrays, shape, layouts=[file])
    file.write_text(text % "dtype: float32")
    assert [one.num_blocks for one in kvbm.match(arrays, shape, layouts=[file])] == [5]


def test_parts_whose_axes_are_not_those_of_the_list() -> None:
    """Parts of an array [2, layers] are no list of two planes for each layer, and the other way round."""
    first, last = ('order: "[<x y> l] b t h"\nplanes: {x: {order: d}, y: {order: d}}', '[l <x y>]')
    layers, planes = (spec.parse(first.replace("[<x y> l]", order), name=order) for order in (last, "[<x y> l]"))
    shape = kvbm.BlockShape(nl=3, no=1, nh=2, nt=4, hd=8, dtype="float16")
    for extents, want in (((2, 3), planes), ((3, 2), layers)):
        found = kvbm.match(np.zeros((*extents, 5, 4, 2, 8), "float16"), shape, layouts=[layers, planes])
        assert [one.layout.name for one in found if one.layout in (layers, planes)] == [want.name]
