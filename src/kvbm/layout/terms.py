"""The elements of the layout language: expressions over sizes, terms, orders, pitches and planes."""

from __future__ import annotations

import ast
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType

from ..errors import LayoutError
from .axes import SIZE_OF
from .shapes import LIMIT, round_up

# ---- expressions over sizes: pitches and extra axes ----------------------------------------------------------------


#: Names in an expression: sizes of the axes, and bytes per element.
SIZES = (*SIZE_OF.values(), "es")
_LONGEST = 1000
#: What Python reads and the language does not have: comments, and other characters.
_FOREIGN = re.compile(r"#.*|[^\w\s+\-*/%(),]", re.ASCII)
FUNCTIONS: Mapping[str, Callable[..., int]] = MappingProxyType(
    {"round_up": round_up, "min": min, "max": max}
)
OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = MappingProxyType(
    {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.FloorDiv: operator.floordiv,
        ast.Mod: operator.mod,
    }
)


@dataclass(frozen=True, slots=True)
class Expression:
    """Integer arithmetic over sizes, such as ``round_up(nt*584, 576)``.

    The text has ``+ - * // %``, integers, ``round_up(x, to)``, ``min``, ``max`` and the names ``nb nl no nh nt hd es``;
    at most 1,000 characters.  Blanks and ends of lines between them have no meaning.  `where` is its file and line.
    Raises `LayoutError` if it contains anything else; `evaluate` does if a name has no value, or the result is below 1
    or above 2**62.
    """

    text: str = field(compare=False)
    where: str = field(compare=False, repr=False, default="")
    key: str = field(init=False, repr=False, default="")

    def __post_init__(self) -> None:
        if len(self.text) > _LONGEST:
            raise LayoutError(
                f"expression '{self.text[:40]}…': expected at most {_LONGEST:,} characters, got {len(self.text):,}"
            )
        self.evaluate(dict.fromkeys(SIZES, 720720), minimum=None)
        if foreign := _FOREIGN.search(self.text):
            raise LayoutError(_unexpected(self.text, foreign[0], SIZES))
        object.__setattr__(self, "key", "".join(self.text.split()))  # only blanks, which have no meaning, are left out

    def evaluate(self, sizes: Mapping[str, int], *, minimum: int | None = 1, exact: bool = False) -> int:
        """The value for these sizes, at least `minimum`.  With `exact`, ``//`` must have no remainder, as for groups of scales."""

        def walk(node: ast.expr) -> int:
            value = computed(node)
            if abs(value) >= 1 << 1000:  # a much larger number could not be converted to text
                raise OverflowError("a number beyond 2**1000")
            return value

        def computed(node: ast.expr) -> int:
            match node:
                case ast.Constant(value=int() as value) if not isinstance(value, bool):
                    return value
                case ast.Name(id=name) if name in sizes:
                    return sizes[name]
                case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                    a, b = walk(left), walk(right)
                    if exact and isinstance(op, ast.FloorDiv) and a % b:
                        raise LayoutError(f"expression {self.text!r}: {b} does not divide {a}")
                    return OPERATORS[type(op)](a, b)
                case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in FUNCTIONS:
                    return FUNCTIONS[name](*map(walk, args))
            raise LayoutError(_unexpected(self.text, ast.unparse(node), sizes))

        try:
            value = walk(_parsed(self.text))
        except LayoutError:
            raise
        except SyntaxError:
            raise LayoutError(_unexpected(self.text, self.text, sizes)) from None
        except (TypeError, ValueError, ArithmeticError, RecursionError, MemoryError) as error:
            raise LayoutError(f"expression {self.text!r}: {str(error) or 'nested too deeply'}") from None
        if minimum is not None and not minimum <= value < LIMIT:
            wanted = f"at least {minimum}" if value < minimum else "less than 2**62"
            raise LayoutError(f"expression {self.text!r}: expected {wanted}, got {value}")
        return value


@lru_cache(maxsize=1024)
def _parsed(text: str) -> ast.expr:
    with warnings.catch_warnings():  # Python warns of texts such as "1if nh else 2", which are refused
        warnings.simplefilter("ignore")
        return ast.parse(text, mode="eval").body


def _unexpected(text: str, got: str, sizes: Iterable[str]) -> str:
    """A message about an expression that has something else than the language allows."""
    advice = ""
    if unit := re.fullmatch(r"\s*(\d+)\s*(?:(bytes?|b)|([kKmMgG])i?[bB]?)\s*", text):
        power = {"k": 10, "m": 20, "g": 30}[unit[3].lower()] if unit[3] else 0
        advice = f"; bytes are written as {int(unit[1]) << power} B"
    elif "#" in text:
        advice = "; write comments outside of the expression, such as behind its quotation marks"
    elif re.search(r"[^/]/[^/]", text):
        advice = "; divide with //"
    elif text.count("(") > text.count(")"):
        advice = "; between { and }, an expression with a comma needs quotation marks"
    return f"expression {text!r}: expected integers, {', '.join(sizes)}, + - * // %, round_up(x, to), min, max; got {got!r}{advice}"


