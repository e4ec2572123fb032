"""The matrix of conversions: the cases that run, chosen in the same way on every machine.

A case is a pair of layouts, a dtype, sizes, a batch and two alignments.  The full product is far too large.  So the
default run covers every *pair of values* that matters (every layout pair with every width, with every batch and with
every kind of shape; every dtype with every batch, every alignment, …).  The marker `full` runs everything.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from oracle import AXES, ITEMSIZE, IllegalError, Order, Placed, copyable, parse_order, read_yaml

LAYOUTS = Path(__file__).resolve().parents[2] / "layouts"

# What the design says is shipped, written down a second time: a slip in a YAML file is then a failing test.
SHIPPED = {
    "nhd": Order("[b l o] t h d"),
    "hnd": Order("[b l o] h t d"),
    "operational": Order("[b] l o {t h d}"),
    "operational_nhd": Order("[b] l o t h d"),
    "operational_hnd": Order("[b] l o h t d"),
    "universal": Order("[b] h l o t d"),
    "vllm/flash_attn_nhd": Order("[l] o b t h d"),
    "vllm/LBHNC": Order("l b h t o d"),
    "vllm/LBNHC": Order("l b t h o d"),
    "vllm/LHBNC": Order("l h b t o d"),
    "vllm/BLHNC": Order("b l h t o d"),
    "vllm/BLNHC": Order("b l t h o d"),
    "vllm/BHLNC": Order("b h l t o d"),
    "vllm/paged_attn_v0": Order("[l o] b h d/16B t d%16B", "[l o] b h d t"),
    "hf/dynamic_cache": Order("[l o] h b t d"),
}


def _files_with(key: str) -> tuple[str, ...]:
    """Names of the shipped layouts whose file has a key."""
    files = sorted(path for path in LAYOUTS.rglob("*.yaml") if path.relative_to(LAYOUTS).parts[0] not in ("shapes", "placements"))
    has = re.compile(rf"^{key}:", re.MULTILINE)
    return tuple(f.relative_to(LAYOUTS).with_suffix("").as_posix() for f in files if has.search(f.read_text("utf-8")))


@cache
def planar() -> tuple[str, ...]:
    """Layouts of several planes, which are tested in test_planes."""
    return _files_with("planes")


@cache
def padded() -> tuple[str, ...]:
    """Layouts with a pitch, which the oracle takes only as numbers: test_catalogue says where their elements are."""
    return tuple(name for name in _files_with("pitch") if name not in planar())


@cache
def orders() -> dict[str, Order]:
    """Every shipped layout: those above, and all others in layouts/."""
    found = dict(SHIPPED)
    for path in sorted(LAYOUTS.rglob("*.yaml")):
        name = path.relative_to(LAYOUTS).with_suffix("").as_posix()
        if not name.startswith("shapes/") and name not in found and name not in padded() and name not in planar():
            found[name] = read_yaml(path, name)
    return found


@cache
def further() -> tuple[str, ...]:
    """One name for each order of the catalogue that is not above; the others are equal."""
    first: dict[tuple[str, str], str] = {}
    for name, order in orders().items():
        first.setdefault((order.k, order.v), name)
    return tuple(name for name in first.values() if name not in SHIPPED)


@cache
def latent(name: str) -> bool:
    """True if the layout has no heads and no K and V: it holds latents."""
    return "h" not in orders()[name].k


@cache
def scales(name: str) -> bool:
    """True if it also has no layers: it holds scale factors of matrices."""
    return latent(name) and "l" not in orders()[name].k


def names() -> list[str]:
    """One name of each order that has heads."""
    return sorted([*SHIPPED, *(name for name in further() if not latent(name))])


DTYPES: dict[int, tuple[str, ...]] = {
    width: tuple(name for name, size in ITEMSIZE.items() if size == width) for width in (1, 2, 4, 8)
}
BATCHES = ("none", "one", "two", "many")
ALIGNS = (0, 1, 2, 4, 8)  # base addresses modulo 64; what is below the item size is a view no tensor library makes
ID_KINDS = ("list", "int64", "int32", "all")

# nl, no, nh, nt, hd: sizes of one, primes, sizes beside powers of two, sizes beyond a tile of 32 or 64.
SHAPES = (
    (1, 2, 2, 16, 32),
    (2, 2, 4, 16, 64),
    (3, 2, 2, 8, 16),
    (2, 1, 1, 16, 64),
    (1, 2, 1, 1, 128),
    (3, 2, 5, 7, 5),
    (2, 2, 3, 1, 5),
    (1, 1, 1, 1, 1),
    (5, 2, 1, 3, 7),
    (2, 2, 2, 32, 8),
    (1, 2, 8, 2, 16),
    (1, 2, 2, 5, 128),
    (2, 2, 7, 16, 1),
    (40, 2, 1, 2, 16),
    (1, 1, 3, 33, 24),
    (2, 2, 16, 4, 32),
    (3, 1, 2, 128, 16),
    (1, 2, 3, 65, 40),
    (2, 2, 1, 64, 64),
    (1, 2, 2, 128, 72),
    (1, 1, 1, 256, 12),
)


@dataclass(frozen=True)
class Case:
    src: str
    dst: str
    dtype: str
    shape: tuple[int, int, int, int, int]
    batch: str
    src_align: int
    dst_align: int
    ids: str

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        return f"{self.src}>{self.dst}-{self.dtype}-{sizes}-{self.batch}-a{self.src_align}.{self.dst_align}-{self.ids}"

    @property
    def values(self) -> tuple[tuple[str, object], ...]:
        """The values of a case besides its pair, by name."""
        aligns = ("src align", self.src_align), ("dst align", self.dst_align)
        return ("dtype", self.dtype), ("shape", self.shape), ("batch", self.batch), *aligns, ("ids", self.ids)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(AXES[1:], self.shape, strict=True))

    @cached_property
    def batch_ids(self) -> tuple[list[int], list[int], int, int]:
        """(src ids, dst ids, src blocks, dst blocks): shuffled, with gaps, different on the two sides."""
        rng = random.Random(zlib.crc32(str(self).encode()))
        elements = int(np.prod(self.shape))
        n = {"none": 0, "one": 1, "two": 2, "many": max(3, min(17, 60_000 // elements))}[self.batch]
        if self.ids == "all":  # no ids given: block i to block i, all of them
            blocks = max(n, 1)
            return list(range(blocks)), list(range(blocks)), blocks, blocks
        src_blocks, dst_blocks = n + rng.randint(1, 3), n + rng.randint(1, 3)
        src, dst = rng.sample(range(src_blocks), n), rng.sample(range(dst_blocks), n)
        if self.batch == "many" and rng.random() < 0.3:
            src[-1] = src[0]  # one block may be read twice
        if self.batch == "many" and rng.random() < 0.3:
            dst.sort(reverse=True)
        return src, dst, src_blocks, dst_blocks

    @property
    def src_placed(self) -> Placed:
        return Placed(orders()[self.src], self.sizes, self.itemsize, self.batch_ids[2])

    @property
    def dst_placed(self) -> Placed:
        return Placed(orders()[self.dst], self.sizes, self.itemsize, self.batch_ids[3])


@cache
def legal(name: str, shape: tuple[int, ...], itemsize: int) -> bool:
    """True if every split divides, and is on the axes that it fuses.  test_layout tests that the rest is one-to-one."""
    order, sizes = orders()[name], dict(zip(AXES[1:], shape, strict=True))
    if latent(name) and (sizes["o"], sizes["h"]) != (1, 1):
        return False
    if scales(name) and sizes["l"] != 1:
        return False
    try:
        Placed(order, sizes, itemsize, 2)
        for piece in (piece for text in filter(None, (order.k, order.v)) for piece in parse_order(text)[1]):
            piece.extent({**sizes, "b": 2}, itemsize)  # V's too, where there is only K
            inside = math.prod(sizes.get(axis, 1) for axis in piece.axes[1:])
            for _, number, in_bytes in piece.ops[:1] if len(piece.axes) > 1 else ():
                n = piece.elements(number, in_bytes, itemsize)
                if inside % n and n % inside:
                    return False
    except IllegalError:
        return False
    return True


def _opaque_pair(src: str, dst: str) -> bool:
    return bool(orders()[src].opaque) or bool(orders()[dst].opaque)


@cache
def refused(src: str, dst: str, shape: tuple[int, ...] = (3, 2, 4, 16, 16), itemsize: int = 2) -> bool:
    """True for an opaque group against a required order (at sizes where every axis counts)."""
    if not _opaque_pair(src, dst):
        return False
    if scales(src) or scales(dst):
        shape = (1, 1, 1, 256, 12)
    elif latent(src) or latent(dst):
        shape = (3, 1, 1, 8, 16)
    sizes = dict(zip(AXES[1:], shape, strict=True))
    return not copyable(Placed(orders()[src], sizes, itemsize, 2), Placed(orders()[dst], sizes, itemsize, 2))


#: What each order of the catalogue is converted from and into, besides its neighbours: rows, and transposed tiles.
HUBS = ("universal", "vllm/paged_attn_v0")


@cache
def _every_pair() -> tuple[tuple[str, str], ...]:
    """All pairs of the layouts above; each order of the catalogue with the hubs and with the next one, in both directions."""
    chosen = [(s, d) for s in sorted(SHIPPED) for d in sorted(SHIPPED)]
    groups: dict[tuple[bool, bool], list[str]] = {}
    for name in further():
        groups.setdefault((latent(name), scales(name)), []).append(name)
    for some in groups.values():
        for name, other in zip(some, [*some[1:], some[0]], strict=True):
            chosen += [pair for hub in (*HUBS, other) for pair in ((name, hub), (hub, name))]
    return tuple(dict.fromkeys(chosen))


@cache
def everyone() -> tuple[str, ...]:
    """One name per meaning, including latents; pairs of layouts of several planes are in test_planes."""
    return tuple(sorted([*SHIPPED, *further()]))


def others(src: str) -> list[str]:
    """All layouts with a common shape, including the layout itself: it is converted to each of them."""
    return [dst for dst in everyone() if not refused(src, dst) and possible(src, dst)]


def draw(rng: random.Random, src: str, dst: str, options: Sequence[Any], batches: Sequence[str]) -> Case:
    """A random case of a pair: `options` are its dtypes with the shapes that are possible for each."""
    dtype, shape = rng.choice(options)
    batch, src_align, dst_align = rng.choice(batches), rng.choice(ALIGNS), rng.choice(ALIGNS)
    return Case(src, dst, dtype, shape, batch, src_align, dst_align, rng.choice(ID_KINDS))


#: Elements of a block in `meetings`: tiny, as the pairs are many.
TINY = 2200


def meetings(src: str) -> list[Case]:
    """A layout with every other one: one case per pair, with varying widths, shapes, batches, alignments and kinds of ids.

    Of eight cases drawn for a pair, the one with the most combinations that are new for this layout is taken.
    """
    seen: set[tuple[object, ...]] = set()
    chosen = []
    for dst in others(src):
        rng = random.Random(zlib.crc32(f"{src} meets {dst}".encode()))
        options = [one for one in possible(src, dst) if math.prod(one[1]) <= TINY] or list(possible(src, dst))
        drawn = [draw(rng, src, dst, options, BATCHES[1:]) for _ in range(8)]
        best = max(drawn, key=lambda case: sum(key not in seen for key in turns(case)))
        chosen.append(best)
        seen.update(turns(best))
    return chosen


def turns(case: Case) -> Iterator[tuple[object, ...]]:
    """Values of a case, and pairs of them, that `meetings` distributes over the partners of a layout."""
    values = (("width", case.itemsize), *case.values)
    yield from values
    for a, b in itertools.combinations(values, 2):
        yield (*a, *b)


def pairs() -> list[tuple[str, str]]:
    """Ordered pairs that can be copied."""
    return [(s, d) for s, d in _every_pair() if not refused(s, d)]


def refused_pairs() -> list[tuple[str, str]]:
    return [(s, d) for s in names() for d in names() if refused(s, d)]


def _kind(shape: tuple[int, ...]) -> str:
    """The kind of difficulty of a shape."""
    _, no, nh, nt, hd = shape
    if hd % 8:
        return "odd"
    if 1 in (no, nh, nt):
        return "ones"
    if nt > 32:
        return "long"
    return "even"


@cache
def possible(src: str, dst: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple(
        (dtype, shape)
        for width, dtypes in DTYPES.items()
        for shape in SHAPES
        if legal(src, shape, width) and legal(dst, shape, width)
        for dtype in dtypes
    )


def covers(case: Case) -> Iterator[tuple[object, ...]]:
    """The pairs of values this case covers."""
    pair = (case.src, case.dst)
    if case.batch == "none":  # nothing moves: covers nothing else
        yield ("pair batch", pair, case.batch)
        return
    width, kind = case.itemsize, _kind(case.shape)
    yield ("pair width", pair, width)
    yield ("pair batch", pair, case.batch)
    yield ("pair kind", pair, kind)
    yield ("src shape width", case.src, case.shape, width)
    yield ("dst shape width", case.dst, case.shape, width)
    yield ("src dtype", case.src, case.dtype)
    yield ("dst dtype", case.dst, case.dtype)
    for a, b in itertools.combinations(case.values, 2):
        yield (f"{a[0]} {b[0]}", a[1], b[1])


@cache
def cases() -> tuple[Case, ...]:
    """The default run."""
    seen: set[tuple[object, ...]] = set()
    chosen: list[Case] = []
    for src, dst in pairs():
        rng = random.Random(zlib.crc32(f"{src}>{dst}".encode()))
        options = possible(src, dst)
        want = {("pair width", (src, dst), ITEMSIZE[dtype]) for dtype, _ in options}
        want |= {("pair batch", (src, dst), batch) for batch in BATCHES}
        want |= {("pair kind", (src, dst), _kind(shape)) for _, shape in options}
        while not want <= seen:
            best, most = None, -1
            for _ in range(12):
                case = draw(rng, src, dst, options, BATCHES)
                if case.batch == "none" and case.ids == "all":
                    continue
                new = sum((8 if key in want else 1) for key in covers(case) if key not in seen)
                if new > most:
                    best, most = case, new
            if best is not None and most > 0:
                chosen.append(best)
                seen.update(covers(best))
    return tuple(chosen)


def everything(src: str, dst: str) -> Iterator[Case]:
    """All cases of one pair: widths × shapes × batches; dtypes of a width, alignments and kinds of ids vary.

    Batches also vary, unless the pair is one of those that the default run covers closely.
    """
    turns = itertools.cycle(itertools.product(ALIGNS, ALIGNS, ID_KINDS))
    names = {width: itertools.cycle(dtypes) for width, dtypes in DTYPES.items()}
    options = sorted({(ITEMSIZE[dtype], shape) for dtype, shape in possible(src, dst)})
    if (src, dst) in _every_pair():
        wanted = list(itertools.product(options, BATCHES))
    else:
        wanted = list(zip(options, itertools.cycle(BATCHES[1:]), strict=False))
    for (width, shape), batch in wanted:
        src_align, dst_align, ids = next(turns)
        dtype = next(names[width])
        if batch == "none":
            ids = "list"
        yield Case(src, dst, dtype, shape, batch, src_align, dst_align, ids)  # type: ignore[arg-type]
