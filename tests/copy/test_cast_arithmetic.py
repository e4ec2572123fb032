"""The arithmetic of casts: the oracle of docs/reference/cast.md against ml_dtypes, torch, NumPy and exact fractions."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cast_oracle as oracle
import pages
from cast_oracle import FORMATS, PLAIN, QUANTISED, SCALES
from coordinates import in_case

PAGE = "docs/reference/cast.md"
NAN = {"bfloat16": 0x7FFF, "float16": 0x7FFF, "float32": 0x7FFFFFFF}
#: The least size that saturates, and whether it does so itself; as the page's table.
SATURATES = {
    "float8_e4m3fn": (464.0, False),
    "float8_e5m2": (61440.0, True),
    "float4_e2m1fn": (7.0, True),
    "int8": (127.5, True),
}
MAX = np.finfo(np.float32).max


def dtype(fmt: str) -> np.dtype:
    """NumPy's or ml_dtypes' dtype."""
    return np.dtype(fmt if fmt in ("int8", "float16", "float32") else getattr(ml_dtypes, fmt))


def theirs(x: np.ndarray, fmt: str) -> np.ndarray:
    """Bits after a conversion by NumPy or ml_dtypes."""
    with np.errstate(all="ignore"):
        found = x.astype(dtype(fmt))
    return found.view(f"u{found.dtype.itemsize}")


def read(bits: np.ndarray, fmt: str) -> np.ndarray:
    """float32 values of codes, by NumPy or ml_dtypes."""
    with np.errstate(all="ignore"):
        return bits.astype(f"u{dtype(fmt).itemsize}").view(dtype(fmt)).astype(np.float32)


def codes(fmt: str) -> np.ndarray:
    count = 16 if fmt == "float4_e2m1fn" else 1 << 8 * dtype(fmt).itemsize
    return np.arange(count, dtype=f"u{dtype(fmt).itemsize}")


def every(plain: str) -> np.ndarray:
    """All values of a format of 16 bits, with all payloads of NaN."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    if plain == "bfloat16":
        return (bits << 16).view(np.float32)
    return read(bits, plain)


def saturates(t: np.ndarray, fmt: str) -> np.ndarray:
    bound, itself = SATURATES[fmt]
    with np.errstate(invalid="ignore"):
        return (np.abs(t) >= bound) if itself else (np.abs(t) > bound)


def same(x: np.ndarray, y: np.ndarray) -> bool:
    """Equal as bits, except that any NaN is like any other."""
    both = np.isnan(x) & np.isnan(y)
    return bool(np.all(both | (x.view(np.uint32) == y.view(np.uint32))))


def numbers(random: np.random.Generator, count: int) -> np.ndarray:
    """float32 numbers of all exponents, also subnormal."""
    found = random.integers(0, 1 << 32, 2 * count, dtype=np.uint32).view(np.float32)
    return found[np.isfinite(found)][:count]


def groups() -> dict[str, np.ndarray]:
    """Groups of 16 of each kind."""
    random = np.random.default_rng(7)
    normal = random.standard_normal((400, 16)).astype(np.float32)
    found = {"normal": normal, "wide": numbers(random, 400 * 16).reshape(400, 16)}
    found["bfloat16"] = read(theirs(normal, "bfloat16"), "bfloat16")
    found["scaled"] = normal * np.exp2(random.integers(-120, 120, (400, 1))).astype(np.float32)
    found["zeros"] = np.zeros((4, 16), np.float32) * np.float32([[1], [-1], [1], [-1]])
    found["one huge"] = normal[:64] * np.float32(1e-3)
    found["one huge"][:, 3] = np.where(np.arange(64) % 2, MAX, -MAX / 3)
    found["subnormal"] = random.integers(0, 1 << 23, (64, 16), dtype=np.uint32).view(np.float32)
    found["subnormal"][:4] = np.uint32([[1], [2], [3], [0]]).view(np.float32)
    found["around the least normal"] = normal[:64] * np.float32(2.0**-120)
    found["inf"] = normal[:64].copy()
    found["inf"][:, 5], found["inf"][:, 6] = np.inf, -np.inf
    found["only inf"] = np.full((2, 16), np.float32(np.inf))
    found["NaN"] = normal[:64].copy()
    payloads = random.integers(1, 1 << 22, 64, dtype=np.uint32) | np.uint32(0x7F800000)
    found["NaN"][:, 9] = (payloads | (np.arange(64, dtype=np.uint32) % 2 << 31)).view(np.float32)
    found["NaN"][0], found["NaN"][1, :9] = np.nan, 0
    found["NaN"][1, 10:] = 0
    found["powers of two"] = np.exp2(np.arange(-149, 128, dtype=np.float32))[:, None] * np.float32([1, -0.75, 0.5, -0.0])
    return found


