"""Arguments of a caller: what they are, and how a message quotes them.  None of these functions raises another's error.

An argument may be any object.  Its own code (``__index__``, ``__iter__``, ``__eq__``, ``__repr__``) may raise anything.
"""

from __future__ import annotations

import itertools
import numbers
import operator
import reprlib
import sys
from collections.abc import Iterable
from typing import Any

from .errors import BindError, KvbmError, printable


def imported(name: str) -> Any:
    """A module whose objects may be arguments; None if it is not imported, or another thread is importing it."""
    module = sys.modules.get(name)
    return None if getattr(getattr(module, "__spec__", None), "_initializing", False) else module


def whole(value: Any) -> int | None:
    """The value as an int, also for NumPy integers; None for anything else."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not hasattr(type(value), "__index__"):
        return None
    try:
        return None if str(getattr(value, "dtype", "")) == "torch.bool" else operator.index(value)
    except Exception:  # an array of several, or the object's own code
        return None


def is_real(value: Any) -> bool:
    """True for a number of Python or NumPy that is no bool."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def seconds(what: str, value: Any) -> float:
    """A time in seconds, below 1e9; `BindError` if it is none."""
    if type(value) is float and 0 <= value < 1e9:
        return value
    if not is_real(value) or not 0 <= value < 1e9:
        raise BindError(f"{what}: expected seconds, got {quoted(value)}")
    return float(value)


def wholes(values: Any, most: int = 1 << 20) -> tuple[int, ...] | None:
    """The integers of a list of at most `most`; None for anything else, also for a mask."""
    if hasattr(type(values), "filled") or isinstance(values, str | bytes | bytearray):
        return None
    try:
        if len(values) > most if hasattr(type(values), "__len__") else False:
            return None
        found = [whole(one) for one in itertools.islice(iter(values), most + 1)]
    except Exception:  # no iterable, or the object's own code
        return None
    return None if len(found) > most else tuple(one for one in found if one is not None) if None not in found else None


def number(what: str, value: Any, least: int, most: int | None = None, error: type[KvbmError] = BindError) -> int:
    """An integer from `least` to `most`.

    Raises `KvbmError`: of the class `error`: ``what: expected an integer from 1 on, got 'a'``.
    """
    found = whole(value)
    if found is None or found < least or (most is not None and found > most):
        raise error(f"{what}: expected an integer from {least} {'on' if most is None else f'to {most}'}, got {quoted(value)}")
    return found


def require_a(
    kind: type | tuple[type, ...], what: str, value: Any, words: str, error: type[KvbmError] = BindError
) -> None:
    """Raise an error of the class `error` unless the value is of a kind: ``pool: expected a kvbm.Pool, got 3``."""
    try:
        fits = isinstance(value, kind)
    except Exception:  # the object says itself of what class it is
        fits = False
    if not fits:
        raise error(f"{what}: expected {words}, got {quoted(value)}")


def require_like(what: str, given: Any, names: Iterable[str], expected: str, *, methods: bool = False) -> None:
    """Raise `BindError` unless the object has these attributes, or these methods."""
    try:
        found = [getattr(given, name) for name in names]
    except Exception:  # of the object's own code: it is none
        found = [None]
    if any(one is None for one in found) or (methods and not all(map(callable, found))):
        raise BindError(f"{what}: expected {expected}, got {quoted(given)}")


def flag(what: str, value: Any, error: type[KvbmError] = BindError) -> bool:
    """True or False; also NumPy's."""
    if value is True or value is False:
        return bool(value)
    if type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    raise error(f"{what}: expected True or False, got {quoted(value)}")


def require_text(what: str, value: Any, among: Iterable[str], error: type[KvbmError] = BindError) -> None:
    """Raise an error of the class `error` unless the value is one of these texts."""
    known = list(among)
    if not isinstance(value, str) or str.__str__(value) not in known:
        raise error(f"{what}: expected one of {', '.join(map(repr, known))}, got {quoted(value)}")


def listed(what: str, values: Any, words: str, *, most: int = 1 << 20, error: type[KvbmError] = BindError) -> list[Any]:
    """The items of an iterable of at most `most` items."""
    try:
        found = list(itertools.islice(iter(values), most + 1))
    except Exception as problem:
        reason = (
            ""
            if isinstance(problem, TypeError)
            else f" (reading it raises {type(problem).__name__}: {printable(str(problem))})"
        )
        raise error(f"{what}: expected {words}, got {quoted(values)}{reason}") from None
    if len(found) > most:
        raise error(f"{what}: expected {words}, at most {most:,}, got more")
    return found


class _Quoter(reprlib.Repr):
    """`repr` with limits: of integers that Python refuses to print, of nested and long values, and of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxdict = 4, 16
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdeque = self.maxarray = 64
        self.maxstring = self.maxlong = self.maxother = 1000

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002
        return repr(x) if x.bit_length() < 1000 else f"<an integer of {x.bit_length()} bits>"

    def repr_str(self, x: str, level: int) -> str:  # noqa: ARG002
        return repr(x[: self.maxstring])

    repr_bytes = repr_bytearray = repr_str

    def repr_instance(self, x: Any, level: int) -> str:
        torch = imported("torch")
        if torch is not None and isinstance(x, torch.Tensor):  # to print one whose storage was freed ends the process
            return f"<{type(x).__name__} of shape {tuple(x.shape)}, {x.dtype}>"
        readers: Any = ((dict, self.repr_dict), (list, self.repr_list), (tuple, self.repr_tuple))
        for kind, read in readers:
            if isinstance(x, kind):  # of a class of its own: its items may be such tensors
                return f"{type(x).__name__}({read(x, level)})"
        try:
            return repr(x)
        except Exception as error:
            return f"<{type(x).__name__}, whose repr raises {type(error).__name__}>"


_QUOTER = _Quoter()


def quoted(value: Any, most: int = 200) -> str:
    """A value of a caller, as it may stand in a message: its `repr`, of at most `most` characters.

    A tensor is told by its shape and dtype: torch ends the process if it prints a tensor whose storage was freed.
    """
    try:
        text = _QUOTER.repr(value)
    except Exception:  # a type that lies about itself
        text = f"<{type(value).__name__}>"
    return printable(text, most)
