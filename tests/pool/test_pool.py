"""Binding and converting refuse everything that could make a copy wrong without an error, and leave the destination unchanged."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvbm
import kvbm.numpy
import oracle
from kvbm.layout.shapes import ITEMSIZE, PACKED, numpy_name
from kvbm.layout.spec import example_shape, layouts_dir, load_dir
from kvbm.memory.allocation import available_bytes, total_bytes
from memory import Bound, FakeCuda, FakeDlpack, aligned, numpy_dtype

SHAPE = kvbm.BlockShape(nl=2, no=2, nh=3, nt=4, hd=8, dtype="float32")


def zeros(name: str, num_blocks: int = 3, shape: kvbm.BlockShape = SHAPE, dtype: str | None = None) -> list[np.ndarray]:
    kind = numpy_dtype(dtype or shape.dtype)
    return [np.zeros(a.shape, kind) for a in kvbm.load(name).resolve(shape, num_blocks).allocations]


def test_binds() -> None:
    arrays = zeros("vllm/flash_attn_nhd", 5)
    pool = kvbm.Pool(kvbm.load("vllm/flash_attn_nhd"), SHAPE, arrays)
    assert pool.num_blocks == 5 and pool.device == "cpu" and pool.shape == SHAPE
    assert pool.layout.name == "vllm/flash_attn_nhd"
    assert pool.nbytes == sum(a.nbytes for a in arrays) == 5 * SHAPE.nbytes
    assert pool.addresses.dtype == np.uint64
    assert pool.addresses.tolist() == [a.ctypes.data for a in arrays]
    assert all(a is b for a, b in zip(pool.arrays, arrays, strict=True))


@pytest.mark.parametrize("name", ["nhd", "universal", "vllm/LBHNC", "vllm/paged_attn_v0", "hf/dynamic_cache"])
def test_number_of_blocks(name: str) -> None:
    assert kvbm.Pool(kvbm.load(name), SHAPE, zeros(name, 4)).num_blocks == 4


def test_one_array_for_one_allocation() -> None:
    array = zeros("vllm/LBHNC")[0]
    assert kvbm.Pool(kvbm.load("vllm/LBHNC"), SHAPE, array).num_blocks == 3


@pytest.mark.parametrize("dtype", sorted(oracle.ITEMSIZE))
def test_every_dtype_on_the_host(dtype: str) -> None:
    shape = kvbm.BlockShape(nl=2, no=2, nh=3, nt=4, hd=16, dtype=dtype)
    pool = kvbm.Pool(kvbm.load("nhd"), shape, zeros("nhd", shape=shape))
    assert pool.nbytes == 3 * shape.nbytes


@pytest.mark.parametrize("dtype", sorted(oracle.ITEMSIZE))
def test_every_dtype_of_torch(dtype: str, torch: Any) -> None:
    shape = kvbm.BlockShape(nl=2, no=2, nh=3, nt=4, hd=16, dtype=dtype)
    tensors = [
        torch.zeros(a.shape, dtype=getattr(torch, dtype)) for a in kvbm.load("nhd").resolve(shape, 3).allocations
    ]
    assert kvbm.Pool(kvbm.load("nhd"), shape, tensors).num_blocks == 3


@pytest.mark.parametrize("device", ["cpu"])
@pytest.mark.parametrize("name", ["nhd", "universal", "vllm/paged_attn_v0"])
def test_allocate(name: str, device: str) -> None:
    pool = kvbm.Pool.allocate(kvbm.load(name), SHAPE, 3, device)
    assert (pool.num_blocks, pool.device) == (3, device)
    assert [a.shape for a in pool.arrays] == [a.shape for a in kvbm.load(name).resolve(SHAPE, 3).allocations]


@pytest.mark.parametrize(
    "device", ["tpu", "cuda:x", "cpu:1", "", "cuda:-1", "cuda:", "pinned:", "pinned:x", "shared:0", "CPU", "cuda:0 "]
)
def test_allocate_nowhere(device: str) -> None:
    with pytest.raises(kvbm.BindError, match=r"device: expected 'cpu', 'shared', 'pinned', 'pinned:N', 'cuda' or 'cuda:N', got"):
        kvbm.Pool.allocate(kvbm.load("nhd"), SHAPE, 3, device)


def test_close() -> None:
    """The caller's arrays stay; memory that the pool owns is freed.  Neither pool can be used afterwards."""
    arrays = zeros("universal")
    with kvbm.Pool(kvbm.load("universal"), SHAPE, arrays) as pool:
        assert not pool.closed
        pool.require_open()
        _ = pool.addresses
    assert pool.closed and pool.arrays == tuple(arrays)
    for use in (pool.require_open, pool.__enter__, pool.pin, lambda: pool.addresses):
        with pytest.raises(kvbm.BindError, match=r"universal.* is closed; expected an open pool"):
            use()
    pool.close()