GROUPS = groups()
WAYS = [(scale, 1.0) for scale in SCALES]
WAYS += [("float8_e4m3fn", g) for g in (0.25, float(np.float32(1e-3)), float(np.float32(3e4)), 2.0**-149, float(MAX))]


# ---- codes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", sorted({*QUANTISED, *SCALES, *PLAIN} - {"float32"}))
def test_each_code_has_the_value_that_ml_dtypes_and_torch_read(fmt: str) -> None:
    mine = oracle.to_float32(codes(fmt), fmt)
    assert mine.dtype == np.float32
    assert same(mine, read(codes(fmt), fmt))
    torch = pytest.importorskip("torch")
    if fmt != "float4_e2m1fn":  # torch does not convert it
        read_by_torch = torch.from_numpy(codes(fmt).copy()).view(getattr(torch, fmt)).to(torch.float32).numpy()
        assert same(mine, read_by_torch)


def test_float32_is_read_and_written_as_it_is() -> None:
    bits = numbers(np.random.default_rng(1), 20_000).view(np.uint32)
    bits[:4] = 0, 0x80000000, 0x7F800000, 0xFF800000
    assert np.array_equal(oracle.to_float32(bits, "float32").view(np.uint32), bits)
    assert oracle.to_float32(np.uint32([0xFF812345]), "float32").view(np.uint32)[0] == NAN["float32"]


# ---- without computed scales ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", ["bfloat16", "float16"])
@pytest.mark.parametrize("fmt", QUANTISED)
def test_each_value_of_16_bits_quantises_as_in_ml_dtypes(fmt: str, plain: str) -> None:
    """Differences: what is too large is M here, and NaN has one code.  NumPy has no rounding conversion to int8."""
    x = every(plain)
    mine, scale, counts = oracle.quantise(x, fmt, None, constant=1.0)
    nan, over = np.isnan(x), saturates(x, fmt)
    if fmt == "int8":
        want = np.clip(np.rint(np.where(nan, 0, x)), -127, 127).astype(np.int8).view(np.uint8)
    else:
        want = theirs(x, fmt)
        if fmt != "float4_e2m1fn":  # which saturates in ml_dtypes, too
            assert not np.isfinite(read(want[over], fmt)).any() and np.isfinite(read(want[~over & ~nan], fmt)).all()
        sign = 8 if fmt == "float4_e2m1fn" else 128
        [largest] = theirs(np.float32([FORMATS[fmt].largest]), fmt)
        want = np.where(over, largest | np.where(x < 0, sign, 0), want)
        want = np.where(nan, 0 if fmt == "float4_e2m1fn" else 0x7F, want)
    assert np.array_equal(mine, want)
    assert scale is None and counts == (0, np.count_nonzero(over), np.count_nonzero(nan))
    assert counts.nan > 0 and counts.saturated > 0


@pytest.mark.parametrize("plain", ["bfloat16", "float16"])
@pytest.mark.parametrize("fmt", ["float8_e4m3fn", "float8_e5m2", "int8"])
def test_each_value_of_16_bits_quantises_as_in_torch(fmt: str, plain: str) -> None:
    """Those that do not saturate: what torch does with others depends on its version."""
    torch = pytest.importorskip("torch")
    x = every(plain)
    x = x[~np.isnan(x) & ~saturates(x, fmt)]
    t = torch.from_numpy(x.copy())
    want = (t.round() if fmt == "int8" else t).to(getattr(torch, fmt)).view(torch.uint8).numpy()
    assert np.array_equal(oracle.quantise(x, fmt, None, constant=1.0)[0], want)


