"""Messages of a resharding to measure: the sections of both pools, and a check of the copies between them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from kvbm.bench.check import WrongCopyError
from kvbm.bench.measure import Ids, cache_bytes, device_of, random_pool, read
from kvbm.copy.transfer import Strategy, Transfer
from kvbm.layout import spec
from kvbm.layout.shapes import BlockShape, load_shape
from kvbm.planner.plan import between
from kvbm.pool.pool import Pool
from kvbm.pool.section import PoolSection

from .race import Asked

__all__ = ["HND", "NHD", "Bound", "Case", "End", "cases", "strategy_on"]

NHD, HND, V0, MLA = "vllm/flash_attn_nhd", "vllm/flash_attn_hnd", "vllm/paged_attn_v0", "vllm/mla"


# ---- cases ---------------------------------------------------------------------------------------------------------


class End(NamedTuple):
    """One rank's pool, and the selected part of it.

    Attributes
    ----------
    layout : str
    shape : BlockShape
    tokens : int
        Tokens per unit.
    chosen : mapping
        Arguments of `PoolSection.section`.
    """

    layout: str
    shape: BlockShape
    tokens: int
    chosen: Mapping[str, Any] = {}

    def part(self, pool: Pool) -> PoolSection:
        units = pool.units(self.tokens)
        return units.section(**self.chosen) if self.chosen else units

    @property
    def units(self) -> int:
        """Ids per block."""
        return self.shape.nt // self.tokens


class Case(NamedTuple):
    """A message between two ranks, and the required ratio per number of units."""

    name: str
    src: End
    dst: End
    asked: tuple[tuple[int, Asked], ...]


def cases(model: BlockShape, *, is_cpu: bool = False, quick: bool = False) -> tuple[Case, ...]:
    """The messages to measure.  `model` is the shape of the whole model."""

    def rank(tp: int, nt: int) -> BlockShape:
        return replace(model, nh=max(model.nh // tp, 1), nt=nt)

    many, hnd64, nhd16 = rank(2, 64), End(HND, rank(2, 64), 16), rank(4, 16)
    upper, second = {"h": range(many.nh // 2, many.nh)}, {"h": range(1, 2)}
    one = End(NHD, rank(8, 16), 16)
    latent = replace(load_shape("deepseek-v3"), nl=min(model.nl, 61), hd=min(4 * model.hd + 64, 576), nt=64)
    batches = (64,) if quick else (16, 64, 256)
    reach = ((64, 0.9), (256, 0.9)) if is_cpu else ((16, None), (64, 0.90), (256, 0.95))
    found = [
        Case("tp 4 → 2, nt 16 → 64, NHD → HND", End(NHD, nhd16, 16), hnd64._replace(chosen=upper), reach),
        Case("tp 8 → 2, one head, nt 16 → 64", one, hnd64._replace(chosen=second), ((64, 0.88), (256, 0.93))),
        Case("tp 2 → 8, one head of four, nt 64 → 16", hnd64._replace(chosen=second), one, ((64, None), (256, None))),
        Case("nt 48 → 32, NHD → HND", End(NHD, rank(4, 48), 16), End(HND, rank(4, 32), 16), ((64, None), (256, 0.90))),
        Case("nt 64 → 16, HND → NHD", End(HND, rank(4, 64), 16), End(NHD, nhd16, 16), ((64, None), (256, 0.95))),
        Case(
            "MLA DCP 1 → 4, interleave 1, nt 64",
            End(MLA, latent, 64, {"t": range(1, 64, 4)}),
            End(MLA, latent, 16),
            ((299, 0.90),),  # units of 16 rows in each of 61 layers: 336 MB
        ),
        Case(
            "K only, NHD → HND, nt 16",
            End(NHD, nhd16, 16, {"o": 0}),
            End(HND, nhd16, 16, {"o": 0}),
            ((64, None), (256, None)),
        ),
        Case("unit 4, NHD → HND", End(NHD, rank(4, 4), 4), End(HND, rank(4, 64), 4), _none(4, batches)),
        Case("unit 1, nt 5 → 7, NHD → HND", End(NHD, rank(4, 5), 1), End(HND, rank(4, 7), 1), _none(16, batches)),
        Case("paged_attn_v0 nt 64 → NHD nt 16", End(V0, rank(4, 64), 16), End(NHD, nhd16, 16), _none(1, (64, 256))),
    ]
    if is_cpu:  # the required ratios of a GPU do not apply to the CPU
        found[1:] = [] if quick else [case._replace(asked=_none(1, [n for n, _ in case.asked])) for case in found[1:]]
    return tuple(found)


def _none(times: int, batches: Sequence[int]) -> tuple[tuple[int, Asked], ...]:
    return tuple((times * n, None) for n in batches)


# ---- pairs of pools ------------------------------------------------------------------------------------------------


class Bound:
    """Two pools of random bytes, the sections of a case, and the plan and transfer between them."""

    def __init__(self, case: Case, places: tuple[str, str], largest: int, stack: contextlib.ExitStack) -> None:
        self.case, self.places = case, places
        self.pools = [
            stack.enter_context(random_pool(spec.load(end.layout), end.shape, _held(end, largest, place), place, seed=seed))
            for seed, (end, place) in enumerate(zip((case.src, case.dst), places, strict=True), 1)
        ]  # fmt: skip
        src, dst = (end.part(pool) for end, pool in zip((case.src, case.dst), self.pools, strict=True))
        self.sections = [src.of, dst.of]
        self.plan = between(src.of, dst.of, case.name)
        self.move = stack.enter_context(Transfer(src, dst, strategy_on(places[0])))

    def ids(self, n: int) -> list[tuple[Any, Any]]:
        src, dst = self.sections
        return Ids(src.num_ids, dst.num_ids, n, Ids.for_cache(n * self.plan.nbytes, self.places[0])).sets

    def check(self, copy: Callable[[Any, Any], object], n: int, by: str) -> None:
        """Copy once, and check elements of the whole destination: those that must arrive and those that must not change.

        Raises
        ------
        WrongCopyError
            A byte differs.
        """
        random = np.random.default_rng(n)
        src_ids, dst_ids = (random.permutation(section.num_ids)[:n].astype(np.int32) for section in self.sections)
        dst, end, count = self.pools[1], self.case.dst, 20_000
        at = {
            axis: random.integers(size, size=count)
            for axis, size in dst.resolved.sizes.items()
            if axis not in ("b", "t")
        }
        unit = random.integers(self.sections[1].num_ids, size=count)
        unit[::2] = random.choice(dst_ids, size=unit[::2].size)  # half of the samples are in units that are written
        token = random.integers(end.tokens, size=count)
        pair = np.full(self.sections[1].num_ids, -1)
        pair[dst_ids] = np.arange(n)
        where = {"unit": unit, "t": token, **at}
        theirs, arrives = {"unit": src_ids[pair[unit]].astype(np.int64), "t": token, **at}, pair[unit] >= 0
        for axis in {*self.case.src.chosen, *end.chosen}:
            size = dst.resolved.sizes if axis != "t" else {"t": end.tokens}
            here = _coordinates(end.chosen.get(axis, range(size[axis])))
            there = _coordinates(self.case.src.chosen.get(axis, range(len(here))))
            known = np.full(size[axis], -1)
            known[here] = there
            theirs[axis] = known[where[axis]]
            arrives &= theirs[axis] >= 0
            theirs[axis] = np.maximum(theirs[axis], 0)
        want = np.where(arrives[:, None], self._elements(0, theirs), self._elements(1, where))
        copy(src_ids, dst_ids)
        wrong = np.flatnonzero((self._elements(1, where) != want).any(axis=1))
        if wrong.size:
            first = int(wrong[0])
            place = " ".join(f"{axis}={int(values[first])}" for axis, values in where.items())
            what = "was to arrive" if arrives[first] else "was to stay"
            raise WrongCopyError(f"{self.case.name} by {by}: wrong at {place}, which {what} ({wrong.size} of {count})")

    def _elements(self, side: int, at: Mapping[str, Any]) -> Any:
        """Elements of a pool, ``(count, itemsize)``."""
        pool, end = self.pools[side], (self.case.src, self.case.dst)[side]
        inside = {axis: values for axis, values in at.items() if axis not in ("unit", "o")}
        inside["t"] = at["unit"] % end.units * end.tokens + at["t"]
        halves = at.get("o", np.zeros_like(at["unit"]))
        where = np.empty_like(at["unit"])
        for o in np.unique(halves):  # K and V may have different orders
            own = halves == o
            fixed = {"o": int(o)} if "o" in at else {}
            block, here = at["unit"][own] // end.units, {axis: values[own] for axis, values in inside.items()}
            entry, offset = pool.resolved.address(block, **here, **fixed)
            where[own] = pool.addresses.astype(np.int64)[np.asarray(entry)] + np.asarray(offset)
        itemsize = pool.shape.itemsize
        return read(device_of(pool.device), where, np.full(where.size, itemsize, np.int64)).reshape(-1, itemsize)


def strategy_on(place: str) -> Strategy:
    """The measured strategy: on a GPU the kernel, without tuning."""
    return "direct" if device_of(place) >= 0 else "auto"


def _coordinates(given: Any) -> list[int]:
    return [given] if isinstance(given, int) else list(given)


def _held(end: End, largest: int, place: str) -> int:
    """Number of blocks for twice the units of the largest batch, and for more than the cache."""
    block = spec.load(end.layout).resolve(end.shape, 1).block_bytes
    return max(-(-2 * largest // end.units), -(-2 * cache_bytes(place) // block))
