"""Copies that cast: pools on guarded buffers, and every byte that they should hold afterwards.

Addresses come from `oracle` and `plane_oracle`, values from `cast_oracle`.  None of them shares code with kvbm.  kvbm is imported
only to bind the buffers.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import mmap
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import cast_oracle
import kvbm
import matrix
import memory
import oracle
import plane_oracle
from cast_oracle import PLAIN, QUANTISED
from kvbm.layout import spec
from plane_oracle import TABLE, Drawn, DrawnPlane

BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "float4_e2m1fn": 4}

#: nl, no, nh, nt, hd
Sizes = tuple[int, int, int, int, int]


def width(dtype: str) -> int:
    return BITS.get(dtype, 8)


# ---- layouts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Own:
    """A layout of the test, without planes: one order, or one for K and one for V.  Pitches are (word, bytes)."""

    k: str
    v: str = ""
    pitch: tuple[tuple[str, int], ...] = ()

    @property
    def yaml(self) -> str:
        order = f'{{k: "{self.k}", v: "{self.v}"}}' if self.v else f'"{self.k}"'
        pitch = f"pitch: {{{', '.join(f'{word}: {n} B' for word, n in self.pitch)}}}\n" if self.pitch else ""
        return f"order: {order}\n{pitch}"


@dataclass(frozen=True)
class Planar:
    """A layout of the test with planes, and which plane holds the scales of which."""

    drawn: Drawn
    scales: tuple[tuple[str, str], ...] = (("scale", "data"),)

    @property
    def yaml(self) -> str:
        text = self.drawn.yaml.replace("    dtype: \n", "")
        for scale, data in self.scales:
            text = text.replace(f"  {scale}:\n", f"  {scale}:\n    scales: {data}\n")
        return text

    def typed(self, dtype: str) -> Drawn:
        """With the shape's dtype for planes that have none."""
        planes = tuple(dataclasses.replace(one, dtype=one.dtype or dtype) for one in self.drawn.planes)
        return dataclasses.replace(self.drawn, planes=planes)


#: A shipped layout by name, or a layout of the test.
Meant = str | Own | Planar


def title(meant: Meant) -> str:
    return meant if isinstance(meant, str) else meant.yaml


#: Planes that scale another one, of shipped layouts: the catalogue's names.
SCALED = {"latent", "key", "data"}
UNSCALED = ("vllm/deepseek_v4", "record/deepseek_v4_tokens", "record/deepseek_v4_planes")


def scales_of(meant: Meant) -> dict[str, str]:
    """Plane of values → plane of its scales."""
    if isinstance(meant, Planar):
        return {data: scale for scale, data in meant.scales}
    if isinstance(meant, Own) or meant not in TABLE or meant in UNSCALED:
        return {}
    planes = plane_oracle.FAMILIES[TABLE[meant].family].planes
    return dict.fromkeys(SCALED & set(planes), "scale") if "scale" in planes else {}


@dataclass(frozen=True)
class Part:
    """A part of a pool: coordinates by axis, and tokens per unit (0: blocks)."""

    chosen: tuple[tuple[str, tuple[int, ...]], ...] = ()
    tokens: int = 0

    def of(self, pool: Any) -> Any:
        if self.tokens:
            pool = pool.units(self.tokens)
        return pool.section(**{axis: list(some) for axis, some in self.chosen}) if self.chosen else pool


WHOLE = Part()


# ---- pools -----------------------------------------------------------------------------------------------------------