@pytest.mark.parametrize("fmt", QUANTISED)
def test_float32_values_quantise_as_in_ml_dtypes(fmt: str) -> None:
    """Ties and their neighbours, which 16 bits mostly cannot hold."""
    values = np.unique(np.abs(oracle.value(codes(fmt), fmt)))
    values = values[np.isfinite(values) & (values <= FORMATS[fmt].largest)].astype(np.float32)
    ties = (values[1:] + values[:-1]) / 2
    near = np.concatenate([values, ties, np.nextafter(ties, 0), np.nextafter(ties, np.float32(np.inf))])
    x = np.concatenate([near, -near])
    want = np.rint(x).astype(np.int8).view(np.uint8) if fmt == "int8" else theirs(x, fmt)
    assert np.array_equal(oracle.quantise(x, fmt, None, constant=1.0)[0], want)


@pytest.mark.parametrize("fmt", QUANTISED)
def test_what_saturates(fmt: str) -> None:
    bound, itself = np.float32(SATURATES[fmt][0]), SATURATES[fmt][1]
    below, above = np.nextafter(bound, np.float32(0)), np.nextafter(bound, np.float32(np.inf))
    for x, over in ((below, False), (bound, itself), (above, True), (MAX, True), (np.float32(np.inf), True)):
        for signed in (x, -x):
            with in_case(fmt, signed):
                [code], _, counts = oracle.quantise(np.float32([signed]), fmt, None, constant=1.0)
                assert oracle.value(code, fmt) == np.copysign(FORMATS[fmt].largest, signed)
                assert counts == (0, int(over), 0)


@pytest.mark.parametrize("to", PLAIN)
@pytest.mark.parametrize("fmt", QUANTISED)
def test_each_code_dequantises_as_in_numpy(fmt: str, to: str) -> None:
    """A multiplication in float32, and a conversion by ml_dtypes or NumPy."""
    for c in np.float32([1, 0.1, 3e-6, 1e36, 1e-40, 2.0**-149, MAX]):
        with in_case(fmt, to, c), np.errstate(all="ignore"):
            mine = oracle.dequantise(codes(fmt), None, fmt, None, to, constant=float(c))
            y = read(codes(fmt), fmt) * c
            want = np.where(np.isnan(y), NAN[to], theirs(y, to))
            assert mine.dtype == FORMATS[to].bits and np.array_equal(mine, want)


def test_both_roundings_of_a_dequantised_value_happen() -> None:
    """127 * e is just above a tie of bfloat16; the rounding to float32 moves it to the tie."""
    ties = np.arange(0x3F80, 0x4000, 2, dtype=np.uint32) << 16 | 0x8000  # the kept bit is even: a tie goes down
    for e in (Fraction(float(tie)) / 127 for tie in ties.view(np.float32)):
        c = np.nextafter(np.float32(float(e)), np.float32(2))
        exact, y = Fraction(float(c)) * 127, np.float32(127) * c
        if y in ties.view(np.float32) and exact > Fraction(float(y)):
            break
    else:
        pytest.fail("no such scale")
    [x] = oracle.dequantise(np.uint8([127]), None, "int8", None, "bfloat16", constant=float(c))
    assert x == y.view(np.uint32) >> 16, "one rounding would be one higher"


# ---- operations ----------------------------------------------------------------------------------------------------


def test_the_oracles_operations_are_those_of_float32() -> None:
    random = np.random.default_rng(3)
    x, y = numbers(random, 200_000), numbers(random, 200_000)
    small = random.integers(1, 1 << 24, 50_000, dtype=np.uint32).view(np.float32)  # quotients and products are subnormal
    x = np.concatenate([x, small, small * np.float32(2**20)])
    y = np.concatenate([y, numbers(random, 50_000), np.float32(1) + random.random(50_000, np.float32) * np.float32(2**20)])
    with np.errstate(all="ignore"):
        for mine, want in (
            (x.astype(float) * y.astype(float), x * y),
            (x.astype(float) / y.astype(float), x / y),
            (1 / y.astype(float), 1 / y),
        ):
            assert np.array_equal(oracle.fl32(mine).astype(np.float32).view(np.uint32), want.view(np.uint32))


