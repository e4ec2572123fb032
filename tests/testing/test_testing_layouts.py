"""layout_cases and the pytest plugin: a correct copy, made by the tests' own oracle, passes; every kind of wrong copy fails."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvbm
import matrix
import plane_oracle
from coordinates import in_case
from kvbm.errors import BindError, KvbmError, LayoutError, PlanError, SpecError
from kvbm.testing import LayoutCase, layout_cases
from oracle import Placed

pytest_plugins = ["pytester"]

SMALL = kvbm.BlockShape(nl=2, no=2, nh=2, nt=8, hd=16)
EVEN = kvbm.BlockShape(nl=2, no=2, nh=2, nt=16, hd=16)  # where words of 16 bytes divide all that is cut


def memory(array: Any, nbytes: int) -> np.ndarray:
    """The bytes of an array, from its first element on."""
    address = array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def sides(case: LayoutCase) -> tuple[Placed, Placed]:
    """Both layouts in the oracle's form."""
    sizes, itemsize = dict(case.shape.sizes), case.shape.itemsize
    return (
        Placed(matrix.orders()[case.src.name], sizes, itemsize, case.src_blocks),
        Placed(matrix.orders()[case.dst.name], sizes, itemsize, case.dst_blocks),
    )


def places(placed: Placed, ids: Any, opaque: bool) -> tuple[np.ndarray, np.ndarray]:
    """Entry and offset of every element; for an opaque group in memory order."""
    entry, offset = placed.address(ids)
    if opaque:
        offset = np.sort(offset.reshape(*offset.shape[:3], -1), axis=3)
    return entry.reshape(len(ids), -1), offset.reshape(len(ids), -1)


Places = tuple[np.ndarray, np.ndarray]


def planes(case: LayoutCase) -> dict[str, tuple[Places, Places, int]]:
    """For each plane, from the oracles: entry and offset of every item of the batch on both sides, and its bytes."""
    if not case.src.planes:
        placed = sides(case)
        opaque = any(side.order.opaque for side in placed)
        read, write = places(placed[0], case.src_ids, opaque), places(placed[1], case.dst_ids, opaque)
        return {"": (read, write, case.shape.itemsize)}
    shape = (*case.shape.sizes.values(), case.shape.dtype)
    src, dst = (
        {plane.name: plane for plane in plane_oracle.held(layout.name, shape, blocks).planes}
        for layout, blocks in ((case.src, case.src_blocks), (case.dst, case.dst_blocks))
    )
    return {
        name: (
            *(
                tuple(at.reshape(case.batch, -1) for at in side[name].address(ids))
                for side, ids in ((src, case.src_ids), (dst, case.dst_ids))
            ),
            plane.itemsize,
        )
        for name, plane in dst.items()
    }  # type: ignore[return-value]


def copy(case: LayoutCase, *, but: int = 0, without: str | None = None) -> None:
    """The copy by the oracles, without the last `but` elements of each block (and plane), or without a plane."""
    bytes_ = [
        [memory(array, nbytes(layout, case.shape, blocks, index)) for index, array in enumerate(arrays)]
        for layout, blocks, arrays in (
            (case.src, case.src_blocks, case.src_arrays),
            (case.dst, case.dst_blocks, case.dst_arrays),
        )
    ]
    for read, write, itemsize in (each for name, each in planes(case).items() if name != without):
        count = read[0].shape[1] - but
        (read_entry, read_offset), (write_entry, write_offset) = (
            [each[:, :count] for each in side] for side in (read, write)
        )
        data = np.empty((*read_entry.shape, itemsize), np.uint8)
        for entry in np.unique(read_entry):
            mine = read_entry == entry
            for byte in range(itemsize):
                data[mine, byte] = bytes_[0][entry][read_offset[mine] + byte]
        for entry in np.unique(write_entry):
            mine = write_entry == entry
            for byte in range(itemsize):
                bytes_[1][entry][write_offset[mine] + byte] = data[mine, byte]


def nbytes(layout: kvbm.Layout, shape: kvbm.BlockShape, blocks: int, index: int) -> int:
    """Bytes of an array, including padding."""
    if not layout.planes:
        return Placed(matrix.orders()[layout.name], dict(shape.sizes), shape.itemsize, blocks).spaces[index].nbytes
    return plane_oracle.held(layout.name, (*shape.sizes.values(), shape.dtype), blocks).tensors[index].nbytes


def one(src: str = "nhd", dst: str = "universal", **rest: Any) -> LayoutCase:
    return next(layout_cases(pairs=[(src, dst)], **{"shapes": [SMALL], "batches": [2], **rest}))


def convert(case: LayoutCase) -> None:
    """The copy by kvbm."""
    src = kvbm.Pool(case.src, case.shape, case.src_arrays)
    kvbm.convert(src, kvbm.Pool(case.dst, case.shape, case.dst_arrays), case.src_ids, case.dst_ids)


