"""Nests of steps in one allocation: their extent in bytes, and whether two of them share a byte."""

from __future__ import annotations

from collections.abc import Sequence

#: Most steps of a comparison of two nests; beyond, they are said to share a byte.
_MOST_STEPS = 100_000


def meet(
    a: Sequence[tuple[int, int]], a_start: int, a_size: int, b: Sequence[tuple[int, int]], b_start: int, b_size: int
) -> bool:
    """True if two nests of steps (extents and strides, slowest first) share a byte.

    Exact, and fast if both have equal strides.  After `_MOST_STEPS` steps the answer is True: no caller then uses memory that may
    be shared.
    """
    a_reach, b_reach = ([reach(steps[i:], size) for i in range(len(steps) + 1)] for steps, size in ((a, a_size), (b, b_size)))
    disjoint: set[tuple[int, int, int]] = set()

    def compare(i: int, j: int, ahead: int) -> bool:
        """True if the nests `a[i:]` and `b[j:]` meet, with b `ahead` bytes after a."""
        if ahead >= a_reach[i] or -ahead >= b_reach[j]:
            return False
        if i == len(a) and j == len(b):
            return True
        if (i, j, ahead) in disjoint:
            return False
        if len(disjoint) > _MOST_STEPS:
            return True
        # If both have the same outer stride, only the difference of their indices matters.
        both = i < len(a) and j < len(b) and a[i][1] == b[j][1]
        if both or (i < len(a) and (j == len(b) or a_reach[i] >= b_reach[j])):
            extent, stride = a[i]
            behind, rest = (b[j][0] - 1, j + 1) if both else (0, j)
            first = max(-behind, (ahead - a_reach[i + 1]) // stride + 1)
            last = min(extent - 1, (ahead + b_reach[rest] - 1) // stride)
            found = any(compare(i + 1, rest, ahead - turn * stride) for turn in range(first, last + 1))
        else:
            extent, stride = b[j]
            first = max(0, (-ahead - b_reach[j + 1]) // stride + 1)
            last = min(extent - 1, (a_reach[i] - ahead - 1) // stride)
            found = any(compare(i, j + 1, ahead + turn * stride) for turn in range(first, last + 1))
        disjoint.add((i, j, ahead))
        return found

    return compare(0, 0, b_start - a_start)


def reach(steps: Sequence[tuple[int, int]], size: int) -> int:
    """Bytes from the first byte to the end of the last item."""
    return size + sum((extent - 1) * stride for extent, stride in steps)
