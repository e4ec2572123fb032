"""layout_cases and the pytest plugin: a right copy passes, made by the tests' own oracle; each kind of wrong one is told."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvbm
import matrix
import plane_oracle
from kvbm.errors import BindError, KvbmError, LayoutError, PlanError, SpecError
from kvbm.testing import LayoutCase, layout_cases
from oracle import Placed

pytest_plugins = ["pytester"]

SMALL = kvbm.BlockShape(nl=2, no=2, nh=2, nt=8, hd=16)
EVEN = kvbm.BlockShape(nl=2, no=2, nh=2, nt=16, hd=16)  # where words of 16 bytes divide all that is cut


def memory(array: Any, nbytes: int) -> np.ndarray:
    """The bytes that an array lies on, from its first element on."""
    address = array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def sides(case: LayoutCase) -> tuple[Placed, Placed]:
    """Both layouts as the oracle reads them."""
    sizes, itemsize = dict(case.shape.sizes), case.shape.itemsize
    return (
        Placed(matrix.orders()[case.src.name], sizes, itemsize, case.src_blocks),
        Placed(matrix.orders()[case.dst.name], sizes, itemsize, case.dst_blocks),
    )


def places(placed: Placed, ids: Any, opaque: bool) -> tuple[np.ndarray, np.ndarray]:
    """Entry and offset of every element; those of an opaque group as they lie in memory."""
    entry, offset = placed.address(ids)
    if opaque:
        offset = np.sort(offset.reshape(*offset.shape[:3], -1), axis=3)
    return entry.reshape(len(ids), -1), offset.reshape(len(ids), -1)


Places = tuple[np.ndarray, np.ndarray]


def planes(case: LayoutCase) -> dict[str, tuple[Places, Places, int]]:
    """Of each plane, by the oracles: entry and offset of every item of the batch on both sides, and its bytes."""
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


def copy(case: LayoutCase, *, but: int = 0) -> None:
    """The copy by the oracles, without the last `but` elements of each block (and plane)."""
    bytes_ = [
        [memory(array, nbytes(layout, case.shape, blocks, index)) for index, array in enumerate(arrays)]
        for layout, blocks, arrays in (
            (case.src, case.src_blocks, case.src_arrays),
            (case.dst, case.dst_blocks, case.dst_arrays),
        )
    ]
    for read, write, itemsize in planes(case).values():
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
    """Bytes of an array, padding included."""
    if not layout.planes:
        return Placed(matrix.orders()[layout.name], dict(shape.sizes), shape.itemsize, blocks).spaces[index].nbytes
    return plane_oracle.held(layout.name, (*shape.sizes.values(), shape.dtype), blocks).tensors[index].nbytes


def one(src: str = "nhd", dst: str = "universal", **rest: Any) -> LayoutCase:
    return next(layout_cases(pairs=[(src, dst)], **{"shapes": [SMALL], "batches": [2], **rest}))


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


@pytest.mark.parametrize("name", sorted(matrix.orders()))
def test_every_shipped_layout_has_cases(name: str) -> None:
    """At a shape of its own kind; into itself, as an opaque one goes into no other."""
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
        ({"layouts": ["nothing"]}, SpecError, "layout 'nothing': expected one of"),
        ({"layouts": ["nhd"], "dtypes": ["float7"]}, kvbm.DTypeError, "float7"),
        ({"layouts": ["nhd"], "batches": [0]}, BindError, "batches: expected numbers of blocks from 1 on, got 0"),
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


@pytest.mark.parametrize("name", [name for name in matrix.further() if not matrix.latent(name)])
def test_kvbm_s_copies_are_right(name: str) -> None:
    """Both ways, with NumPy's arrays and torch's."""
    for pair, framework in (((name, "universal"), "numpy"), (("universal", name), "torch")):
        for case in layout_cases(pairs=[pair], dtypes=["uint8", "bfloat16"], batches=[3], framework=framework):
            src = kvbm.Pool(case.src, case.shape, case.src_arrays)
            kvbm.convert(src, kvbm.Pool(case.dst, case.shape, case.dst_arrays), case.src_ids, case.dst_ids)
            case.check()


def test_padding_is_part_of_the_check() -> None:
    """vllm/tpu pads each head to 128 elements."""
    case = one("nhd", "vllm/tpu", batches=[1])
    src = kvbm.Pool(case.src, case.shape, case.src_arrays)
    kvbm.convert(src, kvbm.Pool(case.dst, case.shape, case.dst_arrays), case.src_ids, case.dst_ids)
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
    assert error.endswith(", which is what stood there before (2 of 2,048 elements are wrong)")


def test_elements_that_lie_elsewhere_say_where_they_are_from() -> None:
    """Heads and tokens in the other order."""
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
    case.dst_arrays[0][1, other, 1, 7, 1, 15] ^= 1
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
    case.src_arrays[0][0, 0, 0] ^= 1
    assert case.error() == "nhd → universal: the source was written to, at l=0 o=0 h=0 t=0 d=0 of block 0 (1 bytes)"


def test_seeds_and_blocks_differ() -> None:
    cases = [one(seed=seed, batches=[4]) for seed in (0, 0, 1)]
    first, same, other = ([array.tobytes() for array in case.src_arrays] for case in cases)
    assert first == same != other
    assert len(set(first)) == len(first), "no two chunks are alike"


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
    """In a process of its own, so that the plugin comes by its entry point."""
    quiet = ("-p", "no:hypothesispytest", "-p", "no:xdist", "-p", "no:cacheprovider")
    return pytester.runpytest_subprocess(*quiet, *arguments)


def test_plugin_goes_through_the_layouts(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(MINE)
    result = run(pytester, "-v", "--kvbm-layouts=nhd,hnd", "--kvbm-dtypes=uint8,float32", "--kvbm-batches=2")
    result.assert_outcomes(passed=4, failed=4)
    result.stdout.fnmatch_lines(
        ["*test_mine?hnd->nhd-uint8-b2? PASSED*", "*AssertionError: nhd → hnd: bytes that no copy may touch*"]
    )


def test_plugin_has_defaults(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_mine(kvbm_case): assert not hasattr(kvbm_case.src_arrays[0], 'data_ptr')")
    run(pytester).assert_outcomes(passed=4 * 4 * 2)


@pytest.mark.usefixtures("torch")
def test_plugin_gives_tensors(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_mine(kvbm_case): assert kvbm_case.src_arrays[0].data_ptr()")
    run(pytester, "--kvbm-layouts=nhd", "--kvbm-framework=torch").assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--kvbm-layouts=nhd,nothing", "layout 'nothing': expected one of"),
        ("--kvbm-layouts=nhd,", "--kvbm-layouts: expected a list such as a,b,c, got 'nhd,'"),
        ("--kvbm-batches=one", "invalid literal"),
        ("--kvbm-device=tpu", "device: expected cpu, cuda or cuda:N"),
    ],
)
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
            assert kvbm == {"kvbm", "kvbm.testing", "kvbm.testing.plugin"}
            assert not {"numpy", "torch", "click", "yaml"} & set(sys.modules)
        """
    )
    run(pytester, "--strict-markers", "--strict-config", "-W", "error").assert_outcomes(passed=1)
