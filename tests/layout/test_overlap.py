"""Whether memory is shared: nests of steps against sets of bytes, and pools that lie between each other's rows."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

import kvbm
from kvbm import BindError, Pool, Transfer
from kvbm.layout import spec
from kvbm.layout.overlap import meet

Nest = tuple[tuple[int, int], ...]


def bytes_of(nest: Nest, start: int, size: int) -> set[int]:
    steps = itertools.product(*(range(extent) for extent, _ in nest))
    firsts = (start + sum(i * stride for i, (_, stride) in zip(turn, nest, strict=True)) for turn in steps)
    return {first + k for first in firsts for k in range(size)}


def random_nest(rng: random.Random) -> tuple[Nest, int]:
    made: list[tuple[int, int]] = []
    held = size = rng.choice([1, 2, 4])
    for _ in range(rng.choice([0, 1, 2, 3])):
        stride, extent = held + rng.choice([0, 0, 1, 2, 5]), rng.randrange(2, 5)
        made.append((extent, stride))
        held = stride * extent + (rng.randrange(4) if rng.random() < 0.3 else 0)
    return tuple(reversed(made)), size


def test_nests_meet_if_they_share_a_byte() -> None:
    rng, found = random.Random(1), [0, 0]
    for _ in range(4000):
        (a, a_size), (b, b_size) = random_nest(rng), random_nest(rng)
        if rng.random() < 0.5:
            b, b_size = tuple((max(2, extent + rng.choice([-1, 0, 1])), stride) for extent, stride in a), a_size
        x, y = rng.randrange(60), rng.randrange(60)
        want = bool(bytes_of(a, x, a_size) & bytes_of(b, y, b_size))
        found[want] += 1
        assert meet(a, x, a_size, b, y, b_size) == want, (a, x, a_size, b, y, b_size)
    assert min(found) > 1000


def test_a_comparison_that_would_take_long_says_that_they_meet() -> None:
    a, b = [(1009, 10**9), (997, 10**6 + 2), (991, 1002)], [(1013, 10**9 + 2), (983, 10**6 + 4), (977, 1006)]
    assert meet(a, 0, 2, b, 1, 1)


SHAPE = "nl=1,no=1,nh=4,nt=16,hd=8,dtype=float16"
VIEW = 'order: "l b t h d"\npitch: {b: 1024}'  # one of two halves of every page


def halves(blocks: int = 64) -> tuple[np.ndarray, list[Pool]]:
    page = np.zeros((blocks, 2, 16, 4, 8), np.float16)
    page[:, 0] = np.random.default_rng(0).random((blocks, 16, 4, 8))
    return page, [Pool(spec.parse(VIEW, name="half"), SHAPE, [page[None, :, half]]) for half in (0, 1)]


def test_pools_between_each_others_rows_are_apart() -> None:
    page, (src, dst) = halves()
    kvbm.convert(src, dst, range(64), range(64)[::-1])
    assert np.array_equal(page[:, 1], page[::-1, 0])
    page[:, 1] = 0
    Transfer(src, dst, verify=True).copy([3], [9]).synchronize()
    assert np.array_equal(page[9, 1], page[3, 0])
    few = Pool(spec.parse(VIEW, name="half"), SHAPE, [page[None, 5:20, 1]])  # another number of blocks
    kvbm.convert(src, few, [7], [2])
    assert np.array_equal(page[7, 1], page[7, 0])


def test_pools_that_share_a_byte_are_found() -> None:
    """Against sets of bytes: views of pages of all kinds."""
    _, (src, _) = halves(6)
    page, shape = np.zeros((6, 2, 16, 4, 8), np.float16), "nl=1,no=1,nh=1,nt=4,hd=8,dtype=float16"
    flat, found = page.reshape(-1), [0, 0]
    address = flat.ctypes.data
    for pitches in itertools.product((32, 64, 96), repeat=2):
        for start in range(0, 160, 8):
            layouts = [spec.parse(f'order: "l b t h d"\npitch: {{b: {pitch}}}', name=str(pitch)) for pitch in pitches]
            views = [
                np.lib.stride_tricks.as_strided(flat[at:], (1, 5, 4, 1, 8), (0, 2 * pitch, 16, 16, 2))
                for at, pitch in zip((0, start), pitches, strict=True)
            ]
            sets = [
                bytes_of(((5, 2 * pitch), (64, 1)), view.ctypes.data - address, 1)
                for view, pitch in zip(views, pitches, strict=True)
            ]
            pools = [Pool(layout, shape, [view], num_blocks=5) for layout, view in zip(layouts, views, strict=True)]
            apart = not sets[0] & sets[1]
            found[apart] += 1
            if apart:
                kvbm.convert(*pools)
            elif (pitches[0], 0) != (pitches[1], start):
                with pytest.raises(BindError, match="overlap in memory: array 0 of the source and array 0 of the destination"):
                    kvbm.convert(*pools)
    assert min(found) > 5, found
    assert src.holds(int(src.addresses[0]), int(src.addresses[0]) + 1)


def test_digests_may_lie_between_the_rows_of_a_pool() -> None:
    page, (src, dst) = halves(4)
    room = page[2, 1].reshape(-1).view(np.uint64)[:4]
    assert np.array_equal(src.digest(out=room), src.digest())
    with pytest.raises(BindError, match="expected separate memory"):
        dst.digest(out=room)
    with pytest.raises(BindError, match="expected separate memory"):
        src.digest(out=page.reshape(-1).view(np.uint64)[254:258])  # begins in the padding, ends in a row
