"""Reshardings that cast: pools of two engines with other partitions and other formats, and every byte they should hold afterwards.

Who holds what is from `reshard_oracle`, addresses from `casting` (its oracles), values from `cast_oracle`.  None of them shares
code with kvbm.  All values are made, and cast, for the whole model at once: so the bits are those of every partition.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import cast_oracle
import casting
import kvbm
import reshard_oracle
from cast_oracle import PLAIN, QUANTISED
from casting import Given, Meant, Scales, Side
from kvbm import reshard
from reshard_oracle import Case, Engine, Told

#: Axes in the order of a model's values: positions come first.
ORDER = "lohcsdr"


@dataclass(frozen=True)
class Kind:
    """The formats of two engines: their layouts, dtypes, and the model's heads."""

    name: str
    layouts: tuple[Meant, Meant]
    dtypes: tuple[str, str]
    no: int = 2
    nh: int = 4
    hd: int = 32
    scale: Scales = None

    @property
    def back(self) -> Kind:
        return replace(self, name=f"{self.name}, back", layouts=self.layouts[::-1], dtypes=self.dtypes[::-1])


_FORTH = (
    Kind("fp8", ("nhd", "record/per_token_head_fp8_planes"), ("bfloat16", "bfloat16")),
    Kind("fp8 records", ("operational_hnd", "vllm/per_token_head_fp8"), ("float32", "uint8"), hd=64),
    Kind("int8", ("universal", "record/per_token_head_int8_planes"), ("float16", "float16"), nh=6),
    Kind("mxfp8", ("hnd", "record/mxfp8_universal"), ("bfloat16", "bfloat16"), hd=64),
    Kind("nvfp4", ("nhd", "record/nvfp4_universal"), ("bfloat16", "bfloat16"), scale=Given(0.25, (0.5, 0.01, 3.0))),
    Kind("constant", ("nhd", "universal"), ("bfloat16", "float8_e4m3fn"), scale=0.5),
    Kind("by layer", ("vllm/LBHNC", "hnd"), ("float32", "int8"), scale=Given((0.5, 0.01, 3.0), (0.25, 0.02, 7.0))),
    Kind("wider", ("nhd", "hnd"), ("bfloat16", "float32"), scale=1.0),
    Kind("mla", ("record/mla_joined", "vllm/fp8_ds_mla"), ("bfloat16", "bfloat16"), no=1, nh=1, hd=576),
)
KINDS = (*_FORTH, *(kind.back for kind in _FORTH))


def drawn(kind: Kind, seed: int, length: int = 60, most: int = 6, **changes: Any) -> Case:
    """A case by chance with the layouts of a kind: placements, block sizes, tables, ranges.  Ranks are few, as pools are large."""
    rng = random.Random(seed)
    nts = rng.choice([(4, 4), (4, 16), (16, 4), (8, 12), (1, 4), (5, 7)])
    nl = rng.randrange(1, 4) if kind.hd < 500 else 2
    engines = [
        replace(reshard_oracle.random_engine(rng, nl, kind.nh, tuple(range(nl)), most, nt), layouts=("",)) for nt in nts
    ]
    gather = rng.random() < 0.2
    case = Case(
        seed, nl, kind.no, kind.nh, kind.hd, kind.dtypes[0], engines[0], engines[1], (), (1, 1),
        layers=None, clear_tail=rng.random() < 0.3, stripe=not gather and rng.random() < 0.3, gather=gather, prefer=None,
        align=(0, 0),
    )  # fmt: skip
    if nl > 1 and rng.random() < 0.3:
        first = rng.randrange(nl)
        case = replace(case, layers=range(first, rng.randrange(first + 1, nl + 1)))
    return reshard_oracle._with_sequences(replace(case, **changes), rng, length)


@dataclass
class Memory:
    """What a rank's memory held before."""

    before: np.ndarray


@dataclass
class Scene:
    """The memory of all ranks before."""

    sides: tuple[list[Memory], list[Memory]] = field(default_factory=lambda: ([], []))