def test_dlpack() -> None:
    class OnlyDlpack:
        def __init__(self, array: np.ndarray) -> None:
            self.array = array

        def __dlpack__(self, **rest: Any) -> Any:
            return self.array.__dlpack__(**rest)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.array.__dlpack_device__()

    arrays = zeros("vllm/flash_attn_nhd")
    pool = kvbm.Pool(kvbm.load("vllm/flash_attn_nhd"), SHAPE, [OnlyDlpack(a) for a in arrays])
    assert pool.addresses.tolist() == [a.ctypes.data for a in arrays]


@pytest.mark.parametrize(("code", "dtype"), [(2, "float16"), (4, "bfloat16"), (1, "uint16")])
def test_dlpack_of_a_gpu(code: int, dtype: str) -> None:
    """Also bfloat16, which neither NumPy nor `__cuda_array_interface__` supports."""
    shape = kvbm.BlockShape(nl=1, no=2, nh=3, nt=4, hd=8, dtype=dtype)
    array = np.zeros((2, 5, 4, 3, 8), np.uint16)
    pool = kvbm.Pool(kvbm.load("vllm/flash_attn_nhd"), shape, [FakeDlpack(array, code)])
    assert (pool.device, pool.num_blocks, pool.addresses.tolist()) == ("cuda:0", 5, [array.ctypes.data])
    with pytest.raises(kvbm.BindError, match="strides"):
        kvbm.Pool(
            kvbm.load("vllm/flash_attn_nhd"), shape, [FakeDlpack(array.swapaxes(2, 3).copy().swapaxes(2, 3), code)]
        )


def test_dlpack_that_cannot_be_read() -> None:
    shape = kvbm.BlockShape(nl=1, no=2, nh=3, nt=4, hd=8, dtype="bfloat16")
    with pytest.raises(kvbm.BindError, match=r"array 0.*cuda\.core.*DLPack.*integers"):
        kvbm.Pool(kvbm.load("vllm/flash_attn_nhd"), shape, [FakeDlpack(np.zeros((2, 5, 4, 3, 8), np.uint16), 77)])


def both(src: str = "nhd", dst: str = "universal", blocks: tuple[int, int] = (4, 5)) -> tuple[Bound, Bound]:
    return Bound(src, SHAPE, blocks[0]), Bound(dst, SHAPE, blocks[1], dst=True)


