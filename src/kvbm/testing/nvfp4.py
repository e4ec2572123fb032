"""An example: a block-scaled matrix-vector product in NVFP4.

Elements have 4 bits (e2m1), two per byte with the even one in the low half.  Each 16 neighbours of a row share a scale (e4m3).
For each matrix of the batch

    c[m] = sum over k of  a[m, k] * scale_a[m, k // 16]  *  b[0, k] * scale_b[0, k // 16]

`generate_input` returns the scales twice: row by row, and in the order for tensor cores.  The latter are computed by kvbm, from
the layout ``swizzle/linear`` to ``swizzle/128x4``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ..copy.transfer import convert
from ..errors import MissingPackageError
from ..layout.shapes import BlockShape
from ..layout.spec import load
from ..pool.pool import Pool
from .sizes import GROUPS as TILE_GROUPS
from .sizes import ROWS as TILE_ROWS
from .sizes import require_sizes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["E2M1", "Input", "example_kernel", "generate_input", "ref_kernel", "swizzle_scales"]

#: ``(a, b, scale_a, scale_b, scale_a_permuted, scale_b_permuted, c)``.
Input: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]"

#: Value of each 4-bit code; bit 3 is the sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

#: Elements that share a scale.
GROUP = 16

#: Bytes of the scales: the e4m3 numbers from 0.25 to 1.875.  With them sums of 4,096 products are almost exact in float32 in any
#: order, and are far below the maximum of float16.
_SCALE_CODES = (0x28, 0x40)


def generate_input(m: int, k: int, l: int, seed: int, device: Any = None) -> Input:  # noqa: E741
    """Generate the inputs from a seed.  They are the same on every machine and device.

    Parameters
    ----------
    m, k, l : int
        Rows (a multiple of 128), elements of a row (a multiple of 4), matrices.
    seed : int
        Seed of the random numbers.
    device : str or torch.device, optional
        Default: the GPU if torch finds one, else the CPU.

    Returns
    -------
    a : Tensor of float4_e2m1fn_x2, (m, k // 2, l)
        In memory ``l m k``, as all that follow: the batch is the slowest axis.
    b : Tensor of float4_e2m1fn_x2, (128, k // 2, l)
        The vector is row 0; the other rows are padding, and hold numbers, too.
    scale_a, scale_b : Tensor of float8_e4m3fn, (m, k // 16, l) and (128, k // 16, l)
        If k is not a multiple of 16, the last scale is for the remaining elements.
    scale_a_permuted, scale_b_permuted : Tensor of float8_e4m3fn, (32, 4, m // 128, 4, ceil(k / 64), l)
        In the order of cuBLAS and CUTLASS.  Element ``[i, j, r, g, q, l]`` is the scale of row ``r*128 + j*32 + i`` and group
        ``q*4 + g``; groups are padded to a multiple of 4 with zeros.
    c : Tensor of float16, (m, 1, l)
        The output of the kernel.  It contains random numbers at first.

    Raises
    ------
    SpecError
        The sizes are not allowed by `TestCase`, or torch has no float4_e2m1fn_x2.
    CudaUnavailableError
        `device` is a GPU, and kvbm was built without CUDA.

    Examples
    --------
    >>> a, b, scale_a, scale_b, scale_a_permuted, scale_b_permuted, c = generate_input(128, 256, 1, seed=7, device="cpu")
    >>> tuple(a.shape), tuple(scale_a.shape), tuple(scale_a_permuted.shape)
    ((128, 128, 1), (128, 16, 1), (32, 4, 1, 4, 4, 1))
    >>> scale_a[37, 6, 0] == scale_a_permuted[5, 1, 0, 2, 1, 0]
    tensor(True)
    """
    torch = torch_module()
    require_sizes("generate_input", m, k, l, seed)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    random = np.random.Generator(np.random.Philox(seed))
    groups = -(-k // GROUP)

    def take(low: int, high: int, *shape: int) -> Tensor:
        return torch.from_numpy(random.integers(low, high, shape, dtype=np.uint8)).to(device)

    def by_batch(tensor: Tensor) -> Tensor:
        return tensor.permute(1, 2, 0)

    a, b = (take(0, 256, l, rows, k // 2).view(torch.float4_e2m1fn_x2) for rows in (m, TILE_ROWS))
    scale_a, scale_b = (take(*_SCALE_CODES, l, rows, groups).view(torch.float8_e4m3fn) for rows in (m, TILE_ROWS))
    # mma: 32, 4, m/128, 4, k/4, l, the order in which CUTLASS names the axes of (l, m/128, k/4, 32, 4, 4)
    permuted_a, permuted_b = (swizzle_scales(scales).permute(3, 4, 1, 5, 2, 0) for scales in (scale_a, scale_b))
    c = torch.from_numpy(random.standard_normal((l, m, 1), np.float32)).to(torch.float16).to(device)
    return (*map(by_batch, (a, b, scale_a, scale_b)), permuted_a, permuted_b, by_batch(c))


def swizzle_scales(scales: Tensor, layout: str = "swizzle/128x4") -> Tensor:
    """Convert scale factors to another layout with kvbm.

    Parameters
    ----------
    scales : Tensor of 8 bits, (l, rows, groups)
        Contiguous, in the layout ``swizzle/linear``.
    layout : str
        ``"swizzle/128x4"`` or ``"swizzle/8x4"``.

    Returns
    -------
    Tensor
        Contiguous, with the shape of the layout's order: ``(l, rows/128, groups/4, 32, 4, 4)``, or ``(l, rows/8, groups/4, 8,
        4)``.  Rows and groups are padded with zeros to whole tiles.

    Notes
    -----
    On a GPU it runs on torch's current stream.
    """
    torch = torch_module()
    batch, rows, groups = scales.shape
    to = load(layout)
    tile = TILE_ROWS if layout.endswith("128x4") else 8
    padded_rows, padded_groups = -(-rows // tile) * tile, -(-groups // TILE_GROUPS) * TILE_GROUPS
    shape = BlockShape(nl=1, no=1, nh=1, nt=padded_rows, hd=padded_groups, dtype="float8_e4m3fn")
    linear = torch.zeros(batch, padded_rows, padded_groups, dtype=torch.uint8, device=scales.device)
    linear[:, :rows, :groups] = scales.view(torch.uint8)
    made = torch.empty(to.resolve(shape, batch).first.shape, dtype=torch.uint8, device=scales.device)
    convert(Pool(load("swizzle/linear"), shape, linear), Pool(to, shape, made))
    return made.view(scales.dtype)


def ref_kernel(data: Input) -> Tensor:
    """The reference: every element is decoded by the table; products and sums are float32.

    Parameters
    ----------
    data : tuple
        The result of `generate_input`.  The permuted scales are not used.

    Returns
    -------
    Tensor of float16, (m, 1, l)
        The tensor `c`, which is overwritten.
    """
    a, b, scale_a, scale_b, _, _, c = data
    for index in range(c.shape[2]):
        row = _decoded(b[:1, :, index], scale_b[:1, :, index])
        # Do not use a matrix product: it may round to TF32.
        c[:, 0, index] = (_decoded(a[:, :, index], scale_a[:, :, index]) * row).sum(dim=1).to(c.dtype)
    return c


def example_kernel(data: Input) -> Tensor:
    """An example kernel in plain torch.  It uses the permuted scales, as tensor cores do.

    Parameters and result are those of `ref_kernel`, which does not use these scales.  So the two agree only if the swizzle is
    correct.
    """
    a, b, _, _, scale_a, scale_b, c = data
    rows_a, rows_b = (scale.permute(5, 2, 1, 0, 4, 3).flatten(4).flatten(1, 3) for scale in (scale_a, scale_b))
    groups = -(-a.shape[1] * 2 // GROUP)
    for index in range(c.shape[2]):
        row = _decoded(b[:1, :, index], rows_b[index, :1, :groups])
        c[:, 0, index] = (_decoded(a[:, :, index], rows_a[index, :, :groups]) @ row[0]).to(c.dtype)
    return c


def _decoded(packed: Tensor, scales: Tensor) -> Tensor:
    """Values in float32, ``(rows, k)``."""
    torch = torch_module()
    both = torch.tensor([(E2M1[code & 15], E2M1[code >> 4]) for code in range(256)], device=packed.device)
    values = both[packed.view(torch.uint8).int()].flatten(1)
    wide = scales.to(torch.float32).repeat_interleave(GROUP, dim=1)[:, : values.shape[1]]
    return values * wide


def torch_module() -> Any:
    try:
        import torch
    except ImportError:
        raise MissingPackageError(
            "kvbm.testing.nvfp4 works on torch tensors: expected torch 2.8 or newer, got none; pip install 'kvbm-layouts[testing]'"
        ) from None
    if not hasattr(torch, "float4_e2m1fn_x2"):
        raise MissingPackageError(
            f"kvbm.testing.nvfp4: expected torch 2.8 or newer, for float4_e2m1fn_x2, got {torch.__version__}: pip install -U torch"
        )
    return torch
