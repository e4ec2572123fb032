"""Fewer parts of a plan: K and V, contiguous planes, and pieces of an axis at equal distances become one part.

Loops inside a part are merged by `layout.loops.coalesce`.  Which parts share a launch: `lowering.launches`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .loopnest import Mode, Part


def in_step(parts: Sequence[Part]) -> list[Part]:
    """Merge parts that differ only in their start, at equal distances: the pieces of an axis."""
    groups: dict[Part, list[Part]] = {}
    for part in parts:
        like = replace(part, src_offset=0, dst_offset=0, src_table_offset=0, dst_table_offset=0, key=0)
        groups.setdefault(like, []).append(part)
    made = []
    for group in groups.values():
        before = len(group) + 1
        while len(group) < before:
            before = len(group)
            group = _progressions(group)
        made += group
    return made


def _progressions(parts: Sequence[Part]) -> list[Part]:
    """Merge each run of parts at equal distances.  All parts have one shape and are in order."""
    merged, at = [], 0
    while at < len(parts):
        first, last = parts[at], at
        step = _step(first, parts[at + 1]) if at + 1 < len(parts) else None
        while step and last + 1 < len(parts) and _step(parts[last], parts[last + 1]) == step:
            last += 1
        if last > at and step:
            loops = [Mode(last - at + 1, *step), *first.inner, *first.outer]
            merged.append(Part.of(loops, first.start, (first.src_id, first.dst_id), first.label, first.half, first.key))
        else:
            merged.append(first)
        at = last + 1
    return merged


def _distance(one: Part, other: Part) -> tuple[int, int, int, int, int]:
    """The distance between the starts of two parts, as strides of a mode."""
    (src, src_table), (dst, dst_table) = ((b[0] - a[0], b[1] - a[1]) for a, b in zip(one.start, other.start, strict=True))
    return src, dst, src_table, dst_table, other.key - one.key


def _step(one: Part, other: Part) -> tuple[int, int, int, int, int] | None:
    """The distance of two parts; None if their shapes differ or it is negative."""
    steps = _distance(one, other)
    return steps if (one.outer, one.inner) == (other.outer, other.inner) and min(steps) >= 0 else None


def rejoined(halves: list[Part]) -> list[Part]:
    """Merge K and V into one part if they differ only in their start."""
    if len(halves) != 2:
        return halves
    k, v = halves
    whole = _joined(k, v, k.label[:-1].strip(), None)
    return [whole] if whole else halves


def gathered(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Merge planes that are contiguous on both sides, until there are none left."""
    if len(parts) == 1:
        return tuple(parts)
    done: list[Part] = []
    for part in sorted(parts, key=lambda part: (part.src_table_offset, part.src_offset)):
        while (
            done
            and _goes_on(last := done[-1], part)
            and (whole := _joined(last, part, f"{last.label} + {part.label}", part.half))
        ):
            done.pop()
            part = whole
        done.append(part)
    return tuple(sorted(done, key=lambda part: -part.nbytes)) if len(done) < len(parts) else tuple(parts)


def _goes_on(one: Part, other: Part) -> bool:
    """True if the runs of the second part begin where those of the first end, on both sides and in keys."""
    run = one.run_bytes
    ends = tuple((start + run, entry) for start, entry in one.start)
    return ends == other.start and one.half == other.half and one.key + run * one.inner[0].key == other.key


def _joined(one: Part, other: Part, label: str, half: int | None) -> Part | None:
    """Two parts as one, if they differ only in their start, or if the second's runs continue the first's; else None."""
    if (one.outer, one.inner[1:], one.src_id, one.dst_id) != (other.outer, other.inner[1:], other.src_id, other.dst_id):
        return None
    if _goes_on(one, other):
        loops = [one.inner[0]._replace(extent=one.run_bytes + other.run_bytes)]
    elif one.run_bytes == other.run_bytes:
        loops = [one.inner[0], Mode(2, *_distance(one, other))]
    else:
        return None
    return Part.of([*loops, *one.inner[1:], *one.outer], one.start, (one.src_id, one.dst_id), label, half, one.key)
