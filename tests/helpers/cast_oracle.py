"""Expected bits of casts, from the definition in docs/reference/cast.md alone.

It shares no code with kvbm, nor with the conversions of ml_dtypes or torch.  All arithmetic is in float64, where each float32
operation is computed with enough digits and then rounded once to the format's grid.  A product of two float32 numbers is exact in
float64.  A quotient has 53 bits before it is rounded to at most 24: as 53 >= 2 * 24 + 2, the second rounding gives what a single
one would give.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Format(NamedTuple):
    """A binary format with a sign, or an integer (no exponent)."""

    exponent: int
    mantissa: int
    bias: int
    largest: float
    bits: np.dtype
    emax: int

    @property
    def least(self) -> int:
        """The exponent of the least positive normal value."""
        return 1 - self.bias


FORMATS = {
    "float32": Format(8, 23, 127, (2 - 2.0**-23) * 2.0**127, np.dtype(np.uint32), 127),
    "bfloat16": Format(8, 7, 127, (2 - 2.0**-7) * 2.0**127, np.dtype(np.uint16), 127),
    "float16": Format(5, 10, 15, 65504.0, np.dtype(np.uint16), 15),
    "float8_e4m3fn": Format(4, 3, 7, 448.0, np.dtype(np.uint8), 8),
    "float8_e5m2": Format(5, 2, 15, 57344.0, np.dtype(np.uint8), 15),
    "float4_e2m1fn": Format(2, 1, 1, 6.0, np.dtype(np.uint8), 2),
    "int8": Format(0, 0, 1, 127.0, np.dtype(np.uint8), 6),
}
QUANTISED = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "int8")
SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu", "float8_e4m3fn")
PLAIN = ("bfloat16", "float16", "float32")
FLOAT32 = FORMATS["float32"]


class Counts(NamedTuple):
    """What a cast counts."""

    zero_groups: int
    saturated: int
    nan: int


# ---- bits ----------------------------------------------------------------------------------------------------------


def value(bits: np.ndarray, fmt: str) -> np.ndarray:
    """The values of codes, in float64."""
    code = np.asarray(bits).astype(np.int64)
    if fmt == "int8":
        return np.where(code & 128, code - 256, code).astype(np.float64)
    if fmt == "float8_e8m0fnu":
        return np.where(code == 255, np.nan, np.ldexp(1.0, (code - 127).astype(np.int32)))
    this = FORMATS[fmt]
    low = code & ((1 << this.mantissa) - 1)
    high = (code >> this.mantissa) & ((1 << this.exponent) - 1)
    negative = (code >> (this.mantissa + this.exponent)) & 1
    whole = np.where(high == 0, low, low + (1 << this.mantissa)).astype(np.float64)
    found = np.ldexp(whole, (np.maximum(high, 1) - this.bias - this.mantissa).astype(np.int32))
    top = high == (1 << this.exponent) - 1
    if fmt == "float8_e4m3fn":
        found = np.where(top & (low == 7), np.nan, found)
    elif fmt != "float4_e2m1fn":
        found = np.where(top, np.where(low == 0, np.inf, np.nan), found)
    return np.where(negative == 1, -found, found)


def to_float32(bits: np.ndarray, fmt: str) -> np.ndarray:
    """The values of codes, in float32, which is exact."""
    return from_code(encode(value(bits, fmt), "float32", nan=0x7FFFFFFF))


def from_code(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint32).view(np.float32)


def encode(values: np.ndarray, fmt: str, nan: int) -> np.ndarray:
    """The codes of values that the format has, of inf where it has that, and of NaN; no NaN in float8_e8m0fnu."""
    if fmt == "float8_e8m0fnu":
        return (np.frexp(values)[1] + 126).astype(np.uint8)
    this = FORMATS[fmt]
    size = np.abs(values)
    negative = np.signbit(values)
    finite = np.isfinite(size)
    safe = np.where(finite, size, 0)
    if fmt == "int8":
        code = np.where(finite, values, 0).astype(np.int64) & 255
    else:
        _, power = np.frexp(safe)  # safe = f * 2**power, f from 1/2 below 1
        normal = np.where(safe == 0, this.least, np.maximum(power - 1, this.least))
        whole = np.ldexp(safe, (this.mantissa - normal).astype(np.int32))
        assert np.array_equal(whole, np.floor(whole)), "not on the grid"
        # A subnormal has no leading one, so the exponent's field is one less than that of the least normal.
        code = whole.astype(np.int64) + ((normal - this.least).astype(np.int64) << this.mantissa)
        code = np.where(np.isinf(size), ((1 << this.exponent) - 1) << this.mantissa, code)
        code |= negative.astype(np.int64) << (this.mantissa + this.exponent)
    return np.where(np.isnan(size), nan, code).astype(this.bits)


# ---- roundings -----------------------------------------------------------------------------------------------------


def on_grid(values: np.ndarray, fmt: str, up: bool = False) -> np.ndarray:
    """Round to nearest, ties to even, or up, as if the format had no largest exponent.  NaN and inf stay."""
    this = FORMATS[fmt]
    _, power = np.frexp(np.where(np.isfinite(values), values, 0))
    step = np.zeros_like(power) if fmt == "int8" else np.maximum(power - 1, this.least) - this.mantissa
    with np.errstate(invalid="ignore"):
        scaled = np.ldexp(values, -step)
        return np.copysign(np.ldexp(np.ceil(scaled) if up else np.rint(scaled), step), values)


def fl32(values: np.ndarray) -> np.ndarray:
    """One rounding to float32, with overflow to inf."""
    found = on_grid(values, "float32")
    return np.where(np.abs(found) > FLOAT32.largest, np.copysign(np.inf, found), found)


# ---- scales --------------------------------------------------------------------------------------------------------


def _given(scale_fmt: str | None, global_scale: float, constant: float | None) -> None:
    if (scale_fmt is None) != (constant is not None):
        raise ValueError("either a format of scales or a constant")
    if scale_fmt is not None and scale_fmt not in SCALES:
        raise ValueError(f"not a format of scales: {scale_fmt}")
    if global_scale != 1 and scale_fmt != "float8_e4m3fn":
        raise ValueError("a global scale belongs to scales in float8_e4m3fn")
    for one in (global_scale, 1.0 if constant is None else constant):
        if not (0 < one < np.inf) or float(np.float32(one)) != one:
            raise ValueError(f"not a finite float32 above 0: {one}")


def largest(x: np.ndarray) -> np.ndarray:
    """``a``: the largest finite size of each group."""
    return np.max(np.where(np.isfinite(x), np.abs(x), 0.0), axis=-1, initial=0.0)


def scales(a: np.ndarray, fmt: str, scale_fmt: str, global_scale: float = 1.0) -> np.ndarray:
    """``s`` of groups, in float64."""
    this = FORMATS[fmt]
    if scale_fmt == "float8_e8m0fnu":
        _, power = np.frexp(a)
        found = np.ldexp(1.0, np.clip(power - 1 - this.emax, -127, 127))
    else:
        ratio = fl32(a / this.largest)
        if scale_fmt == "float32":
            found = np.maximum(ratio, 2.0**-126)
        elif scale_fmt == "float8_e4m3fn":
            found = np.clip(on_grid(fl32(ratio / global_scale), scale_fmt), 2.0**-9, 448.0)
        else:
            held = FORMATS[scale_fmt]
            found = np.clip(on_grid(ratio, scale_fmt, up=True), 2.0**held.least, held.largest)
    return np.where(a == 0, 1.0, found)


def effective(s: np.ndarray, scale_fmt: str, global_scale: float) -> np.ndarray:
    """``e`` of groups."""
    with np.errstate(invalid="ignore"):
        return fl32(s * global_scale) if scale_fmt == "float8_e4m3fn" else s


def reciprocal(e: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.minimum(fl32(1.0 / e), FLOAT32.largest)


# ---- both directions -----------------------------------------------------------------------------------------------


def quantise(
    x: np.ndarray, fmt: str, scale_fmt: str | None, global_scale: float = 1.0, constant: float | None = None
) -> tuple[np.ndarray, np.ndarray | None, Counts]:
    """Quantise groups.

    Parameters
    ----------
    x : array of float32, (..., n)
        The last axis is the group.
    fmt : str
        A format of `QUANTISED`.
    scale_fmt : str or None
        A format of `SCALES`; None with `constant`.
    global_scale : float, optional
        ``g``, for scales in float8_e4m3fn.
    constant : float, optional
        Instead of computed scales.

    Returns
    -------
    codes : array of uint8, (..., n)
        One element in each byte, also of float4_e2m1fn (0 to 15).
    scale_bits : array of unsigned integers, (...), or None
        None with `constant`.
    counts : Counts
    """
    _given(scale_fmt, global_scale, constant)
    x = np.asarray(x)
    assert fmt in QUANTISED and x.dtype == np.float32, (fmt, x.dtype)
    with np.errstate(invalid="ignore"):  # signalling NaN
        x = x.astype(np.float64)
    zeros, bits = 0, None
    if scale_fmt is None:
        e = np.full(x.shape[:-1], constant, np.float64)
    else:
        a = largest(x)
        s = scales(a, fmt, scale_fmt, global_scale)
        zeros = int(np.count_nonzero(a == 0))
        bits = encode(s, scale_fmt, nan=0)
        e = effective(s, scale_fmt, global_scale)
    t = fl32(x * reciprocal(e)[..., None])
    missing = np.isnan(x)
    rounded = on_grid(np.where(missing, 0.0, t), fmt)
    limit = FORMATS[fmt].largest
    over = np.abs(rounded) > limit
    codes = encode(np.clip(rounded, -limit, limit), fmt, nan=0)
    codes = np.where(missing, 0x7F if fmt.startswith("float8") else 0, codes).astype(np.uint8)
    return codes, bits, Counts(zeros, int(np.count_nonzero(over)), int(np.count_nonzero(missing)))


def dequantise(
    codes: np.ndarray,
    scale_bits: np.ndarray | None,
    fmt: str,
    scale_fmt: str | None,
    to: str,
    global_scale: float = 1.0,
    constant: float | None = None,
) -> np.ndarray:
    """The bits of dequantised groups, uint16 or uint32, ``(..., n)``.  Parameters as those of `quantise`."""
    _given(scale_fmt, global_scale, constant)
    assert fmt in QUANTISED and to in PLAIN, (fmt, to)
    q = value(codes, fmt)
    if scale_fmt is None:
        e = np.full(q.shape[:-1], constant, np.float64)
    else:
        assert scale_bits is not None
        e = effective(value(scale_bits, scale_fmt), scale_fmt, global_scale)
    with np.errstate(invalid="ignore"):
        y = fl32(q * e[..., None])
    if to == "float32":
        return encode(y, to, nan=0x7FFFFFFF)
    x = on_grid(y, to)
    x = np.where(np.abs(x) > FORMATS[to].largest, np.copysign(np.inf, x), x)
    return encode(x, to, nan=0x7FFF)
