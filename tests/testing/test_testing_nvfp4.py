"""The NVFP4 example, compared with NumPy: values from the bits, scales by the published formula, sums in double precision."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import kvbm
from kvbm.errors import MissingPackageError, SpecError
from kvbm.testing import CORRECTNESS_TESTS, SMOKE_TESTS, TestCase, make_match_reference, nvfp4
from kvbm.testing.nvfp4 import example_kernel, generate_input, ref_kernel

pytestmark = pytest.mark.usefixtures("torch")

#: Besides the suites: one group, part of a group, groups that do not fill a tile.
SIZES = [(128, 4, 1), (128, 20, 2), (256, 16, 1), (128, 144, 3), (384, 320, 2)]
ALL = [(case.m, case.k, case.l) for case in (*SMOKE_TESTS, *CORRECTNESS_TESTS[:2])] + SIZES


def raw(tensor: Any) -> np.ndarray:
    import torch

    tensor = tensor if tensor.element_size() == 1 else tensor.flatten()
    return (
        tensor.view(torch.uint8).contiguous().cpu().numpy()
    )  # in this order: PyTorch 2.8 copies no pairs of four bits


def e2m1(codes: np.ndarray) -> np.ndarray:
    """Sign, two bits of exponent with bias 1, one bit of mantissa."""
    sign, exponent, mantissa = 1 - 2.0 * (codes >> 3), (codes >> 1 & 3).astype(int), (codes & 1) / 2
    return sign * np.where(exponent == 0, mantissa, (1 + mantissa) * 2.0 ** (exponent - 1))


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Four bits of exponent with bias 7, three of mantissa."""
    exponent, mantissa = (codes >> 3 & 15).astype(int), (codes & 7) / 8
    return (1 - 2.0 * (codes >> 7)) * np.where(
        exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7)
    )


def matrix(packed: Any, scales: Any) -> np.ndarray:
    """Values in double precision, (rows, k, l)."""
    codes = raw(packed)
    values = np.empty((codes.shape[0], codes.shape[1] * 2, codes.shape[2]))
    values[:, 0::2], values[:, 1::2] = e2m1(codes & 15), e2m1(codes >> 4)
    return values * np.repeat(e4m3(raw(scales)), 16, axis=1)[:, : values.shape[1]]