class Side:
    """A pool on a guarded buffer, with the bytes it had before.

    `where`: ``cpu``; ``pinned`` or ``cuda`` (torch's memory); ``fake`` or ``fake pinned``, on the fake driver.
    """

    def __init__(
        self,
        meant: Meant,
        sizes: Sizes,
        dtype: str,
        blocks: int,
        *,
        dst: bool = False,
        align: int = 0,
        how: str = "steps",
        where: str = "cpu",
        seed: int = 0,
        part: Part = WHOLE,
        make: Any = None,
    ) -> None:
        self.meant, self.sizes, self.dtype, self.blocks, self.part, self.where = (
            meant,
            sizes,
            dtype,
            blocks,
            part,
            where,
        )
        nl, no, nh, nt, hd = sizes
        self.shape = kvbm.BlockShape(nl=nl, no=no, nh=nh, nt=nt, hd=hd, dtype=dtype)
        by_axis = {"l": nl, "o": no, "h": nh, "t": nt, "d": hd}
        if isinstance(meant, Planar):
            self.layout = spec.parse(meant.yaml, name="own")
            self.arena: Any = meant.typed(dtype).held(by_axis, blocks).arena(align, how)
        elif isinstance(meant, str) and meant in TABLE:
            self.layout = kvbm.load(meant)
            self.arena = plane_oracle.held(meant, (*sizes, dtype), blocks).arena(align, how)
        else:
            order = matrix.orders()[meant] if isinstance(meant, str) else oracle.Order(meant.k, meant.v, meant.pitch)
            self.layout = kvbm.load(meant) if isinstance(meant, str) else spec.parse(meant.yaml, name="own")
            placed = oracle.Placed(order, by_axis, oracle.ITEMSIZE[dtype], blocks)
            self.arena = placed.layout_bytes(align, how)
        self.planes: dict[str, Plane] = {}
        if isinstance(self.arena.placed, oracle.Placed):
            self.planes[""] = Plane("", dtype, by_axis)
        else:
            for one in self.arena.placed.planes:
                self.planes[one.name] = Plane(
                    one.name, one.dtype, dict(one.extents), one.axis if width(one.dtype) < 8 else ""
                )
        self.scales = scales_of(meant)
        self._grids: dict[Any, np.ndarray] = {}
        self.before = oracle.noise(self.arena.nbytes, 2000 + seed) if dst else self._filled(seed, make)
        self._bind()

    def _filled(self, seed: int, make: Any) -> np.ndarray:
        """Noise, and values in every plane: made for plain ones, and all codes for quantised ones."""
        buffer = oracle.noise(self.arena.nbytes, 1000 + seed)
        rng = np.random.default_rng(seed)
        for plane in self.planes.values():
            at = self.elements(plane.name, range(self.blocks), whole=True)
            if plane.dtype in PLAIN and plane.name not in self.scales.values():
                codes = (make or values)(rng, plane.dtype, at.shape)
            elif plane.name in self.scales.values():
                codes = scale_codes(rng, plane.dtype, at.shape)
            else:
                codes = rng.integers(0, 1 << width(plane.dtype), at.shape)
            self.write(buffer, plane.name, at, codes)
        return buffer

    def _bind(self) -> None:
        plain = isinstance(self.arena.placed, oracle.Placed)
        if self.where == "cpu":
            self.memory: Any = memory.aligned(self.before)
            buffer = self.memory
        elif self.where.startswith("fake"):
            self.pages = mmap.mmap(-1, self.before.size + mmap.PAGESIZE)
            buffer = self.memory = np.frombuffer(self.pages, np.uint8)[: self.before.size]
            self.memory[:] = self.before
        else:
            import torch

            self.memory = torch.from_numpy(self.before).clone()
            self.memory = self.memory.pin_memory() if self.where == "pinned" else self.memory.to("cuda:0")
            torch.cuda.synchronize()
            buffer = self.memory if self.where == "cuda" else self.memory.numpy()
        if self.where == "fake" and plain:
            address, spaces = buffer.ctypes.data, zip(self.arena.placed.spaces, self.arena.bases, strict=True)
            arrays: list[Any] = [
                memory.FakeCuda(one.shape, self.dtype, address=address + base, strides=one.strides)
                for one, base in spaces
            ]
        elif plain:
            arrays = memory.views(self.arena, buffer, self.dtype, "torch" if self.where == "cuda" else "numpy")
        else:
            resolved = self.layout.resolve(self.shape, self.blocks)
            arrays = []
            for one, base in zip(resolved.allocations, self.arena.bases, strict=True):
                kind = kvbm.layout.shapes.numpy_name(one.dtype)
                if self.where == "fake":
                    arrays.append(
                        memory.FakeCuda(one.shape, kind, address=buffer.ctypes.data + base, strides=one.strides)
                    )
                elif self.where == "cuda":
                    arrays.append(
                        memory.Strided(buffer.data_ptr() + base, one.shape, one.strides, np.dtype(kind).str, buffer)
                    )
                else:
                    arrays.append(np.ndarray(one.shape, kind, buffer, base, one.strides))
        self.pool = kvbm.Pool(self.layout, self.shape, arrays)
        if self.where == "fake pinned":
            self.pool.pin()

    @property
    def given(self) -> Any:
        """What is handed to kvbm."""
        return self.part.of(self.pool)

    @property
    def after(self) -> np.ndarray:
        return self.memory if isinstance(self.memory, np.ndarray) else self.memory.cpu().numpy()

    @property
    def untouched(self) -> bool:
        return np.array_equal(self.after, self.before)

    def put(self, data: np.ndarray) -> None:
        """Replace all bytes."""
        self.before = data
        if isinstance(self.memory, np.ndarray):
            self.memory[:] = data
        else:
            import torch

            self.memory.copy_(torch.from_numpy(data))
            torch.cuda.synchronize()

    # ---- addresses

    def elements(self, name: str, ids: Any, layers: range | None = None, *, whole: bool = False) -> np.ndarray:
        """Byte position of every element: ids, then the plane's axes.  Of elements that share a byte, twice the same."""
        plane = self.planes[name]
        ids = np.asarray(ids, np.int64).reshape(-1)
        tokens = 0 if whole else self.part.tokens
        each = plane.extents.get("t", 1) // tokens if tokens else 1
        at = self._grid(name)[ids // each]
        axes = ["b", *plane.extents]
        if tokens:
            axis = axes.index("t")
            at = (
                np.stack(
                    [
                        one.take(range(u % each * tokens, u % each * tokens + tokens), axis - 1)
                        for one, u in zip(at, ids.tolist(), strict=True)
                    ]
                )
                if ids.size
                else at.take(range(tokens), axis)
            )
        if not whole:
            for axis, some in self.part.chosen:
                if axis in axes:
                    at = at.take(some, axes.index(axis))
            if layers is not None:
                at = at.take(layers, axes.index("l"))
        return at

    def _grid(self, name: str) -> np.ndarray:
        if name not in self._grids:
            plane = self.planes[name]
            if name == "" and isinstance(self.arena.placed, oracle.Placed):
                at = self.arena.positions(np.arange(self.blocks))
            else:
                (one,) = (one for one in self.arena.placed.planes if one.name == name)
                at = self.arena.of(one, np.arange(self.blocks))
                if plane.packed:
                    at = np.repeat(at, 2, axis=1 + [*plane.extents].index(plane.packed))
            assert at.shape == (self.blocks, *plane.extents.values()), (at.shape, plane)
            self._grids[name] = at
        return self._grids[name]

    def high(self, name: str, at: np.ndarray) -> np.ndarray:
        """Which elements are in the high half of their byte."""
        plane = self.planes[name]
        axis = 1 + [*plane.extents].index(plane.packed)
        odd = np.arange(at.shape[axis]) % 2 == 1
        return np.broadcast_to(odd.reshape([-1 if k == axis else 1 for k in range(at.ndim)]), at.shape)

    def read(self, buffer: np.ndarray, name: str, at: np.ndarray) -> np.ndarray:
        """The codes at these positions, as uint32."""
        plane = self.planes[name]
        if plane.packed:
            return (buffer[at] >> np.where(self.high(name, at), 4, 0)).astype(np.uint32) & 15
        found = buffer[at].astype(np.uint32)
        for k in range(1, width(plane.dtype) // 8):
            found |= buffer[at + k].astype(np.uint32) << np.uint32(8 * k)
        return found

    def write(self, buffer: np.ndarray, name: str, at: np.ndarray, codes: np.ndarray) -> None:
        plane = self.planes[name]
        codes = np.asarray(codes)
        if plane.packed:
            high = self.high(name, at)
            buffer[at[~high]] = codes[~high] & 15
            buffer[at[high]] |= (codes[high] << 4).astype(np.uint8)
            return
        for k in range(width(plane.dtype) // 8):
            buffer[at + k] = (codes.astype(np.uint32) >> np.uint32(8 * k)).astype(np.uint8)

    def explain(self, got: np.ndarray, want: np.ndarray, limit: int = 3) -> str:
        """The elements that differ."""
        wrong = np.flatnonzero(got != want)
        lines = [f"{wrong.size} of {got.size} bytes differ; first:"] if wrong.size else ["equal"]
        for at in wrong[:limit].tolist():
            where = "guard, padding or another block"
            for name, plane in self.planes.items():
                found = self._grid(name)
                hit = np.argwhere((found <= at) & (at < found + max(width(plane.dtype) // 8, 1)))
                if hit.size:
                    where = f"plane {name!r} of {plane.dtype}: " + ", ".join(
                        f"{a}={c}" for a, c in zip(["b", *plane.extents], hit[0].tolist(), strict=True)
                    )
            lines.append(f"  byte {at}: got {got[at]:02x}, want {want[at]:02x} ({where})")
        return "\n".join(lines)


@dataclass(frozen=True)
class Plane:
    """A plane: its dtype, its axes without b, and the axis along which two elements share a byte."""

    name: str
    dtype: str
    extents: dict[str, int] = field(hash=False)
    packed: str = ""


# ---- values ----------------------------------------------------------------------------------------------------------


def values(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Codes of a plain format.  Runs of 16 to 64: normal ones of any size, zeros, subnormals, one huge, any bits, NaN and inf."""
    count = int(np.prod(shape))
    run = int(rng.choice((16, 32, 64)))
    runs = -(-count // run)
    x = rng.standard_normal((runs, run)) * np.exp2(rng.integers(-12, 9, (runs, 1)))
    kind = rng.integers(0, 10, runs)
    x[kind == 0] = 0
    x[kind == 1, int(rng.integers(run))] = 30000.0
    if dtype == "float16":
        codes = x.astype(np.float16).view(np.uint16).astype(np.uint32)
    else:
        codes = x.astype(np.float32).view(np.uint32)
        codes = codes >> np.uint32(16) if dtype == "bfloat16" else codes
    bits = width(dtype)
    sign = np.uint32(1 << bits - 1)
    noise = rng.integers(0, 1 << bits, (runs, run), dtype=np.uint64).astype(np.uint32)
    top = np.uint32({"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}[dtype])
    payload = np.uint32({"bfloat16": 0x7F, "float16": 0x3FF, "float32": 0x7FFFFF}[dtype])
    codes = np.where((kind == 2)[:, None], noise & (sign | payload), codes)  # subnormals
    codes = np.where((kind == 3)[:, None], noise, codes)  # anything
    few = rng.integers(0, 16, (runs, run))
    some = np.isin(kind, (0, 4, 5))[:, None]
    codes = np.where(some & (few == 0), noise & (sign | payload) | top, codes)  # NaN
    codes = np.where(some & (few == 1), noise & sign | top, codes)  # inf
    codes = np.where((kind == 0)[:, None] & (few > 1), noise & sign, codes)  # -0 as well
    return codes.reshape(-1)[:count].reshape(shape)


def every(dtype: str) -> Any:
    """All 65,536 codes of a format of 16 bits, again and again; of float32 all with zeros below."""

    def make(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
        count = int(np.prod(shape))
        codes = np.resize(np.arange(1 << 16, dtype=np.uint32), count)
        return (codes << np.uint32(16) if kind == "float32" else codes).reshape(shape)

    return make


def shuffled(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """All codes of 16 bits in random order, so that groups hold every kind of value."""
    codes = every(kind)(rng, kind, shape)
    return rng.permutation(codes.reshape(-1)).reshape(shape)


def scale_codes(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Three in four are usual; the others are any bits: NaN, inf, zero, negative, subnormal."""
    bits = width(dtype)
    noise = rng.integers(0, 1 << bits, shape, dtype=np.uint64).astype(np.uint32)
    usual = np.exp2(rng.integers(-20, 10, shape)) * rng.uniform(1, 2, shape)
    if dtype == "float32":
        codes = usual.astype(np.float32).view(np.uint32)
    elif dtype == "bfloat16":
        codes = usual.astype(np.float32).view(np.uint32) >> np.uint32(16)
    elif dtype == "float16":
        codes = usual.astype(np.float16).view(np.uint16).astype(np.uint32)
    elif dtype == "float8_e8m0fnu":
        codes = rng.integers(100, 140, shape).astype(np.uint32)
    else:
        codes = rng.integers(1, 0x7F, shape).astype(np.uint32)
    return np.where(rng.integers(0, 4, shape) == 0, noise, codes)


def to_float32(codes: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "float32":
        return codes.astype(np.uint32).view(np.float32)
    if dtype == "bfloat16":
        return (codes.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return cast_oracle.to_float32(codes, dtype)


def plain_to_plain(codes: np.ndarray, src: str, dst: str, constant: float) -> np.ndarray:
    """IEEE: one product in float32, one rounding, overflow to inf, one NaN."""
    x = to_float32(codes, src)
    with np.errstate(invalid="ignore"):
        x = x.astype(np.float64)
        factor = cast_oracle.reciprocal(np.float64(np.float32(constant)))
        t = cast_oracle.fl32(x * factor)
    if dst == "float32":
        return cast_oracle.encode(t, dst, nan=0x7FFFFFFF)
    y = cast_oracle.on_grid(t, dst)
    y = np.where(np.abs(y) > cast_oracle.FORMATS[dst].largest, np.copysign(np.inf, y), y)
    return cast_oracle.encode(y, dst, nan=0x7FFF)


# ---- scales of the caller --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Given:
    """Scales of K and of V: a number, or one for each layer of the quantised side.  Without those of V: for K and V."""

    k: float | tuple[float, ...]
    v: float | tuple[float, ...] | None = None

    @property
    def cast(self) -> Any:
        return kvbm.Scale(self.k) if self.v is None else kvbm.Scale(k=self.k, v=self.v)

    def first(self, layers: int) -> Given:
        """Those of the first layers."""
        return Given(*(of[:layers] if isinstance(of, tuple) else of for of in (self.k, self.v)))  # type: ignore[arg-type]

    def of(self, layer: int, half: int) -> float:
        mine = self.k if self.v is None or half == 0 else self.v
        return float(np.float32(mine[layer] if isinstance(mine, tuple) else mine))


#: Scales of the caller of a cast: None for ``"amax"``.
Scales = float | Given | None


def each_scale(
    given: Scales, axes: Sequence[str], shape: tuple[int, ...], layers: range | None
) -> Iterator[tuple[Any, float]]:
    """Coordinates of (id, axes …) with one scale of the caller, and that scale."""
    if not isinstance(given, Given):
        yield ..., float(np.float32(1.0 if given is None else given))
        return
    sizes = dict(zip(["b", *axes], shape, strict=False))
    for layer, half in itertools.product(range(sizes.get("l", 1)), range(sizes.get("o", 1))):
        at = {"l": layer, "o": half}
        number = layers[layer] if layers is not None else layer
        yield tuple(at.get(axis, slice(None)) for axis in ("b", *axes)), given.of(number, half)


# ---- what a copy writes ----------------------------------------------------------------------------------------------


def in_axes(at: np.ndarray, mine: Sequence[str], theirs: Sequence[str]) -> np.ndarray:
    """Reorder ids and axes to those of the other side.  An axis that one side lacks has one coordinate."""
    names = ["b", *mine]
    for axis in [name for name in names if name != "b" and name not in theirs]:
        assert at.shape[names.index(axis)] == 1, axis
        at = at.take(0, names.index(axis))
        names.remove(axis)
    for axis in theirs:
        if axis not in names:
            at = at[..., None]
            names.append(axis)
    return at.transpose([names.index(name) for name in ("b", *theirs)])


def grouped(found: np.ndarray, axes: Sequence[str], scale: Plane, count: int) -> np.ndarray:
    """Elements as (id, axes of the scales, elements of a group); `count`: scales along the axis that only scales have."""
    own = [axis for axis in scale.extents if axis not in axes]
    divided = [axis for axis in axes if axis not in scale.extents and axis not in "loht"]
    names, shape = ["b"], [found.shape[0]]
    for axis, size in zip(axes, found.shape[1:], strict=True):
        if own and divided[:1] == [axis]:
            assert size % count == 0
            names, shape = [*names, own[0]], [*shape, count]
            size //= count
        names, shape = [*names, axis], [*shape, size]
    if own and not divided:
        names, shape = [*names, own[0]], [*shape, 1]
    found = found.reshape(shape)
    first = ["b", *scale.extents]
    order = [*first, *(name for name in names if name not in first)]
    found = found.transpose([names.index(name) for name in order])
    return found.reshape(*found.shape[: len(first)], -1)


def matched(src: Side, dst: Side) -> list[tuple[str, str]]:
    """Planes of values on both sides."""
    ours, theirs = ([name for name in side.planes if name not in side.scales.values()] for side in (src, dst))
    if len(ours) == len(theirs) == 1:
        return [(ours[0], theirs[0])]
    assert set(ours) == set(theirs)
    return [(name, name) for name in ours]


def expected(
    src: Side,
    dst: Side,
    src_ids: Any,
    dst_ids: Any,
    scale: Scales = None,
    layers: tuple[range | None, range | None] = (None, None),
    source: np.ndarray | None = None,
    before: np.ndarray | None = None,
) -> np.ndarray:
    """The destination's bytes after the copy.  `scale`: of the caller; None for ``"amax"``."""
    source = src.before if source is None else source
    result = (dst.before if before is None else before).copy()
    kept = [
        (a, b)
        for a, b in zip(np.asarray(src_ids).tolist(), np.asarray(dst_ids).tolist(), strict=True)
        if a != -1 and b != -1
    ]
    if not kept:
        return result
    ids = [np.array([pair[k] for pair in kept]) for k in (0, 1)]
    for ours, theirs in matched(src, dst):
        _one(src, dst, ours, theirs, ids, layers, scale, source, result)
    return result


def _one(
    src: Side,
    dst: Side,
    ours: str,
    theirs: str,
    ids: Any,
    layers: Any,
    given: Scales,
    source: np.ndarray,
    result: np.ndarray,
) -> None:
    here, there = src.planes[ours], dst.planes[theirs]
    reads, writes = src.elements(ours, ids[0], layers[0]), dst.elements(theirs, ids[1], layers[1])
    of_src, of_dst = src.scales.get(ours), dst.scales.get(theirs)
    if here.dtype == there.dtype and (of_src is None) == (of_dst is None):  # bits as they are
        codes = in_axes(src.read(source, ours, reads), [*here.extents], [*there.extents])
        dst.write(result, theirs, writes, codes)
        if of_src:
            scales = src.read(source, of_src, src.elements(of_src, ids[0], layers[0]))
            axes = [*src.planes[of_src].extents], [*dst.planes[of_dst].extents]
            dst.write(result, of_dst, dst.elements(of_dst, ids[1], layers[1]), in_axes(scales, *axes))
        return
    if of_dst is not None or of_src is not None:
        side, name, mine = (dst, of_dst, 1) if of_dst is not None else (src, of_src, 0)
        assert name is not None
        axes = [*(here, there)[mine].extents]
        codes = in_axes(src.read(source, ours, reads), [*here.extents], axes)
        at = side.elements(name, ids[mine], layers[mine])
        plane = side.planes[name]
        own = [axis for axis in plane.extents if axis not in axes]
        count = at.shape[1 + [*plane.extents].index(own[0])] if own else 1
        number = grouped(np.arange(codes.size).reshape(codes.shape), axes, plane, count)
        codes = codes.reshape(-1)[number]
        found, bits = np.empty(codes.shape, np.uint32), np.empty(codes.shape[:-1], np.uint32)
        multiplies = plane.dtype == "float8_e4m3fn"
        for some, g in each_scale(given if multiplies else None, [*plane.extents], codes.shape, layers[mine]):
            if mine == 1:
                group = to_float32(codes[some], here.dtype)
                found[some], bits[some], _ = cast_oracle.quantise(group, there.dtype, plane.dtype, g)
            else:
                stored = src.read(source, name, at)[some]
                found[some] = cast_oracle.dequantise(codes[some], stored, here.dtype, plane.dtype, there.dtype, g)
        if mine == 1:
            dst.write(result, name, at, bits)
        back = np.empty(number.size, np.uint32)
        back[number] = found
        whole = back.reshape([(reads, writes)[mine].shape[0], *(reads, writes)[mine].shape[1:]])
        dst.write(result, theirs, writes, whole if mine == 1 else in_axes(whole, axes, [*there.extents]))
        return
    codes = in_axes(src.read(source, ours, reads), [*here.extents], [*there.extents])
    found = np.empty(codes.shape, np.uint32)
    for some, c in each_scale(given, [*there.extents], codes.shape, layers[here.dtype in PLAIN]):
        if there.dtype in QUANTISED:
            found[some], _, _ = cast_oracle.quantise(to_float32(codes[some], here.dtype), there.dtype, None, constant=c)
        elif here.dtype in QUANTISED:
            found[some] = cast_oracle.dequantise(codes[some], None, here.dtype, None, there.dtype, constant=c)
        else:
            found[some] = plain_to_plain(codes[some], here.dtype, there.dtype, c)
    dst.write(result, theirs, writes, found)


def check(src: Side, dst: Side, want: np.ndarray, what: Any = "") -> None:
    """Every byte of the destination, and that the source is unchanged."""
    got = dst.after
    assert np.array_equal(got, want), f"{title(src.meant)} → {title(dst.meant)}: {what}\n{dst.explain(got, want)}"
    assert src.untouched, f"{title(src.meant)} → {title(dst.meant)}: {what}: the source changed"


def multiplies(meant: Meant) -> bool:
    """True if a scale of the caller multiplies stored scales: those of NVFP4."""
    if isinstance(meant, str):
        return "nvfp4" in meant
    return isinstance(meant, Planar) and any(
        plane.dtype == "float8_e4m3fn" for plane in meant.drawn.planes if plane.name in dict(meant.scales)
    )


def cast_of(scale: Scales) -> Any:
    return "amax" if scale is None else scale.cast if isinstance(scale, Given) else kvbm.Scale(scale)


def convert_and_check(
    src: Side, dst: Side, src_ids: Any, dst_ids: Any, scale: Scales = None, what: Any = "", **rest: Any
) -> None:
    want = expected(src, dst, src_ids, dst_ids, scale)
    kvbm.convert(src.given, dst.given, src_ids, dst_ids, cast=cast_of(scale), **rest)
    check(src, dst, want, what)


# ---- layouts of the tests --------------------------------------------------------------------------------------------


def plane(
    name: str, dtype: str, order: str, axis: str = "", elements: int = 1, shared: str = "", **rest: Any
) -> DrawnPlane:
    """A plane; `order` of K and of V are separated by a bar."""
    orders = tuple(tuple(half.split()) for half in order.split("|"))
    return DrawnPlane(name, dtype, axis, elements, tuple(shared.split()), orders, **rest)


def planar(order: str, *planes: DrawnPlane, pitch: tuple[tuple[str, int], ...] = (), scales: Any = None) -> Planar:
    """A layout from its order; `<>` stands for the planes."""
    table, _, inner = order.partition("]") if order.startswith("[") else ("", "", order)
    term = "<" + " ".join(one.name for one in planes) + ">"
    words = [[term if word == "<>" else word for word in text.strip("[ ").split()] for text in (table, inner)]
    made = Drawn(tuple(words[0]), tuple(words[1]), planes, pitch)
    return Planar(made, (("scale", "data"),) if scales is None else scales)


def digested() -> Iterator[tuple[Meant, str, Sizes, Scales]]:
    """Layouts of one plane of values, which casts digest in the same pass, with a plain order, sizes and the scale of the caller.

    Cells have the scales of 1 to 16 groups, a group has a part of a cell or several, and their numbers are odd and even.  On one
    multiprocessor threads take three turns or more in the layouts with the order of the keys.
    """
    e4m3, e8m0, e2m1 = "float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn"
    counts: list[tuple[str, str, int, tuple[int, ...]]] = [
        (e4m3, "float32", 0, (16, 128, 80, 256)),  # one scale a row
        ("int8", "float32", 128, (256, 512)),
        ("float8_e5m2", "float32", 16, (32, 64)),
        (e4m3, e8m0, 32, (32, 64, 128, 256, 512)),
        (e2m1, e4m3, 16, (32, 64, 128, 256, 512)),
        (e2m1, e4m3, 32, (128,)),
        (e2m1, e8m0, 32, (32, 64, 128, 512)),
    ]
    turn = 0
    for dtype, scale, group, widths in counts:
        for width in widths:
            tokens = (3, 4, 16, 5)[turn % 4]
            order, turn = ("t h d", "h t d")[turn % 2], turn + 1
            own = ("h t s", "t h s")[turn % 2] if group and width > group else "h t"
            axis = ("s", width // group) if "s" in own else ("", 1)
            given = 0.37 if scale == e4m3 and turn % 2 else None
            data = plane("data", dtype, "l o h t d", "d", width)
            layout = planar("[b] <>", data, plane("scale", scale, f"l o {own}", *axis))
            yield layout, f"[b] l o {order}", (2, 2, 3, tokens, width), given
            axes = "t l o h" + (" s" if group and width > group else "")
            layout = planar("[b] <>", plane("data", dtype, "t l o h d", "d", width), plane("scale", scale, axes, *axis))
            yield layout, "[b] t l o h d", (4, 2, 4, (2048, 2560)[turn % 2] // width, width), given
    split = planar("[b] <>", plane("data", e4m3, "l o d/64 h d%64/16 t d%16", "d", 128), plane("scale", "float32", "l o h t"))
    yield split, "[b] l o h t d", (2, 2, 3, 4, 128), None  # a group goes through three modes
    yield Own("[b] l o t h d"), "[b] l o h t d", (2, 2, 3, 5, 128), 0.25


def resized(one: Side, **sizes: int) -> Sizes:
    """The sizes of a side with some replaced."""
    return tuple(dataclasses.replace(one.shape, **sizes).sizes[axis] for axis in "lohtd")  # type: ignore[return-value]


# ---- files -----------------------------------------------------------------------------------------------------------


def header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file."""
    raw = path.read_bytes()
    found: dict[str, Any] = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    return found


def tensors(path: Path) -> list[bytes]:
    """The bytes of the allocations, in the order of the table."""
    raw, found = path.read_bytes(), header(path)
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    return [
        raw[start + one["data_offsets"][0] : start + one["data_offsets"][1]]
        for name, one in sorted(found.items())
        if name.startswith("alloc_")
    ]
