"""Element addresses of planar layouts, written as the engines write them: byte offsets, one formula per plane.

It shares no code with kvbm: no order is parsed and nothing is planned.  A layout is what `TABLE` says for each coordinate.
Data encode their coordinates, all other bytes are noise, and every byte is compared: guards, padding, other blocks.
"""

# ruff: noqa: E741  (l is the layer)
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

import oracle

#: Bytes an item, and elements an item, of the dtypes that planes have.
ITEMS = {name: (size, 1) for name, size in oracle.ITEMSIZE.items()} | dict.fromkeys(oracle.PAIRED, (1, 2))

Sizes = Any  # nb, nl, no, nh, nt, hd, es (bytes an element of the shape's dtype)
Index = Any  # a coordinate, or an array of them


@dataclass(frozen=True)
class Tensor:
    """One dense array of an engine, with its usual shape in items."""

    shape: tuple[int, ...]
    dtype: str = "uint8"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEMS[self.dtype][0]


@dataclass(frozen=True)
class Elements:
    """A plane: the axes of its elements, and the place of each as (tensor, byte); `axis` is the packed axis."""

    name: str
    dtype: str
    extents: Mapping[str, int]
    where: Callable[[Mapping[str, Index]], tuple[Index, Index]]
    axis: str = ""

    @property
    def itemsize(self) -> int:
        return ITEMS[self.dtype][0]

    def items(self) -> dict[str, np.ndarray]:
        """Coordinates of the first element of every item, by axis."""
        step = ITEMS[self.dtype][1]
        return {a: np.arange(0, n, step if a == self.axis else 1) for a, n in self.extents.items()}

    def grid(self, ids: Any, layers: range | None = None) -> dict[str, np.ndarray]:
        """Open grid over blocks and items: b first, then the plane's axes."""
        axes = {"b": np.asarray(ids, dtype=np.int64), **self.items()}
        if layers is not None:
            axes["l"] = np.arange(layers.start, layers.stop)
        return dict(zip(axes, np.ix_(*axes.values()), strict=True))

    def address(self, ids: Any, layers: range | None = None) -> tuple[np.ndarray, np.ndarray]:
        coords = self.grid(ids, layers)
        shape = np.broadcast_shapes(*(c.shape for c in coords.values()))
        entry, offset = self.where(coords)
        return np.broadcast_to(entry, shape), np.broadcast_to(offset, shape)


@dataclass(frozen=True)
class Held:
    """A planar layout with sizes: its tensors and its planes."""

    tensors: tuple[Tensor, ...]
    planes: tuple[Elements, ...]
    num_blocks: int

    @property
    def spaces(self) -> tuple[Tensor, ...]:  # what oracle.Arena calls them
        return self.tensors

    @property
    def block_bytes(self) -> int:
        return sum(math.prod(len(c) for c in p.items().values()) * p.itemsize for p in self.planes)

    def check(self) -> None:
        """In the tensors, and one-to-one over all planes."""
        limit = np.array([tensor.nbytes for tensor in self.tensors])
        start = np.concatenate([[0], np.cumsum(limit)])
        taken = []
        for plane in self.planes:
            entry, offset = plane.address(range(self.num_blocks))
            assert (offset >= 0).all() and (offset + plane.itemsize <= limit[entry]).all(), plane.name
            taken += [(start[entry] + offset + k).ravel() for k in range(plane.itemsize)]
        bytes_ = np.concatenate(taken)
        assert oracle.are_distinct(bytes_) and bytes_.size == self.block_bytes * self.num_blocks

    def arena(self, align: int = 0, how: str = "steps") -> Arena:
        return Arena(self, align, how)


class Arena(oracle.Arena):
    """The tensors in one guarded buffer."""

    placed: Held  # type: ignore[assignment]

    def of(self, plane: Elements, ids: Any, layers: range | None = None) -> np.ndarray:
        """Byte position of every item of a plane."""
        entry, offset = plane.address(ids, layers)
        return np.asarray(self.bases, dtype=np.int64)[entry] + offset

    def source(self, salt: int = 0) -> np.ndarray:
        """Noise, and in every item its coordinate."""
        buffer = oracle.noise(self.nbytes, 1000 + salt)
        ids = np.arange(self.placed.num_blocks)
        for plane in self.placed.planes:
            oracle.scatter(buffer, self.of(plane, ids), coded(plane, ids, salt))
        return buffer

    def dest(self, salt: int = 0) -> np.ndarray:
        return oracle.noise(self.nbytes, 2000 + salt)