def test_a_reciprocal_that_overflows_is_the_largest_number() -> None:
    e = np.array([0.0, 2.0**-149, 2.0**-128, 2.0**-128 + 2.0**-149, 2.0**-127, 2.0**126, 2.0**127])
    want = np.float32([MAX, MAX, MAX, MAX, 2.0**127, 2.0**-126, 2.0**-127])
    want[3] = np.float32(1) / np.float32(e[3])
    assert np.array_equal(oracle.reciprocal(e), want.astype(float)) and want[3] < MAX
    q, _, counts = oracle.quantise(np.float32([[0, -0.0, 1e-30, -1]]), "float8_e4m3fn", None, constant=2.0**-140)
    assert q.tolist() == [[0, 0x80, 0x7E, 0xFE]] and counts == (0, 2, 0)


def test_a_reciprocal_and_a_division_differ_by_one_unit() -> None:
    random = np.random.default_rng(4)
    x = random.standard_normal(100_000).astype(np.float32)
    e = (np.float32(1) + random.random(100_000, np.float32)) * np.float32(0.01)
    units = (x * (np.float32(1) / e)).view(np.int32).astype(np.int64) - (x / e).view(np.int32)
    assert set(np.abs(units)) == {0, 1}


# ---- scales --------------------------------------------------------------------------------------------------------


def naive(x: np.ndarray, fmt: str, scale_fmt: str, g: float) -> tuple[np.ndarray, np.ndarray, tuple[int, int, int]]:
    """The same in NumPy's float32 and with the conversions of ml_dtypes, one group after the other."""
    q, bits = np.zeros(x.shape, np.uint8), np.zeros(len(x), FORMATS.get(scale_fmt, FORMATS["int8"]).bits)
    zeros = saturated = 0
    largest, kept = np.float32(FORMATS[fmt].largest), dtype(scale_fmt)
    for i, row in enumerate(x):
        finite = np.abs(row[np.isfinite(row)])
        a = finite.max() if finite.size else np.float32(0)
        zeros += a == 0
        ratio = a / largest
        if a == 0:
            s = np.float32(1)
        elif scale_fmt == "float32":
            s = max(ratio, np.float32(2.0**-126))
        elif scale_fmt == "float8_e8m0fnu":
            k = len(bin(int(Fraction(float(a)) * 2**149))) - 3 - 149 - FORMATS[fmt].emax
            s = np.float32(2.0 ** min(max(k, -127), 127))
        elif scale_fmt == "float8_e4m3fn":
            s = min(max(ratio / np.float32(g), np.float32(2.0**-9)), np.float32(448))
        else:
            near = ratio.astype(kept)
            if not np.isfinite(near):
                near = ml_dtypes.finfo(kept).max
            elif near.astype(np.float32) < ratio:
                near = np.nextafter(near, kept.type(np.inf))
            s = min(max(near, ml_dtypes.finfo(kept).smallest_normal), ml_dtypes.finfo(kept).max)
        stored = np.array(s).astype(kept)
        bits[i] = stored.view(bits.dtype)
        e = stored.astype(np.float32) * np.float32(g)
        r = np.float32(1) / e
        t = row * (r if np.isfinite(r) else MAX)
        nan, over = np.isnan(row), saturates(t, fmt)
        saturated += np.count_nonzero(over)
        t = np.clip(np.where(nan, 0, t), -largest, largest)
        codes = np.rint(t).astype(np.int8).view(np.uint8) if fmt == "int8" else theirs(t, fmt)
        q[i] = np.where(nan, 0x7F if fmt.startswith("float8") else 0, codes)
    return q, bits, (int(zeros), int(saturated), np.count_nonzero(np.isnan(x)))


