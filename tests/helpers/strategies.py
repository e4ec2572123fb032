"""Random layouts and pairs of layouts for hypothesis, each as YAML for kvbm and as an Order for the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

import oracle

_NAMES = {"b": "nb", "l": "nl", "o": "no", "h": "nh", "t": "nt", "d": "hd"}


@dataclass(frozen=True)
class Declared:
    """One random layout."""

    yaml: str
    order: oracle.Order

    def __repr__(self) -> str:
        return f"\n{self.yaml}"


@dataclass(frozen=True)
class Sizes:
    nl: int
    no: int
    nh: int
    nt: int
    hd: int
    dtype: str
    num_blocks: int

    @property
    def sizes(self) -> dict[str, int]:
        return {"l": self.nl, "o": self.no, "h": self.nh, "t": self.nt, "d": self.hd}

    @property
    def itemsize(self) -> int:
        return oracle.ITEMSIZE[self.dtype]

    def placed(self, order: oracle.Order, num_blocks: int | None = None) -> oracle.Placed:
        return oracle.Placed(order, self.sizes, self.itemsize, num_blocks or self.num_blocks)


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


@st.composite
def sizes(draw: Any, limit: int = 1500) -> Sizes:
    hd = draw(st.sampled_from((1, 2, 3, 4, 5, 8, 12, 16, 24)))
    nt = draw(st.sampled_from((1, 2, 3, 4, 6, 8)))
    nh = draw(st.sampled_from((1, 2, 3, 4)))
    no = draw(st.sampled_from((1, 2, 2)))
    nl = draw(st.sampled_from((1, 2, 3)))
    nb = draw(st.sampled_from((1, 2, 3)))
    while nl * no * nh * nt * hd * nb > limit:  # every coordinate is visited: keep them few
        if nt > 2:
            nt //= 2
        elif nb > 1:
            nb -= 1
        elif nl > 1:
            nl -= 1
        else:
            nh = max(1, nh // 2)
    return Sizes(nl, no, nh, nt, hd, draw(st.sampled_from(sorted(oracle.ITEMSIZE))), nb)


@st.composite
def chain(draw: Any, n: int, through: int | None = None) -> tuple[int, ...]:
    """Split points of n, each dividing the next: (3, 6) for 24."""
    points: list[int] = []
    low = 1
    targets = [through, n] if through else [n]
    for target in targets:
        while draw(st.integers(0, 3)):
            options = [k for k in _divisors(target) if k > low and k % low == 0 and k < target]
            if not options:
                break
            low = draw(st.sampled_from(options))
            points.append(low)
        if target != n and 1 < target < n:
            low = target
            points.append(low)
    return tuple(points)


def _pieces(draw: Any, head: str, points: tuple[int, ...], itemsize: int) -> list[str]:
    """Words that cover the axis: its quotient, its middle digits, its remainder, in a random notation."""
    if not points:
        return [head]
    unit = (lambda c: f"{c * itemsize}B") if draw(st.booleans()) and head.endswith(("d", "d)")) else str
    words = [f"{head}/{unit(points[-1])}"]
    for low, high in zip(points, points[1:], strict=False):
        if draw(st.booleans()):
            words.append(f"{head}/{unit(low)}%{high // low}")
        else:
            words.append(f"{head}%{unit(high)}/{unit(low)}")
    words.append(f"{head}%{unit(points[0])}")
    return words


@dataclass(frozen=True)
class Splits:
    """Split points both sides of a pair may use, so that a common refinement exists."""

    single: dict[str, tuple[int, ...]]
    fused: tuple[str, str] | None
    fused_points: tuple[int, ...]


@st.composite
def splits(draw: Any, shape: Sizes) -> Splits:
    s = shape.sizes
    fused = draw(st.sampled_from((None, None, ("h", "d"), ("t", "d"), ("h", "t"))))
    points: tuple[int, ...] = ()
    if fused:
        points = draw(chain(s[fused[0]] * s[fused[1]], through=s[fused[1]]))
    single = {a: draw(chain(s[a])) for a in ("l", "h", "t", "d") if not fused or a not in fused}
    return Splits(single, fused, points)


def _some(draw: Any, points: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(p for p in points if draw(st.integers(0, 3)))


def _words(draw: Any, shape: Sizes, allowed: Splits) -> list[str]:
    s = shape.sizes
    words = ["b"]
    done: set[str] = set()
    if allowed.fused:
        x, y = allowed.fused
        if draw(st.booleans()):
            words += _pieces(draw, f"({x} {y})", _some(draw, allowed.fused_points), shape.itemsize)
        else:
            words += _pieces(draw, y, _some(draw, tuple(p for p in allowed.fused_points if p < s[y])), shape.itemsize)
            above = tuple(p // s[y] for p in allowed.fused_points if p > s[y])
            words += _pieces(draw, x, _some(draw, above), shape.itemsize)
        done = {x, y}
    for axis in ("l", "o", "h", "t", "d"):
        if axis in done or (s[axis] == 1 and draw(st.integers(0, 3)) == 0):
            continue
        words += _pieces(draw, axis, _some(draw, allowed.single.get(axis, ())), shape.itemsize)
    return words


@st.composite
def layout(draw: Any, shape: Sizes, allowed: Splits | None = None, opaque: bool = False) -> Declared:
    """A legal layout for the shape."""
    if allowed is None:
        allowed = draw(splits(shape))
    if opaque:
        words = draw(st.permutations(["b", "l", "o"]))
        in_table = draw(st.integers(0, 3))
        words += ["{" + " ".join(draw(st.permutations(["t", "h", "d"]))) + "}"]
    else:
        words = draw(st.permutations(_words(draw, shape, allowed)))
        in_table = draw(st.sampled_from((0, 0, 1, 1, 2, 3)))
    table, inner = list(words[:in_table]), list(words[in_table:])
    if not inner:
        table, inner = table[:-1], table[-1:]
    halves = [inner]
    if shape.no == 2 and not opaque and draw(st.integers(0, 3)) == 0:
        if "o" in table:
            other = [w for w in _words(draw, shape, allowed) if w != "o"]
            in_k = {a for w in table for a in w if a in _NAMES}
            plain_table = all(w in _NAMES for w in table)  # K's brackets are V's, so V may split the rest as it likes
            if plain_table:
                fused_in_table = [w for w in other if any(a in in_k for a in w if a in _NAMES) and w not in table]
                if not fused_in_table:
                    halves.append(list(draw(st.permutations([w for w in other if w not in table]))))
        elif "o" in inner:
            at = inner.index("o")
            halves.append(inner[: at + 1] + list(draw(st.permutations(inner[at + 1 :]))))
    texts = [" ".join(filter(None, [f"[{' '.join(table)}]" if table else "", *half])) for half in halves]
    if len(texts) == 2 and texts[0] == texts[1]:
        texts = texts[:1]
    shared = len(texts) == 2 and "o" not in table
    pitch: list[tuple[str, int]] = []
    lines = []
    if len(texts) == 1 and draw(st.integers(0, 2)) == 0:
        for word in dict.fromkeys(draw(st.lists(st.sampled_from(inner), min_size=1, max_size=2))):
            plain = shape.placed(oracle.Order(texts[0], pitch=tuple(pitch)))
            index = inner.index(word)
            held = plain.spaces[0].strides[index]
            in_elements = draw(st.booleans())
            step = shape.itemsize if in_elements or draw(st.integers(0, 3)) else 1
            value = held + step * draw(st.integers(0, 9))
            if word in dict(pitch) or "{" in word:  # an opaque group is contiguous
                continue
            candidate = [*pitch, (word, value)]
            try:
                shape.placed(oracle.Order(texts[0], pitch=tuple(candidate)))
            except oracle.IllegalError:
                continue
            pitch = candidate
            text = f"{value // shape.itemsize}" if in_elements and value % shape.itemsize == 0 else f"{value} B"
            lines.append(f'  "{word}": "{text}"')
    assert not (shared and pitch)
    text = f'order: "{texts[0]}"\n' if len(texts) == 1 else f'order:\n  k: "{texts[0]}"\n  v: "{texts[1]}"\n'
    if lines:
        text += "pitch:\n" + "\n".join(lines) + "\n"
    order = oracle.Order(texts[0], texts[1] if len(texts) == 2 else "", tuple(pitch))
    return Declared(text, order)


@st.composite
def one(draw: Any, limit: int = 1500) -> tuple[Sizes, Declared]:
    shape = draw(sizes(limit))
    return shape, draw(layout(shape, opaque=draw(st.integers(0, 9)) == 0))


@st.composite
def pair(draw: Any, limit: int = 1500, opaque: bool = True) -> tuple[Sizes, Declared, Declared]:
    """Two layouts of one shape with a common refinement."""
    shape = draw(sizes(limit))
    allowed = draw(splits(shape))
    kinds = [opaque and draw(st.integers(0, 11)) == 0 for _ in range(2)]
    return shape, draw(layout(shape, allowed, kinds[0])), draw(layout(shape, allowed, kinds[1]))


def refinable(points: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """True if the union of split points is a divisibility chain."""
    union = sorted(set(points) | set(others))
    return all(b % a == 0 for a, b in zip(union, union[1:], strict=False))


def cases(number: int) -> settings:
    """The test's own number of cases in a profile of 300; a third of it in the profile ci, and in proportion in the others."""
    return settings(max_examples=max(number * settings.default.max_examples // 300, 10))  # type: ignore[union-attr]