def coded(plane: Elements, ids: Any, salt: int) -> np.ndarray:
    """uint8, an item's bytes last: a hash of plane and coordinate."""
    key: Any = np.uint64(salt + 1 + sum(map(ord, plane.name)))
    coords = plane.grid(ids)
    for axis, values in coords.items():
        key = oracle.mix(np.asarray(key ^ (values.astype(np.uint64) + np.uint64(ord(axis) << 40))))
    shape = np.broadcast_shapes(*(c.shape for c in coords.values()))
    words = np.ascontiguousarray(np.broadcast_to(key, shape))
    return words.view(np.uint8).reshape(*shape, 8)[..., : plane.itemsize]


def expected(
    src: Arena,
    dst: Arena,
    source: np.ndarray,
    before: np.ndarray,
    src_ids: Sequence[int],
    dst_ids: Sequence[int],
    layers: tuple[range | None, range | None] = (None, None),
) -> np.ndarray:
    """The destination after the copy; pairs with a -1 are skipped."""
    result = before.copy()
    pairs = [(s, d) for s, d in zip(src_ids, dst_ids, strict=True) if s != -1 and d != -1]
    if not pairs:
        return result
    there = {plane.name: plane for plane in dst.placed.planes}
    assert set(there) == {plane.name for plane in src.placed.planes}
    for plane in src.placed.planes:
        other = there[plane.name]
        # Both sides in one order of axes: a layout may name an axis of one, or none.
        reads, writes = (
            side.of(mine, [pair[k] for pair in pairs], layers[k])
            for k, (side, mine) in enumerate(((src, plane), (dst, other)))
        )
        named = ["b", *other.extents]
        reads = reads.transpose([["b", *plane.extents].index(axis) for axis in named])
        assert reads.shape == writes.shape and plane.dtype == other.dtype
        oracle.scatter(result, writes, oracle.gather(source, reads, plane.itemsize))
    return result


def explain(dst: Arena, got: np.ndarray, want: np.ndarray, limit: int = 4) -> str:
    """The elements that differ, for a failing test's message."""
    wrong = np.flatnonzero(got != want)
    lines = [f"{wrong.size} of {got.size} bytes differ; first:"] if wrong.size else ["equal"]
    for at in wrong[:limit].tolist():
        where = "guard or padding"
        for plane in dst.placed.planes:
            position = dst.of(plane, range(dst.placed.num_blocks))
            found = np.argwhere((position <= at) & (at < position + plane.itemsize))
            if found.size:
                where = f"{plane.name} " + ", ".join(
                    f"{a}={c}" for a, c in zip(["b", *plane.extents], found[0].tolist(), strict=True)
                )
        lines.append(f"  byte {at}: got {got[at]:02x}, want {want[at]:02x} ({where})")
    return "\n".join(lines)


# ---- any planar layout, from its structure ---------------------------------------------------------------------------


