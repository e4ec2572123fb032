"""The expected value of every byte after a resharding, from a rule of two lines per axis: which rank holds a token, head, layer.

It shares no code with kvbm's placements, plans and sequences.  A rank's coordinates are counted digit by digit.  What it holds is
filtered from all coordinates.  A token's slot is the number of tokens held before it.  `oracle` and `plane_oracle` give the places
of elements in memory.  An element's bytes are a hash of the model's coordinate, on whichever rank; all other bytes are noise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np

import matrix
import oracle
import plane_oracle

# ---- who holds what --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """An engine's placement of the cache on its ranks, and the layouts that its ranks use in turns.

    Attributes
    ----------
    mesh : tuple of (str, int)
        Slowest axis first.
    heads, tokens : (axis of the mesh, divisor, ranks) or None
        ``(place // divisor) % ranks`` is the share that a rank holds.
    every : int
        Consecutive tokens of one rank.
    bounds : tuple of int
        The first layer of each stage of ``pp``, and the number of layers.
    group : tuple of int
        The layers of the model that the pools hold.
    """

    mesh: tuple[tuple[str, int], ...]
    heads: tuple[str, int, int] | None
    tokens: tuple[str, int, int] | None
    every: int
    bounds: tuple[int, ...]
    group: tuple[int, ...]
    nt: int
    layouts: tuple[str, ...]

    @property
    def world(self) -> int:
        return int(np.prod([size for _, size in self.mesh]))

    def _share(self, rank: int, digit: tuple[str, int, int] | None) -> tuple[int, int]:
        if digit is None:
            return 0, 1
        place = dict(zip((a for a, _ in self.mesh), np.unravel_index(rank, [n for _, n in self.mesh]), strict=True))
        return int(place[digit[0]]) // digit[1] % digit[2], digit[2]

    def holds_layers(self, rank: int) -> list[int]:
        stage, _ = self._share(rank, ("pp", 1, len(self.bounds) - 1) if len(self.bounds) > 2 else None)
        return [layer for layer in self.group if self.bounds[stage] <= layer < self.bounds[stage + 1]]

    def holds_heads(self, rank: int, nh: int) -> list[int]:
        share, of = self._share(rank, self.heads)
        return [h for h in range(nh) if (h * of // nh == share if of <= nh else share * nh // of == h)]

    def holds_tokens(self, rank: int, positions: np.ndarray) -> np.ndarray:
        share, of = self._share(rank, self.tokens)
        return positions // self.every % of == share

    def layout(self, rank: int) -> str:
        return self.layouts[rank % len(self.layouts)]

    def placement(self, model: Any, name: str) -> Any:
        """The same as an argument for kvbm."""
        import kvbm

        shard: dict[str, Any] = {}
        if self.heads:
            shard["h"] = self._text(self.heads)
        if self.tokens:
            shard["t"] = f"{self._text(self.tokens)} by {self.every}"
        if len(self.bounds) > 2:
            shard["l"] = {"over": "pp", "bounds": list(self.bounds)}
        group = None if len(self.group) == self.bounds[-1] else self.group
        return kvbm.Placement(dict(self.mesh), shard=shard, model=model, nt=self.nt, layers=group, name=name)

    def _text(self, digit: tuple[str, int, int]) -> str:
        axis, divisor, of = digit
        rest = dict(self.mesh)[axis] // divisor
        return axis + (f"/{divisor}" if divisor > 1 else "") + (f"%{of}" if rest != of else "")


@dataclass(frozen=True)
class Told:
    """A sequence on one side: a block table per rank, and the position at which it begins."""

    tables: tuple[tuple[int, ...], ...]
    origins: tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One call: the model, both engines, sequences as (tokens, source, destination), and options."""

    seed: int
    nl: int
    no: int
    nh: int
    hd: int
    dtype: str
    src: Engine
    dst: Engine
    sequences: tuple[tuple[range, Told, Told], ...]
    blocks: tuple[int, int]
    layers: range | None
    clear_tail: bool
    stripe: bool
    gather: bool
    prefer: int | None
    align: tuple[int, int]

    @property
    def engines(self) -> tuple[Engine, Engine]:
        return self.src, self.dst


# ---- memory ----------------------------------------------------------------------------------------------------------


@dataclass
class Memory:
    """A rank's pool in a guarded buffer, with the places of every plane's items by block, slot, and the other axes."""

    arena: Any
    planes: dict[str, tuple[tuple[str, ...], dict[str, np.ndarray], int, np.ndarray]]
    before: np.ndarray


def memory_of(case: Case, side: int, rank: int) -> Memory:
    engine, blocks = case.engines[side], case.blocks[side]
    name, align = engine.layout(rank), case.align[side]
    sizes = len(engine.holds_layers(rank)), case.no, len(engine.holds_heads(rank, case.nh)), engine.nt, case.hd
    how = ("steps", "rows", "scattered")[(case.seed + rank) % 3]
    arena, planes = _placed(name, sizes, case.dtype, blocks, align, how)
    return Memory(arena, planes, oracle.noise(arena.nbytes, 5000 + 100 * case.seed + 10 * rank + side))


@cache
def _placed(
    name: str, sizes: tuple[int, ...], dtype: str, blocks: int, align: int, how: str
) -> tuple[Any, dict[str, Any]]:
    planes: dict[str, tuple[tuple[str, ...], dict[str, np.ndarray], int, np.ndarray]] = {}
    ids = np.arange(blocks)
    if name in plane_oracle.TABLE:
        arena: Any = plane_oracle.held(name, (*sizes, dtype), blocks).arena(align, how)
        for plane in arena.placed.planes:
            planes[plane.name] = _by_slot(["b", *plane.extents], plane.items(), plane.itemsize, arena.of(plane, ids))
        return arena, planes
    itemsize, pack = plane_oracle.ITEMS[dtype]
    axes = dict(zip("lohtd", (*sizes[:4], sizes[4] // pack), strict=True))
    arena = oracle.Placed(matrix.orders()[name], axes, itemsize, blocks).layout_bytes(align, how)
    items = {a: np.arange(n) * (pack if a == "d" else 1) for a, n in axes.items()}
    planes[""] = _by_slot([*"blohtd"], items, itemsize, arena.positions(ids))
    return arena, planes


def _by_slot(axes: list[str], items: dict[str, np.ndarray], itemsize: int, at: np.ndarray) -> Any:
    others = tuple(sorted(axis for axis in axes if axis not in "bt"))
    return others, items, itemsize, at.transpose([axes.index(axis) for axis in ("b", "t", *others)])


def values(case: Case, plane: str, others: Sequence[str], grid: Sequence[np.ndarray], itemsize: int) -> np.ndarray:
    """Bytes of the items at these coordinates of the model; sequence and position come first."""
    key: Any = np.uint64(case.seed * 1000 + sum(map(ord, plane)))
    for axis, coordinates in zip(("sequence", "position", *others), grid, strict=True):
        key = oracle.mix(np.asarray(key ^ (coordinates.astype(np.uint64) + np.uint64(sum(map(ord, axis)) << 40))))
    words = np.ascontiguousarray(key)
    return words.view(np.uint8).reshape(*words.shape, 8)[..., :itemsize]


def held(engine: Engine, rank: int, told: Told, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Positions that a rank holds, from the table's first one; the block of each (-1: none) and its slot there."""
    positions = np.arange(told.origins[rank], stop)
    positions = positions[engine.holds_tokens(rank, positions)]
    slots = np.arange(positions.size)
    return positions, np.asarray(told.tables[rank], np.int64)[slots // engine.nt], slots % engine.nt


def tail(engine: Engine, rank: int, told: Told, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Block and slot of every place behind a rank's last token, in the blocks of its table in which any rank has a token."""
    positions = np.arange(told.origins[rank], stop)
    counts = [int(engine.holds_tokens(other, positions).sum()) for other in range(engine.world)]
    places = [(entry, slot) for entry in range(len(told.tables[rank])) for slot in range(engine.nt)]
    used = {count // engine.nt if count % engine.nt else count // engine.nt - 1 for count in counts}
    rest = [(told.tables[rank][entry], slot) for entry, slot in places[counts[rank] :] if entry <= max(used)]
    return np.array([block for block, _ in rest], np.int64), np.array([slot for _, slot in rest], np.int64)


class Scene:
    """The memory of all ranks before and after a case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.sides = tuple([memory_of(case, side, rank) for rank in range(case.engines[side].world)] for side in (0, 1))
        for rank, memory in enumerate(self.sides[0]):
            for index, (tokens, told, _) in enumerate(case.sequences):
                # All of the table's slots hold tokens, also those behind the range: taken by mistake they are seen.
                slots = len(told.tables[rank]) * case.src.nt
                stop = max(tokens.stop, told.origins[rank] + slots * (case.src.tokens[2] if case.src.tokens else 1))
                positions, blocks, at = held_in_table(case.src, rank, told, stop)
                self._write(memory.before, 0, rank, index, positions, blocks, at)

    @cached_property
    def after(self) -> list[np.ndarray]:
        return self._after()[0]

    @cached_property
    def writes(self) -> list[np.ndarray]:
        """How often every byte of each destination pool must be written: once, or not."""
        return self._after()[1]

    @cache  # noqa: B019  (a scene lives as long as its case)
    def _after(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        case = self.case
        made, counts = [], []
        for rank, memory in enumerate(self.sides[1]):
            result, count = memory.before.copy(), np.zeros(memory.before.size, np.int32)
            for index, (tokens, source, told) in enumerate(case.sequences):
                if not len(tokens):
                    continue
                positions, blocks, at = held(case.dst, rank, told, tokens.stop)
                kept = (positions >= tokens.start) & (blocks >= 0) & ~self.is_null(source, positions)
                self._write(result, 1, rank, index, positions[kept], blocks[kept], at[kept], case.layers, count)
                if case.clear_tail:
                    ids, slots = tail(case.dst, rank, told, tokens.stop)
                    self._write(result, 1, rank, -1, slots, ids, slots, case.layers, count)
            made.append(result)
            counts.append(count)
        return made, counts

    def is_null(self, told: Told, positions: np.ndarray) -> np.ndarray:
        """True if the source has no block for a position; all its ranks agree."""
        found = np.zeros(positions.size, bool)
        for rank in range(self.case.src.world):
            if not positions.size:
                break
            ours, blocks, _ = held(self.case.src, rank, told, int(positions.max()) + 1)
            found |= np.isin(positions, ours[blocks < 0])
        return found

    def _write(
        self,
        buffer: np.ndarray,
        side: int,
        rank: int,
        index: int,
        positions: np.ndarray,
        blocks: np.ndarray,
        at: np.ndarray,
        layers: range | None = None,
        count: np.ndarray | None = None,
    ) -> None:
        engine, memory = self.case.engines[side], self.sides[side][rank]
        kept = blocks >= 0
        positions, blocks, at = positions[kept], blocks[kept], at[kept]
        own = engine.holds_layers(rank)
        mine = [i for i, layer in enumerate(own) if layers is None or layer in layers]
        for plane, (others, items, itemsize, where) in memory.planes.items():
            place = where[blocks, at]
            coordinates = {**items, "l": np.asarray(own), "h": np.asarray(engine.holds_heads(rank, self.case.nh))}
            grid = [np.asarray([index]), positions, *(coordinates[axis] for axis in others)]
            if "l" in others:
                axis = others.index("l")
                place = np.take(place, mine, axis=1 + axis)
                grid[2 + axis] = grid[2 + axis][mine]
            data = values(self.case, plane, others, np.ix_(*grid), itemsize)[0]
            if index < 0:
                data = np.zeros_like(data)
            oracle.scatter(buffer, place, data)
            if count is not None:
                for k in range(itemsize):
                    count[place + k] += 1


@lru_cache(maxsize=64)
def _scene(case: Case) -> Scene:
    """Nobody writes into the memory of a scene."""
    return Scene(case)


def held_in_table(engine: Engine, rank: int, told: Told, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `held`, up to the end of the table."""
    positions = np.arange(told.origins[rank], stop)
    positions = positions[engine.holds_tokens(rank, positions)][: len(told.tables[rank]) * engine.nt]
    slots = np.arange(positions.size)
    return positions, np.asarray(told.tables[rank], np.int64)[slots // engine.nt], slots % engine.nt


# ---- cases by chance -------------------------------------------------------------------------------------------------

_WIDTHS = ("int8", "float8_e4m3fn", "bfloat16", "float16", "float32", "int4")


@cache
def _plain(no: int, nh: int, hd: int, dtype: str) -> tuple[str, ...]:
    """Layouts of one plane for the model's heads; opaque groups have separate tests."""
    found = []
    for name in matrix.everyone():
        order = matrix.orders()[name]
        if order.opaque or matrix.scales(name) or (matrix.latent(name) and (no, nh) != (1, 1)):
            continue
        if dtype in oracle.PAIRED and not all(
            text.split()[-1] == "d" and text.count("d") == 1 for text in filter(None, (order.k, order.v))
        ):
            continue
        found.append(name)
    return tuple(found)


def _legal(name: str, case: Case, engine: Engine, rank: int) -> bool:
    sizes = len(engine.holds_layers(rank)), case.no, len(engine.holds_heads(rank, case.nh)), engine.nt, case.hd
    if name in plane_oracle.TABLE:
        return engine.nt % 4 == 0 if name == "vllm/nvfp4" else engine.nt == 128 if name == "sglang/mxfp8" else True
    itemsize, pack = plane_oracle.ITEMS[case.dtype]
    return matrix.legal(name, (*sizes[:4], sizes[4] // pack), itemsize)


def random_engine(rng: random.Random, nl: int, nh: int, group: tuple[int, ...], most: int, nt: int) -> Engine:
    while True:
        sizes = {
            "pp": rng.choice([1, 1, 2, 3]),
            "cp": rng.choice([1, 1, 1, 2, 3, 4]),
            "tp": rng.choice([1, 2, 3, 4, 6, 8]),
        }
        if sizes["pp"] > nl or np.prod(list(sizes.values())) > most:
            continue
        mesh = tuple(rng.sample(list(sizes.items()), 3))
        kind, tokens, heads = rng.random(), None, None
        inside = rng.choice([k for k in (1, 2, 3, 4) if sizes["tp"] % k == 0]) if kind < 0.4 else 1
        of = sizes["tp"] // inside
        if (nh % of == 0 or of % nh == 0) and rng.random() < 0.9:
            heads = ("tp", inside, of)
        if inside > 1 and rng.random() < 0.9:
            tokens = ("tp", 1, inside)
        elif sizes["cp"] > 1 and rng.random() < 0.85:
            tokens = ("cp", 1, sizes["cp"])
        every = rng.choice([e for e in (1, 2, 4, nt, 2 * nt, nt // 2, nt // 3) if e and (e % nt == 0 or nt % e == 0)])
        cuts = sorted(rng.sample(range(1, nl), sizes["pp"] - 1)) if rng.random() < 0.85 else []
        bounds = (0, *cuts, nl) if sizes["pp"] > 1 and cuts else (0, nl)
        made = Engine(mesh, heads, tokens, every if tokens else 1, bounds, group, nt, ())
        if all(made.holds_layers(rank) for rank in range(made.world)):
            return made


_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 16, 16, 24, 32, 32, 48, 64)


def random_case(seed: int, most_ranks: int = 8, planar: float = 0.25) -> Case:
    rng = random.Random(seed)
    is_planar = rng.random() < planar
    # Equal, multiples, and sizes that do not divide each other.
    small = rng.choice(_SIZES)
    nts = [small, rng.choice([small, 2 * small, 4 * small, rng.choice(_SIZES), rng.choice(_SIZES)])]
    nts = [min(nt, 64) for nt in rng.sample(nts, 2)]
    nl = rng.randrange(1, 6)
    names: Sequence[str]
    if is_planar:
        family = rng.choice([name for name in plane_oracle.FAMILIES if name != "mxfp8"])
        shape = plane_oracle.FAMILIES[family].shapes[0]
        no, nh, hd, dtype = shape[1], shape[2], shape[4], shape[5]
        if nh > 1:
            no, nh = (2 if family == "nvfp4" else no), rng.choice([1, 2, 3, 4])
        nl = min(nl, 3)
        names = [name for name, formula in plane_oracle.TABLE.items() if formula.family == family]
    else:
        dtype = rng.choice(_WIDTHS)
        no, nh = rng.choice([(1, 1), (2, 1), (2, 2), (2, 3), (2, 4), (2, 6), (1, 4)])
        hd = rng.choice([4, 8, 16, 32]) * (2 if dtype in oracle.PAIRED else 1)
        names = _plain(no, nh, hd, dtype)
    group = tuple(range(nl))
    if nl > 2 and rng.random() < 0.2:
        group = tuple(sorted(rng.sample(range(nl), rng.randrange(1, nl))))
    engines = [random_engine(rng, nl, nh, group, most_ranks, nt) for nt in nts]
    gather = rng.random() < 0.2
    case = Case(
        seed, nl, no, nh, hd, dtype, engines[0], engines[1], (), (1, 1),
        layers=None, clear_tail=rng.random() < 0.25, stripe=not gather and rng.random() < 0.3, gather=gather,
        prefer=rng.randrange(100) if rng.random() < 0.1 else None, align=(rng.choice([0, 4, 16]), rng.choice([0, 8])),
    )  # fmt: skip
    if rng.random() < 0.25:
        first = rng.randrange(nl)
        case = replace(case, layers=range(first, rng.randrange(first + 1, nl + 1)))
    chosen = []
    for engine in engines:
        fits = [name for name in names if all(_legal(name, case, engine, rank) for rank in range(engine.world))]
        if not fits:
            return random_case(seed + 10**6, most_ranks, planar)
        some = [rng.choice(fits) for _ in range(rng.choice([1, 1, 1, 2]))]
        # Its pairs of tokens cannot be divided: a range that begins within one is refused.
        some = ["vllm/cpu_vec" if name == "vllm/cpu_amx" else name for name in some]
        chosen.append(replace(engine, layouts=tuple(some)))
    case = replace(case, src=chosen[0], dst=chosen[1])
    return _with_sequences(case, rng, 40 if is_planar else rng.choice([20, 130, 200]))


def _with_sequences(case: Case, rng: random.Random, length: int) -> Case:
    ranges = []
    for _ in range(rng.choice([1, 1, 2, 3])):
        first = rng.choice([0, 0, rng.randrange(length)])
        ranges.append(range(first, first + rng.choice([0, 1, rng.randrange(length), rng.randrange(length)])))
    sides, blocks = [], []
    for side, engine in enumerate(case.engines):
        period = engine.every * (engine.tokens[2] if engine.tokens else 1)
        period = 1 if not engine.tokens or engine.tokens[2] == 1 else period
        many = not case.gather and rng.random() < 0.2  # another origin on every rank
        nulls = side == 1 or not (many or case.gather)
        used, told = [0] * engine.world, []
        spare = [list(range(2000))] * engine.world
        alike = rng.random() < 0.3
        for tokens in ranges:
            kind = rng.random()
            origin = 0 if kind < 0.6 else tokens.start // period * period if kind < 0.8 else (
                rng.randrange(tokens.start // period + 1) * period
            )  # fmt: skip
            origins = [
                rng.randrange(tokens.start // period + 1) * period if many else origin for _ in range(engine.world)
            ]
            lengths = []
            for rank in range(engine.world):
                own = engine.holds_tokens(rank, np.arange(origins[rank], tokens.stop)).sum() if len(tokens) else 0
                lengths.append(-(-int(own) // engine.nt) + rng.choice([0, 0, 0, 1]))
            empty = (
                {i for i in range(max(lengths, default=0)) if rng.random() < 0.15}
                if nulls and rng.random() < 0.4
                else set()
            )
            tables = []
            for rank, entries in enumerate(lengths):
                entries = max(lengths) if alike else entries
                source = spare[0] if alike else spare[rank]
                ids = source[used[rank] : used[rank] + entries]
                used[rank] += entries
                tables.append(tuple(-1 if i in empty else block for i, block in enumerate(ids)))
            told.append(Told(tuple(tables), tuple(origins)))
        # As many blocks as there must be: ids count through those that are used, in an order by chance.
        count = max(used) + rng.choice([0, 1, 3])
        count = max(count, 1)
        numbers = [
            _numbers(rng if not alike else random.Random(case.seed), told, rank, count, alike)
            for rank in range(engine.world)
        ]
        told = [
            Told(tuple(tuple(numbers[r].get(b, -1) for b in table) for r, table in enumerate(t.tables)), t.origins)
            for t in told
        ]
        sides.append(told)
        blocks.append(count)
    sequences = tuple((tokens, s, d) for tokens, s, d in zip(ranges, *sides, strict=True))
    return replace(case, sequences=sequences, blocks=(blocks[0], blocks[1]))


def _numbers(rng: random.Random, told: Sequence[Told], rank: int, count: int, alike: bool) -> dict[int, int]:
    used = [b for t in told for b in t.tables[0 if alike else rank] if b >= 0]
    if alike:
        used = sorted({b for t in told for table in t.tables for b in table if b >= 0})
    return dict(zip(used, rng.sample(range(count), len(used)), strict=True))


# ---- carried out -----------------------------------------------------------------------------------------------------


class RefusedError(Exception):
    """kvbm refuses to plan this pair of layouts, with a reason."""


#: Makes arrays of a rank's memory: of (arena, buffer, dtype).  Buffers are what `fill` returns for bytes.
Arrays = Callable[[Any, Any, str], list[Any]]


def host_arrays(arena: Any, buffer: np.ndarray, dtype: str) -> list[Any]:
    if isinstance(arena, plane_oracle.Arena):
        return [
            np.ndarray(tensor.shape, _numpy(tensor.dtype), buffer, base)
            for tensor, base in zip(arena.placed.tensors, arena.bases, strict=True)
        ]
    from memory import numpy_views

    return numpy_views(arena, buffer, "uint8" if dtype in oracle.PAIRED else dtype)


def _numpy(dtype: str) -> Any:
    from memory import numpy_dtype

    return np.dtype("uint8") if dtype in oracle.PAIRED else numpy_dtype(dtype)


class Run:
    """A case with its pools."""

    def __init__(
        self, case: Case, fill: Callable[[np.ndarray], Any], arrays: Arrays, pinned: tuple[bool, bool] = (False, False)
    ) -> None:
        import kvbm
        from kvbm import reshard

        self.case, self.scene = case, _scene(case)
        model = kvbm.BlockShape(case.nl, case.no, case.nh, 4, case.hd, case.dtype)
        self.places = [engine.placement(model, name) for engine, name in zip(case.engines, ("src", "dst"), strict=True)]
        self.buffers = [[fill(memory.before) for memory in side] for side in self.scene.sides]
        self.pools = [
            [
                kvbm.Pool(
                    kvbm.load(case.engines[side].layout(rank)),
                    self.places[side].shape(rank),
                    (host_arrays if pinned[side] else arrays)(memory.arena, self.buffers[side][rank], case.dtype),
                    num_blocks=case.blocks[side],
                )
                for rank, memory in enumerate(self.scene.sides[side])
            ]
            for side in (0, 1)
        ]
        for pool in (pool for side in (0, 1) if pinned[side] for pool in self.pools[side]):
            pool.pin()
        options: dict[str, Any] = {}
        if case.prefer is not None:
            options["prefer"] = lambda rank, ranks: ranks[(rank * 7 + case.prefer) % len(ranks)]
        if case.gather:
            self.plans = list(reshard.gather(*self.places, **options))
        else:
            self.plans = [reshard.plan(*self.places, stripe=case.stripe, **options)]

    @cached_property
    def steps(self) -> list[Any]:
        """One copy after the other, which the ranks of links do not make."""
        import kvbm
        from kvbm import reshard

        try:
            return [
                reshard.Local(made, self.pools[0] if number == 0 else self.pools[1], self.pools[1])
                for number, made in enumerate(self.plans)
            ]
        except kvbm.PlanError as error:
            raise RefusedError(str(error)) from None

    def spans(self, side: int) -> Any:
        import kvbm

        case = self.case
        made = [
            [
                kvbm.Span(told.tables[rank], tokens, told.origins[rank])
                for tokens, *sides in case.sequences
                for told in [sides[side]]
            ]
            for rank in range(case.engines[side].world)
        ]
        if len(case.sequences) == 1:
            told = case.sequences[0][1 + side]
            return (
                made[0][0] if len(set(zip(told.tables, told.origins, strict=True))) == 1 else [one for (one,) in made]
            )
        return made

    def call(self, **options: Any) -> list[Any]:
        import kvbm

        src, dst = self.spans(0), self.spans(1)
        done = []
        for number, step in enumerate(self.steps):
            try:
                done.append(
                    step(
                        src if number == 0 else dst,
                        dst,
                        layers=self.case.layers,
                        clear_tail=self.case.clear_tail,
                        **options,
                    )
                )
            except kvbm.PlanError as error:
                raise RefusedError(str(error)) from None
        return done

    def check(self, read: Callable[[Any], np.ndarray]) -> None:
        for rank, memory in enumerate(self.scene.sides[0]):
            assert np.array_equal(read(self.buffers[0][rank]), memory.before), (
                f"{self.case}: source rank {rank} changed"
            )
        for rank, want in enumerate(self.scene.after):
            got = read(self.buffers[1][rank])
            if not np.array_equal(got, want):
                wrong = np.flatnonzero(got != want)
                old = (got == self.scene.sides[1][rank].before)[wrong].sum()
                raise AssertionError(
                    f"{self.case}:\ndestination rank {rank}: {wrong.size} bytes differ ({old} of them unwritten), first "
                    f"{where(self.scene.sides[1][rank], int(wrong[0]))}"
                )

    def count(self) -> list[np.ndarray]:
        """How often each byte of the destination is written: every copy runs alone, into bytes that it changes (on the host)."""
        from kvbm.reshard import local

        known = {
            id(pool): buffer
            for side in (0, 1)
            for pool, buffer in zip(self.pools[side], self.buffers[side], strict=True)
        }
        ranks = {id(pool): rank for rank, pool in enumerate(self.pools[1])}
        counts = [np.zeros(buffer.size, np.int32) for buffer in self.buffers[1]]
        copy = local.Transfer.copy

        def counted(transfer: Any, *args: Any, **rest: Any) -> Any:
            src, dst = transfer._executor.keep
            source = known.get(id(src))  # zeros behind the last token are of a pool that is nobody's
            known[id(dst)][:] = 0 if source is not None else 1
            if source is not None:
                source[:] = 1
            done = copy(transfer, *args, **rest)
            counts[ranks[id(dst)]] += known[id(dst)] == (1 if source is not None else 0)
            return done

        local.Transfer.copy = counted  # type: ignore[assignment, method-assign]
        try:
            self.call()
        finally:
            local.Transfer.copy = copy  # type: ignore[method-assign]
        return counts


def where(memory: Memory, byte: int) -> str:
    """The coordinate of the rank at a byte."""
    for plane, (others, _, itemsize, at) in memory.planes.items():
        found = np.argwhere((at <= byte) & (byte < at + itemsize))
        if found.size:
            return f"{plane} " + ", ".join(
                f"{a}={c}" for a, c in zip(("b", "t", *others), found[0].tolist(), strict=True)
            )
    return f"byte {byte}: guard or padding"


def on_host(case: Case) -> None:
    """Run a case in host memory; compare bytes, guards, the source, and the number of writes of each byte."""
    from memory import aligned

    run = Run(case, aligned, host_arrays)
    run.call()
    run.check(np.asarray)
    for rank, (got, want) in enumerate(zip(run.count(), run.scene.writes, strict=True)):
        assert np.array_equal(got, want), (
            f"{case}: destination rank {rank}: writes {np.unique(got)}, expected {np.unique(want)}"
        )
