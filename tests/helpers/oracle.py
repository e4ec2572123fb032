"""The expected value of every byte: a second, simple implementation of the layout language that shares no code with kvbm.

Nothing here imports kvbm, makes plans or is optimised.  A layout is an order string.  Its meaning is evaluated for all
coordinates at once as NumPy index arrays.  All data are bytes (uint8), so every dtype is covered.  An element's bytes are
a hash of its coordinate, so an element in the wrong place is always detected.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

AXES = ("b", "l", "o", "h", "t", "d")

ITEMSIZE = {
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1, "bool": 1,
    "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float8_e8m0fnu": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
}  # fmt: skip

#: Two elements share a byte.
PAIRED = ("float4_e2m1fn", "int4", "uint4")

GUARD = 96  # bytes of guard before, between and after allocations


class IllegalError(Exception):
    """The layout does not fit the shape, or the pair of layouts is no copy."""


@dataclass(frozen=True)
class Piece:
    """One word of an order: `d`, `d/16B`, `m/32%4`, `(h d)%16`."""

    text: str
    axes: tuple[str, ...]
    ops: tuple[tuple[str, int, bool], ...]  # ("/" or "%", number, is it in bytes)

    def extent(self, sizes: Mapping[str, int], itemsize: int) -> int:
        extent = math.prod(sizes[a] for a in self.axes)
        for op, number, in_bytes in self.ops:
            n = self.elements(number, in_bytes, itemsize)
            if extent % n:
                raise IllegalError(f"{self.text}: {n} does not divide {extent}")
            extent = extent // n if op == "/" else n
        return extent

    def value(self, coords: Mapping[str, np.ndarray], sizes: Mapping[str, int], itemsize: int) -> np.ndarray:
        index: Any = np.int64(0)
        for axis in self.axes:  # row-major: the last of a fused group is the fastest
            index = index * sizes[axis] + coords[axis]
        for op, number, in_bytes in self.ops:
            n = self.elements(number, in_bytes, itemsize)
            index = index // n if op == "/" else index % n
        return index

    @staticmethod
    def elements(number: int, in_bytes: bool, itemsize: int) -> int:
        if not in_bytes:
            return number
        if number % itemsize:
            raise IllegalError(f"{number} B is no whole number of elements of {itemsize} B")
        return number // itemsize


_WORD = re.compile(r"(?:\(\s*(?P<fused>[a-z][a-z ]*)\)|(?P<axis>[a-z][a-z_0-9]*))(?P<ops>(?:[/%]\d+B?)*)")


@lru_cache(4096)
def parse_order(text: str) -> tuple[tuple[Piece, ...], tuple[Piece, ...], tuple[str, ...]]:
    """-> (pieces in brackets, pieces outside, axes of the opaque group)."""
    table: list[Piece] = []
    inner: list[Piece] = []
    opaque: tuple[str, ...] = ()
    rest = text.strip()
    inside_brackets = False
    while rest:
        if rest[0] in "[]":
            inside_brackets = rest[0] == "["
            rest = rest[1:].lstrip()
            continue
        if rest[0] == "{":  # one run of elements; read as row-major in the order given
            group, rest = rest[1:].split("}", 1)
            opaque = tuple(group.split())
            inner.append(Piece("{" + group + "}", opaque, ()))
            rest = rest.lstrip()
            continue
        m = _WORD.match(rest)
        if m is None:
            raise IllegalError(f"cannot read {rest!r}")
        axes = tuple((m["fused"] or m["axis"]).split())
        ops = tuple(
            (op[0], int(op[1:].rstrip("B")), op.endswith("B")) for op in re.findall(r"[/%]\d+B?", m["ops"] or "")
        )
        piece = Piece(m[0].strip(), axes, ops)
        (table if inside_brackets else inner).append(piece)
        rest = rest[m.end() :].lstrip()
    return tuple(table), tuple(inner), opaque


@dataclass(frozen=True)
class Order:
    """A layout from its text: one order, or one for K and one for V; pitches are evaluated numbers of bytes."""

    k: str
    v: str = ""
    pitch: tuple[tuple[str, int], ...] = ()
    name: str = ""

    @property
    def opaque(self) -> frozenset[str]:
        return frozenset(parse_order(self.k)[2])

    @property
    def bracketed(self) -> tuple[str, ...]:
        return tuple(a for p in parse_order(self.k)[0] for a in p.axes)


def read_yaml(path: Path, name: str) -> Order:
    """A shipped layout without a pitch."""
    data = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    order = data["order"]
    if isinstance(order, dict):
        return Order(order["k"], order["v"], name=name)
    return Order(order, name=name)


@dataclass(frozen=True)
class Space:
    """One allocation."""

    coords: dict[str, int]  # which allocation it is: the values of the words in brackets
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    nbytes: int


@dataclass
class Placed:
    """A layout with sizes: the place of every element."""

    order: Order
    sizes: dict[str, int]
    itemsize: int
    num_blocks: int
    spaces: list[Space] = field(default_factory=list)

    def __post_init__(self) -> None:
        table, _, _ = parse_order(self.order.k)
        names = [p.text for p in table]
        full = self._full()
        extents = [p.extent(full, self.itemsize) for p in table]
        inner = cache(self._inner)
        for flat in range(math.prod(extents)):
            coords = dict(zip(names, (int(c) for c in np.unravel_index(flat, extents or (1,))), strict=False))
            _, shape, strides, nbytes = inner(coords.get("o", 0))
            if self.order.v and self.sizes["o"] == 2 and "o" not in names:  # two orders in one array: it has no axes
                shape, strides = [nbytes // self.itemsize], [self.itemsize]
            self.spaces.append(Space(coords, tuple(shape), tuple(strides), nbytes))

    def _full(self) -> dict[str, int]:
        return {**self.sizes, "b": self.num_blocks}

    def _inner(self, o: int) -> tuple[tuple[Piece, ...], list[int], list[int], int]:
        text = self.order.v if (o == 1 and self.order.v) else self.order.k
        _, inner, _ = parse_order(text)
        full, pitch = self._full(), dict(self.order.pitch)
        shape = [p.extent(full, self.itemsize) for p in inner]
        strides = [0] * len(inner)
        run = self.itemsize
        for i in reversed(range(len(inner))):
            strides[i] = pitch.get(inner[i].text, run)
            if strides[i] < run:
                raise IllegalError(f"pitch of {inner[i].text} is {strides[i]}, it holds {run}")
            run = strides[i] * shape[i]
        return inner, shape, strides, run

    def grid(self, ids: np.ndarray) -> dict[str, np.ndarray]:
        """Open coordinate arrays, broadcastable to (len(ids), nl, no, nh, nt, hd)."""
        axes = [np.asarray(ids, dtype=np.int64)] + [np.arange(self.sizes[a], dtype=np.int64) for a in AXES[1:]]
        return dict(zip(AXES, np.ix_(*axes), strict=True))

    def address(self, ids: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(allocation, byte offset), both shaped (len(ids), nl, no, nh, nt, hd)."""
        coords = self.grid(np.asarray(ids))
        full = self._full()
        halves = []
        for o in (0, 1):
            table, _, _ = parse_order(self.order.v if (o == 1 and self.order.v) else self.order.k)
            entry: Any = np.int64(0)
            for piece in table:
                entry = entry * piece.extent(full, self.itemsize) + piece.value(coords, full, self.itemsize)
            pieces, _, strides, _ = self._inner(o)
            offset: Any = np.int64(0)
            for piece, stride in zip(pieces, strides, strict=True):
                offset = offset + piece.value(coords, full, self.itemsize) * stride
            halves.append((entry, offset))
        shape = np.broadcast_shapes(*(c.shape for c in coords.values()))
        is_v = np.broadcast_to(coords["o"] == 1, shape)
        return tuple(
            np.where(is_v, np.broadcast_to(v, shape), np.broadcast_to(k, shape))
            for k, v in zip(*halves, strict=True)  # type: ignore[return-value]
        )

    def id_step(self) -> set[tuple[int, int]]:
        """(table entries, bytes) that a block id steps: one pair, unless K and V disagree."""
        steps = set()
        for o in range(2 if self.order.v and self.sizes["o"] == 2 else 1):
            table, _, _ = parse_order(self.order.k)
            inner, _, strides, _ = self._inner(o)
            entries = 1
            for piece in reversed(table):
                if piece.text == "b":
                    steps.add((entries, 0))
                entries *= piece.extent(self._full(), self.itemsize)
            steps |= {(0, stride) for piece, stride in zip(inner, strides, strict=True) if piece.text == "b"}
        return steps

    def check(self) -> None:
        """Require: one-to-one, inside the allocations, all axes present; else raise IllegalError."""
        for text in filter(None, (self.order.k, self.order.v)):
            table, inner, _ = parse_order(text)
            seen = {a for p in table + inner for a in p.axes}
            missing = [a for a, n in self._full().items() if a not in seen and (n > 1 or a == "b")]
            if missing:
                raise IllegalError(f"axes {missing} are missing")
        entry, offset = self.address(np.arange(self.num_blocks))
        limit = np.array([s.nbytes for s in self.spaces])
        if (offset + self.itemsize > limit[entry]).any() or (offset < 0).any():
            raise IllegalError("outside its allocation")
        key = (entry * (int(limit.max()) + 1) + offset).ravel()
        if not are_distinct(key):
            raise IllegalError("not one-to-one")

    def layout_bytes(self, align: int = 0, how: str = "steps") -> Arena:
        return Arena(self, align, how)