@pytest.mark.parametrize(
    ("src_ids", "dst_ids", "match"),
    [
        ([0, 4], [0, 1], r"src_ids\[1\] is 4.*0 to 3"),
        ([0, 1], [0, 5], r"dst_ids\[1\] is 5.*0 to 4"),
        ([0, -2], [0, 1], r"src_ids\[1\] is -2.*0 to 3"),
        ([0, 1], [-7, 1], r"dst_ids\[0\] is -7.*0 to 4"),
        ([0, 2**40], [0, 1], r"src_ids\[1\] is 1099511627776"),
        ([2**31], [0], r"src_ids\[0\] is 2147483648"),
        ([2**32], [0], r"src_ids\[0\] is 4294967296"),  # whose low half is a block
        ([0, 1, 2], [3, 2, 3], r"dst_ids\[2\].*3"),  # twice
        ([0, 1], [0], r"2.*1"),
        ([0], [0, 1], r"1.*2"),
        ([0.5], [0], r"src_ids.*integer.*float"),
        ([[0, 1]], [[0, 1]], r"src_ids.*integer, got list"),
        ([True], [0], r"src_ids.*integer.*bool"),
        (["0"], [0], r"src_ids.*integer"),
        (None, None, r"4.*5"),  # different numbers of blocks
    ],
)
def test_ids(src_ids: Any, dst_ids: Any, match: str) -> None:
    src, dst = both()
    with pytest.raises(kvbm.BindError, match=match):
        kvbm.convert(src.pool, dst.pool, src_ids, dst_ids)
    assert dst.untouched and src.untouched


def test_ids_on_one_side_only() -> None:
    src, dst = both()
    with pytest.raises(kvbm.BindError, match="5"):
        kvbm.convert(src.pool, dst.pool, [0, 1, 2, 3, 0, 1], None)  # six ids, five blocks
    assert dst.untouched
    kvbm.convert(src.pool, dst.pool, [0, 1, 2, 3, 0], None)  # a block may be read twice
    want = oracle.expected_bytes(src.arena, dst.arena, src.before, dst.before, [0, 1, 2, 3, 0], range(5))
    assert np.array_equal(dst.buffer, want)


def test_ids_from_torch(torch: Any) -> None:
    src, dst = both()
    kvbm.convert(src.pool, dst.pool, torch.tensor([3, 1]), torch.tensor([0, 4], dtype=torch.int32))
    want = oracle.expected_bytes(src.arena, dst.arena, src.before, dst.before, [3, 1], [0, 4])
    assert np.array_equal(dst.buffer, want)


def test_too_large_for_int64() -> None:
    src, dst = both()
    with pytest.raises(kvbm.BindError, match="src_ids"):
        kvbm.convert(src.pool, dst.pool, np.array([2**63], np.uint64), [0])
    assert dst.untouched


@pytest.mark.parametrize(
    ("other", "error", "match"),
    [
        ({"nt": 8}, kvbm.BindError, r"nhd → universal.*nt=4.*nt=8"),
        ({"dtype": "int32"}, kvbm.DTypeError, r"float32.*int32"),
    ],
)
def test_pools_of_different_shapes(other: dict[str, Any], error: type[Exception], match: str) -> None:
    src, dst = Bound("nhd", SHAPE, 2), Bound("universal", replace(SHAPE, **other), 2, dst=True)
    with pytest.raises(error, match=match):
        kvbm.convert(src.pool, dst.pool)
    assert dst.untouched


def test_host_memory_that_no_gpu_reaches() -> None:
    """Copies between a GPU and the host use pinned memory, or are refused."""
    src = Bound("vllm/flash_attn_nhd", SHAPE, 2)
    far = kvbm.Pool(src.layout, SHAPE, [FakeCuda((2, 2, 4, 3, 8), "float32") for _ in range(2)])
    with pytest.raises(kvbm.BindError, match=r"the source is in host memory that GPUs cannot access.*pinned.*pin\(\)"):
        kvbm.convert(src.pool, far)
    with pytest.raises(kvbm.BindError, match=r"the destination is in host memory that GPUs cannot access.*pin\(\)"):
        kvbm.convert(far, src.pool)
    assert src.untouched


def test_read_only_destination() -> None:
    src, dst = both(blocks=(4, 4))
    for array in dst.arrays:
        array.flags.writeable = False
    locked = kvbm.Pool(dst.layout, SHAPE, dst.arrays)
    with pytest.raises(kvbm.BindError, match="read-only"):
        kvbm.convert(src.pool, locked)
    assert dst.untouched
    kvbm.convert(locked, src.pool)  # as a source it is fine


