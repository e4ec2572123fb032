"""What is refused when arrays are bound: each check of `memory.array_checks`, with what the error says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvbm
import kvbm.numpy
from memory import FakeCuda, numpy_dtype

SHAPE = kvbm.BlockShape(nl=2, no=2, nh=3, nt=4, hd=8, dtype="float32")


def zeros(name: str, num_blocks: int = 3, shape: kvbm.BlockShape = SHAPE, dtype: str | None = None) -> list[np.ndarray]:
    kind = numpy_dtype(dtype or shape.dtype)
    return [np.zeros(a.shape, kind) for a in kvbm.load(name).resolve(shape, num_blocks).allocations]


def _refused(
    tensors: Any, match: str, error: type[Exception] = kvbm.BindError, name: str = "vllm/flash_attn_nhd"
) -> None:
    with pytest.raises(error, match=match) as info:
        kvbm.Pool(kvbm.load(name), SHAPE, tensors)
    assert name in str(info.value), "the error names the layout"


def test_wrong_rank() -> None:
    arrays = zeros("vllm/flash_attn_nhd")
    arrays[1] = arrays[1].reshape(2, 3, 4, 24)
    _refused(arrays, r"array 1.*l=1.*5 axes.*\(2, 3, 4, 24\)")
    _refused([a.reshape(2, 3, 4, 24) for a in zeros("vllm/flash_attn_nhd")], r"array 0.*5 axes.*\(2, 3, 4, 24\)")


def test_wrong_shape_names_the_axis() -> None:
    arrays = zeros("vllm/flash_attn_nhd")
    arrays[1] = np.zeros((2, 3, 4, 3, 7), "float32")
    _refused(arrays, r"array 1.*axis 'd'.*expected 8, got 7")
    _refused([np.zeros((2, 3, 4, 2, 8), "float32")] * 2, r"array 0.*axis 'h'.*expected 3, got 2")


def test_the_other_order_of_the_same_shape() -> None:
    """At nt = nh the shapes of NHD and HND are equal; at other sizes the error names the axis."""
    _refused([np.zeros((2, 3, 3, 4, 8), "float32") for _ in range(2)], r"axis 't'.*expected 4, got 3")


def test_wrong_number_of_blocks_in_one() -> None:
    arrays = zeros("vllm/flash_attn_nhd", 3)
    arrays[1] = zeros("vllm/flash_attn_nhd", 4)[1]
    _refused(arrays, r"array 1.*axis 'b'.*expected 3, got 4")


def test_non_contiguous() -> None:
    arrays = zeros("vllm/flash_attn_nhd")
    arrays[0] = np.zeros((2, 3, 3, 4, 8), "float32").transpose(0, 1, 3, 2, 4)
    assert arrays[0].shape == (2, 3, 4, 3, 8)
    _refused(arrays, r"array 0.*l=0.*contiguous.*strides")
    arrays[0] = np.zeros((2, 3, 4, 3, 16), "float32")[..., ::2]
    _refused(arrays, r"array 0.*contiguous")
    arrays[0] = np.zeros((2, 6, 4, 3, 8), "float32")[:, :3]
    _refused(arrays, r"array 0.*contiguous")
    arrays[0] = np.broadcast_to(np.zeros((1, 1, 1, 1, 8), "float32"), (2, 3, 4, 3, 8))
    _refused(arrays, r"array 0.*stride of 0 bytes along axis 0 of 2")
    arrays[0] = np.zeros((2, 3, 4, 3, 8), "float32")[:, ::-1]
    _refused(arrays, r"array 0.*stride of -\d+ bytes along axis 1 of 3.*reversed")


def test_wrong_stride_where_the_layout_has_a_pitch() -> None:
    from kvbm.layout import spec

    layout = spec.parse('order: "b l o h t d"\npitch: {b: "4096 B"}', name="padded")
    right = np.ndarray((2, 2, 2, 3, 4, 8), "float32", np.zeros(8192, np.uint8), 0, (4096, 768, 384, 128, 32, 4))
    assert kvbm.Pool(layout, SHAPE, right).num_blocks == 2
    with pytest.raises(kvbm.BindError, match=r"padded.*strides.*4096.*1536"):
        kvbm.Pool(layout, SHAPE, np.zeros((2, 2, 2, 3, 4, 8), "float32"))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_wrong_count(count: int) -> None:
    _refused(zeros("vllm/flash_attn_nhd")[:1] * count, rf"expected .*got {count or 'none'}")


@pytest.mark.parametrize("count", [1, 2, 5, 11])
def test_wrong_count_where_each_block_has_arrays(count: int) -> None:
    _refused(zeros("nhd", 3)[:count], rf"multiple of 4 .*got {count}", name="nhd")


@pytest.mark.parametrize("dtype", ["float64", "float16", "int32", "uint32", "int8", "complex64"])
def test_wrong_dtype(dtype: str) -> None:
    arrays = [a.astype(dtype) for a in zeros("vllm/flash_attn_nhd")]
    _refused(arrays, rf"array 0.*float32.*{dtype}", kvbm.DTypeError)
    _refused(arrays, r".", TypeError)


def test_stand_ins_have_the_same_width() -> None:
    shape = kvbm.BlockShape(nl=2, no=2, nh=3, nt=4, hd=8, dtype="bfloat16")
    for dtype in ("uint16", "int16"):
        assert kvbm.Pool(kvbm.load("nhd"), shape, zeros("nhd", shape=shape, dtype=dtype)).num_blocks == 3
    for dtype in ("uint8", "uint32", "float16", "float32"):
        with pytest.raises(kvbm.DTypeError, match=rf"bfloat16.*{dtype}"):
            kvbm.Pool(kvbm.load("nhd"), shape, zeros("nhd", shape=shape, dtype=dtype))


def test_mixed_dtypes() -> None:
    arrays = zeros("vllm/flash_attn_nhd")
    arrays[1] = arrays[1].astype("int32")
    _refused(arrays, r"array 1 .*is int32, array 0 float32; expected one dtype for all", kvbm.DTypeError)


def test_device_mix() -> None:
    arrays: list[Any] = zeros("vllm/flash_attn_nhd")
    fake = FakeCuda((2, 3, 4, 3, 8), "float32", device=0)
    _refused([arrays[0], fake], r"array 1 .*is on cuda:0.*array 0 on cpu")
    other = FakeCuda((2, 3, 4, 3, 8), "float32", device=1)
    _refused([fake, other], r"array 1 .*is on cuda:1.*array 0 on cuda:0")


def test_not_an_array() -> None:
    _refused([[1.0, 2.0], [3.0]], r"array 0.*list")
    _refused(["x", "y"], r"array 0.*str")
    _refused(7, r"array 0.*int")


def test_arrays_of_one_pool_that_overlap() -> None:
    array = zeros("vllm/flash_attn_nhd")[0]
    _refused([array, array], r"arrays 0 and 1 share memory")
    memory = np.zeros(3 * array.size // 2, "float32")
    half = array.size // 2
    overlapping = [memory[: array.size].reshape(array.shape), memory[half:].reshape(array.shape)]
    _refused(overlapping, r"arrays 0 and 1 share memory")


# ---- what `convert` refuses: the destination is untouched ----------------------------------------------------------