@dataclass(frozen=True)
class DrawnPlane:
    """A plane of a random layout: its element axis and size (None: one element), its orders (one, or K's and V's)."""

    name: str
    dtype: str
    axis: str
    elements: int
    shared: tuple[str, ...]
    orders: tuple[tuple[str, ...], ...]
    offset: int | None = None
    pitch: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Drawn:
    """A random planar layout: words in brackets and behind them, the term of its planes among either."""

    table: tuple[str, ...]
    inner: tuple[str, ...]
    planes: tuple[DrawnPlane, ...]
    pitch: tuple[tuple[str, int], ...] = ()

    @property
    def apart(self) -> bool:
        return any(word.startswith("<") for word in self.table)

    @property
    def yaml(self) -> str:
        brackets = ["[" + " ".join(self.table) + "]"] if self.table else []
        lines = [f'order: "{" ".join([*brackets, *self.inner])}"']
        lines += [f"pitch: {{{', '.join(f'{word}: {n} B' for word, n in self.pitch)}}}"] if self.pitch else []
        extra = {p.axis: p.elements for p in self.planes if p.axis and p.axis != "d"}
        lines += [f"axes: {{{', '.join(f'{a}: {n}' for a, n in extra.items())}}}"] if extra else []
        lines.append("planes:")
        for plane in self.planes:
            texts = [" ".join(order) for order in plane.orders]
            order = f'"{texts[0]}"' if len(texts) == 1 else f'{{k: "{texts[0]}", v: "{texts[1]}"}}'
            lines.append(f"  {plane.name}:")
            lines += [f"    order: {order}"] if any(texts) else []
            lines.append(f"    dtype: {plane.dtype}")
            lines += [f"    offset: {plane.offset}"] if plane.offset is not None else []
            lines += [f"    shared: {' '.join(plane.shared)}"] if plane.shared else []
            lines += [f"    pitch: {{{', '.join(f'{word}: {n} B' for word, n in plane.pitch)}}}"] if plane.pitch else []
        return "\n".join(lines) + "\n"

    def __repr__(self) -> str:
        return f"\n{self.yaml}"

    def held(self, sizes: Mapping[str, int], num_blocks: int) -> Held:
        """Read plainly; raises IllegalError where the layout is none at these sizes."""
        full = {"b": num_blocks, **sizes, **{p.axis: p.elements for p in self.planes if p.axis}}
        in_table, outside = (
            oracle.parse_order(" ".join(word for word in words if word[0] != "<"))[1]
            for words in (self.table, self.inner)
        )
        entries, table = 1, []
        count = len(self.planes) if self.apart else 1
        step_of_plane = 0
        for word in reversed(self.table):
            if word.startswith("<"):
                step_of_plane, entries = entries, entries * count
            else:
                piece = next(p for p in in_table if p.text == word)
                table.append((piece, entries))
                entries *= piece.extent(full, 1)
        own = [self._own(plane, full) for plane in self.planes]
        starts, records = [], []
        end = 0
        for plane, (_, size, reach) in zip(self.planes, own, strict=True):
            start = (plane.offset if plane.offset is not None else end) if not self.apart else 0
            end = max(end, start + (size if plane.offset is None else reach))
            starts.append(start)
            records.append(size)
        if not self.apart:
            used: set[int] = set()
            for plane, start, (halves, _, _) in zip(self.planes, starts, own, strict=True):
                mine = {start + at for half in halves for at in occupied(half, ITEMS[plane.dtype][0])}
                if used & mine:
                    raise oracle.IllegalError(f"{plane.name} overlaps")
                used |= mine
            records = [end] * len(self.planes)
        elements, spaces = [], [0] * entries
        for index, (plane, (halves, _, _)) in enumerate(zip(self.planes, own, strict=True)):
            stride, around = records[index], []
            for piece in reversed(outside):
                pitch = dict(self.pitch).get(piece.text, stride)
                if pitch < stride:
                    raise oracle.IllegalError(f"pitch of {piece.text}")
                around.append((piece, pitch, 1))
                stride = pitch * piece.extent(full, 1)
            entry0 = index * step_of_plane
            for step in np.ndindex(*(p.extent(full, 1) for p, _ in table)):
                spaces[entry0 + sum(s * e for s, (_, e) in zip(step, table, strict=True))] = stride
            elements.append(_element(plane, halves, table, around, full, entry0, starts[index]))
        return Held(tuple(Tensor((n,)) for n in spaces), tuple(elements), num_blocks)

    def _own(self, plane: DrawnPlane, full: Mapping[str, int]) -> tuple[list[Any], int, int]:
        """Steps of K's and V's order, (piece, bytes, elements per item); bytes held with padding, and up to the last byte."""
        itemsize, pack = ITEMS[plane.dtype]
        halves, sizes, reaches = [], set(), set()
        for order in plane.orders[: full["o"]]:
            _, words, _ = oracle.parse_order(" ".join(order))
            stride, packed, steps, reach = itemsize, pack, [], itemsize
            for piece in reversed(words):
                extent = piece.extent(full, itemsize)
                by = 1
                if packed > 1 and extent > 1:
                    if extent % packed or (piece.ops and piece.ops[-1][0] == "/"):
                        raise oracle.IllegalError("does not pack")
                    by, extent, packed = packed, extent // packed, 1
                pitch = dict(plane.pitch).get(piece.text, stride)
                if pitch < stride:
                    raise oracle.IllegalError(f"pitch of {piece.text}")
                steps.append((piece, pitch, by))
                reach += (extent - 1) * pitch
                stride = pitch * extent
            if packed > 1:
                raise oracle.IllegalError("nothing to pack along")
            halves.append([(piece, pitch, by, piece.extent(full, itemsize) // by) for piece, pitch, by in steps])
            sizes.add(stride)
            reaches.add(reach)
        if len(sizes) > 1:
            raise oracle.IllegalError("K and V hold different sizes")
        return halves, sizes.pop(), max(reaches)


def occupied(half: Sequence[tuple[Any, int, int, int]], itemsize: int) -> set[int]:
    """Bytes of a plane, relative to its start, one by one."""
    found = set(range(itemsize))
    for _, pitch, _, extent in half:
        found = {at + k * pitch for at in found for k in range(extent)}
    return found


def _element(
    plane: DrawnPlane, halves: list[Any], table: Any, around: Any, full: Mapping[str, int], entry0: int, start: int
) -> Elements:
    axes = [a for a in ("l", "o", "h", "t") if a not in plane.shared] + ([plane.axis] if plane.axis else [])
    packed = {piece.axes[-1] for half in halves for piece, _, by, _ in half if by > 1}
    if len(packed) > 1:
        raise oracle.IllegalError("K and V pack along different axes")  # legal, and beyond what this file says

    def where(coords: Mapping[str, Index]) -> tuple[Index, Index]:
        entry: Any = np.int64(entry0)
        for piece, step in table:
            entry = entry + piece.value(coords, full, 1) * step
        sides = []
        for half in halves:
            offset: Any = np.int64(start)
            for piece, pitch, by, *_ in (*half, *around):
                offset = offset + piece.value(coords, full, ITEMS[plane.dtype][0]) // by * pitch
            sides.append(offset)
        return entry, sides[0] if len(sides) == 1 else np.where(coords["o"] == 1, sides[1], sides[0])

    return Elements(plane.name, plane.dtype, {a: full[a] for a in axes}, where, *packed)


# ---- the catalogue, as the engines say it ----------------------------------------------------------------------------


def up(n: int, to: int) -> int:
    """The next multiple of `to`."""
    return (n + to - 1) // to * to


@dataclass(frozen=True)
class Family:
    """Layouts with the same planes: (dtype, extents by axis, the last one packed) of each plane, and the shapes for tests.

    A shape is nl, no, nh, nt, hd, dtype.  A plane whose dtype is None has the shape's dtype.
    """

    planes: Mapping[str, tuple[str | None, Callable[[Sizes], dict[str, int]]]]
    shapes: tuple[tuple[int, int, int, int, int, str], ...]


@dataclass(frozen=True)
class Formula:
    """A layout: its tensors, and (tensor, byte) of each plane's elements."""

    family: str
    tensors: Callable[[Sizes], list[Tensor]]
    where: Mapping[str, Callable[..., tuple[Index, Index]]]


def _mla(dtype: str | None, axis: str, n: int) -> tuple[str | None, Callable[[Sizes], dict[str, int]]]:
    return dtype, lambda z: {"l": z.nl, "t": z.nt, axis: n}


def _gqa(dtype: str | None, axis: str = "", per: int = 1) -> tuple[str | None, Callable[[Sizes], dict[str, int]]]:
    """Axis of hd / per elements, if there is one."""
    own = (lambda z: {axis: z.hd // per}) if axis else (lambda _: {})
    return dtype, lambda z: {"l": z.nl, "o": z.no, "h": z.nh, "t": z.nt, **own(z)}


def _wide(axis: str, share: Callable[[int], int]) -> tuple[str | None, Callable[[Sizes], dict[str, int]]]:
    return None, lambda z: {"l": z.nl, "h": z.nh, "t": z.nt, axis: share(z.hd)}


E4M3, E8M0, FP4 = "float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn"

# fmt: off
FAMILIES = {
    "fp8": Family(
        {"latent": _mla(E4M3, "c", 512), "scale": _mla("float32", "s", 4), "rope": _mla("bfloat16", "r", 64)},
        tuple((nl, 1, 1, nt, 576, dtype) for nl, nt, dtype in
              ((2, 4, "bfloat16"), (1, 16, "float8_e4m3fn"), (3, 1, "uint8"), (2, 3, "float32"), (1, 64, "bfloat16")))),
    "v4": Family(
        {"latent": _mla(E4M3, "c", 448), "scale": _mla(E8M0, "s", 8), "rope": _mla("bfloat16", "r", 64)},
        tuple((nl, 1, 1, nt, 512, "bfloat16") for nl, nt in ((2, 4), (1, 16), (3, 1), (2, 3), (1, 64), (1, 72)))),
    "v41": Family(
        {"latent": _mla(E4M3, "d", 512), "scale": _mla(E8M0, "s", 16)},
        tuple((nl, 1, 1, nt, 512, "bfloat16") for nl, nt in ((2, 4), (1, 16), (3, 1), (2, 3), (1, 64)))),
    "nvfp4_mla": Family(
        {"latent": _mla(FP4, "c", 512), "rope": _mla(E4M3, "r", 64), "scale": _mla(E4M3, "s", 32)},
        tuple((nl, 1, 1, nt, 576, "bfloat16") for nl, nt in ((2, 4), (1, 16), (3, 1), (2, 3), (1, 64)))),
    "dsa": Family(
        {"key": _mla(E4M3, "d", 128), "scale": (  # one a token
            "float32", lambda z: {"l": z.nl, "t": z.nt})},
        tuple((nl, 1, 1, nt, 128, "bfloat16") for nl, nt in ((2, 4), (1, 16), (3, 1), (2, 3), (1, 64)))),
    "dsa_mxfp4": Family(
        {"key": _mla(FP4, "d", 128), "scale": _mla(E8M0, "s", 4)},
        tuple((nl, 1, 1, nt, 128, "bfloat16") for nl, nt in ((2, 4), (1, 16), (3, 1), (2, 3), (1, 64)))),
    "nvfp4": Family(
        {"data": _gqa(FP4, "d"), "scale": _gqa(E4M3, "s", 16)},
        tuple((nl, 2, nh, nt, hd, "bfloat16") for nl, nh, nt, hd in
              ((2, 2, 8, 64), (1, 3, 16, 128), (3, 1, 4, 64), (2, 2, 12, 192), (1, 5, 32, 256)))),
    "pth_fp8": Family(
        {"data": _gqa(E4M3, "d"), "scale": _gqa("float32")},
        tuple((nl, no, nh, nt, hd, "bfloat16") for nl, no, nh, nt, hd in
              ((2, 2, 2, 8, 64), (1, 2, 3, 5, 20), (3, 1, 2, 4, 7), (1, 2, 8, 16, 128), (2, 2, 1, 1, 1)))),
    "pth_int8": Family(
        {"data": _gqa("int8", "d"), "scale": _gqa("float32")},
        tuple((nl, no, nh, nt, hd, "float16") for nl, no, nh, nt, hd in
              ((2, 2, 2, 8, 64), (1, 2, 3, 5, 20), (3, 1, 2, 4, 7), (2, 2, 1, 1, 1)))),
    "mxfp8": Family(
        {"data": _gqa(E4M3, "d"), "scale": _gqa(E8M0, "s", 32)},
        tuple((nl, no, nh, 128, 128, "bfloat16") for nl, no, nh in ((1, 2, 2), (2, 2, 1), (1, 1, 3)))),
    "diff": Family(
        {"k": _wide("d", lambda hd: hd), "v": _wide("e", lambda hd: hd * 2 // 3)},
        tuple((nl, 1, nh, nt, hd, dtype) for nl, nh, nt, hd, dtype in
              ((2, 2, 4, 192, "bfloat16"), (1, 3, 5, 24, "float32"), (3, 1, 2, 9, "uint8"), (2, 2, 1, 48, "float16")))),
    "mla": Family(
        {"latent": _mla(None, "c", 512), "rope": _mla(None, "r", 64)},
        tuple((nl, 1, 1, nt, 576, dtype) for nl, nt, dtype in
              ((2, 4, "bfloat16"), (1, 16, E4M3), (3, 1, "float32"), (2, 3, "float16"), (1, 64, "bfloat16")))),
}


def _v_scale(z: Sizes, t: Index, s: Index) -> Index:
    """NVFP4 on SM100: the scales of V interleaved by four tokens, from the catalogue's table to the letter."""
    S = z.hd // 16  # noqa: N806
    return ((t // 4) * 4 + s // (S // 4)) * S + (s % (S // 4)) * 4 + t % 4


def _nvfp4(z: Sizes) -> SimpleNamespace:
    D, S = z.hd // 2, z.hd // 16  # noqa: N806
    return SimpleNamespace(D=D, S=S, half=z.nh * z.nt * (D + S), data=z.nh * z.nt * D)


def _universal_head(z: Sizes, h: Index, l: Index, o: Index, token: int) -> Index:
    """Where K or V of a head and layer starts: heads outermost, `token` bytes of data and scales each."""
    return ((h * z.nl + l) * z.no + o) * z.nt * token


#: Records of the catalogue's table; P is a page.
TABLE: dict[str, Formula] = {
    # 656 bytes: 512 latent, 4 scales, 64 rope values of two bytes
    "vllm/fp8_ds_mla": Formula("fp8", lambda z: [Tensor((z.nb, z.nt, 656))] * z.nl, {
        "latent": lambda z, b, l, t, c: (l, b * z.nt * 656 + t * 656 + c),
        "scale": lambda z, b, l, t, s: (l, b * z.nt * 656 + t * 656 + 512 + 4 * s),
        "rope": lambda z, b, l, t, r: (l, b * z.nt * 656 + t * 656 + 528 + 2 * r)}),
    "record/mla_fp8_pages": Formula("fp8", lambda z: [Tensor((z.nb, z.nt * 656))] * z.nl, {
        "latent": lambda z, b, l, t, c: (l, b * z.nt * 656 + t * 512 + c),
        "scale": lambda z, b, l, t, s: (l, b * z.nt * 656 + z.nt * 512 + t * 16 + 4 * s),
        "rope": lambda z, b, l, t, r: (l, b * z.nt * 656 + z.nt * 528 + t * 128 + 2 * r)}),
    "record/mla_fp8_planes": Formula("fp8", lambda z: [Tensor((z.nl, z.nt * 656))] * z.nb, {
        "latent": lambda z, b, l, t, c: (b, l * z.nt * 656 + t * 512 + c),
        "scale": lambda z, b, l, t, s: (b, l * z.nt * 656 + z.nt * 512 + t * 16 + 4 * s),
        "rope": lambda z, b, l, t, r: (b, l * z.nt * 656 + z.nt * 528 + t * 128 + 2 * r)}),
    "record/mla_fp8_tensors": Formula("fp8", lambda z: [Tensor((z.nb, z.nt, 512), E4M3)] * z.nl
                                      + [Tensor((z.nb, z.nt, 4), "float32")] * z.nl
                                      + [Tensor((z.nb, z.nt, 64), "bfloat16")] * z.nl, {
        "latent": lambda z, b, l, t, c: (l, (b * z.nt + t) * 512 + c),
        "scale": lambda z, b, l, t, s: (z.nl + l, ((b * z.nt + t) * 4 + s) * 4),
        "rope": lambda z, b, l, t, r: (2 * z.nl + l, ((b * z.nt + t) * 64 + r) * 2)}),
    # 584 bytes: 448 latent, 64 rope values of two bytes, and 8 scales behind all tokens
    "vllm/deepseek_v4": Formula("v4", lambda z: [Tensor((z.nb, up(z.nt * 584, 576)))] * z.nl, {
        "latent": lambda z, b, l, t, c: (l, b * up(z.nt * 584, 576) + t * 576 + c),
        "rope": lambda z, b, l, t, r: (l, b * up(z.nt * 584, 576) + t * 576 + 448 + 2 * r),
        "scale": lambda z, b, l, t, s: (l, b * up(z.nt * 584, 576) + z.nt * 576 + t * 8 + s)}),
    "record/deepseek_v4_tokens": Formula("v4", lambda z: [Tensor((z.nb, z.nt, 584))] * z.nl, {
        "latent": lambda z, b, l, t, c: (l, (b * z.nt + t) * 584 + c),
        "rope": lambda z, b, l, t, r: (l, (b * z.nt + t) * 584 + 448 + 2 * r),
        "scale": lambda z, b, l, t, s: (l, (b * z.nt + t) * 584 + 576 + s)}),
    "record/deepseek_v4_planes": Formula("v4", lambda z: [Tensor((z.nl, z.nt * 584))] * z.nb, {
        "latent": lambda z, b, l, t, c: (b, l * z.nt * 584 + t * 448 + c),
        "rope": lambda z, b, l, t, r: (b, l * z.nt * 584 + z.nt * 448 + t * 128 + 2 * r),
        "scale": lambda z, b, l, t, s: (b, l * z.nt * 584 + z.nt * 576 + t * 8 + s)}),
    # 528 bytes
    "vllm/mla_v41": Formula("v41", lambda z: [Tensor((z.nb, up(z.nt * 528, 512)))] * z.nl, {
        "latent": lambda z, b, l, t, d: (l, b * up(z.nt * 528, 512) + t * 512 + d),
        "scale": lambda z, b, l, t, s: (l, b * up(z.nt * 528, 512) + z.nt * 512 + t * 16 + s)}),
    "record/mla_v41_tokens": Formula("v41", lambda z: [Tensor((z.nb, z.nt, 528))] * z.nl, {
        "latent": lambda z, b, l, t, d: (l, (b * z.nt + t) * 528 + d),
        "scale": lambda z, b, l, t, s: (l, (b * z.nt + t) * 528 + 512 + s)}),
    # 352 bytes: two values a byte
    "vllm/nvfp4_ds_mla": Formula("nvfp4_mla", lambda z: [Tensor((z.nb, z.nt, 352))] * z.nl, {
        "latent": lambda z, b, l, t, c: (l, (b * z.nt + t) * 352 + c // 2),
        "rope": lambda z, b, l, t, r: (l, (b * z.nt + t) * 352 + 256 + r),
        "scale": lambda z, b, l, t, s: (l, (b * z.nt + t) * 352 + 320 + 8 * (s % 4) + s // 4)}),
    "record/nvfp4_mla_planes": Formula("nvfp4_mla", lambda z: [Tensor((z.nl, z.nt * 352))] * z.nb, {
        "latent": lambda z, b, l, t, c: (b, l * z.nt * 352 + t * 256 + c // 2),
        "rope": lambda z, b, l, t, r: (b, l * z.nt * 352 + z.nt * 256 + t * 64 + r),
        "scale": lambda z, b, l, t, s: (b, l * z.nt * 352 + z.nt * 320 + t * 32 + s)}),
    # 132 and 68 bytes
    "vllm/dsa_indexer": Formula("dsa", lambda z: [Tensor((z.nb, z.nt, 132))] * z.nl, {
        "key": lambda z, b, l, t, d: (l, b * z.nt * 132 + t * 128 + d),
        "scale": lambda z, b, l, t: (l, b * z.nt * 132 + z.nt * 128 + t * 4)}),
    "record/dsa_indexer_tokens": Formula("dsa", lambda z: [Tensor((z.nb, z.nt, 132))] * z.nl, {
        "key": lambda z, b, l, t, d: (l, (b * z.nt + t) * 132 + d),
        "scale": lambda z, b, l, t: (l, (b * z.nt + t) * 132 + 128)}),
    "vllm/dsa_indexer_mxfp4": Formula("dsa_mxfp4", lambda z: [Tensor((z.nb, z.nt, 68))] * z.nl, {
        "key": lambda z, b, l, t, d: (l, b * z.nt * 68 + t * 64 + d // 2),
        "scale": lambda z, b, l, t, s: (l, b * z.nt * 68 + z.nt * 64 + t * 4 + s)}),
    "record/dsa_indexer_mxfp4_tokens": Formula("dsa_mxfp4", lambda z: [Tensor((z.nb, z.nt, 68))] * z.nl, {
        "key": lambda z, b, l, t, d: (l, (b * z.nt + t) * 68 + d // 2),
        "scale": lambda z, b, l, t, s: (l, (b * z.nt + t) * 68 + 64 + s)}),
    # NVFP4: K data, K scales, V data, V scales
    "vllm/nvfp4": Formula("nvfp4", lambda z: [Tensor((z.nb, 2 * z.nh, z.nt, z.hd // 2 + z.hd // 16))] * z.nl, {
        "data": lambda z, b, l, o, h, t, d: (
            l, (n := _nvfp4(z)) and b * 2 * n.half + o * n.half + (h * z.nt + t) * n.D + d // 2),
        "scale": lambda z, b, l, o, h, t, s: (
            l, (n := _nvfp4(z)) and b * 2 * n.half + np.where(
                o == 0, n.data + (h * z.nt + t) * n.S + s, n.half + n.data + h * z.nt * n.S + _v_scale(z, t, s)))}),
    "vllm/nvfp4_sm120": Formula("nvfp4", lambda z: [Tensor((z.nb, 2 * z.nh, z.nt, z.hd // 2 + z.hd // 16))] * z.nl, {
        "data": lambda z, b, l, o, h, t, d: (
            l, (n := _nvfp4(z)) and b * 2 * n.half + o * n.half + (h * z.nt + t) * n.D + d // 2),
        "scale": lambda z, b, l, o, h, t, s: (
            l, (n := _nvfp4(z)) and b * 2 * n.half + o * n.half + n.data + (h * z.nt + t) * n.S + s)}),
    "record/nvfp4_tensors": Formula("nvfp4", lambda z: [Tensor((z.nb, 2, z.nh, z.nt, z.hd // 2), FP4)] * z.nl
                                    + [Tensor((z.nb, 2, z.nh, z.nt, z.hd // 16), E4M3)] * z.nl, {
        "data": lambda z, b, l, o, h, t, d: (l, (((b * 2 + o) * z.nh + h) * z.nt + t) * (z.hd // 2) + d // 2),
        "scale": lambda z, b, l, o, h, t, s: (z.nl + l, (((b * 2 + o) * z.nh + h) * z.nt + t) * (z.hd // 16) + s)}),
    "record/nvfp4_universal": Formula(
        "nvfp4", lambda z: [Tensor((z.nh, z.nl, 2, z.nt * (z.hd // 2 + z.hd // 16)))] * z.nb, {
        "data": lambda z, b, l, o, h, t, d: (
            b, (n := _nvfp4(z)) and _universal_head(z, h, l, o, n.D + n.S) + t * n.D + d // 2),
        "scale": lambda z, b, l, o, h, t, s: (
            b, (n := _nvfp4(z)) and _universal_head(z, h, l, o, n.D + n.S) + z.nt * n.D + t * n.S + s)}),
    # SGLang's MXFP8: pages of 128 tokens, scales in the 128x4 order of the tensor cores
    "sglang/mxfp8": Formula("mxfp8", lambda z: [Tensor((z.nb, z.nt, z.nh, z.hd), E4M3)] * (z.no * z.nl)
                            + [Tensor((z.nb, z.nh, 32, 4, 4), E8M0)] * (z.no * z.nl), {
        "data": lambda z, b, l, o, h, t, d: (o * z.nl + l, ((b * z.nt + t) * z.nh + h) * z.hd + d),
        "scale": lambda z, b, l, o, h, t, s: (
            z.no * z.nl + o * z.nl + l, b * z.nh * 512 + ((h * 32 + t % 32) * 4 + t // 32) * 4 + s)}),
    "record/mxfp8_tensors": Formula("mxfp8", lambda z: [Tensor((z.nb, z.nt, z.nh, z.hd), E4M3)] * (z.no * z.nl)
                                    + [Tensor((z.nb, z.nt, z.nh, z.hd // 32), E8M0)] * (z.no * z.nl), {
        "data": lambda z, b, l, o, h, t, d: (o * z.nl + l, ((b * z.nt + t) * z.nh + h) * z.hd + d),
        "scale": lambda z, b, l, o, h, t, s: (
            z.no * z.nl + o * z.nl + l, ((b * z.nt + t) * z.nh + h) * (z.hd // 32) + s)}),
    "record/mxfp8_universal": Formula(
        "mxfp8", lambda z: [Tensor((z.nh, z.nl, z.no, z.nt * (z.hd + z.hd // 32)))] * z.nb, {
        "data": lambda z, b, l, o, h, t, d: (b, _universal_head(z, h, l, o, z.hd + z.hd // 32) + t * z.hd + d),
        "scale": lambda z, b, l, o, h, t, s: (
            b, _universal_head(z, h, l, o, z.hd + z.hd // 32) + z.nt * z.hd + t * (z.hd // 32) + s)}),
    # K and V of different width side by side; the dtype is the shape's
    "vllm/diff_kv": Formula("diff", lambda z: [Tensor((z.nb, z.nt, z.nh, (z.hd + z.hd * 2 // 3) * z.es))] * z.nl, {
        "k": lambda z, b, l, h, t, d: (l, (((b * z.nt + t) * z.nh + h) * (z.hd + z.hd * 2 // 3) + d) * z.es),
        "v": lambda z, b, l, h, t, e: (l, (((b * z.nt + t) * z.nh + h) * (z.hd + z.hd * 2 // 3) + z.hd + e) * z.es)}),
    "record/diff_kv_universal": Formula(
        "diff", lambda z: [Tensor((z.nh, z.nl, z.nt * (z.hd + z.hd * 2 // 3) * z.es))] * z.nb, {
        "k": lambda z, b, l, h, t, d: (b, ((h * z.nl + l) * z.nt * (z.hd + z.hd * 2 // 3) + t * z.hd + d) * z.es),
        "v": lambda z, b, l, h, t, e: (
            b, ((h * z.nl + l) * z.nt * (z.hd + z.hd * 2 // 3) + z.nt * z.hd + t * (z.hd * 2 // 3) + e) * z.es)}),
    "flashinfer/mla_split": Formula("mla", lambda z: [Tensor((z.nb, z.nt, 512), z.dtype)] * z.nl
                                    + [Tensor((z.nb, z.nt, 64), z.dtype)] * z.nl, {
        "latent": lambda z, b, l, t, c: (l, ((b * z.nt + t) * 512 + c) * z.es),
        "rope": lambda z, b, l, t, r: (z.nl + l, ((b * z.nt + t) * 64 + r) * z.es)}),
    "record/mla_joined": Formula("mla", lambda z: [Tensor((z.nb, z.nt, 576 * z.es))] * z.nl, {
        "latent": lambda z, b, l, t, c: (l, ((b * z.nt + t) * 576 + c) * z.es),
        "rope": lambda z, b, l, t, r: (l, ((b * z.nt + t) * 576 + 512 + r) * z.es)}),
}
# One scale a token and head: in the row itself, or behind the rows of a head.
for _kind in ("fp8", "int8"):
    TABLE[f"vllm/per_token_head_{_kind}"] = Formula(
        f"pth_{_kind}", lambda z: [Tensor((z.nb, z.nt, z.nh, z.no * (z.hd + 4)))] * z.nl, {
        "data": lambda z, b, l, o, h, t, d: (
            l, b * z.nt * z.nh * z.no * (z.hd + 4) + ((t * z.nh + h) * z.no + o) * (z.hd + 4) + d),
        "scale": lambda z, b, l, o, h, t: (
            l, b * z.nt * z.nh * z.no * (z.hd + 4) + ((t * z.nh + h) * z.no + o) * (z.hd + 4) + z.hd)})
    TABLE[f"record/per_token_head_{_kind}_planes"] = Formula(
        f"pth_{_kind}", lambda z: [Tensor((z.nh, z.nl, z.no, z.nt * (z.hd + 4)))] * z.nb, {
        "data": lambda z, b, l, o, h, t, d: (b, _universal_head(z, h, l, o, z.hd + 4) + t * z.hd + d),
        "scale": lambda z, b, l, o, h, t: (b, _universal_head(z, h, l, o, z.hd + 4) + z.nt * z.hd + 4 * t)})
# fmt: on


def held(name: str, shape: tuple[int, int, int, int, int, str], num_blocks: int) -> Held:
    """A layout of the table at sizes."""
    formula = TABLE[name]
    nl, no, nh, nt, hd, dtype = shape
    z = SimpleNamespace(nb=num_blocks, nl=nl, no=no, nh=nh, nt=nt, hd=hd, dtype=dtype, es=ITEMS[dtype][0])
    planes = []
    for plane, (own, extents) in FAMILIES[formula.family].planes.items():
        at = formula.where[plane]
        sizes = extents(z)
        planes.append(
            Elements(plane, own or dtype, sizes, lambda c, at=at: at(z, **c), list(sizes)[-1])  # type: ignore[misc]
        )
    return Held(tuple(formula.tensors(z)), tuple(planes), num_blocks)


def pairs() -> list[tuple[str, str]]:
    """Ordered pairs of layouts of the same planes, each with itself included."""
    return [(a, b) for a in TABLE for b in TABLE if TABLE[a].family == TABLE[b].family]