# ---- declarations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Term:
    """One factor of an order: axes fused row-major, then quotients and remainders read left to right."""

    #: Letters.  Several axes are fused, the first slowest.
    axes: tuple[str, ...]
    steps: tuple[tuple[str, int, bool], ...] = ()  # ``("/" or "%", size, size is in bytes)``
    opaque: bool = False  # the axes are contiguous, and their order is unspecified
    planes: bool = False  # the names are planes, in their order

    def __str__(self) -> str:
        if self.planes:
            return "<" + " ".join(self.axes) + ">"
        if self.opaque:
            return "{" + " ".join(self.axes) + "}"
        head = self.axes[0] if len(self.axes) == 1 else "(" + " ".join(self.axes) + ")"
        return head + "".join(f"{op}{size}{'B' if in_bytes else ''}" for op, size, in_bytes in self.steps)

    def extent(self, sizes: Mapping[str, int]) -> int:
        """Size of the fused axes before any split."""
        return sizes[self.axes[0]] if len(self.axes) == 1 else math.prod(sizes[axis] for axis in self.axes)

    def cut(self, sizes: Mapping[str, int], itemsize: int, pack: int = 1) -> tuple[int, int]:
        """The term as ``(index // divisor) % extent``, in elements; `pack` elements have `itemsize` bytes.

        Raises `LayoutError` if a split does not divide its axis.
        """
        divisor, extent = 1, self.extent(sizes)
        for op, size, in_bytes in self.steps:
            count, rest = divmod(size * pack, itemsize) if in_bytes else (size, 0)
            if rest or count < 1:
                raise LayoutError(f"'{self}': {size} bytes are not a whole number of {itemsize}-byte elements")
            if extent % count:
                what = f"{size} B = {count} elements" if in_bytes else str(count)
                raise LayoutError(f"'{self}': the split {what} does not divide {extent}")
            if op == "/":
                divisor, extent = divisor * count, extent // count
            else:
                extent = count
        return divisor, extent


@dataclass(frozen=True)
class Order:
    """An order: axes in brackets select an allocation, the others are inside it, slowest first."""

    table: tuple[Term, ...]
    inner: tuple[Term, ...]
    where: str = field(default="", compare=False)

    def __str__(self) -> str:
        brackets = ["[" + " ".join(map(str, self.table)) + "]"] if self.table else []
        return " ".join([*brackets, *map(str, self.inner)])

    @cached_property
    def terms(self) -> tuple[Term, ...]:
        return self.table + self.inner

    @cached_property
    def whole(self) -> frozenset[str]:
        """The axes, if none is split or repeated; else an empty set."""
        axes = [axis for term in self.terms for axis in term.axes]
        once = len(set(axes)) == len(axes) and not any(term.steps for term in self.terms)
        return frozenset(axes) if once else frozenset()


@dataclass(frozen=True, slots=True)
class Pitch:
    """Distance between neighbours along a term, in bytes or in elements."""

    expression: Expression
    in_bytes: bool

    def __str__(self) -> str:
        apart = " " if re.search(r"\b0[xX]\w*$", self.expression.key) else ""  # 0xA bytes are not 0xAB
        return self.expression.key + (f"{apart}B" if self.in_bytes else "")


@dataclass(frozen=True, slots=True)
class Plane:
    """One kind of elements of a block that holds several kinds: quantised data, scales, positions."""

    #: Name of the plane.  It must be the same in both layouts of a conversion.
    name: str
    #: Terms of the plane, inside the terms that all planes share: one order, or one for K and one for V.
    orders: tuple[Order, ...]
    dtype: str | None = None  # default: the dtype of the shape
    #: Bytes from the start of the record to the plane.  Default: directly after the plane before.
    offset: Expression | None = None
    pitch: tuple[tuple[str, Pitch], ...] = ()  # as for `Layout`, for the plane's terms; sorted
    #: Axes of the shape along which the plane has a single value, such as one scale for all tokens of a block.
    shared: tuple[str, ...] = ()
    #: Name of the plane whose elements this plane scales (`kvbm.layout.scales`).  A copy without a cast does not use
    #: it, so it does not change the meaning of a layout.
    scales: str = field(default="", compare=False)

    def __str__(self) -> str:
        text = " / ".join(map(str, self.orders))
        at = f"at {self.offset.key} B" if self.offset else ""
        return " ".join(filter(None, (f"{self.name}:", text, self.dtype, at)))

    @property
    def meaning(self) -> str:
        """The plane in one line.  Planes with the same meaning have the same text."""
        pitch = " ".join(f"{term}={p}" for term, p in self.pitch)
        shared = " ".join(self.shared)
        return f"{self} pitch {pitch} shared {shared}"
