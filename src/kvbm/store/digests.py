"""Digests that are stored with blocks: one per block, one per layer of each block, and one per token of each block.

They are computed as if each block were at position 0 and the file held the whole model (``docs/reference/digest.md``).  So the
digests of a block's layers add up to the block's digest modulo 2**64, and so do those of its tokens.  They do not depend on the
layout.  The digests of layers and tokens show which part of a block is wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._arguments import quoted, require_a, wholes
from ..digest.cells import alone, keys_of
from ..errors import BindError, LayoutError, PlanError
from ..layout.region import Section

if TYPE_CHECKING:
    from ..layout.resolved import Resolved
    from ..layout.shapes import BlockShape
    from ..pool.pool import Pool

__all__ = ["DIGEST", "PARTS", "Damage", "Digests", "Kinds", "blocks_of", "damages"]

#: The name of the definition in the metadata.
DIGEST = "kvbm-digest-1"

#: Kind of digest → its tensor in a file.
PARTS = {"blocks": "kvbm.digests", "layers": "kvbm.digests.layers", "tokens": "kvbm.digests.tokens"}

_MOST_IDS = (1 << 31) - 1


def blocks_of(title: object, given: Any, num_blocks: int) -> list[int]:
    """Numbers of blocks, checked against `num_blocks`."""
    found = wholes(given, 1 << 26)
    if found is None:
        raise BindError(f"{title}: expected numbers of blocks, got {quoted(given)}")
    for block in found:
        if not 0 <= block < num_blocks:
            raise BindError(f"{title}: expected blocks from 0 to {num_blocks - 1}, got {quoted(block)}")
    return list(found)


@dataclass(frozen=True)
class Kinds:
    """Which digests exist: one per block, per layer of a block, per token of a block; else why there are none of blocks."""

    blocks: bool = False
    layers: bool = False
    tokens: bool = False
    reason: str = ""

    @classmethod
    def of(cls, resolved: Resolved) -> Kinds:
        """The kinds that a layout has.  Layers and tokens in an opaque group have no separate digests."""
        whole = resolved.section
        try:
            _plan(whole, ())
        except (LayoutError, PlanError) as error:
            return cls(reason=str(error))
        layers = _has(lambda: _plan(whole.select("l", range(1)), [("l", range(1))]))
        is_countable = whole.num_blocks * whole.count("t") <= _MOST_IDS
        return cls(True, layers, is_countable and _has(lambda: _plan(whole.cut(1), [("t", range(1))])))

    def __and__(self, other: Kinds) -> Kinds:
        return Kinds(self.blocks and other.blocks, self.layers and other.layers, self.tokens and other.tokens)

    def nbytes(self, shape: BlockShape, num_blocks: int) -> int:
        """Bytes of the digests in a file."""
        return sum(
            8 * math.prod(sizes) for kind, sizes in Digests.sizes(shape, num_blocks).items() if getattr(self, kind)
        )


def _plan(section: Section, choices: Iterable[tuple[str, Any]]) -> None:
    layout = section.layout
    alone(section, keys_of(layout.resolve(section.shape, section.num_blocks).section, None, choices), 1, layout.name)


def _has(plan: Any) -> bool:
    try:
        plan()
    except (LayoutError, PlanError):
        return False
    return True


@dataclass(frozen=True, eq=False)
class Digests:
    """Digests of some blocks.

    Attributes
    ----------
    blocks : numpy.ndarray of uint64
        Shape ``(n,)``.
    layers : numpy.ndarray of uint64, optional
        Shape ``(n, nl)``.  Each row adds up to the block's digest.
    tokens : numpy.ndarray of uint64, optional
        Shape ``(n, nt)``.  Each row adds up to the block's digest.
    """

    blocks: npt.NDArray[np.uint64]
    layers: npt.NDArray[np.uint64] | None = None
    tokens: npt.NDArray[np.uint64] | None = None

    @staticmethod
    def sizes(shape: BlockShape, num_blocks: int) -> Mapping[str, tuple[int, ...]]:
        """Kind → shape of its array, in the order of a file."""
        return {"blocks": (num_blocks,), "layers": (num_blocks, shape.nl), "tokens": (num_blocks, shape.nt)}

    @classmethod
    def zeros(cls, shape: BlockShape, num_blocks: int, kinds: Kinds) -> Digests:
        """Digests of some kinds, filled with zeros."""
        sizes = cls.sizes(shape, num_blocks)
        return cls(**{kind: np.zeros(size, np.uint64) for kind, size in sizes.items() if getattr(kinds, kind)})

    @classmethod
    def of(
        cls, pool: Pool, ids: Sequence[int] | None = None, *, kinds: Kinds | None = None, stream: Any = None
    ) -> Digests:
        """Compute digests of blocks of a pool.

        Parameters
        ----------
        pool : Pool
            The pool that holds the blocks.
        ids : sequence of int, optional
            Block ids.  Default: all.
        kinds : Kinds, optional
            Kinds of digests.  Default: all that the layout has.
        stream : optional
            As for `Pool.digest`.

        Raises
        ------
        BindError
            A block id is out of range.
        PlanError
            The layout has no digests.
        """
        from ..pool.pool import Pool

        require_a(Pool, "pool", pool, "a kvbm.Pool")
        kinds = Kinds.of(pool.resolved) if kinds is None else kinds
        require_a(Kinds, "kinds", kinds, "a Kinds object, as Digests.kinds returns it")
        given = np.arange(pool.num_blocks) if ids is None else np.array(blocks_of("ids", ids, pool.num_blocks), np.int64)
        layers = tokens = None
        if kinds.layers:
            rows = [pool.section(l=layer).digest(given, stream=stream) for layer in range(pool.shape.nl)]
            layers = np.stack(rows, axis=1).astype(np.uint64)
        if kinds.tokens:
            nt = pool.shape.nt
            units = (given[:, None] * nt + np.arange(nt)).reshape(-1)
            tokens = pool.units(1).digest(units, stream=stream).reshape(given.size, nt)
        blocks = pool.digest(given, stream=stream) if layers is None else layers.sum(axis=1, dtype=np.uint64)
        return cls(blocks, layers, tokens)

    @property
    def kinds(self) -> Kinds:
        """The kinds of digests that exist."""
        return Kinds(True, self.layers is not None, self.tokens is not None)

    def require(self, shape: BlockShape, num_blocks: int) -> None:
        """Raise `BindError` if the arrays do not have the shapes for `num_blocks` blocks."""
        for kind, size in self.sizes(shape, num_blocks).items():
            part = getattr(self, kind)
            if part is None and kind != "blocks":
                continue
            if not isinstance(part, np.ndarray) or (part.shape, part.dtype) != (size, np.uint64):
                got = f"{part.shape} of {part.dtype}" if isinstance(part, np.ndarray) else f"{quoted(part)}"
                raise BindError(f"digests: {kind}: expected an array {size} of uint64, got {got}")

    def arrays(self) -> list[npt.NDArray[np.uint64]]:
        """The existing arrays, in the order of a file."""
        return [part for part in (self.blocks, self.layers, self.tokens) if part is not None]

    def take(self, rows: Sequence[int] | range) -> Digests:
        """The digests of some rows; `BindError` if a row is out of range."""
        at = np.array(blocks_of("rows", rows, len(self.blocks)), np.int64)
        return Digests(*(None if part is None else part[at] for part in (self.blocks, self.layers, self.tokens)))  # type: ignore[arg-type]

    def put(self, rows: range, some: Digests) -> None:
        """Set the digests of some rows."""
        for own, part in zip(self.arrays(), some.arrays(), strict=True):
            own[rows.start : rows.stop] = part

    def torn(self) -> npt.NDArray[np.bool_]:
        """A mask of the blocks whose digests do not add up: the digests themselves were changed."""
        found = np.zeros(self.blocks.size, np.bool_)
        for part in (self.layers, self.tokens):
            if part is not None:
                found |= part.sum(axis=1, dtype=np.uint64) != self.blocks
        return found


@dataclass(frozen=True)
class Damage:
    """A block that does not match its stored digests.

    Attributes
    ----------
    block : int
        Number of the block.
    what : {"data", "digests"}
        What was changed: the block, or only its stored digests.
    layers, tokens : tuple of int, optional
        The wrong layers and tokens; all others of the block are right.  None if the digests do not show it.
    expected, found : int
        The block's stored digest, and its current digest.
    """

    block: int
    what: str
    layers: tuple[int, ...] | None
    tokens: tuple[int, ...] | None
    expected: int
    found: int

    def __str__(self) -> str:
        named = [
            f"{name}{'' if len(some) == 1 else 's'} {numbers(some)}"
            for name, some in (("layer", self.layers), ("token", self.tokens))
            if some
        ]
        where = ", ".join(named) or ("layers and tokens not known" if self.what == "data" else "the block's own")
        if self.what == "digests":
            return f"block {self.block}: its stored digests were changed ({where}), the block itself was not"
        return f"block {self.block}: {where}: digest {self.found:#018x}, stored {self.expected:#018x}"


def damages(
    stored: Digests, pool: Pool, ids: Sequence[int], names: Sequence[int] | None = None, stream: Any = None
) -> list[Damage]:
    """Find the blocks that do not match their stored digests, and in each the smallest rectangle of wrong layers and tokens.

    `stored` has a row for each of `ids`, the blocks in the pool; messages call them by `names`, by default `ids`.
    """
    there = Digests.of(pool, ids, kinds=stored.kinds & Kinds.of(pool.resolved), stream=stream)
    found, torn = [], stored.torn()
    for row, name in enumerate(ids if names is None else names):
        wrong = [
            None if old is None or new is None else tuple(np.flatnonzero(np.atleast_1d(old[row] != new[row])).tolist())
            for old, new in zip(_parts(stored), _parts(there), strict=True)
        ]
        is_wrong = [bool(one) for one in wrong if one is not None]
        if any(is_wrong) or torn[row]:
            # A wrong byte changes the digests of the block, of a layer and of a token.  If one of these is right, so are the bytes.
            _, layers, tokens = wrong
            what = "data" if all(is_wrong) else "digests"
            found.append(Damage(int(name), what, layers, tokens, int(stored.blocks[row]), int(there.blocks[row])))
    return found


def _parts(digests: Digests) -> tuple[npt.NDArray[np.uint64] | None, ...]:
    return digests.blocks, digests.layers, digests.tokens


def numbers(some: Iterable[int]) -> str:
    """Ascending numbers as text: ``1, 4-7``."""
    runs = []
    for _, group in itertools.groupby(enumerate(some), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        runs.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ", ".join(runs) if len(runs) <= 12 else ", ".join([*runs[:11], f"… {runs[-1]}"])