@pytest.mark.parametrize("shift", [0, 4, 1024])
def test_source_and_destination_overlap(shift: int) -> None:
    n = 4 * SHAPE.nbytes
    memory = aligned(oracle.noise(n + 4096, 3))
    before = memory.copy()
    array = kvbm.load("vllm/LBHNC").resolve(SHAPE, 4).allocations[0].shape
    other = kvbm.load("vllm/BHLNC").resolve(SHAPE, 4).allocations[0].shape
    src = kvbm.Pool(kvbm.load("vllm/LBHNC"), SHAPE, memory[:n].view("float32").reshape(array))
    dst = kvbm.Pool(kvbm.load("vllm/BHLNC"), SHAPE, memory[shift : shift + n].view("float32").reshape(other))
    with pytest.raises(kvbm.BindError, match="overlap"):
        kvbm.convert(src, dst, [0], [3])
    assert np.array_equal(memory, before)


def test_one_array_shared_among_many() -> None:
    """Only the last allocation of one side overlaps the first of the other."""
    src, dst = both("nhd", "nhd", (3, 3))
    arrays = list(dst.arrays)
    arrays[-1] = src.arrays[0]
    mixed = kvbm.Pool(dst.layout, SHAPE, arrays)
    with pytest.raises(kvbm.BindError, match="overlap"):
        kvbm.convert(src.pool, mixed)
    with pytest.raises(kvbm.BindError, match="overlap"):
        kvbm.convert(mixed, src.pool)
    assert src.untouched and dst.untouched


def test_same_pool() -> None:
    """A pool may be converted into itself, but no block may be both read and written."""
    pool = Bound("universal", SHAPE, 5)
    for src_ids, dst_ids in (([0, 1], [1, 2]), ([0], [0]), (None, None)):
        with pytest.raises(kvbm.BindError, match=r"(?i)read.*writ|writ.*read"):
            kvbm.convert(pool.pool, pool.pool, src_ids, dst_ids)
        assert pool.untouched
    kvbm.convert(pool.pool, pool.pool, [0, 1], [3, 2])
    want = oracle.expected_bytes(pool.arena, pool.arena, pool.before, pool.before, [0, 1], [3, 2])
    assert np.array_equal(pool.buffer, want)


def test_the_same_memory_in_two_pools() -> None:
    pool = Bound("universal", SHAPE, 5)
    twin = kvbm.Pool(pool.layout, SHAPE, pool.arrays)
    with pytest.raises(kvbm.BindError):
        kvbm.convert(pool.pool, twin, [0, 1], [1, 2])
    assert pool.untouched


