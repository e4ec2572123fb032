"""Nests of steps in one allocation: their extent in bytes, whether two of them share a byte, and merged steps."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["meet", "merge_steps", "reach"]


def meet(
    a: Sequence[tuple[int, int]], a_start: int, a_size: int, b: Sequence[tuple[int, int]], b_start: int, b_size: int
) -> bool:
    """True if two nests of steps (extents and strides, slowest first) share a byte.  Exact; fast if both have equal steps."""
    if a_start >= b_start + reach(b, b_size) or b_start >= a_start + reach(a, a_size):
        return False
    if not a and not b:
        return True
    if b and (not a or reach(b, b_size) > reach(a, a_size)):
        a, a_start, a_size, b, b_start, b_size = b, b_start, b_size, a, a_start, a_size
    (extent, stride), *inner = a
    # If both have the same outer step, only the difference of their indices matters.
    rest, behind = (b[1:], extent - 1) if b and a[0] == b[0] else (b, 0)
    first = max(-behind, (b_start - a_start - reach(inner, a_size)) // stride)
    last = min(extent - 1, (b_start + reach(rest, b_size) - a_start) // stride)
    return any(meet(inner, a_start + turn * stride, a_size, rest, b_start, b_size) for turn in range(first, last + 1))


def reach(steps: Sequence[tuple[int, int]], size: int) -> int:
    """Bytes from the first byte to the end of the last item."""
    return size + sum((extent - 1) * stride for extent, stride in steps)


def merge_steps(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Extents and strides, fastest first.  Axes that continue each other are merged; axes of extent one are left out."""
    runs: list[tuple[int, int]] = []
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent == 1:
            continue
        if runs and stride == runs[-1][0] * runs[-1][1]:
            runs[-1] = (runs[-1][0] * extent, runs[-1][1])
        else:
            runs.append((extent, stride))
    return runs