@pytest.mark.parametrize(("scale", "g"), WAYS)
@pytest.mark.parametrize("fmt", QUANTISED)
def test_groups_quantise_as_in_numpy(fmt: str, scale: str, g: float) -> None:
    for name, x in GROUPS.items():
        with in_case(name), np.errstate(all="ignore"):
            q, bits, counts = oracle.quantise(x[:64], fmt, scale, g)
            want = naive(x[:64], fmt, scale, g)
            assert bits is not None and bits.shape == x[:64].shape[:1]
            assert np.array_equal(bits, want[1]) and np.array_equal(q, want[0]) and counts == want[2]


def test_more_axes_are_more_groups() -> None:
    x = GROUPS["normal"][:24]
    q, bits, _ = oracle.quantise(x, "int8", "bfloat16")
    other, more, _ = oracle.quantise(x.reshape(2, 3, 4, 16), "int8", "bfloat16")
    assert bits is not None and more is not None
    assert np.array_equal(other.reshape(q.shape), q) and more.shape == (2, 3, 4) and np.array_equal(more.ravel(), bits)
    back = oracle.dequantise(other, more, "int8", "bfloat16", "float16")
    assert np.array_equal(back.reshape(q.shape), oracle.dequantise(q, bits, "int8", "bfloat16", "float16"))


@pytest.mark.parametrize("fmt", QUANTISED)
def test_scales_of_mx_are_exact_powers_of_two(fmt: str) -> None:
    """All positive bfloat16 values, and the neighbours of all powers of two; the logarithm is the length of an integer."""
    powers = np.exp2(np.arange(-149, 128, dtype=np.float32))
    around = [powers, np.nextafter(powers, np.float32(0)), np.nextafter(powers, np.float32(np.inf))]
    a = np.concatenate([every("bfloat16")[1:0x7F80], *around])
    a = a[a > 0]
    _, bits, _ = oracle.quantise(a[:, None], fmt, "float8_e8m0fnu")
    whole = [(Fraction(float(one)) * 2**149).numerator for one in a]
    emax = {"float8_e4m3fn": 8, "float8_e5m2": 15, "float4_e2m1fn": 2, "int8": 6}[fmt]
    want = [min(max(one.bit_length() - 1 - 149 - emax, -127), 127) + 127 for one in whole]
    assert bits is not None and bits.tolist() == want and min(want) == 0 and max(want) == 254 - emax


@pytest.mark.parametrize("scale", ["bfloat16", "float16"])
@pytest.mark.parametrize("fmt", QUANTISED)
def test_scales_of_16_bits_are_the_least_that_are_not_below_the_quotient(fmt: str, scale: str) -> None:
    """Also where the quotient is just above or below a value of the format."""
    M = FORMATS[fmt].largest  # noqa: N806, as on the page
    random = np.random.default_rng(5)
    first, last = (0x0080, 0x7F00) if scale == "bfloat16" else (0x0400, 0x7BFF)
    v = read(random.integers(first, last, 500).astype(np.uint16), scale).astype(float) * M
    v = v[v < MAX / 2].astype(np.float32)
    inf = np.float32(np.inf)
    a = np.concatenate([v, np.nextafter(v, np.float32(0)), np.nextafter(v, inf), v * (1 + random.random(v.size, np.float32))])
    least = Fraction(2) ** FORMATS[scale].least
    a = a[(a.astype(float) / M > float(least)) & (a.astype(float) / M < FORMATS[scale].largest)]
    _, bits, counts = oracle.quantise(a[:, None], fmt, scale)
    assert bits is not None and a.size > 1000 and counts == (0, 0, 0)
    for one, code in zip(a.tolist(), bits.tolist(), strict=True):
        with in_case(one, code):
            s, below = (Fraction(float(read(np.uint16([c]), scale)[0])) for c in (code, code - 1))
            assert below < Fraction(one) / Fraction(M) <= s