# ---- what is yielded -----------------------------------------------------------------------------------------------


def test_every_pair_dtype_and_batch() -> None:
    found = list(layout_cases(["nhd", "universal"], dtypes=["uint8", "float32"], batches=[1, 4]))
    assert len({str(case) for case in found}) == len(found) == 4 * 2 * 2
    assert {(case.src.name, case.dst.name) for case in found} == {
        (a, b) for a in ("nhd", "universal") for b in ("nhd", "universal")
    }
    assert {(case.shape.dtype, case.batch) for case in found} == {(d, n) for d in ("uint8", "float32") for n in (1, 4)}
    for case in found:
        assert len(set(case.src_ids.tolist())) == len(set(case.dst_ids.tolist())) == case.batch == len(case.src_ids)
        assert case.src_blocks > case.batch and case.dst_blocks > case.batch, "some blocks must stay as they are"
        assert case.src_ids.max() < case.src_blocks and case.dst_ids.max() < case.dst_blocks


def test_every_shape_that_is_given() -> None:
    shapes = [SMALL, kvbm.BlockShape(nl=1, no=2, nh=1, nt=4, hd=8)]
    found = list(layout_cases(["nhd"], shapes=shapes, batches=[1]))
    assert [case.shape for case in found] == shapes
    assert [str(case) for case in found] == ["nhd->nhd-bfloat16-2x2x2x8x16-b1", "nhd->nhd-bfloat16-1x2x1x4x8-b1"]


def test_every_shipped_layout_has_cases() -> None:
    """At a shape of its kind, and to itself, as an opaque layout can be converted to no other."""
    for name in sorted(matrix.orders()):
        with in_case(name):
            _check_every_shipped_layout_has_cases(name)


def _check_every_shipped_layout_has_cases(name: str) -> None:
    assert list(layout_cases(pairs=[(name, name)], dtypes=["uint8", "bfloat16"], batches=[1]))


def test_memory_is_taken_when_it_is_used() -> None:
    case = one()
    assert not {"_src", "_dst", "src_arrays"} & set(vars(case))
    assert case.src_arrays is case.src_arrays
    assert "_dst" not in vars(case)


def test_files_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text('order: "[l] b o h d/16B t d%16B"\n', encoding="utf-8")
    case = one("nhd", tmp_path / "mine.yaml")  # type: ignore[arg-type]
    assert case.dst.name == "mine" and [array.shape for array in case.dst_arrays] == [(5, 2, 2, 2, 8, 8)] * 2


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"layouts": ["nothing"]}, SpecError, "layout 'nothing': expected a name"),
        ({"layouts": ["nhd"], "dtypes": ["float7"]}, kvbm.DTypeError, "float7"),
        ({"layouts": ["nhd"], "batches": [0]}, BindError, "batches: expected an integer from 1 to 16777216, got 0"),
        ({"layouts": ["nhd"], "device": "tpu"}, BindError, "device: expected cpu, cuda or cuda:N, got 'tpu'"),
        ({"layouts": ["nhd"], "device": "cpu:1"}, BindError, "device: expected"),
        ({"layouts": ["nhd"], "framework": "jax"}, BindError, "framework: expected torch or numpy on cpu, got 'jax'"),
        ({"layouts": ["nhd"], "device": "cuda", "framework": "numpy"}, BindError, "expected torch on cuda, got 'numpy'"),
        ({"layouts": ["nhd"], "pairs": []}, BindError, "expected layouts or pairs, got both"),
        ({"pairs": [("operational", "universal")]}, PlanError, "does not promise the order"),
        ({"pairs": [("nhd", "vllm/paged_attn_v0")], "dtypes": ["float32"], "shapes": [SMALL.__class__(1, 2, 1, 1, 2)]},
         LayoutError, "does not divide"),
    ],
)  # fmt: skip
def test_refused(arguments: dict[str, Any], error: type[KvbmError], said: str) -> None:
    with pytest.raises(error, match=said.replace("(", r"\(")):
        list(layout_cases(**arguments))


# ---- a right copy --------------------------------------------------------------------------------------------------

PAIRS = [
    ("nhd", "universal"), ("universal", "nhd"), ("nhd", "vllm/paged_attn_v0"), ("vllm/paged_attn_v0", "vllm/LBHNC"),
    ("vllm/aiter_shuffle", "hnd"), ("sglang/mha_pool", "trtllm/v1_pool"), ("lmcache/KV_T2D", "hf/dynamic_cache"),
    ("operational", "operational_nhd"), ("operational_hnd", "operational"),
    ("operational", "operational"), ("vllm/ascend_nz", "sglang/page_unified"),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["uint8", "bfloat16", "float64"])
