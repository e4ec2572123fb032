"""Compare a result with the expected one, and find the largest error.

An error of the kernel under test is returned as a sentence, not raised.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _core
from .._arguments import quoted
from ..errors import printable
from . import limits
from .data import clone, dtype_name, is_array, leaves, require_room, values

#: Number of elements that are compared at a time, so that a comparison needs little memory.
CHUNK = 1 << 22

Checker = Callable[[Callable[[Any], Any], Any], tuple[bool, str | None]]


def allclose_with_error(
    actual: Any, expected: Any, rtol: float = 1e-3, atol: float = 1e-3
) -> tuple[bool, float, float]:
    """Check ``|actual - expected| <= atol + rtol * |expected|`` for all elements, and return the largest errors.

    Parameters
    ----------
    actual, expected : arrays
        Arrays of torch, NumPy or CuPy, on any device.  Packed 4-bit values are compared as bytes.
    rtol, atol : float
        0 or larger.

    Returns
    -------
    bool
        True if all elements are within the tolerance.  False if there is a NaN on either side, or if shapes or dtypes differ.
    float
        Largest absolute error.  NaN if there is a NaN; infinite if shapes or dtypes differ.
    float
        Largest error relative to `expected`, likewise; an error beside an expected zero is infinite.

    Raises
    ------
    ValueError
        A tolerance below zero, or an argument that is not an array of numbers.

    Examples
    --------
    >>> import numpy as np
    >>> allclose_with_error(np.array([1.0, 2.5]), np.array([1.0, 2.0]), rtol=0, atol=1)
    (True, 0.5, 0.25)
    >>> allclose_with_error(np.array([np.nan]), np.array([np.nan]), rtol=0, atol=1)
    (False, nan, nan)
    """
    _require_tolerances(rtol, atol)
    actual_values, expected_values = _numbers("actual", actual), _numbers("expected", expected)
    if _shape(actual) != _shape(expected) or dtype_name(actual) != dtype_name(expected):
        return False, math.inf, math.inf
    errors = _compare(actual_values, expected_values, rtol, atol)
    return errors.wrong == 0, errors.max_abs, errors.max_rel


def make_match_reference(
    reference_fn: Callable[[Any], Any], rtol: float = 1e-3, atol: float = 1e-3, *, limit_s: float = 60.0
) -> Checker:
    """Create a function that compares kernels with a reference.

    Parameters
    ----------
    reference_fn : callable
        ``reference_fn(data)`` returns an array, or a tuple, list or dict of arrays.  Its exceptions are raised, as it is not under
        test.
    rtol, atol : float
        As for `allclose_with_error`.
    limit_s : float
        Seconds after which a kernel that no longer computes hangs.  On the CPU one that computes has ten times as long, and is then
        too slow (see `kvbm.testing.limits`).

    Returns
    -------
    callable
        ``check(impl_fn, data) -> (ok, error)``.  Reference and kernel get separate copies of the data.  `error` is None, or a
        sentence on the exception, the time limit, the part with another shape or dtype, the place of a NaN, or the worst element
        with its coordinate and both values.

    Examples
    --------
    >>> import numpy as np
    >>> check = make_match_reference(lambda x: x * 2)
    >>> check(lambda x: x + x, np.ones(4))
    (True, None)
    >>> check(lambda x: x + np.arange(4), np.ones(4))[1]
    'wrong at (3,): expected 2.0, got 4.0 (absolute error 2, relative 1; rtol=0.001, atol=0.001); 3 of 4 elements are wrong'
    """
    _require_tolerances(rtol, atol)
    limits.require_limit(limit_s)

    def check(impl_fn: Callable[[Any], Any], data: Any) -> tuple[bool, str | None]:
        require_room(data, 2)
        expected = reference_fn(clone(data))
        dict(leaves(expected))  # its errors are raised, too
        try:
            actual = limits.call(impl_fn, clone(data), limit_s)
            with limits.Blamed("looking at what the kernel returned raised"):
                error = _difference(actual, expected, rtol, atol)
        except limits.KernelFailure as failure:
            return False, str(failure)
        return error is None, error

    return check


def find_nan(result: Any) -> str | None:
    """A sentence on the first NaN of a result, or None."""
    for place, value in leaves(result):
        if not is_array(value):
            continue
        array = values(value)
        if array.dtype.kind in "fc" and (nans := np.isnan(array)).any():
            return _nan_sentence(place, array, nans)
    return None


def _require_tolerances(rtol: float, atol: float) -> None:
    for name, value in (("rtol", rtol), ("atol", atol)):
        if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not value >= 0:  # type: ignore[redundant-expr]
            raise ValueError(f"{name}: expected a number from 0 on, got {quoted(value)}")


def _numbers(name: str, value: Any) -> npt.NDArray[Any]:
    """The values of an array, or of numbers.  Raises ValueError for anything else."""
    try:
        return values(value)
    except Exception as error:  # of NumPy, of torch, or of the object itself
        why = f"{type(error).__name__}: {printable(str(error))}"
        raise ValueError(f"{name}: expected an array of numbers, got {quoted(value)} ({why})") from None


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if hasattr(value, "shape") else np.asarray(value).shape


def _difference(actual: Any, expected: Any, rtol: float, atol: float) -> str | None:
    """A sentence on the first wrong part of a result, or None."""
    have, want = dict(leaves(actual)), dict(leaves(expected))
    if have.keys() != want.keys():
        return f"the kernel returned {_parts(actual)}; expected {_parts(expected)}, as the reference returns"
    for place, part in want.items():
        mine, where = have[place], f"{place}: " if place else ""
        if not is_array(mine) and is_array(part):
            return f"{where}the kernel returned {_parts(mine)}; expected an array of shape {_shape(part)}"
        if not is_array(part) and not isinstance(part, np.generic | int | float | complex):  # None, a text
            if is_array(mine) or mine != part:
                return f"{where}expected {quoted(part, 60)}, got {_parts(mine) if is_array(mine) else f'{quoted(mine, 60)}'}"
            continue
        if _shape(mine) != _shape(part):
            return f"{where}shape: expected {_shape(part)}, got {_shape(mine)}"
        if dtype_name(mine) != dtype_name(part):
            return f"{where}dtype: expected {dtype_name(part)}, got {dtype_name(mine)}"
        a, e = values(mine), values(part)
        errors = _compare(a, e, rtol, atol)
        if not errors.wrong:
            continue
        if a.dtype.kind in "fc" and (nans := np.isnan(a)).any():
            return _nan_sentence(place, a, nans, e)
        at = tuple(int(index) for index in np.unravel_index(errors.worst, a.shape))
        figures = f"absolute error {errors.worst_abs:.6g}, relative {errors.worst_rel:.6g}; rtol={rtol:g}, atol={atol:g}"
        return (
            f"{where}wrong at {at}: expected {e[at]}, got {a[at]} ({figures}); "
            f"{errors.wrong:,} of {a.size:,} elements are wrong"
        )
    return None


def _nan_sentence(
    place: str, array: npt.NDArray[Any], nans: npt.NDArray[np.bool_], expected: npt.NDArray[Any] | None = None
) -> str:
    at = tuple(int(index) for index in np.unravel_index(int(nans.argmax()), array.shape))
    wanted = f", where {expected[at]} was expected" if expected is not None else ""
    return f"{place + ': ' if place else ''}NaN at {at}{wanted}; {int(nans.sum()):,} of {array.size:,} elements are NaN"


def _parts(value: Any) -> str:
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}"
    return "nothing (None)" if value is None else f"a {type(value).__name__}"


@dataclass
class _Errors:
    max_abs: float = 0.0
    max_rel: float = 0.0
    wrong: int = 0
    worst: int = 0  # flat index of the element with the largest excess over its tolerance
    worst_abs: float = 0.0
    worst_rel: float = 0.0
    excess: float = -math.inf


def _compare(actual: npt.NDArray[Any], expected: npt.NDArray[Any], rtol: float, atol: float) -> _Errors:
    errors = _Errors()
    a_flat, e_flat = actual.reshape(-1), expected.reshape(-1)
    wide = np.complex128 if actual.dtype.kind == "c" else np.float64
    with _core.DefaultArithmetic():  # the caller's may take subnormals for zeros
        for start in range(0, a_flat.size, CHUNK):
            a_raw, e_raw = a_flat[start : start + CHUNK], e_flat[start : start + CHUNK]
            a, e = a_raw.astype(wide), e_raw.astype(wide)
            with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
                nan = np.isnan(a) | np.isnan(e)
                error = np.where(a_raw == e_raw, 0.0, np.abs(a - e))
                # Complex: the same infinity in one part, and the other part differs.
                error[np.isnan(error) & ~nan] = math.inf
                # Integers may differ by less than the precision of a double: compare them exactly.
                error[(error == 0) & (a_raw != e_raw)] = 1.0
                size = np.abs(e)
                relative = np.where(error == 0, 0.0, error / size)
                relative[np.isinf(error)] = math.inf
                excess = error - (atol + rtol * size)
            bad = ~(excess <= 0)  # of a NaN, too
            bad |= np.isinf(error)  # beside an infinite expected value every finite error would be small
            bad[error == 0] = False
            excess[nan | np.isinf(error)] = math.inf
            errors.max_abs, errors.max_rel = (
                math.nan if nan.any() or math.isnan(most) else max(most, float(part.max()))
                for most, part in ((errors.max_abs, error), (errors.max_rel, relative))
            )
            errors.wrong += int(bad.sum())
            worst = int(np.where(bad, excess, -math.inf).argmax())
            if bad[worst] and excess[worst] > errors.excess:
                errors.worst, errors.excess = start + worst, float(excess[worst])
                errors.worst_abs, errors.worst_rel = float(error[worst]), float(relative[worst])
    return errors