@pytest.mark.parametrize("fmt", QUANTISED)
def test_the_ends_of_scales(fmt: str) -> None:
    tiny, huge = np.float32([[2.0**-149]]), np.float32([[MAX]])
    ends = {
        ("float32", 1.0): (0x00800000, None),
        ("bfloat16", 1.0): (0x0080, None),
        ("float16", 1.0): (0x0400, 0x7BFF),
        ("float8_e8m0fnu", 1.0): (0, 254 - FORMATS[fmt].emax),
        ("float8_e4m3fn", 1.0): (1, 0x7E),
        ("float8_e4m3fn", 2.0**-149): (1, 0x7E),
        ("float8_e4m3fn", float(MAX)): (1, None),
    }
    for (scale, g), want in ends.items():
        for x, code in zip((tiny, huge), want, strict=True):
            with in_case(scale, g, x):
                bits = oracle.quantise(x, fmt, scale, g)[1]
                assert bits is not None and (code is None or bits.tolist() == [code])


@pytest.mark.parametrize("fmt", QUANTISED)
def test_finite_elements_do_not_saturate_below_their_scale(fmt: str) -> None:
    """For scales of float32 and bfloat16; for NVFP4 only where the scale is rounded to a subnormal or cut."""
    for name, x in GROUPS.items():
        infinite = np.count_nonzero(np.isinf(x))
        for scale in ("float32", "bfloat16"):
            with in_case(name, scale):
                assert oracle.quantise(x, fmt, scale)[2].saturated == infinite
    if fmt == "float4_e2m1fn":
        a = np.exp2(np.linspace(-6.0, 8.8, 20_000)).astype(np.float32) * np.float32(6)
        _, bits, counts = oracle.quantise(a[:, None], fmt, "float8_e4m3fn")
        assert bits is not None and bits.min() >= 8 and bits.max() == 0x7E and counts.saturated == 0
        assert oracle.quantise(np.float32([[6 * 1.4 * 2.0**-9]]), fmt, "float8_e4m3fn")[2].saturated == 1


# ---- special values ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", PLAIN)
def test_a_scale_that_is_nan_makes_its_group_nan(to: str) -> None:
    nans = {
        "float32": [0x7FC00000, 0x7F800001, 0xFFFFFFFF],
        "bfloat16": [0x7FC0, 0x7F81, 0xFFFF],
        "float16": [0x7E00, 0x7C01, 0xFFFF],
        "float8_e8m0fnu": [0xFF],
        "float8_e4m3fn": [0x7F, 0xFF],
    }
    for fmt in QUANTISED:
        q = np.broadcast_to(codes(fmt), (4, codes(fmt).size))
        for scale, bad in nans.items():
            with in_case(fmt, scale):
                one = 0x7F if scale == "float8_e8m0fnu" else 1 << FORMATS[scale].mantissa
                bits = np.array([*bad, one], np.uint64)
                found = oracle.dequantise(q[: len(bits)], bits, fmt, scale, to)
                assert (found[:-1] == NAN[to]).all() and not (found[-1] == NAN[to]).all()


@pytest.mark.parametrize("to", PLAIN)
def test_scales_that_quantising_never_writes(to: str) -> None:
    """Zero, negative and infinite ones."""
    q = np.uint8([[0x00, 0x80, 0x38, 0xB8, 0x7C, 0xFC]])  # of e5m2: 0, -0, 0.5, -0.5, inf, -inf
    width = 8 * FORMATS[to].bits.itemsize
    nan, inf = NAN[to], (NAN[to] >> FORMATS[to].mantissa) << FORMATS[to].mantissa
    minus = 1 << (width - 1)
    for bits, want in (
        (0x0000, [0, minus, 0, minus, nan, nan]),
        (0x8000, [minus, 0, minus, 0, nan, nan]),
        (0x7C00, [nan, nan, inf, minus | inf, inf, minus | inf]),
        (0xFC00, [nan, nan, minus | inf, inf, minus | inf, inf]),
    ):
        with in_case(hex(bits)):
            found = oracle.dequantise(q, np.uint16([bits]), "float8_e5m2", "float16", to)
            assert found[0].tolist() == want