def test_no_refinement() -> None:
    from kvbm.layout import spec

    shape = kvbm.BlockShape(nl=1, no=2, nh=2, nt=12, hd=4, dtype="uint8")
    pools = [
        kvbm.Pool(
            spec.parse(f'order: "b l o h t/{n} d t%{n}"', name=f"by{n}"),
            shape,
            np.full((2, 1, 2, 2, 12 // n, 4, n), n, np.uint8),
        )
        for n in (3, 2)
    ]
    with pytest.raises((kvbm.PlanError, kvbm.LayoutError), match="no common refinement"):
        kvbm.convert(*pools)
    assert (pools[1].arrays[0] == 2).all()


def test_a_pitch_that_leaves_room_behind_blocks_of_two_orders() -> None:
    """K and V in one array, `o` outside `b`: the array does not show the number of blocks, which must be given."""
    layout = kvbm.layout.spec.parse('order: {k: "o b l t d", v: "o b l d t"}\npitch: {o: "65536B"}')
    shape = kvbm.BlockShape(nl=2, no=2, nh=1, nt=4, hd=8, dtype="uint8")
    padded = kvbm.Pool.allocate(layout, shape, 6)
    plain = kvbm.Pool.allocate(kvbm.load("universal"), shape, 6)
    back = kvbm.Pool.allocate(kvbm.load("universal"), shape, 6)
    assert padded.num_blocks == 6
    plain.arrays[0][:] = np.random.default_rng(0).integers(0, 256, plain.arrays[0].shape, np.uint8)
    kvbm.convert(plain, padded)
    kvbm.convert(padded, back)
    assert np.array_equal(back.arrays[0], plain.arrays[0])
    assert kvbm.Pool(layout, shape, padded.arrays, num_blocks=5).num_blocks == 5
    with pytest.raises(kvbm.BindError, match=r"array 0: the array does not show its number of blocks: 1 to 1024 fit.*num_blocks="):
        kvbm.Pool(layout, shape, padded.arrays)
    with pytest.raises(kvbm.LayoutError, match="pitch"):
        kvbm.Pool(layout, shape, padded.arrays, num_blocks=1025)


def test_a_number_of_blocks_is_found_or_asked_for_and_never_guessed() -> None:
    """Over all shipped layouts and layouts with room behind the blocks; arrays as given, and records and rows as flat bytes."""
    own = [
        kvbm.layout.spec.parse(text, name=f"own {number}")
        for number, text in enumerate((
            'order: {k: "o b l t h d", v: "o b l h d t"}\npitch: {o: "65536 B"}',
            'order: {k: "l o b t h d", v: "l o b h d t"}\npitch: {l: "131072 B"}',
            'order: {k: "o b l t h d", v: "o b l h d t"}',
            'order: {k: "b o l t h d", v: "b o l h d t"}\npitch: {b: "8192 B"}',
            'order: "l b h t <data scale>"\npitch: {l: "65536 B"}\nplanes: {data: {order: "o d", dtype: uint8}, '
            'scale: {order: "o", dtype: float32}}',
        ))
    ]
    shape = kvbm.BlockShape(nl=2, no=2, nh=2, nt=16, hd=32, dtype="bfloat16")
    asked = found = 0
    for layout in (*own, *map(kvbm.load, kvbm.layouts())):
        for blocks in (1, 2, 5, 13):
            try:
                made = kvbm.Pool.allocate(layout, shape, blocks)
            except kvbm.LayoutError:
                continue
            given = [made.arrays]
            if made.resolved.first.is_record and made.arrays[0].flags["C_CONTIGUOUS"]:
                given += [[a.reshape(-1) for a in made.arrays], [a.reshape(2, -1) for a in made.arrays]]
            for arrays in given:
                try:
                    got = kvbm.Pool(layout, shape, list(arrays)).num_blocks
                    found += 1
                except kvbm.BindError as error:
                    asked += "fit" in str(error) and "pass num_blocks=" in str(error)
                    assert "num_blocks=" in str(error) or arrays is not made.arrays, (layout.name, blocks, error)
                    got = kvbm.Pool(layout, shape, list(made.arrays), num_blocks=blocks).num_blocks  # the way out works
                assert got == blocks, layout.name
    assert found > 300
    assert asked >= 8


@pytest.mark.parametrize("dtype", ["uint8", "int8", "bool", "V1", "float8_e4m3fn", "int16", "float32"])
def test_one_rule_for_pools_and_calls(dtype: str) -> None:
    """A pool and `kvbm.numpy.convert` accept the same arrays, and refuse others for the same reason."""
    shape = kvbm.BlockShape(nl=2, no=2, nh=3, nt=4, hd=8, dtype="uint8")
    arrays = [one.astype(getattr(ml_dtypes, dtype, dtype)) for one in zeros("nhd", shape=shape, dtype="uint8")]
    said = []
    for call in (
        lambda: kvbm.Pool(kvbm.load("nhd"), shape, arrays),
        lambda: kvbm.numpy.convert(arrays, "nhd", "universal", f"{shape}"),
    ):
        try:
            call()
        except kvbm.DTypeError as error:
            said.append(str(error).partition(": expected")[2])
    assert len(said) in (0, 2) and len(set(said)) == (dtype in ("int16", "float32")), said


@pytest.mark.slow  # 0.6 s
@pytest.mark.sanitize
def test_which_memory_a_pool_has() -> None:
    """Adjacent arrays, separate ones, and arrays in others' padding: a range meets the pool if it overlaps one of its spans."""
    random = np.random.default_rng(3)
    for count in range(1, 40):
        pool = kvbm.Pool(kvbm.load("nhd"), SHAPE, zeros("nhd"))
        begins = 1000 + np.sort(random.integers(0, 200, count))
        ends = begins + random.choice([1, 2, 8, 60], count)
        pool._spans = np.stack([begins, ends], axis=1).astype(np.uint64)
        inside = np.zeros(2000, bool)
        for begin, end in zip(begins, ends, strict=True):
            inside[begin:end] = True
        edges = (np.flatnonzero(np.diff(inside)) + 1).tolist()
        for begin in range(990, 1270):
            for end in (begin - 1, begin, begin + 1, begin + 2, begin + 9, *edges):
                assert pool.meets(begin, end) == inside[begin : max(begin, end)].any(), (count, begin, end)
    pool = kvbm.Pool(kvbm.load("nhd"), SHAPE, zeros("nhd"))
    for array in pool.arrays:
        first, last = array.ctypes.data, array.ctypes.data + array.nbytes - 1
        assert pool.meets(first, first + 1) and pool.meets(last, last + 1) and not pool.meets(first, first)


def test_reshape_is_advised_only_where_it_makes_no_copy() -> None:
    """Of an array that is not contiguous it does: the result of a copy would not be in the caller's array."""
    sizes = "nl=1,no=2,nh=8,nt=16,hd=128,dtype=float16"
    for shape in ((2, 96, 8, 128), (2, 6, 4, 32, 128), (2 * 6 * 16 * 8 * 128,)):
        with pytest.raises(kvbm.BindError, match=r"call \.reshape\(2, 6, 16, 8, 128\)"):
            kvbm.Pool("vllm/flash_attn_nhd", sizes, [np.zeros(shape, np.float16)])
    for strided in (
        np.zeros((2, 6, 8, 256, 16), np.float16).transpose(0, 1, 2, 4, 3),
        np.zeros((2, 192, 8, 128), np.float16)[:, ::2],
    ):
        with pytest.raises(kvbm.BindError, match="check the shape") as info:
            kvbm.Pool("vllm/flash_attn_nhd", sizes, [strided])
        assert "reshape" not in str(info.value)


def test_a_permutation_that_is_advised_is_accepted() -> None:
    """For each order of the axes of a view, and no other advice where the memory has another order, too."""
    sizes, dims = "nl=1,no=2,nh=8,nt=16,hd=128,dtype=float16", (2, 6, 16, 8, 128)
    for order in itertools.permutations(range(5)):
        if order == (0, 1, 2, 3, 4):
            continue
        view = np.zeros(dims, np.float16).transpose(order)
        with pytest.raises(kvbm.BindError, match=r"expected \(2, 6, 16, 8, 128\)|these strides") as info:
            kvbm.Pool("vllm/flash_attn_nhd", sizes, [view])
        if found := re.search(r"\.permute\(([0-9, ]+)\)", str(info.value)):
            again = view.transpose([int(axis) for axis in found[1].split(",")])
            assert kvbm.Pool("vllm/flash_attn_nhd", sizes, [again]).num_blocks == 6
        else:
            assert view.shape[0] == 2, "the sizes that do not fit say it"
        with pytest.raises(kvbm.BindError) as info:
            kvbm.Pool("vllm/flash_attn_nhd", sizes, [np.ascontiguousarray(view)])
        assert "permute(" not in str(info.value) and "reshape(" not in str(info.value)


def test_arguments_of_foreign_types_end_in_errors_of_kvbm() -> None:
    """Arrays, lists, tensors with gradients and buffers, where a number, an index or a range is expected."""
    torch = pytest.importorskip("torch")
    pool = kvbm.Pool.allocate("nhd", SHAPE, 2)
    other = kvbm.Pool.allocate("nhd", dataclasses.replace(SHAPE, nl=SHAPE.nl + 1), 2)
    for call, said in (
        (lambda: pool.units(np.array([1, 2])), "units: expected a number of tokens"),
        (lambda: pool.resolved.address([1, 2]), "axis 'b': expected an int or a NumPy array"),
        (lambda: pool.resolved.address(0, t="x"), "axis 't': expected an int or a NumPy array"),
        (lambda: kvbm.Span(torch.ones(2, requires_grad=True), range(3)), "table: expected a list of block ids"),
        (lambda: kvbm.Transfer(pool, pool).copy([0], [1], layers=memoryview(bytearray(b"x"))), "layers: expected range"),
        (lambda: kvbm.convert(pool, other), r"use pool\.section\(l=…\), or pass to Transfer\(…\)\.copy layers="),
        (lambda: kvbm.Transfer(pool, other).copy([0], [1]), "layers; pass layers=\\(range"),
    ):
        with pytest.raises(kvbm.KvbmError, match=said):
            call()
    with pytest.raises((kvbm.LayoutError, kvbm.SpecError)):
        kvbm.layout.spec.parse('order: "[l] b t h o d"\npitch: {b: "1if nh else 2"}', name="warns").resolve(SHAPE, 2)


# ---- what allocate makes ---------------------------------------------------------------------------------------------


def test_arrays_of_allocate_have_the_dtype_of_their_elements() -> None:
    """What is assigned is what is read, in the precision of the dtype: no float becomes an integer."""
    for dtype in ITEMSIZE:
        shape = kvbm.BlockShape(nl=2, no=2, nh=2, nt=4, hd=8, dtype=dtype)
        for layout in ("nhd", "universal", "vllm/LBHNC", "vllm/cpu_vec" if numpy_dtype(dtype).itemsize == 2 else "hnd"):
            pool = kvbm.Pool.allocate(layout, shape, 2)
            for array in (pool.arrays[0], pool.arrays[-1], pool.arrays[:1][0]):
                if dtype in PACKED:
                    for write in (
                        lambda a: a.__setitem__(..., 0.5), lambda a: a.__setitem__(0, np.ones(a.shape[1:])),
                        lambda a: a.fill(0.5), lambda a: np.copyto(a, np.ones(a.shape)), lambda a: a.put([0], [0.5]),
                        lambda a: a.__setitem__(0, np.zeros(a.shape[1:], ml_dtypes.float4_e2m1fn)),
                        lambda a: a[0].__setitem__(0, np.float32(1)), lambda a: a.reshape(-1).__setitem__(0, 1.5),
                    ):  # fmt: skip
                        with pytest.raises(TypeError):
                            write(array)
                    array[...] = np.full(array.shape, 0x21, np.uint8)
                    assert (np.asarray(array) == 0x21).all()
                    continue
                assert array.dtype == np.dtype(getattr(ml_dtypes, dtype, dtype)), (dtype, layout)
                if array.dtype.kind not in "iub":
                    array[...] = 0.126
                    assert (abs(array.astype(float) - 0.126) < 0.126 / 8).all(), (dtype, layout)
            views = [array.view(np.ndarray).view(numpy_name(dtype)) for array in pool.arrays]
            assert kvbm.Pool(layout, shape, views).addresses.tolist() == pool.addresses.tolist()
            assert kvbm.Pool(layout, shape, pool.arrays).addresses.tolist() == pool.addresses.tolist()


def test_arrays_of_allocate_are_a_sequence_on_one_piece_of_memory() -> None:
    for layout in load_dir(layouts_dir()):
        if (text := example_shape(layout)) is None:
            continue
        pool = kvbm.Pool.allocate(layout, text, 3)
        kinds, arrays = pool.resolved.allocations, list(pool.arrays)
        assert len(pool.arrays) == len(arrays) == len(kinds) == pool.addresses.size
        assert [one.ctypes.data for one in arrays] == pool.addresses.tolist()
        assert [(a.shape, a.strides) for a in arrays] == [(k.shape, k.strides) for k in kinds]
        assert [a.itemsize for a in arrays] == [k.itemsize for k in kinds]
        assert len({kind.label for kind in kinds}) == len(kinds)
        assert [one.ctypes.data for one in pool.arrays[1:]] == pool.addresses.tolist()[1:]
        assert pool.arrays[-1].ctypes.data == pool.addresses[-1]
        for wrong in (len(arrays), -len(arrays) - 1):
            with pytest.raises(IndexError):
                pool.arrays[wrong]
        pool.require_distinct()
        assert int(pool.spans[-1, 1] - pool.spans[0, 0]) <= total_bytes(pool.resolved)


@pytest.mark.slow  # 1.8 s
@pytest.mark.sanitize
def test_a_pool_keeps_no_object_per_allocation() -> None:
    """40,000 allocations, of each block, layer, and K or V: nothing grows but the table of addresses."""

    def held(blocks: int) -> int:
        gc.collect()
        tracemalloc.start()
        pool = kvbm.Pool.allocate("nhd", "nl=5,no=2,nh=1,nt=1,hd=2,dtype=float16", blocks)
        gc.collect()
        found = tracemalloc.get_traced_memory()[0] - 256 * len(pool.arrays)
        tracemalloc.stop()
        return found

    # Threads that earlier tests have left allocate, too: the least of three.
    grown = min(held(4_000) - held(1_000) for _ in range(3))
    assert grown / 30_000 < 18, grown  # addresses, kinds, and the slab's padding


def test_allocate_compares_the_bytes_with_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = kvbm.load_shape("llama-3.1-70b")
    with pytest.raises(MemoryError, match=r"1000000 blocks|1,000,000 blocks") as caught:
        kvbm.Pool.allocate("nhd", shape, 1_000_000)
    for part in (str(1_000_000 * shape.nbytes), "available", "fewer blocks"):
        assert part in str(caught.value), part
    assert isinstance(caught.value, kvbm.errors.NotEnoughMemoryError)
    monkeypatch.setattr("kvbm.memory.allocation.available_bytes", lambda: (3 << 20, "in this test"))
    kvbm.Pool.allocate("universal", "nl=1,no=1,nh=1,nt=1024,hd=1024,dtype=uint8", 3)
    with pytest.raises(MemoryError, match="3145728 are available in this test"):
        kvbm.Pool.allocate("universal", "nl=1,no=1,nh=1,nt=1024,hd=1024,dtype=uint8", 4)


def test_what_is_available_is_the_least_of_machine_groups_and_process(tmp_path: Path) -> None:
    def write(name: str, text: object) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(str(text))

    assert available_bytes(tmp_path)[0] > 1 << 60
    write("proc/meminfo", "MemTotal: 90 kB\nMemAvailable:   1000 kB\nSwapFree:  24 kB\n")
    assert available_bytes(tmp_path) == (1024 << 10, "of this machine")
    write("proc/self/cgroup", "0::/a/b\n")
    write("sys/fs/cgroup/a/memory.max", 500_000)
    write("sys/fs/cgroup/a/memory.current", 400_000)
    write("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 100\nactive_file 20\n")
    write("sys/fs/cgroup/a/b/memory.max", "max")
    write("sys/fs/cgroup/a/b/memory.current", 10)
    write("sys/fs/cgroup/a/b/memory.stat", "")
    left, where = available_bytes(tmp_path)
    assert left == 100_120 and "control group" in where
    write("sys/fs/cgroup/memory/memory.limit_in_bytes", 300)
    write("sys/fs/cgroup/memory/memory.usage_in_bytes", 400)
    write("sys/fs/cgroup/memory/memory.stat", "")
    assert available_bytes(tmp_path)[0] == 0
