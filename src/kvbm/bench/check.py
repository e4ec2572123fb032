"""The bitwise check of measured copies: the place of every byte follows from the declared layouts alone.

Nothing here uses the planner.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import KvbmError
from ..layout.resolved import Resolved
from ..pool.pool import Pool
from ..testing.layouts import Elements, opaque_axes
from .measure import Bytes, Numbers, device_of, read, write

#: Number of sampled coordinates per check, and number of blocks that are compared as a whole.
SAMPLES, WHOLE_BLOCKS = 4096, 3


class WrongCopyError(KvbmError):
    """A copy to measure wrote wrong bytes at some coordinate."""

    exit_code = 1


class _Blocks(Elements):
    """The addresses of all elements of a plane in a pool's blocks, from the declared layout, in the same order for both sides."""

    def __init__(self, pool: Pool, part: Resolved, opaque: Iterable[str]) -> None:
        super().__init__(part, opaque)
        self.pool = pool
        self.entry_step, self.byte_step = part.id_steps

    @functools.cached_property
    def _ranges(self) -> tuple[Numbers, Numbers, Numbers, Numbers]:
        """Entry, offset and bytes of the contiguous ranges of a block, and the position of every element in them."""
        itemsize = self.itemsize
        order = np.lexsort((self.offset, self.entry))
        entry, offset = self.entry[order], self.offset[order]
        breaks = (np.diff(entry) != 0) | (np.diff(offset) != itemsize)
        starts = np.concatenate([[0], np.nonzero(breaks)[0] + 1])
        place = np.empty_like(order)
        place[order] = np.arange(order.size)
        sizes = np.diff(np.concatenate([starts, [order.size]])) * itemsize
        return entry[starts], offset[starts], sizes, place

    def _at(self, block: int | Numbers, entry: Numbers, offset: Numbers) -> Numbers:
        """Addresses in a block, or in one block each."""
        bases = self.pool.addresses.astype(np.int64)
        found: Numbers = bases[entry + block * self.entry_step] + offset + block * self.byte_step
        return found

    def load(self, block: int) -> Bytes:
        """All elements of a block in the shared order, ``(elements, itemsize)``."""
        entry, offset, sizes, place = self._ranges
        found = read(device_of(self.pool.device), self._at(block, entry, offset), sizes)
        elements: Bytes = found.reshape(-1, self.itemsize)[place]
        return elements

    def spoil(self, block: int, seed: int) -> None:
        """Overwrite a block with random bytes, so that its earlier contents cannot pass for a correct copy."""
        entry, offset, sizes, _ = self._ranges
        data = np.frombuffer(np.random.default_rng(seed).bytes(int(sizes.sum())), np.uint8)
        write(device_of(self.pool.device), self._at(block, entry, offset), sizes, data)

    def sample(self, blocks: Numbers, elements: Numbers) -> Bytes:
        """One element of each of these blocks, ``(samples, itemsize)``."""
        where = self._at(blocks, self.entry[elements], self.offset[elements])
        sizes = np.full(where.size, self.itemsize, np.int64)
        return read(device_of(self.pool.device), where, sizes).reshape(-1, self.itemsize)


class _Wanted(NamedTuple):
    """The required contents of a plane after a copy: blocks that must not change, whole blocks, and samples."""

    left: dict[int, Bytes]
    whole: dict[int, Bytes]
    samples: tuple[Numbers, Numbers]
    sampled: Bytes


class Check:
    """Checks that copies between two pools, of any devices and sizes, write every byte to its place, and nothing else."""

    def __init__(self, src: Pool, dst: Pool) -> None:
        opaque = opaque_axes(src.resolved, dst.resolved)
        sides = [{one.plane: _Blocks(pool, one, opaque[one.plane]) for one in pool.resolved.planes} for pool in (src, dst)]
        self._planes = [(ours, sides[1][plane]) for plane, ours in sides[0].items()]
        self._pools = src, dst
        self._calls = 0

    def __call__(self, copy: Callable[[Any, Any], object], batch: int, what: str) -> None:
        """Run ``copy(src_ids, dst_ids)`` once, of other ids in each call, and check the result.

        It is finished when it returns.  Raises `WrongCopyError` if a byte differs, in a block that had to be written or in one
        that must not change; `what` names pair and backend.
        """
        self._calls += 1
        random = np.random.default_rng(1000 + self._calls)
        pairs = [random.permutation(pool.num_blocks)[:batch].astype(np.int32) for pool in self._pools]
        others = np.setdiff1d(np.arange(self._pools[1].num_blocks), pairs[1])
        left = random.permutation(others)[:2].tolist()
        whole = random.permutation(batch)[:WHOLE_BLOCKS].tolist()
        # All required contents are read before the copy, so a copy that writes into its source is detected, too.
        wanted = [self._before(src, dst, pairs, whole, left, random) for src, dst in self._planes]
        copy(*pairs)
        for (src, dst), one in zip(self._planes, wanted, strict=True):
            self._after(src, dst, pairs, one, what)

    def _before(
        self, src: _Blocks, dst: _Blocks, pairs: Sequence[Any], whole: Sequence[int], left: Sequence[int], random: Any
    ) -> _Wanted:
        samples = random.integers(len(pairs[0]), size=SAMPLES), random.integers(src.entry.size, size=SAMPLES)
        for i in whole:
            dst.spoil(int(pairs[1][i]), seed=self._calls * 64 + i)
        return _Wanted(
            {block: dst.load(block) for block in left},
            {i: src.load(int(pairs[0][i])) for i in whole},
            samples,
            src.sample(pairs[0][samples[0]].astype(np.int64), samples[1]),
        )

    def _after(self, src: _Blocks, dst: _Blocks, pairs: Sequence[Any], want: _Wanted, what: str) -> None:
        for i, wanted in want.whole.items():
            got = dst.load(int(pairs[1][i]))
            self._compare(dst, what, got, wanted, pairs, np.full(src.entry.size, i), None)
        got = dst.sample(pairs[1][want.samples[0]].astype(np.int64), want.samples[1])
        self._compare(dst, what, got, want.sampled, pairs, *want.samples)
        for block, wanted in want.left.items():
            differs = np.nonzero((dst.load(block) != wanted).any(axis=1))[0]
            if differs.size:
                raise WrongCopyError(
                    f"{what}: wrong: block {block} of the destination was not asked for, and is written at "
                    f"{dst.coordinate(int(differs[0]))} ({differs.size:,} of {len(wanted):,} elements)"
                )

    @staticmethod
    def _compare(
        dst: _Blocks, what: str, got: Bytes, want: Bytes, pairs: Sequence[Any], which: Numbers, elements: Numbers | None
    ) -> None:
        differs = np.nonzero((got != want).any(axis=1))[0]
        if differs.size:
            first = int(differs[0])
            pair, element = int(which[first]), first if elements is None else int(elements[first])
            raise WrongCopyError(
                f"{what}: wrong at {dst.coordinate(element)} of block {pairs[0][pair]} → {pairs[1][pair]}: expected bytes "
                f"{want[first].tobytes().hex()}, got {got[first].tobytes().hex()} "
                f"({differs.size:,} of {len(want):,} elements that were looked at differ)"
            )
