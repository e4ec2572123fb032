"""Every shipped layout with rows of odd, prime and few bytes, and copies of them with digests: on the host and on GPUs.

Cells are then small, and lie side by side.  A copy's own words are wider than cells, or have other ends.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from test_digest import HEADS, LATENTS, expected

import kvbm
import matrix
import oracle
import plane_oracle
from kvbm import BlockShape, DTypeError, LayoutError, PlanError

#: Elements of a row.
ROWS = (1, 2, 3, 5, 7, 16, 17, 24, 32, 33, 48, 65, 577)
#: nl, no, nh, nt.
BLOCKS = ((1, 1, 1, 16), (2, 2, 2, 4), (1, 2, 3, 5), (1, 1, 1, 1), (3, 2, 4, 16))
#: Of each width in turn.
DTYPES = (
    "uint8", "float16", "float32", "float64", "float8_e4m3fn", "bfloat16", "int32", "int64",
    "int8", "int16", "uint32", "uint64", "float8_e8m0fnu", "uint16", "float32", "float64",
)  # fmt: skip
#: Largest block: each of its bytes is visited by the oracle.
_MOST = 70_000

#: A layout, and a layout of the same elements to copy to, and nl, no, nh, nt, hd, dtype.
Case = tuple[str, str, tuple[int, int, int, int, int, str]]


def of_planes(family: str) -> list[tuple[int, int, int, int, int, str]]:
    """Shapes of a family of planes, beside those of its table: with small rows of data, and of scales."""
    known = list(plane_oracle.FAMILIES[family].shapes)
    match family:
        case "nvfp4":
            blocks = itertools.product(((1, 1, 4), (2, 2, 8), (1, 3, 16)), (16, 32, 48, 64, 80, 112, 192))
            known += [(nl, 2, nh, nt, hd, "bfloat16") for (nl, nh, nt), hd in blocks]
        case "mxfp8":
            blocks = itertools.product(((1, 1, 1), (1, 2, 2), (2, 2, 1)), (32, 64, 96, 128, 160))
            known += [(nl, no, nh, 128, hd, "bfloat16") for (nl, no, nh), hd in blocks]
        case "pth_fp8" | "pth_int8":
            known += [(*block, hd, "bfloat16") for block, hd in itertools.product(BLOCKS, ROWS)]
        case "diff":
            rows = itertools.product(BLOCKS, (3, 9, 15, 24, 33, 48, 192, 579), DTYPES[:4])
            known += [(nl, 1, nh, nt, hd, dtype) for (nl, _, nh, nt), hd, dtype in rows]
    return known


def is_legal(name: str, shape: Sequence[Any]) -> bool:
    """True unless the engine has no tensors of this size."""
    _, _, _, nt, hd, _ = shape
    return (name != "vllm/nvfp4" or (hd % 64 == 0 and nt % 4 == 0)) and (name != "sglang/mxfp8" or hd == 128)


def cases(each: int, seed: int = 0) -> Iterator[Case]:
    """So many shapes of every layout (0: all), with another layout each; the same on every machine."""
    kinds: dict[Any, list[str]] = {}
    for name in (*HEADS, *LATENTS, *plane_oracle.TABLE):
        is_plain = name not in plane_oracle.TABLE
        kind = (matrix.latent(name), matrix.scales(name)) if is_plain else plane_oracle.TABLE[name].family
        kinds.setdefault(kind, []).append(name)
    for kind, names in kinds.items():
        shapes = []
        if isinstance(kind, str):
            shapes = of_planes(kind)
        else:
            for number, ((nl, no, nh, nt), hd, width) in enumerate(itertools.product(BLOCKS, ROWS, range(4))):
                no, nh = (1, 1) if kind[0] else (no, nh)
                shapes.append((1 if kind[1] else nl, no, nh, nt, hd, DTYPES[width + 4 * (number % 4)]))
        shapes = [one for one in shapes if BlockShape(*one).nbytes <= _MOST]
        for name in names:
            rng = random.Random(f"{name}{seed}")
            legal = [one for one in shapes if is_legal(name, one)]
            for shape in legal if not each else rng.sample(legal, min(each, len(legal))):
                others = [other for other in names if is_legal(other, shape)]
                yield name, rng.choice(others), shape


def sides(
    plain: Callable[..., Any], planar: Callable[..., Any], case: Case, where: Sequence[Any], rng: random.Random
) -> Iterator[tuple[Any, Any]]:
    """A pool, and pools to copy it to: of its layout and of the other; none if a layout is not legal at this size."""
    name, other, shape = case
    is_planar = name in plane_oracle.TABLE
    make, sizes = (planar, shape) if is_planar else (plain, BlockShape(*shape))
    aligns = (0, 0, 0, 16, 8, 1)
    for there in dict.fromkeys((name, other)):
        try:
            s = make(name, sizes, 3, where=where[0], align=rng.choice(aligns))
            d = make(there, sizes, 4, where=where[1], align=rng.choice(aligns), dst=True)
            for side in (s, d) if not is_planar else ():
                side.arena.placed.check()
            kvbm.plan(s.pool.layout, d.pool.layout, BlockShape(*shape))
        except (oracle.IllegalError, LayoutError, PlanError, DTypeError):
            continue
        yield s, d


def check(
    s: Any,
    d: Any,
    rng: random.Random,
    copy: Callable[..., list[int]],
    digest: Callable[..., list[int]],
    **options: Any,
) -> int:
    """Digests of a copy, verified, and of both pools are those of the definition.  1 if the copy is fused.

    ``copy(move, src_ids, dst_ids, tokens)`` copies and returns digests; ``digest(pool, ids, tokens)`` returns those of a pool.
    """
    src_ids, dst_ids = [2, -1, 0], [1, 0, 3]
    tokens = [rng.randrange(1 << 40) for _ in src_ids] if rng.random() < 0.5 else None
    want = expected(s, src_ids, tokens=tokens)
    told = s.pool, d.pool, options
    assert digest(s.pool, src_ids, tokens) == want, told
    with kvbm.Transfer(s.pool, d.pool, verify=rng.random() < 0.5, **options) as move:
        assert copy(move, src_ids, dst_ids, tokens) == want, told
        made = move._executor.digested(None).digests
        assert made is not None
        is_fused = not isinstance(made.permute if options.get("strategy") == "staged" else made.direct, str)
    if s.opaque == d.opaque:
        kept = [1, -1, 3]
        assert digest(d.pool, kept, tokens) == want, told
    return is_fused
