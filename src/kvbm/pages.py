"""Pages: planes whose rows are no whole words on one side go by way of shared memory, a dense piece of a page at a time.

A record of 132 bytes, 128 of data and a scale of 4, begins at a multiple of 4: taken row by row it moves in words of four
bytes.  But some records together are dense, and begin where a word does.  So a kernel reads (or writes) them as one stream of
words, and takes the planes apart in shared memory, which asks nothing of alignment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from .nest import Mode, Part, coalesce

__all__ = ["Staged", "stage"]

#: Bytes of a word, and of a sector of memory: what is written of it in part costs a read.
_WORD, _SECTOR = 16, 32

#: So many times as many words as there would be are many; and that part of all bytes is most of them.
_MANY, _MOSTLY = 1.25, 2

#: Bytes of a piece: what is worth having in flight, and few enough that many CTAs share a multiprocessor; a page that is taken
#: whole; and the most that will do.
_PIECE, _WHOLE, _LARGEST = 12 << 10, 20 << 10, 24 << 10

#: More runs than these on the dense side are no page.
_MOST_RUNS = 4096


class Staged(NamedTuple):
    """How one part of a page goes through shared memory.

    Attributes
    ----------
    part : Part
        Its loops inside a piece of a page; ``inner[0]`` is a run on the side not staged.
    pieces : Mode
        The step from piece to piece.
    word, item : int
        Bytes moved at a time in shared memory, and in memory.
    apart : int
        Bytes from word to word of an item in shared memory.
    place, held : int
        Where it starts in shared memory, and the bytes of the dense segment that starts with it (0: in another's).
    gathers : bool
        Whether the source is staged.
    """

    part: Part
    pieces: Mode
    word: int
    item: int
    apart: int
    place: int
    held: int
    gathers: bool


def stage(parts: Sequence[Part], src_alignment: int, dst_alignment: int) -> list[Staged] | None:
    """Parts of one page by way of shared memory, where that helps and can be done.

    Parameters
    ----------
    parts : sequence of Part
        Planes with the same outer loops.
    src_alignment, dst_alignment : int
        What divides the base addresses.

    Returns
    -------
    list of Staged or None
        None where all rows are whole words and sectors anyway, or neither side is dense in pieces that are whole words.
    """
    if not _is_slow(parts, src_alignment, dst_alignment):
        return None
    found = [_staged(parts, side, (src_alignment, dst_alignment)) for side in (1, 0)]
    # Whichever leaves whole words to the other side.
    return min((one for one in found if one is not None), key=_count_items, default=None)


def _count_items(staged: Sequence[Staged]) -> int:
    return sum(one.part.chunk_bytes // one.item for one in staged)


def _is_slow(parts: Sequence[Part], src_alignment: int, dst_alignment: int) -> bool:
    """Whether rows would take many more words than there are, or write sectors of memory in part."""
    total = sum(part.nbytes for part in parts)
    alignments = ((part, (src_alignment, dst_alignment)) for part in parts)
    words = sum(part.nbytes // min(_word(part, side, both[side]) for side in (0, 1)) for part, both in alignments)
    if words * _WORD > _MANY * total:
        return True
    cut = sum(part.nbytes for part in parts if any(step % _SECTOR for step in _row(part, 1)))
    return cut * _MOSTLY > total


def _row(part: Part, side: int) -> tuple[int, ...]:
    """What is dense on one side by itself, and the steps from one such row to the next."""
    own = coalesce(Mode(mode.extent, _step(mode, side), _step(mode, side)) for mode in part.inner)
    return (own[0].extent, *(mode.dst for mode in own[1:])) if own else (part.run_bytes,)


def _step(mode: Mode, side: int) -> int:
    return mode.dst if side else mode.src


def _start(part: Part, side: int) -> tuple[int, int]:
    """Table entry and bytes."""
    return (part.dst_table_offset, part.dst_offset) if side else (part.src_table_offset, part.src_offset)


def _power(*values: int) -> int:
    common = math.gcd(_WORD, *values)
    return common & -common


def _word(part: Part, side: int, alignment: int) -> int:
    """The word that a part could be moved in, if this side alone decided."""
    return _power(part.run_bytes, alignment, _start(part, side)[1], *(_step(mode, side) for mode in part.inner[1:]))


def _staged(parts: Sequence[Part], side: int, alignments: tuple[int, int]) -> list[Staged] | None:
    if len({tuple(mode.extent for mode in part.outer) for part in parts}) > 1:
        return None
    cut = _pieces(parts, side)
    if cut is None:
        return None
    segments = _segments([part for part, _ in cut], side)
    if segments is None:
        return None
    ids = [step for part in parts for step in (part.dst_id if side else part.src_id).steps]
    steps = [_step(mode, side) for part, pieces in cut for mode in (*part.outer, pieces)]
    if _power(alignments[side], *ids, *steps) < _WORD or any(
        start[1] % _WORD or size % _WORD for start, size in segments
    ):
        return None
    made, begin = [], 0
    places = {}
    for start, size in segments:
        places[start] = begin
        begin += size
    led: set[tuple[int, int]] = set()
    turns: dict[tuple[int, int], tuple[tuple[object, ...], ...]] = {}
    for part, pieces in cut:
        at = _start(part, side)
        first, size = next((s, n) for s, n in segments if s[0] == at[0] and s[1] <= at[1] < s[1] + n)
        if _turns(part, pieces, side) != turns.setdefault(first, _turns(part, pieces, side)):
            return None  # what is side by side in this piece is not in the next
        leads = first == at and first not in led
        if leads:
            led.add(first)
        place = places[first] + at[1] - first[1]
        made.append(_items(part, pieces, side, alignments[1 - side], place, size if leads else 0))
    return made if led == {start for start, _ in segments} else None


def _turns(part: Part, pieces: Mode, side: int) -> tuple[tuple[object, ...], ...]:
    """What an id, each outer loop and a piece step on one side: table entries and bytes."""
    if side:
        return (part.dst_id, *((mode.dst_table, mode.dst) for mode in (*part.outer, pieces)))
    return (part.src_id, *((mode.src_table, mode.src) for mode in (*part.outer, pieces)))


def _items(part: Part, pieces: Mode, side: int, alignment: int, place: int, held: int) -> Staged:
    """A part's loops over items: whole on the side that is not staged, put together from words where runs are short."""
    other, run = 1 - side, part.run_bytes
    loops = sorted(part.inner[1:], key=lambda mode: _step(mode, other))
    far_id = part.src_id if side else part.dst_id

    def sizes(run: int, loops: Sequence[Mode]) -> tuple[int, int]:
        """Bytes of an item, and what divides every step in shared memory."""
        far = [_step(mode, other) for mode in (*loops, pieces, *part.outer) if mode.extent > 1]
        item = _power(run, alignment, _start(part, other)[1], *far_id.steps, *far)
        return item, _power(item, place, *(_step(mode, side) for mode in loops if mode.extent > 1))

    def staged(run: int, loops: Sequence[Mode], word: int, item: int, apart: int) -> Staged:
        inner = (Mode(run, 1, 1), *(mode for mode in loops if mode.extent > 1))
        return Staged(replace(part, inner=inner), pieces, word, item, apart, place, held, side == 0)

    if run in (1, 4) and loops and _step(loops[0], other) == run:
        count = math.gcd(_WORD // run, loops[0].extent)
        rest = [Mode(loops[0].extent // count, loops[0].src * count, loops[0].dst * count), *loops[1:]]
        item, word = sizes(run * count, rest)
        apart = _step(loops[0], side)
        if count > 1 and item == run * count and word >= run and apart % run == 0:
            return staged(item, rest, run, item, apart)
    item, word = sizes(run, loops)
    word = word if word == item else 4 if word >= 4 else 1  # what is compiled
    return staged(run, loops, word, item, 4 if word >= 4 else 1)  # in shared memory two bytes are two words


def _pieces(parts: Sequence[Part], side: int) -> list[tuple[Part, Mode]] | None:
    """The parts with their slowest common loop cut, so that what is left is a piece of a page; and the step to the next piece."""
    total = sum(part.chunk_bytes for part in parts)
    if total <= _WHOLE:
        return [(part, _STILL) for part in parts]
    slowest = [max(part.inner[1:], key=lambda mode: _step(mode, side), default=None) for part in parts]
    if any(mode is None for mode in slowest) or len({mode.extent for mode in slowest if mode}) > 1:
        return [(part, _STILL) for part in parts] if total <= _LARGEST else None
    extent = slowest[0].extent if slowest[0] else 1
    row = total // extent
    # Whole words of every segment: as many rows as the odd sizes of all parts ask for.
    least = math.lcm(*(_WORD // math.gcd(_WORD, _step(mode, side)) for mode in slowest if mode))
    fit = [n for n in range(least, extent + 1, least) if extent % n == 0]
    small = [n for n in fit if n * row <= _PIECE]
    count = max(small) if small else min(fit, default=0)
    if not count or count * row > _LARGEST:
        return None
    return [_cut(part, mode, count) for part, mode in zip(parts, slowest, strict=True) if mode]


_STILL = Mode(1, 0, 0)


def _cut(part: Part, mode: Mode, count: int) -> tuple[Part, Mode]:
    inner = [m._replace(extent=count) if m is mode else m for m in part.inner]
    kept = tuple(m for i, m in enumerate(inner) if m.extent > 1 or i == 0)
    return replace(part, inner=kept), Mode(mode.extent // count, mode.src * count, mode.dst * count)


def _segments(parts: Sequence[Part], side: int) -> list[tuple[tuple[int, int], int]] | None:
    """What the parts hold together on this side, as dense ranges that each begin where a part does."""
    runs: list[tuple[int, int, int]] = []
    for part in parts:
        for run in _runs(part, side):
            runs.append(run)
            if len(runs) > _MOST_RUNS:
                return None
    merged: list[tuple[tuple[int, int], int]] = []
    for entry, start, size in sorted(runs):
        if merged and merged[-1][0][0] == entry and merged[-1][0][1] + merged[-1][1] == start:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append(((entry, start), size))
    starts = {_start(part, side) for part in parts}
    return merged if len(merged) <= len(parts) and all(start in starts for start, _ in merged) else None


def _runs(part: Part, side: int) -> Iterator[tuple[int, int, int]]:
    """Table entry, start and size of everything that is dense by itself."""
    own = coalesce(Mode(mode.extent, _step(mode, side), _step(mode, side)) for mode in part.inner)
    run, loops = (own[0].extent, own[1:]) if own and own[0].dst == 1 else (1, own)
    entry, start = _start(part, side)
    turns = [0] * len(loops)
    for _ in range(math.prod(mode.extent for mode in loops)):
        yield entry, start + sum(turn * mode.dst for turn, mode in zip(turns, loops, strict=True)), run
        for place, mode in enumerate(loops):
            turns[place] += 1
            if turns[place] < mode.extent:
                break
            turns[place] = 0
