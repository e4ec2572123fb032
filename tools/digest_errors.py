#!/usr/bin/env python3
"""Inject errors into blocks, and count those that their digests miss (docs/reference/digest.md).

A block of bfloat16 has 8 tokens, 2 layers, K and V, 2 heads and rows of 64 bytes; each error is at a position of its own, and every
256 of them in a new block.  Only the terms of what an error changed are computed: the rest of both sums is the same.  What changes
no byte is no error, and is drawn again.

usage: digest_errors.py [ERRORS [SEED]]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Index = npt.NDArray[np.int64]
U = np.uint64

SIZES = T, *_, C = 8, 2, 2, 2, 4  # tokens, layers, K and V, heads, cells of a row
LANES = math.prod(SIZES[1:])
FACTORS = [U(x) for x in (0xA55C9364D6777AA3, 0xB78448C894E972E3, 0x1E2754521961FFBB, 0x055CCEA021BDA7A7)]
NUMBER: Index = np.arange(T * LANES).reshape(SIZES)


def fold(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The high half into the low one."""
    return x ^ (x >> U(32))


def content(words: Words) -> npt.NDArray[np.uint64]:
    """Of cells of four words."""
    total = np.full(words.shape[:-1], 0xA0761D6478BD642F, np.uint64)
    for j, factor in enumerate(FACTORS):
        total += words[..., j].astype(np.uint64) * factor
    return fold(total)


def weight(key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Of cells at these keys."""
    return fold(fold(key * U(0xBF58476D1CE4E5B9)) * U(0x94D049BB133111EB)) | U(1)


def block(rng: np.random.Generator) -> Words:
    """Cells of four words."""
    values = rng.standard_normal(T * LANES * 8).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint32).reshape(-1, 4)


#: A block and how many errors → the cells that each changes, and their words then.
Kind = Callable[[np.random.Generator, Words, int], tuple[Index, Words]]


def bits(count: int) -> Kind:
    """That many bits of a cell."""

    def one(rng: np.random.Generator, data: Words, n: int) -> tuple[Index, Words]:
        at = rng.integers(0, len(data), (n, 1))
        new = data[at]
        for _ in range(count):
            new[np.arange(n), 0, rng.integers(0, 4, n)] ^= np.uint32(1) << rng.integers(0, 32, n).astype(np.uint32)
        return at, new

    return one


def top_bits(rng: np.random.Generator, data: Words, n: int) -> tuple[Index, Words]:
    """The highest bits of two words, of one cell or of two."""
    at = two(rng, len(data), n)
    at[::2, 1] = at[::2, 0]
    words = two(rng, 4, n)
    new = data[at]
    for i in range(2):
        new[np.arange(n), i, words[:, i]] ^= np.uint32(1 << 31)
    same = at[:, 0] == at[:, 1]
    new[same, 0] = data[at[same, 0]]  # of one cell: both in the second entry, and nothing in the first
    new[same, 1, words[same, 0]] ^= np.uint32(1 << 31)
    return at, new


def two(rng: np.random.Generator, size: int, n: int) -> Index:
    """Two different numbers, `n` times."""
    first = rng.integers(0, size, n)
    return np.stack([first, (first + rng.integers(1, size, n)) % size], axis=1)


def swap(axis: int) -> Kind:
    """All that two coordinates of an axis hold; of tokens, layers, K and V, heads."""
    lines = np.moveaxis(NUMBER, axis, 0).reshape(SIZES[axis], -1)

    def one(rng: np.random.Generator, data: Words, n: int) -> tuple[Index, Words]:
        a, b = two(rng, len(lines), n).T
        return np.concatenate([lines[a], lines[b]], 1), data[np.concatenate([lines[b], lines[a]], 1)]

    return one


ROWS = NUMBER.reshape(-1, C)


def swap_rows(rng: np.random.Generator, data: Words, n: int) -> tuple[Index, Words]:
    """Two rows of any coordinates."""
    a, b = two(rng, len(ROWS), n).T
    return np.concatenate([ROWS[a], ROWS[b]], 1), data[np.concatenate([ROWS[b], ROWS[a]], 1)]


def zero_row(rng: np.random.Generator, _: Words, n: int) -> tuple[Index, Words]:
    """A row that was never written."""
    at = ROWS[rng.integers(0, len(ROWS), n)]
    return at, np.zeros((*at.shape, 4), np.uint32)


def stale_row(rng: np.random.Generator, _: Words, n: int) -> tuple[Index, Words]:
    """A row of another block, or of this one's before."""
    at = ROWS[rng.integers(0, len(ROWS), n)]
    return at, block(rng)[ROWS[rng.integers(0, len(ROWS), n)]]


def broken_lane(rng: np.random.Generator, _: Words, n: int) -> tuple[Index, Words]:
    """One of 32 lanes of each warp writes nothing: every 32nd cell is what the block held before."""
    at = NUMBER.reshape(-1, 32).T[rng.integers(0, 32, n)]
    return at, block(rng)[at]


def token_shift(rng: np.random.Generator, data: Words, n: int) -> tuple[Index, Words]:
    """Tokens from some one on stand one later; the last is lost."""
    first = rng.integers(0, T - 1, (n, 1))
    token = np.broadcast_to(np.arange(T), (n, T))
    source = np.where(token > first, token - 1, token)
    lines = NUMBER.reshape(T, -1)
    return np.broadcast_to(lines.reshape(1, -1), (n, T * LANES)), data[lines[source].reshape(n, -1)]


KINDS: dict[str, Kind] = {
    "one bit": bits(1),
    "two bits of a cell": bits(2),
    "top bits of two words": top_bits,
    "two tokens exchanged": swap(0),
    "two layers exchanged": swap(1),
    "K and V exchanged": swap(2),
    "two heads exchanged": swap(3),
    "two rows exchanged": swap_rows,
    "a row of zeros": zero_row,
    "a stale row": stale_row,
    "a broken lane": broken_lane,
    "tokens shifted by one": token_shift,
}


def inject(name: str, errors: int, rng: np.random.Generator, batch: int = 256) -> int:
    """How many errors of a kind are missed."""
    done = missed = 0
    while done < errors:
        data, n = block(rng), min(batch, errors - done)
        at, new = KINDS[name](rng, data, n)
        is_error = (new != data[at]).any(axis=(1, 2))
        first = rng.integers(0, 1 << 20, (n, 1)).astype(np.uint64)
        term = weight(at.astype(np.uint64) + first * U(LANES)) * (content(new) - content(data[at]))
        missed += int((is_error & (term.sum(axis=1, dtype=np.uint64) == 0)).sum())
        done += int(is_error.sum())
    return missed


def main(errors: int, seed: int) -> int:
    """Inject that many errors, print the counts, and return how many were missed."""
    rng = np.random.default_rng(seed)
    each, total = -(-errors // len(KINDS)), 0
    for name in KINDS:
        missed = inject(name, each, rng)
        total += missed
        print(f"{name:<24} {each:>9,} injected {missed:>3} missed", flush=True)
    print(f"{'all':<24} {each * len(KINDS):>9,} injected {total:>3} missed")
    return total


if __name__ == "__main__":
    given = [int(one) for one in sys.argv[1:]]
    sys.exit(bool(main(*(given + [1_000_000, 1][len(given) :]))))