class CastRun:
    """A case with its pools, as `reshard_oracle.Run`.

    `own`: makes memory of bytes, for pools that peers open; None: that of `casting.Side`.
    """

    def __init__(self, case: Case, kind: Kind, own: Callable[[np.ndarray], Any] | None = None, where: str = "cpu") -> None:
        self.case, self.kind = case, kind
        self.scale = kind.scale.first(case.nl) if isinstance(kind.scale, Given) else kind.scale
        self.told = casting.cast_of(self.scale)
        models = [kvbm.BlockShape(case.nl, case.no, case.nh, 4, case.hd, dtype) for dtype in kind.dtypes]
        self.places = [
            engine.placement(model, name)
            for engine, model, name in zip(case.engines, models, ("src", "dst"), strict=True)
        ]
        self.ranks: list[list[Side]] = [[], []]
        for side, engine in enumerate(case.engines):
            for rank in range(engine.world):
                sizes = len(engine.holds_layers(rank)), case.no, len(engine.holds_heads(rank, case.nh)), engine.nt, case.hd
                made = Side(
                    kind.layouts[side], sizes, kind.dtypes[side], case.blocks[side], dst=bool(side), seed=100 * case.seed + rank,
                    how=("steps", "rows", "scattered")[(case.seed + rank) % 3], where=where,
                )  # fmt: skip
                self.ranks[side].append(made)
        self.values = [self._made(index, max(tokens.stop, 1)) for index, (tokens, *_) in enumerate(case.sequences)]
        for rank, one in enumerate(self.ranks[0]):
            for index, (tokens, told, _) in enumerate(case.sequences):
                self._write(one, one.before, 0, rank, told, range(tokens.stop), self.values[index])
            one.put(one.before)
        if own is not None:
            for one in (one for side in self.ranks for one in side):
                _move(one, own)
        self.pools = [[one.pool for one in side] for side in self.ranks]
        self.buffers = [[one.memory for one in side] for side in self.ranks]
        self.scene = Scene(tuple([Memory(one.before.copy()) for one in side] for side in self.ranks))  # type: ignore[arg-type]

    # ---- values

    def _planes(self, side: int) -> dict[str, tuple[tuple[str, ...], tuple[int, ...], str]]:
        """Plane → its axes without t in the order of values, the model's sizes, and its dtype."""
        found = {}
        for name, plane in self.ranks[side][0].planes.items():
            axes = tuple(sorted((axis for axis in plane.extents if axis != "t"), key=ORDER.index))
            sizes = {**plane.extents, "l": self.case.nl, "h": self.case.nh}
            found[name] = axes, tuple(sizes[axis] for axis in axes), plane.dtype
        return found

    def _made(self, sequence: int, length: int) -> dict[str, np.ndarray]:
        """Codes of every plane of the source, of the whole model and sequence: positions, then the axes."""
        rng = np.random.default_rng([self.case.seed, sequence])
        found = {}
        scales = set(self.ranks[0][0].scales.values())
        for name, (_, sizes, dtype) in self._planes(0).items():
            shape = (length, *sizes)
            if name in scales:
                found[name] = casting.scale_codes(rng, dtype, shape)
            elif dtype in PLAIN:
                found[name] = casting.values(rng, dtype, shape)
            else:
                found[name] = rng.integers(0, 1 << casting.width(dtype), shape).astype(np.uint32)
        return found

    def cast(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Codes of every plane of the destination."""
        src, dst = self.ranks[0][0], self.ranks[1][0]
        ours, theirs = self._planes(0), self._planes(1)
        found: dict[str, np.ndarray] = {}
        for one, other in casting.matched(src, dst):
            axes, _, here = ours[one]
            there = theirs[other][2]
            codes = values[one]
            of_src, of_dst = src.scales.get(one), dst.scales.get(other)
            if here == there:
                found[other] = codes
                if of_src and of_dst:
                    found[of_dst] = values[of_src]
                continue
            scaled = of_dst or of_src
            if scaled is None:
                found[other] = np.empty(codes.shape, np.uint32)
                for some, given in casting.each_scale(self.scale, axes, codes.shape, None):
                    found[other][some] = _alone(codes[some], here, there, given)
                continue
            scale_axes, scale_sizes, scale_dtype = (theirs if of_dst else ours)[scaled]
            count = scale_sizes[scale_axes.index("s")] if "s" in scale_axes else 1
            as_plane = casting.Plane(scaled, scale_dtype, dict(zip(scale_axes, scale_sizes, strict=True)))
            number = casting.grouped(np.arange(codes.size).reshape(codes.shape), axes, as_plane, count)
            grouped = codes.reshape(-1)[number]
            made, bits = np.empty(grouped.shape, np.uint32), np.empty(grouped.shape[:-1], np.uint32)
            scale = self.scale if scale_dtype == "float8_e4m3fn" else None
            for some, g in casting.each_scale(scale, scale_axes, grouped.shape, None):
                if of_dst:
                    made[some], bits[some], _ = cast_oracle.quantise(casting.to_float32(grouped[some], here), there, scale_dtype, g)
                else:
                    made[some] = cast_oracle.dequantise(grouped[some], values[scaled][some], here, scale_dtype, there, g)
            if of_dst:
                found[of_dst] = bits
            back = np.empty(number.size, np.uint32)
            back[number] = made
            found[other] = back.reshape(codes.shape)
        assert set(found) == set(theirs)
        return found

    # ---- memory

    def _write(
        self, one: Side, buffer: np.ndarray, side: int, rank: int, told: Told, tokens: Any, values: dict[str, np.ndarray] | None,
        kept: Any = None, layers: range | None = None, slots: Any = None,
    ) -> None:  # fmt: skip
        """Write the values of some positions, or zeros, where a rank holds them."""
        engine = self.case.engines[side]
        if slots is None:
            positions, blocks, at = reshard_oracle.held_in_table(engine, rank, told, tokens.stop)
            use = (positions >= tokens.start) & (blocks >= 0)
            use &= np.ones(positions.size, bool) if kept is None else kept(positions)
        else:
            (blocks, at), positions = slots, np.zeros(len(slots[0]), np.int64)
            use = blocks >= 0
        positions, blocks, at = positions[use], blocks[use], at[use]
        if not positions.size:
            return
        own = {"l": engine.holds_layers(rank), "h": engine.holds_heads(rank, self.case.nh)}
        local = {axis: np.arange(len(some)) for axis, some in own.items()}
        if layers is not None:
            local["l"] = np.array([i for i, layer in enumerate(own["l"]) if layer in layers], np.int64)
        for name, (axes, _, _) in self._planes(side).items():
            extents = [*one.planes[name].extents]
            place = one._grid(name)[blocks]
            place = np.take_along_axis(place, at.reshape([-1, *(1 for _ in extents)]), 1 + extents.index("t"))
            if "l" in extents:
                place = place.take(local["l"], 1 + extents.index("l"))
            if values is None:
                codes = np.zeros(place.shape, np.uint32)
            else:
                codes = values[name][positions]
                for axis in "lh":
                    if axis in axes:
                        codes = codes.take(np.asarray(own[axis])[local[axis]], 1 + axes.index(axis))
                codes = codes.transpose([0, *(1 + axes.index(axis) for axis in extents if axis != "t")])
                codes = np.expand_dims(codes, 1 + extents.index("t"))
            one.write(buffer, name, place, np.broadcast_to(codes, place.shape))

    def after(self) -> list[np.ndarray]:
        """The bytes of every destination rank after the case."""
        found = []
        cast = [self.cast(values) for values in self.values]
        for rank, one in enumerate(self.ranks[1]):
            result = self.scene.sides[1][rank].before.copy()
            for index, (tokens, source, told) in enumerate(self.case.sequences):
                if not len(tokens):
                    continue
                self._write(
                    one, result, 1, rank, told, tokens, cast[index], lambda p, s=source: ~self._is_null(s, p), self.case.layers
                )
                if self.case.clear_tail:
                    slots = reshard_oracle.tail(self.case.dst, rank, told, tokens.stop)
                    self._write(one, result, 1, rank, told, tokens, None, None, self.case.layers, slots)
            found.append(result)
        return found

    _is_null = reshard_oracle.Scene.is_null

    def check(self, read: Callable[[Any], np.ndarray] = np.asarray) -> None:
        for rank, memory in enumerate(self.scene.sides[0]):
            assert np.array_equal(read(self.buffers[0][rank]), memory.before), f"{self.case}: source rank {rank} changed"
        for rank, (one, want) in enumerate(zip(self.ranks[1], self.after(), strict=True)):
            got = read(self.buffers[1][rank])
            assert np.array_equal(got, want), f"{self.case}\n{self.kind}: rank {rank}: {one.explain(got, want)}"

    # ---- one process

    def plans(self, **options: Any) -> list[reshard.Resharding]:
        options = {"cast": self.told, **options}
        if self.case.gather:
            return list(reshard.gather(*self.places, **options))
        return [reshard.plan(*self.places, stripe=self.case.stripe, **options)]

    spans = reshard_oracle.Run.spans

    def local(self, **options: Any) -> list[reshard.Local]:
        return [
            reshard.Local(made, self.pools[0] if number == 0 else self.pools[1], self.pools[1], **options)
            for number, made in enumerate(self.plans())
        ]

    def call(self, steps: list[reshard.Local] | None = None, **options: Any) -> list[Any]:
        src, dst = self.spans(0), self.spans(1)
        return [
            step(src if number == 0 else dst, dst, layers=self.case.layers, clear_tail=self.case.clear_tail, **options)
            for number, step in enumerate(steps or self.local())
        ]

    def count(self) -> list[np.ndarray]:
        """How often each byte of the destination is written: every copy runs alone, twice, over bytes that differ (on the host)."""
        from kvbm.reshard import local

        ranks = {id(pool): rank for rank, pool in enumerate(self.pools[1])}
        counts = [np.zeros(buffer.size, np.int32) for buffer in self.buffers[1]]
        copy = local.Transfer.copy

        def counted(transfer: Any, *args: Any, **rest: Any) -> Any:
            memory = self.buffers[1][ranks[id(transfer._executor.keep[1])]]
            source = self.pools[1].index(transfer._executor.keep[0]) if transfer._executor.keep[0] in self.pools[1] else -1
            held, after = memory.copy(), []
            for fill in (0x55, 0xAA):
                if source < 0:
                    memory[:] = fill
                done = copy(transfer, *args, **rest)
                after.append(memory.copy())
            if source < 0:
                counts[ranks[id(transfer._executor.keep[1])]] += after[0] == after[1]
                memory[:] = np.where(after[0] == after[1], after[0], held)
            return done

        local.Transfer.copy = counted  # type: ignore[assignment, method-assign]
        try:
            self.call()
        finally:
            local.Transfer.copy = copy  # type: ignore[method-assign]
        return counts


def _alone(codes: np.ndarray, here: str, there: str, given: float) -> np.ndarray:
    """A cast with one scale of the caller."""
    if there in QUANTISED:
        return cast_oracle.quantise(casting.to_float32(codes, here), there, None, constant=given)[0]
    if here in QUANTISED:
        return cast_oracle.dequantise(codes, None, here, None, there, constant=given)
    return casting.plain_to_plain(codes, here, there, given)


def _move(one: Side, own: Callable[[np.ndarray], Any]) -> None:
    """Bind a pool of the same bytes in other memory."""
    old, new = one.memory, own(one.before)
    base = old.ctypes.data
    arrays = [
        np.ndarray(array.shape, array.dtype, new, array.ctypes.data - base, array.strides) for array in one.pool.arrays
    ]
    one.memory = new
    one.pool = kvbm.Pool(one.layout, one.shape, arrays)


def on_host(case: Case, kind: Kind) -> None:
    """Run a case in host memory; compare bytes, guards, the source, and the number of writes of each byte."""
    run = CastRun(case, kind)
    run.call()
    run.check()
    want = [after != memory.before for after, memory in zip(run.after(), run.scene.sides[1], strict=True)]
    if not case.gather:
        for got, changed in zip(run.count(), want, strict=True):
            assert got.max(initial=0) <= 1, f"{case}: a byte is written {got.max()} times"
            assert (got[changed] == 1).all(), f"{case}: a byte that changes is not written"


def engine(nt: int, tp: int = 1, pp: int = 1, cp: int = 1, nl: int = 2, every: int = 1) -> Engine:
    mesh = tuple((name, size) for name, size in (("pp", pp), ("cp", cp), ("tp", tp)))
    bounds = tuple(nl * i // pp for i in range(pp + 1))
    return Engine(mesh, ("tp", 1, tp), ("cp", 1, cp) if cp > 1 else None, every, bounds, tuple(range(nl)), nt, ("",))