@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_what_the_oracle_copies_is_right(src: str, dst: str, dtype: str) -> None:
    case = one(src, dst, dtypes=[dtype], shapes=[EVEN])
    assert case.error() is not None, "nothing is copied yet"
    copy(case)
    case.check()


@pytest.mark.parametrize(("src", "dst"), [("vllm/mla", "sglang/mla_pool"), ("swizzle/linear", "swizzle/128x4")])
def test_latents_and_scales(src: str, dst: str) -> None:
    case = one(src, dst, shapes=None, batches=[1], dtypes=["uint8"])
    copy(case)
    case.check()


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_kvbm_s_copies_are_right(src: str, dst: str, framework: str) -> None:
    """At the usual sizes."""
    for case in layout_cases(pairs=[(src, dst)], dtypes=["uint8", "bfloat16"], batches=[3], framework=framework):
        convert(case)
        case.check()


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("dtype", ["float4_e2m1fn", "int4"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_four_bits_without_planes(framework: str, dtype: str) -> None:
    """Two elements are one byte, and stay together; their order in the byte is not promised."""
    pairs = [("universal", "vllm/LBHNC"), ("operational", "operational_hnd"), ("nhd", "universal")]
    for case in layout_cases(pairs=pairs, dtypes=[dtype], batches=[3], framework=framework, shapes=[EVEN]):
        convert(case)
        case.check()
    memory(case.dst_arrays[int(case.dst_ids[0])], 2)[1] ^= 1
    pairs_of_elements = 3 * EVEN.nl * EVEN.no * EVEN.nh * EVEN.nt * EVEN.hd // 2
    assert "wrong at l=0 o=0 h=0 t=0 d=2 of block" in str(case.error())
    assert f" (1 of {pairs_of_elements:,} pairs of elements are wrong)" in str(case.error())


def test_padding_is_part_of_the_check() -> None:
    """In vllm/tpu each head is padded to 128 elements."""
    case = one("nhd", "vllm/tpu", batches=[1])
    convert(case)
    case.check()
    strides = case.dst_arrays[0].strides
    last = memory(case.dst_arrays[0], strides[0])
    last[case.shape.hd * 2] ^= 1
    assert case.error() is not None and "which is padding (1 bytes)" in str(case.error())
    assert "bytes that no copy may touch were written, at byte 32 of array 0 (l=0)" in str(case.error())


# ---- a wrong one ---------------------------------------------------------------------------------------------------


def test_an_element_that_is_missing() -> None:
    case = one()
    copy(case, but=1)
    src, dst = int(case.src_ids[0]), int(case.dst_ids[0])
    error = str(case.error())
    assert error.startswith(f"nhd → universal: wrong at l=1 o=1 h=1 t=7 d=15 of block {src} → {dst}: expected bytes ")
    assert error.endswith(", which is the value before the copy (2 of 2,048 elements are wrong)")


def test_elements_that_lie_elsewhere_say_where_they_are_from() -> None:
    """Heads and tokens are exchanged: the error names the elements found there."""
    case = one("nhd", "operational_nhd", dtypes=["float64"])
    copy(case)
    for index in case.dst_ids:
        block = case.dst_arrays[index]  # l o t h d
        block[...] = block.swapaxes(2, 3).reshape(block.shape).copy()
    src = int(case.src_ids[0])
    assert f"wrong at l=0 o=0 h=0 t=1 d=0 of block {src} → {case.dst_ids[0]}" in str(case.error())
    assert f", which is l=0 o=0 h=0 t=2 d=0 of block {src} (" in str(case.error())


def test_a_block_that_was_not_asked_for() -> None:
    case = one("nhd", "vllm/LBHNC")
    copy(case)
    other = next(block for block in range(case.dst_blocks) if block not in case.dst_ids)
    case.dst_arrays[0].view(np.uint16)[1, other, 1, 7, 1, 15] ^= 1
    with pytest.raises(AssertionError) as caught:
        case.check()
    assert f"no copy may touch were written, at l=1 o=1 h=1 t=7 d=15 of block {other} (1 bytes)" in str(caught.value)


@pytest.mark.parametrize(
    ("offset", "said"), [(-1, r"at 1 bytes before array 1 \(l=1\)"), (None, "at 0 bytes behind the last array")]
)
def test_guard_words(offset: int | None, said: str) -> None:
    case = one("nhd", "vllm/flashinfer_nhd")
    copy(case)
    array = case.dst_arrays[1]
    address = array.ctypes.data + (array.nbytes if offset is None else offset)
    (ctypes.c_uint8 * 1).from_address(address)[0] ^= 1
    with pytest.raises(AssertionError, match=said):
        case.check()


def test_a_source_that_was_written_to() -> None:
    case = one()
    copy(case)
    case.src_arrays[0].view(np.uint16)[0, 0, 0] ^= 1
    assert case.error() == "nhd → universal: the source was written to, at l=0 o=0 h=0 t=0 d=0 of block 0 (1 bytes)"


def test_seeds_and_blocks_differ() -> None:
    cases = [one(seed=seed, batches=[4]) for seed in (0, 0, 1)]
    first, same, other = ([array.tobytes() for array in case.src_arrays] for case in cases)
    assert first == same != other
    assert len(set(first)) == len(first), "no two chunks are alike"


# ---- planes --------------------------------------------------------------------------------------------------------

PLANAR = plane_oracle.pairs()
#: One pair of two layouts for each set of planes.
FAMILIES = {plane_oracle.TABLE[src].family: (src, dst) for src, dst in PLANAR if src < dst}


def formula(src: str, dst: str, **rest: Any) -> LayoutCase:
    """A case at the first test sizes of the formulas."""
    shape = plane_oracle.FAMILIES[plane_oracle.TABLE[src].family].shapes[0]
    return one(src, dst, **{"shapes": [kvbm.BlockShape(*shape)], "dtypes": [shape[-1]], **rest})


def tensor_bytes(case: LayoutCase, name: str, pair: int, item: int) -> np.ndarray:
    """The bytes of an item of a plane in the destination, for writing."""
    _, (entry, offset), itemsize = planes(case)[name]
    index, at = int(entry[pair, item]), int(offset[pair, item])
    held = nbytes(case.dst, case.shape, case.dst_blocks, index)
    return memory(case.dst_arrays[index], held)[at : at + itemsize]


def coordinate(case: LayoutCase, name: str, item: int) -> str:
    """A coordinate as in error messages: layer, K or V, head, token, and the plane's other axes."""
    shape = (*case.shape.sizes.values(), case.shape.dtype)
    (plane,) = (p for p in plane_oracle.held(case.dst.name, shape, 1).planes if p.name == name)
    steps = plane.items()
    at = np.unravel_index(item, [len(step) for step in steps.values()])
    found = dict.fromkeys("loht", 0) | {axis: steps[axis][i] for axis, i in zip(steps, at, strict=True)}
    return f"{name} {' '.join(f'{axis}={index}' for axis, index in found.items())}"


def test_all_pairs_of_planes_are_here() -> None:
    assert len(PLANAR) == 82 and len(FAMILIES) == len(plane_oracle.FAMILIES)
    meanings = {kvbm.load(name).fingerprint for pair in PLANAR for name in pair}
    assert meanings == {kvbm.load(name).fingerprint for name in matrix.planar()}


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize(("src", "dst"), FAMILIES.values())
def test_kvbm_s_copies_of_planes_are_right(src: str, dst: str, framework: str) -> None:
    """At the usual sizes, both ways."""
    for case in layout_cases(pairs=[(src, dst), (dst, src)], batches=[3], framework=framework):
        assert case.error() is not None, "nothing is copied yet"
        convert(case)
        case.check()


@pytest.mark.parametrize(("src", "dst"), PLANAR)
def test_what_the_formulas_copy_is_right(src: str, dst: str) -> None:
    """Every expected byte is that of the catalogue's formulas."""
    case = formula(src, dst, batches=[3])
    copy(case)
    case.check()
    copied = {name: int(write[0].size) for name, (_, write, _) in planes(case).items()}
    assert copied and all(copied.values())


@pytest.mark.parametrize(
    ("src", "dst", "sizes"),
    [
        ("vllm/fp8_ds_mla", "record/mla_fp8_planes", (3, 1, 1, 64, 576)),
        ("vllm/deepseek_v4", "record/deepseek_v4_tokens", (3, 1, 1, 64, 512)),
        ("vllm/dsa_indexer", "record/dsa_indexer_tokens", (3, 1, 1, 64, 128)),
        ("vllm/nvfp4", "record/nvfp4_tensors", (3, 2, 4, 16, 128)),
        ("record/mxfp8_tensors", "sglang/mxfp8", (3, 2, 4, 128, 128)),  # the first alone would do with 16 tokens
        ("vllm/diff_kv", "record/diff_kv_universal", (3, 1, 4, 16, 192)),
    ],
)
def test_planes_have_the_sizes_of_models(src: str, dst: str, sizes: tuple[int, ...]) -> None:
    (case,) = layout_cases(pairs=[(src, dst)], batches=[1])
    assert tuple(case.shape.sizes.values()) == sizes


def test_planes_of_one_s_own_have_the_usual_sizes(tmp_path: Path) -> None:
    """If they are not legal for any model."""
    (tmp_path / "mine.yaml").write_text(
        'order: "[l] b <x y>"\nplanes: {x: {order: o h t/16 t%16 d, dtype: int4}, '
        "y: {order: o h t, dtype: float32}}\naxes: {s: 3072//(nt*nl*hd)}\n",
        "utf-8",
    )
    case = next(layout_cases([tmp_path / "mine.yaml"]))
    assert str(case.shape) == "nl=3,no=2,nh=4,nt=16,hd=64,dtype=bfloat16"


def test_a_case_that_is_the_same_at_every_dtype_is_yielded_once() -> None:
    wanted = {"dtypes": ["bfloat16", "float32", "uint8"], "batches": [1, 7]}
    found = [str(case) for case in layout_cases(pairs=[("vllm/nvfp4", "record/nvfp4_tensors")], **wanted)]
    assert found == ["vllm/nvfp4->record/nvfp4_tensors-b1", "vllm/nvfp4->record/nvfp4_tensors-b7"]
    found = [str(case) for case in layout_cases(pairs=[("vllm/diff_kv", "vllm/diff_kv")], **wanted)]
    assert found == [f"vllm/diff_kv->vllm/diff_kv-{d}-b{n}" for d in wanted["dtypes"] for n in (1, 7)]  # type: ignore[attr-defined]


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize(
    ("name", "numpy", "tensors"),
    [
        ("vllm/nvfp4", ["uint8"] * 2, ["uint8"] * 2),
        ("record/nvfp4_tensors", ["uint8"] * 2 + ["float8_e4m3fn"] * 2, ["float4_e2m1fn_x2"] * 2 + ["float8_e4m3fn"] * 2),
        (
            "record/mla_fp8_tensors",
            ["float8_e4m3fn"] * 2 + ["float32"] * 2 + ["bfloat16"] * 2,
            ["float8_e4m3fn"] * 2 + ["float32"] * 2 + ["bfloat16"] * 2,
        ),
        ("sglang/mxfp8", ["float8_e4m3fn"] * 2 + ["float8_e8m0fnu"] * 2, ["float8_e4m3fn"] * 2 + ["float8_e8m0fnu"] * 2),
        ("flashinfer/mla_split", ["bfloat16"] * 4, ["bfloat16"] * 4),
    ],
)
def test_arrays_of_planes(name: str, numpy: list[str], tensors: list[str]) -> None:
    """One array per allocation, with the dtype and shape of the resolved layout."""
    for framework, dtypes in (("numpy", numpy), ("torch", tensors)):
        case = formula(name, name, framework=framework)
        allocations = case.src.resolve(case.shape, case.src_blocks).allocations
        assert [str(array.dtype).removeprefix("torch.") for array in case.src_arrays] == dtypes
        assert [tuple(array.shape) for array in case.src_arrays] == [each.shape for each in allocations]


def test_planes_hold_different_data() -> None:
    """So that a plane in another one's place is detected."""
    case = formula("flashinfer/mla_split", "record/mla_joined")
    latent, rope = case.src_arrays[0], case.src_arrays[2]
    assert not (latent[0, 0, :64] == rope[0, 0]).any()


@pytest.mark.parametrize("family", FAMILIES)
def test_one_wrong_byte_of_each_plane(family: str) -> None:
    """The first and the last of a block; the error names plane, coordinate, blocks and bytes."""
    case = formula(*FAMILIES[family])
    copy(case)
    for name, (read, _, itemsize) in planes(case).items():
        items = read[0].shape[1]
        for pair, item in ((0, 0), (1, items - 1), (1, items // 2)):
            found = tensor_bytes(case, name, pair, item)
            want = found.tobytes().hex()
            found[-1] ^= 0x80
            what = "pairs of elements" if name in ("data", "key", "latent") and "fp4" in family else "elements"
            error = str(case.error())
            assert error.startswith(
                f"{case.src.name} → {case.dst.name}: wrong at {coordinate(case, name, item)} of block {case.src_ids[pair]} → "
                f"{case.dst_ids[pair]}: expected bytes {want}, got {found.tobytes().hex()}"
            )
            assert error.endswith(f" (1 of {2 * items:,} {what} of {name} are wrong)"), error
            assert len(want) == 2 * itemsize
            found[-1] ^= 0x80
    case.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plane_that_is_missing(family: str) -> None:
    """All others are copied: wrong bytes are counted per plane."""
    for name in planes(formula(*FAMILIES[family])):
        case = formula(*FAMILIES[family])
        copy(case, without=name)
        error = str(case.error())
        assert f"wrong at {name} " in error and ", which is the value before the copy (" in error, error
        assert error.endswith(f" of {name} are wrong)") and " and " not in error, error
    copied = formula(*FAMILIES[family])
    assert str(copied.error()).count(" elements of ") == len(planes(copied)), "nothing is copied yet"


def tensor_bytes_of(case: LayoutCase, index: int) -> np.ndarray:
    return memory(case.dst_arrays[index], nbytes(case.dst, case.shape, case.dst_blocks, index))


def test_scales_of_k_and_v_that_are_swapped() -> None:
    case = formula("vllm/nvfp4", "record/nvfp4_tensors")
    copy(case)
    for scales in case.dst_arrays[2:]:  # b o h t s, a layer
        block = scales[int(case.dst_ids[1])]
        block[...] = block[::-1].copy()
    src, dst = int(case.src_ids[1]), int(case.dst_ids[1])
    error = str(case.error())
    assert f": wrong at scale l=0 o=0 h=0 t=0 s=0 of block {src} → {dst}: expected bytes " in error
    assert f", which is scale l=0 o=1 h=0 t=0 s=0 of block {src} (" in error, "V's scales lie in another order there"
    assert error.endswith(" elements of scale are wrong)") and "data" not in error


def test_a_plane_that_is_read_at_another_s_place() -> None:
    """A kernel that reads the rope values at the scales' place, and one that reads past the end of a page."""
    case = formula("vllm/fp8_ds_mla", "record/mla_fp8_tensors")
    copy(case)
    src, dst = int(case.src_ids[0]), int(case.dst_ids[0])
    case.dst_arrays[4].view(np.uint16)[dst, 1, :8] = case.src_arrays[0][src, 1, 512:528].view(np.uint16)
    assert f"wrong at rope l=0 o=0 h=0 t=1 r=0 of block {src} → {dst}" in str(case.error())
    assert f", which is scale l=0 o=0 h=0 t=1 s=0 of block {src} (8 of 1,024 elements of rope are wrong)" in str(
        case.error()
    )
    case = formula("vllm/deepseek_v4", "record/deepseek_v4_tokens")
    copy(case)
    page = memory(case.src_arrays[0], 5 * 576 * case.src_blocks)[5 * 576 * src :]
    case.dst_arrays[0][case.dst_ids[0], 2, 576:] = page[4 * 584 : 4 * 584 + 8]
    at = 5 * 576 * src + 4 * 584
    assert f", which is byte {at} of array 0 (l=0), which is padding (8 of 128 elements of scale are" in str(
        case.error()
    )


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_padding_behind_records(framework: str) -> None:
    """A page of four records of 584 bytes is padded to five times 576: a copy of whole pages writes the padding."""
    case = formula("record/deepseek_v4_planes", "vllm/deepseek_v4", framework=framework)
    convert(case)
    case.check()
    page = int(case.dst_ids[0]) * 5 * 576
    memory(case.dst_arrays[1], page + 5 * 576)[page + 4 * 584] ^= 1
    assert str(case.error()).endswith(
        f"bytes that no copy may touch were written, at byte {page + 4 * 584} of array 1 (l=1), which is padding (1 bytes)"
    )


GAPS = """
order: "[l] b <x y>"
planes:
  x: {order: t h d, dtype: int8, pitch: {h: 20 B}}
  y: {order: h, dtype: float32, shared: t, offset: nt*nh*20 + 8}
"""
TURNED = """
order: "[b] l <y x>"
planes:
  x: {order: h t d, dtype: int8}
  y: {order: h, dtype: float32, shared: t}
"""


def test_gaps_inside_a_record(tmp_path: Path) -> None:
    """Also for a plane that has one value for all tokens."""
    for name, text in (("gaps", GAPS), ("turned", TURNED)):
        (tmp_path / f"{name}.yaml").write_text(text, "utf-8")
    mine = [tmp_path / "gaps.yaml", tmp_path / "turned.yaml"]
    shape = kvbm.BlockShape(nl=2, no=1, nh=2, nt=4, hd=16)
    for case in layout_cases(mine, shapes=[shape], batches=[2]):
        convert(case)
        case.check()
        if case.dst.name == "gaps":
            for at, said in ((16, "padding"), (4 * 2 * 20, "padding"), (4 * 2 * 20 + 8, "y l=0 o=0 h=0 of block 0")):
                found = memory(case.dst_arrays[0], at + 1)
                found[at] ^= 1
                if 0 in case.dst_ids and said != "padding":
                    said = f"wrong at y l=0 o=0 h=0 of block {case.src_ids[list(case.dst_ids).index(0)]} → 0"
                assert said in str(case.error())
                found[at] ^= 1


OPAQUE = 'order: "[l] b <x y>"\nplanes: {{x: {{order: "{}"}}, y: {{order: {}, dtype: int8}}}}\naxes: {{s: 4}}\n'


def test_an_order_that_one_plane_does_not_promise(tmp_path: Path) -> None:
    """Its elements keep their order in memory; those of the other plane are placed by coordinates."""
    (tmp_path / "one.yaml").write_text(OPAQUE.format("{t d}", "t s"), "utf-8")
    (tmp_path / "other.yaml").write_text(OPAQUE.format("d t", "s t"), "utf-8")
    case = one(tmp_path / "one.yaml", tmp_path / "other.yaml", shapes=[kvbm.BlockShape(1, 1, 1, 4, 8)])  # type: ignore[arg-type]
    for i, j in zip(case.src_ids, case.dst_ids, strict=True):
        src, dst = case.src_arrays[0][i], case.dst_arrays[0][j]
        dst[:64] = src[:64]
        dst[64:].reshape(4, 4)[...] = src[64:].reshape(4, 4).T
    case.check()
    dst[64:].reshape(4, 4)[...] = src[64:].reshape(4, 4)
    said = f"wrong at y l=0 o=0 h=0 t=0 s=1 of block {i} → {j}: expected bytes {src[65]:02x}, got {src[68]:02x}"
    assert f"{said}, which is y l=0 o=0 h=0 t=1 s=0 of block {i} (12 of 32 elements of y are wrong)" in str(
        case.error()
    )
    convert(case)
    case.check()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_no_copy_of_planes_may_touch(family: str) -> None:
    """Other blocks of each plane, guard words on both sides of every array, and the source."""
    case = formula(*FAMILIES[family])
    copy(case)
    other = next(block for block in range(case.dst_blocks) if block not in case.dst_ids)
    shape = (*case.shape.sizes.values(), case.shape.dtype)
    for plane in plane_oracle.held(case.dst.name, shape, case.dst_blocks).planes:
        entry, offset = (at.reshape(-1)[-1] for at in plane.address([other]))
        at = tensor_bytes_of(case, entry)[offset:]
        at[0] ^= 1
        last = coordinate(case, plane.name, math.prod(len(step) for step in plane.items().values()) - 1)
        assert str(case.error()).endswith(
            f": bytes that no copy may touch were written, at {last} of block {other} (1 bytes)"
        )
        at[0] ^= 1
    for index, array in enumerate(case.dst_arrays):
        for place in (-1, nbytes(case.dst, case.shape, case.dst_blocks, index)):
            byte = (ctypes.c_uint8 * 1).from_address(array.ctypes.data + place)
            byte[0] ^= 1
            assert "no copy may touch were written, at " in str(case.error()) and "byte" in str(case.error())
            byte[0] ^= 1
    case.check()
    for array in case.src_arrays:
        first = memory(array, 1)
        first[0] ^= 1
        error = str(case.error())
        assert ": the source was written to, at " in error and error.endswith(" (1 bytes)"), error
        first[0] ^= 1
    case.check()


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("nhd", "vllm/nvfp4"),
        ("vllm/nvfp4", "nhd"),
        ("vllm/fp8_ds_mla", "vllm/mla"),
        ("vllm/nvfp4", "vllm/dsa_indexer"),
        ("vllm/fp8_ds_mla", "vllm/deepseek_v4"),  # at no sizes are both legal
        ("record/diff_kv_universal", "vllm/mla_v41"),
        ("swizzle/linear", "sglang/mxfp8"),
    ],
)
def test_different_planes_are_refused(src: str, dst: str) -> None:
    with pytest.raises(PlanError, match=r"expected the same planes on both sides|a copy converts no dtype") as caught:
        list(layout_cases(pairs=[(src, dst)]))
    assert str(caught.value).startswith(f"{src} → {dst}: ")
    if (src, dst) == ("nhd", "vllm/nvfp4"):
        with pytest.raises(PlanError) as said:
            kvbm.plan(kvbm.load(src), kvbm.load(dst), kvbm.BlockShape(2, 2, 2, 16, 128))
        assert str(said.value) == str(caught.value)


def test_planes_that_are_illegal_at_given_sizes_say_so() -> None:
    with pytest.raises(LayoutError, match=r"sglang/mxfp8.yaml:6: plane 'scale': 't%32'"):
        list(layout_cases(["sglang/mxfp8"], shapes=[kvbm.BlockShape(1, 2, 2, 16, 128)]))


#: On a GPU: records of one dtype a plane and of three, pages with padding, tables, pairs of elements, swizzles, shape's dtype.
ON_A_GPU = [
    ("vllm/fp8_ds_mla", "record/mla_fp8_tensors"),
    ("record/mla_fp8_tensors", "record/mla_fp8_planes"),
    ("record/deepseek_v4_planes", "vllm/deepseek_v4"),
    ("vllm/nvfp4", "record/nvfp4_tensors"),
    ("record/nvfp4_universal", "vllm/nvfp4"),
    ("sglang/mxfp8", "record/mxfp8_tensors"),
    ("record/per_token_head_int8_planes", "vllm/per_token_head_int8"),
    ("vllm/dsa_indexer_mxfp4", "record/dsa_indexer_mxfp4_tokens"),
    ("vllm/diff_kv", "record/diff_kv_universal"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("src", "dst"), ON_A_GPU)
def test_gpu_planes(src: str, dst: str) -> None:
    """The arrays are tensors on the device; a correct copy passes, one wrong byte of a plane is reported."""
    import torch

    for case in layout_cases(pairs=[(src, dst)], dtypes=["bfloat16", "float32"], batches=[1, 7], device="cuda"):
        assert all(array.is_cuda for array in (*case.src_arrays, *case.dst_arrays))
        assert case.error() is not None, "nothing is copied yet"
        convert(case)
        case.check()
        for name, (_, (entry, offset), _) in planes(case).items():
            array = case.dst_arrays[int(entry[0, -1])]
            at = int(offset[0, -1]) // array.element_size()
            last = array.as_strided((1,), (1,), array.storage_offset() + at).view(torch.uint8)
            last[0] ^= 1
            error = str(case.error())
            assert f": wrong at {coordinate(case, name, entry.shape[1] - 1)} of block" in error, error
            last[0] ^= 1
        case.check()


# ---- the plugin ----------------------------------------------------------------------------------------------------

MINE = """
    import kvbm

    def test_mine(kvbm_case):
        src = kvbm.Pool(kvbm_case.src, kvbm_case.shape, kvbm_case.src_arrays)
        dst = kvbm.Pool(kvbm_case.dst, kvbm_case.shape, kvbm_case.dst_arrays)
        kvbm.convert(src, dst, kvbm_case.src_ids, kvbm_case.dst_ids)
        if kvbm_case.dst.name == "hnd":
            kvbm_case.dst_arrays[0][0, 0, 0] += 1
        kvbm_case.check()
"""


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """Run pytest in a separate process, so that the plugin is loaded by its entry point."""
    quiet = ("-p", "no:hypothesispytest", "-p", "no:xdist", "-p", "no:cacheprovider")
    return pytester.runpytest_subprocess(*quiet, *arguments)


def test_plugin_goes_through_the_layouts(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(MINE)
    result = run(pytester, "-v", "--kvbm-layouts=nhd,hnd", "--kvbm-dtypes=uint8,float32", "--kvbm-batches=2")
    result.assert_outcomes(passed=4, failed=4)
    result.stdout.fnmatch_lines(
        ["*test_mine?hnd->nhd-uint8-b2? PASSED*", "*AssertionError: nhd → hnd: bytes that no copy may touch*"]
    )


@pytest.mark.slow
def test_plugin_goes_through_planes(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(MINE)
    layouts = "vllm/fp8_ds_mla,record/mla_fp8_planes,record/mla_fp8_tensors"
    result = run(pytester, "-v", f"--kvbm-layouts={layouts}", "--kvbm-dtypes=uint8,bfloat16", "--kvbm-batches=2")
    result.assert_outcomes(passed=9)
    result.stdout.fnmatch_lines(["*test_mine?vllm/fp8_ds_mla->record/mla_fp8_tensors-b2? PASSED*"])


@pytest.mark.slow
def test_plugin_has_defaults(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_mine(kvbm_case): assert not hasattr(kvbm_case.src_arrays[0], 'data_ptr')")
    run(pytester).assert_outcomes(passed=4 * 4 * 2)


@pytest.mark.usefixtures("torch")
@pytest.mark.slow
def test_plugin_gives_tensors(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_mine(kvbm_case): assert kvbm_case.src_arrays[0].data_ptr()")
    run(pytester, "--kvbm-layouts=nhd", "--kvbm-framework=torch").assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--kvbm-layouts=nhd,nothing", "layout 'nothing': expected a name"),
        (
            "--kvbm-layouts=nhd,vllm/nvfp4",
            "nhd → vllm/nvfp4: nhd has no planes, and the other side has 'data', 'scale'; ",
        ),
        ("--kvbm-layouts=nhd,", "--kvbm-layouts: expected a list such as a,b,c, got 'nhd,'"),
        ("--kvbm-batches=one", "invalid literal"),
        ("--kvbm-device=tpu", "device: expected cpu, cuda or cuda:N"),
    ],
)
@pytest.mark.slow
def test_plugin_refuses(pytester: pytest.Pytester, option: str, said: str) -> None:
    pytester.makepyfile(MINE)
    result = run(pytester, option)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    lines = [line for line in result.stdout.lines if said in line]
    assert lines and lines[0].startswith("--kvbm-"), "the sentence alone"
    assert "plugin.py" not in result.stdout.str() and not result.stderr.str()


def test_plugin_costs_other_runs_nothing(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import sys

        def test_other(request):
            assert request.config.pluginmanager.has_plugin("kvbm")
            kvbm = {name for name in sys.modules if name.startswith("kvbm")}
            assert kvbm == {"kvbm", "kvbm._shown", "kvbm._version", "kvbm.testing", "kvbm.testing.plugin"}
            assert not {"numpy", "torch", "click", "yaml"} & set(sys.modules)
        """
    )
    run(pytester, "--strict-markers", "--strict-config", "-W", "error").assert_outcomes(passed=1)