def are_distinct(values: np.ndarray) -> bool:
    """True if no value comes twice.  numpy.unique would make a hash table, which takes twenty times as long."""
    ordered = np.sort(values, axis=None)
    return not (ordered[1:] == ordered[:-1]).any()


class Arena:
    """Places of the allocations in one byte buffer: guard, allocation, guard, … ; every base is `align` modulo 64.

    `how`: at a constant stride ("steps"), at strides that vary equally in every block, if b is the slowest axis in brackets
    ("rows"), or at random places ("scattered").
    """

    def __init__(self, placed: Placed, align: int, how: str = "steps") -> None:
        self.placed = placed
        count = len(placed.spaces)
        order = np.random.default_rng(count).permutation(count) if how == "scattered" else np.arange(count)
        in_a_block = max(count // placed.num_blocks, 1)
        self.bases: list[int] = [0] * count
        at = 0
        for number, entry in enumerate(order.tolist()):
            gap = {"steps": 0, "rows": entry % in_a_block % 3, "scattered": number * number % 5}[how]
            at = (at + GUARD + 63) // 64 * 64 + 64 * gap + align
            self.bases[entry] = at
            at += placed.spaces[entry].nbytes
        self.nbytes = at + GUARD
        self._positions: dict[bytes, np.ndarray] = {}

    def positions(self, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Byte position in the buffer of every element, (len(ids), nl, no, nh, nt, hd); read-only, as every salt asks for it."""
        wanted = np.asarray(ids, dtype=np.int64).tobytes()
        if wanted not in self._positions:
            entry, offset = self.placed.address(ids)
            found = np.asarray(self.bases, dtype=np.int64)[entry] + offset
            found.flags.writeable = False
            self._positions[wanted] = found
        return self._positions[wanted]


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser."""
    x = x.astype(np.uint64, copy=True)
    with np.errstate(over="ignore"):
        x += np.uint64(0x9E3779B97F4A7C15)
        x ^= x >> np.uint64(30)
        x *= np.uint64(0xBF58476D1CE4E5B9)
        x ^= x >> np.uint64(27)
        x *= np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return x


def coded(placed: Placed, ids: Sequence[int] | np.ndarray, salt: int) -> np.ndarray:
    """uint8 (len(ids), nl, no, nh, nt, hd, itemsize): each element encodes its coordinate."""
    coords = placed.grid(np.asarray(ids))
    key: Any = np.uint64(salt + 1)
    for axis in AXES:
        key = mix(np.asarray(key ^ (coords[axis].astype(np.uint64) + np.uint64(ord(axis) << 40))))
    shape = np.broadcast_shapes(*(c.shape for c in coords.values()))
    words = np.ascontiguousarray(np.broadcast_to(key, shape))
    return words.view(np.uint8).reshape(*shape, 8)[..., : placed.itemsize]


def noise(nbytes: int, seed: int) -> np.ndarray:
    """Bytes for guards, padding and blocks that no copy may touch."""
    return np.frombuffer(bytearray(np.random.Generator(np.random.SFC64(seed)).bytes(nbytes)), np.uint8)


def salts(itemsize: int) -> tuple[int, ...]:
    """Seeds of the codes.  One byte has 256 values, so two elements may agree by chance, but hardly for both salts."""
    return (0, 1) if itemsize == 1 else (0,)


def scatter(buffer: np.ndarray, positions: np.ndarray, data: np.ndarray) -> None:
    """buffer[position + k] = data[..., k]."""
    for k in range(data.shape[-1]):
        buffer[positions + k] = data[..., k]


def gather(buffer: np.ndarray, positions: np.ndarray, itemsize: int) -> np.ndarray:
    return np.stack([buffer[positions + k] for k in range(itemsize)], axis=-1)


def source_bytes(arena: Arena, salt: int) -> np.ndarray:
    """A whole source buffer: noise, with every block's elements coded."""
    buffer = noise(arena.nbytes, seed=1000 + salt)
    ids = np.arange(arena.placed.num_blocks)
    scatter(buffer, arena.positions(ids), coded(arena.placed, ids, salt))
    return buffer


def dest_bytes(arena: Arena, salt: int) -> np.ndarray:
    """A whole destination buffer before the copy."""
    return noise(arena.nbytes, seed=2000 + salt)


_INNER = ("h", "t", "d")


def copyable(src: Placed, dst: Placed) -> bool:
    """False for an opaque inner group against a required order."""
    opaque = src.order.opaque or dst.order.opaque
    if not opaque:
        return True
    if src.order.opaque and dst.order.opaque:
        return src.order.opaque == dst.order.opaque
    plain = dst if src.order.opaque else src
    # The opaque group is one run of bytes; the other side must hold those elements as one run, too.
    if opaque != set(_INNER):
        raise NotImplementedError("the oracle knows opaque groups of exactly h, t and d")
    _, offset = plain.address([0])
    runs = np.sort(offset.reshape(-1, math.prod(plain.sizes[a] for a in _INNER)), axis=1)
    return bool((np.diff(runs, axis=1) == plain.itemsize).all())


def expected_bytes(
    src: Arena, dst: Arena, src_buffer: np.ndarray, dst_buffer: np.ndarray, src_ids: Any, dst_ids: Any
) -> np.ndarray:
    """The destination after the copy, untouched bytes included."""
    if not copyable(src.placed, dst.placed):
        raise IllegalError("opaque against an order that is needed")
    result = dst_buffer.copy()
    if len(src_ids) == 0:
        return result
    read, write = src.positions(src_ids), dst.positions(dst_ids)
    if src.placed.order.opaque or dst.placed.order.opaque:  # a run stays a run: element k in memory stays element k
        n = math.prod(src.placed.sizes[a] for a in _INNER)
        read, write = np.sort(read.reshape(-1, n), axis=1), np.sort(write.reshape(-1, n), axis=1)
    scatter(result, write, gather(src_buffer, read, src.placed.itemsize))
    return result


def explain(dst: Arena, got: np.ndarray, want: np.ndarray, limit: int = 4) -> str:
    """The coordinates that differ, for a failing test's message."""
    wrong = np.flatnonzero(got != want)
    if wrong.size == 0:
        return "equal"
    ids = np.arange(dst.placed.num_blocks)
    position = dst.positions(ids)
    owner = np.full(dst.nbytes, -1, dtype=np.int64)
    for k in range(dst.placed.itemsize):
        owner[position.ravel() + k] = np.arange(position.size)
    lines = [f"{wrong.size} of {got.size} bytes differ; first:"]
    for at in wrong[:limit]:
        where = "guard or padding"
        if owner[at] >= 0:
            where = ", ".join(
                f"{a}={int(c)}" for a, c in zip(AXES, np.unravel_index(owner[at], position.shape), strict=True)
            )
        lines.append(f"  byte {at}: got {got[at]:02x}, want {want[at]:02x} ({where})")
    return "\n".join(lines)