def test_minus_128_is_read() -> None:
    found = oracle.dequantise(np.uint8([[0x80, 0x81]]), np.uint16([0x3F00]), "int8", "bfloat16", "float32")
    assert found.view(np.float32).tolist() == [[-64, -63.5]]


def test_the_global_scale_is_part_of_the_scale() -> None:
    x = GROUPS["normal"]
    for g in (0.25, float(np.float32(1e-3))):
        q, bits, _ = oracle.quantise(x, "float4_e2m1fn", "float8_e4m3fn", g)
        assert bits is not None
        back = oracle.dequantise(q, bits, "float4_e2m1fn", "float8_e4m3fn", "float32", g).view(np.float32)
        e = read(bits, "float8_e4m3fn") * np.float32(g)
        assert np.array_equal(back, read(q, "float4_e2m1fn") * e[:, None])


# ---- there and back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "g"), WAYS)
@pytest.mark.parametrize("fmt", QUANTISED)
def test_the_bound_of_the_error(fmt: str, scale: str, g: float) -> None:
    precision, least = {
        "float8_e4m3fn": (2.0**-4, 2.0**-9),
        "float8_e5m2": (2.0**-3, 2.0**-16),
        "float4_e2m1fn": (2.0**-2, 0.5),
        "int8": (0.0, 1.0),
    }[fmt]
    seen, worst = 0, 0.0
    for name in ("normal", "bfloat16", "wide", "scaled", "one huge"):
        x = GROUPS[name]
        q, bits, _ = oracle.quantise(x, fmt, scale, g)
        assert bits is not None
        back = oracle.dequantise(q, bits, fmt, scale, "float32", g).view(np.float32).astype(float)
        e = oracle.effective(oracle.value(bits, scale), scale, g)[:, None]
        bound = np.maximum(precision * np.abs(x.astype(float)), e * least / 2) * (1 + 2.0**-14)
        holds = (e >= 2.0**-100) & (e <= 2.0**100) & ~saturates(oracle.fl32(x * oracle.reciprocal(e)), fmt)
        error = np.abs(back - x.astype(float))
        with in_case(name):
            assert (error <= bound)[holds].all()
        seen += np.count_nonzero(holds)
        worst = max(worst, float(np.max((error / bound)[holds], initial=0)))
    if g == 1:
        assert seen > 1000 and worst > 0.9, "the bound is tight"


@pytest.mark.parametrize("fmt", QUANTISED)
def test_what_was_quantised_stays_as_it_is(fmt: str) -> None:
    """With a constant: each code but NaN, inf, -128 comes back."""
    q = codes(fmt)
    held = np.abs(oracle.value(q, fmt)) <= FORMATS[fmt].largest
    for c in (1.0, 0.75, float(np.float32(0.1)), 2.0**-127, 2.0**100):
        with in_case(c):
            x = oracle.dequantise(q[held], None, fmt, None, "float32", constant=c).view(np.float32)
            again, _, counts = oracle.quantise(x, fmt, None, constant=c)
            assert np.array_equal(again, q[held]) and counts == (0, 0, 0)


# ---- the page ------------------------------------------------------------------------------------------------------