def test_the_table_is_the_format() -> None:
    assert list(nvfp4.E2M1) == e2m1(np.arange(16)).tolist()
    assert sorted({abs(value) for value in nvfp4.E2M1}) == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_the_even_element_is_in_the_low_half() -> None:
    """The product cannot show it, because a and b would be swapped in the same way."""
    import torch

    packed = torch.tensor([[0x21, 0xF7] + [0] * 6 + [0x05]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    scales = torch.tensor([[2.0, 0.5]]).to(torch.float8_e4m3fn)
    assert nvfp4._decoded(packed, scales)[0].tolist() == [1.0, 2.0, 12.0, -12.0, *[0.0] * 12, 1.5, 0.0]


@pytest.mark.parametrize(("m", "k", "l"), ALL)
def test_inputs(m: int, k: int, l: int) -> None:  # noqa: E741
    import torch

    a, b, scale_a, scale_b, permuted_a, permuted_b, c = generate_input(m, k, l, seed=1, device="cpu")
    groups, tiles = -(-k // 16), -(-k // 64)
    for tensor, shape, dtype in (
        (a, (m, k // 2, l), torch.float4_e2m1fn_x2),
        (b, (128, k // 2, l), torch.float4_e2m1fn_x2),
        (scale_a, (m, groups, l), torch.float8_e4m3fn),
        (scale_b, (128, groups, l), torch.float8_e4m3fn),
        (permuted_a, (32, 4, m // 128, 4, tiles, l), torch.float8_e4m3fn),
        (permuted_b, (32, 4, 1, 4, tiles, l), torch.float8_e4m3fn),
        (c, (m, 1, l), torch.float16),
    ):
        assert (tuple(tensor.shape), tensor.dtype) == (shape, dtype)
    for tensor in (a, b, scale_a, scale_b, c):
        assert tensor.permute(2, 0, 1).is_contiguous(), "the batch is the slowest"
    assert permuted_a.permute(5, 2, 4, 0, 1, 3).is_contiguous()
    assert len(np.unique(raw(a) & 15)) == 16 or m * k < 1024, "every code is there"


@pytest.mark.parametrize("which", [2, 3])
@pytest.mark.parametrize(("m", "k", "l"), ALL)
def test_the_swizzle_is_the_published_one(m: int, k: int, l: int, which: int) -> None:  # noqa: E741
    """Byte of row m and group k: m/128*(K/4)*512 + k/4*512 + m%32*16 + m%128/32*4 + k%4; padding is zero."""
    made = generate_input(m, k, l, seed=2, device="cpu")
    scales, memory = raw(made[which]), made[which + 2].permute(5, 2, 4, 0, 1, 3)
    rows, groups = scales.shape[:2]
    tiles = -(-groups // 4)
    want = np.zeros((l, rows // 128 * tiles * 512), np.uint8)
    row, group = np.meshgrid(np.arange(rows), np.arange(groups), indexing="ij")
    place = row // 128 * tiles * 512 + group // 4 * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4
    for batch in range(l):
        want[batch, place] = scales[:, :, batch]
    assert np.array_equal(raw(memory).reshape(l, -1), want)


def test_the_swizzle_of_few_rows() -> None:
    import torch

    scales = torch.arange(2 * 11 * 6, dtype=torch.uint8).view(2, 11, 6)
    got = raw(nvfp4.swizzle_scales(scales, "swizzle/8x4")).reshape(2, -1)
    row, group = np.meshgrid(np.arange(11), np.arange(6), indexing="ij")
    want = np.zeros((2, 16 * 8), np.uint8)
    for batch in range(2):
        want[batch, row // 8 * 2 * 32 + group // 4 * 32 + row % 8 * 4 + group % 4] = scales[batch].numpy()
    assert np.array_equal(got, want)


def test_kvbm_makes_the_swizzle(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own kernel from the shipped YAML: with another layout the scales differ."""
    asked: list[str] = []

    def load(name: str) -> kvbm.Layout:
        asked.append(name)
        return kvbm.load(name)

    monkeypatch.setattr(nvfp4, "load", load)
    generate_input(128, 256, 1, seed=3, device="cpu")
    assert set(asked) == {"swizzle/linear", "swizzle/128x4"}


@pytest.mark.parametrize(("m", "k", "l"), ALL)
def test_reference(m: int, k: int, l: int) -> None:  # noqa: E741
    inputs = generate_input(m, k, l, seed=4, device="cpu")
    a, b, scale_a, scale_b, _, _, c = inputs
    want = np.einsum("mkl,kl->ml", matrix(a, scale_a), matrix(b, scale_b)[0])
    got = ref_kernel(inputs)
    assert got is c
    np.testing.assert_allclose(got[:, 0].double().numpy(), want, rtol=2.0**-11, atol=2.0**-10)
    assert np.isfinite(want).all() and np.abs(want).max() < 65504 and want.std() > 1


@pytest.mark.parametrize(
    "case", [*SMOKE_TESTS, *CORRECTNESS_TESTS[:3], TestCase(128, 20, 2, seed=5, name="part")], ids=str
)
def test_the_example_is_right(case: TestCase) -> None:
    assert make_match_reference(ref_kernel)(example_kernel, case.data(device="cpu")) == (True, None)


def test_the_example_takes_the_permuted_scales() -> None:
    """So the two kernels check the swizzle: wrong scales are found, with their row."""
    inputs = list(SMOKE_TESTS[0].data(device="cpu"))
    assert not inputs[4].flip(0).equal(inputs[4])
    wrong = [*inputs[:4], inputs[4].flip(0), *inputs[5:]]
    ok, error = make_match_reference(ref_kernel)(example_kernel, wrong)
    assert not ok and error is not None and re.match(r"wrong at \(\d+, 0, 0\): expected ", error)


def test_the_same_seed_is_the_same_data() -> None:
    one, same, other = (generate_input(128, 64, 1, seed=seed, device="cpu") for seed in (1, 1, 2))
    for index in range(7):
        assert np.array_equal(raw(one[index]), raw(same[index]))
        assert not np.array_equal(raw(one[index]), raw(other[index])), index


def test_these_data_were_made_before() -> None:
    """A seed gives the same data in all versions."""
    a, _, scale_a, *_ = generate_input(128, 64, 1, seed=1, device="cpu")
    assert (raw(a)[0, :4, 0].tolist(), raw(scale_a)[0, :4, 0].tolist()) == (GOLDEN_A, GOLDEN_SCALES)


GOLDEN_A, GOLDEN_SCALES = [58, 206, 192, 107], [53, 55, 42, 61]


@pytest.mark.parametrize("sizes", [(100, 64, 1), (128, 6, 1), (128, 64, 0)])
def test_sizes_are_those_of_a_case(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(SpecError, match="generate_input"):
        generate_input(*sizes, seed=0)


def test_torch_is_too_old_or_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    import torch

    monkeypatch.delattr(torch, "float4_e2m1fn_x2")
    with pytest.raises(MissingPackageError, match=r"expected torch 2\.8 or newer, for float4_e2m1fn_x2, got"):
        generate_input(128, 64, 1, seed=0)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingPackageError, match=r"expected torch 2\.8 or newer, got none; pip install 'kvbm-layouts"):
        generate_input(128, 64, 1, seed=0)