def tables() -> list[list[list[str]]]:
    """Of the page: the rows of each, with the heads of the columns."""
    found = []
    for table in re.findall(r"(?:^\|.*\|\n)+", pages.read(PAGE), re.MULTILINE):
        lines = [line for line in table.splitlines() if not line.startswith("|---")]
        found.append([[cell.strip().strip("`") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines])
    return found


def number(text: str) -> float:
    match = re.fullmatch(r"(-?)2\^(-?\d+)", text)
    return float(f"{match[1]}1") * 2.0 ** int(match[2]) if match else float(text)


def test_the_formats_of_the_page() -> None:
    [quantised] = [table for table in tables() if "emax, the exponent of M" in table[0]]
    assert {row[0] for row in quantised[1:]} == set(QUANTISED)
    for row in quantised[1:]:
        cells: Any = dict(zip(quantised[0], row, strict=True))
        this = FORMATS[row[0]]
        assert float(cells["M, the largest value"]) == this.largest
        assert int(cells["emax, the exponent of M"]) == this.emax == int(np.floor(np.log2(this.largest)))
        positive = oracle.value(codes(row[0]), row[0])
        assert number(cells["least positive"]) == positive[positive > 0].min()
        if row[0] != "int8":
            assert cells["bits: sign, exponent, mantissa"] == f"1, {this.exponent}, {this.mantissa}"
            assert int(cells["bias"]) == this.bias and number(cells["least positive normal"]) == 2.0**this.least
    [scales] = [table for table in tables() if table[0][-2:] == ["largest", "NaN"]]
    assert {row[0] for row in scales[1:]} == set(SCALES)
    for row in scales[1:]:
        limits = ml_dtypes.finfo(dtype(row[0]))
        assert number(row[3]) == float(limits.smallest_normal), row
        assert number(row[4]) == float(limits.smallest_subnormal), row


def test_the_bounds_of_the_page() -> None:
    [saturated] = [table[1:] for table in tables() if table[0][1:2] == ["saturated"] and table[0][0] == "format"]
    want = {fmt: rf"\|t\| {'>=' if itself else '>'} {bound:g}" for fmt, (bound, itself) in SATURATES.items()}
    assert {row[0]: row[1] for row in saturated} == want


def test_the_examples_of_the_page() -> None:
    ways = [("float8_e4m3fn", "float32", 1.0), ("float4_e2m1fn", "float8_e8m0fnu", 1.0), ("float4_e2m1fn", "float8_e4m3fn", 0.25)]
    found = [table[1:] for table in tables() if table[0][:3] == ["x", "t", "code"]]
    for (fmt, scale, g), rows in zip(ways, found, strict=True):
        x = np.float32([[number(row[0]) for row in rows]])
        q, bits, _ = oracle.quantise(x, fmt, scale, g)
        assert bits is not None
        e = oracle.effective(oracle.value(bits, scale), scale, g)
        t = oracle.fl32(x * oracle.reciprocal(e)[:, None])[0]
        back = oracle.value(oracle.dequantise(q, bits, fmt, scale, "bfloat16", g), "bfloat16")[0]
        for i, row in enumerate(rows):
            with in_case(fmt, row):
                assert np.float32(number(row[1])) == t[i] and int(row[2], 16) == q[0, i]
                for text, mine in ((row[3], oracle.value(q, fmt)[0, i]), (row[4], back[i])):
                    assert number(text) == mine and np.signbit(number(text)) == np.signbit(mine)


def test_the_example_where_a_division_gives_another_code() -> None:
    text = pages.read(PAGE)
    a, x = np.float32(1.53125), np.float32(1.3671875)
    s = a / np.float32(448)
    r = np.float32(1) / s
    t, quotient = str(x * r), int(x / s)  # formatted with str, float32 numbers have the fewest digits that name them
    for one in (f"`a = {a}`", f"= {s!s}`, `r = {r!s}`", f"`x = {x!s}`", f"(x / s)` is {quotient},", f"is {t}, so `q = 416`"):
        assert one in text, one
    q, bits, _ = oracle.quantise(np.array([[a, x]]), "float8_e4m3fn", "float32")
    assert bits is not None and bits.view(np.float32)[0] == s and oracle.value(q, "float8_e4m3fn").tolist() == [[448, 416]]
    assert read(theirs(np.array([x / s]), "float8_e4m3fn"), "float8_e4m3fn") == 384


@pytest.mark.parametrize(
    "given",
    [
        {"scale_fmt": None},
        {"scale_fmt": "float32", "constant": 1.0},
        {"scale_fmt": "float32", "global_scale": 2.0},
        {"scale_fmt": "float8_e5m2"},
        {"scale_fmt": "float8_e4m3fn", "global_scale": 0.0},
        {"scale_fmt": None, "constant": 0.1},
        {"scale_fmt": None, "constant": float("inf")},
        {"scale_fmt": None, "constant": float("nan")},
    ],
)
def test_the_oracle_refuses_what_the_page_does_not_define(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        oracle.quantise(np.zeros((1, 4), np.float32), "int8", **given)
