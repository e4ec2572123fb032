"""Pages: planes whose rows are not whole words on one side are copied through shared memory.

A record of 132 bytes (128 bytes of data and a scale of 4 bytes) begins at a multiple of 4.  Row by row, it can only be copied in
words of four bytes.  But several such records together are dense and begin at a multiple of a word.  So a kernel reads (or writes)
a piece of them as one stream of words, and separates the planes in shared memory, where they need no alignment.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from .kernel_forms import WIDEST, widest_word
from .loopnest import STILL, Mode, Part, nest

#: Bytes of a sector of memory.  A partly written sector costs a read.
_SECTOR = 32

#: Pages are used if rows need more than `_MANY` times the words of a dense copy, or if more than 1 / `_MOSTLY` of all bytes are
#: written in rows whose size or step is not a multiple of a sector.
_MANY, _MOSTLY = 1.25, 2

#: Bytes of a piece: enough in flight, and few enough that several CTAs share a multiprocessor.  Largest page that is copied as one
#: piece.  Largest piece at all.
_PIECE, _WHOLE, _LARGEST = 12 << 10, 20 << 10, 24 << 10

#: Largest number of runs on the dense side.
_MOST_RUNS = 4096


class Staged(NamedTuple):
    """How one part of a page is copied through shared memory."""

    part: Part  # its loops inside a piece of a page; ``inner[0]`` is a run on the side that is not staged
    pieces: Mode  # the step from piece to piece
    #: Bytes per access to shared memory, and to global memory.
    word: int
    item: int
    distance: int  # distance in bytes between the words of an item in shared memory
    #: Its start in shared memory, and the bytes of the dense segment that starts with it (0: it lies in another part's
    #: segment).
    place: int
    held: int
    gathers: bool  # True if the source is the staged side


def stage(parts: Sequence[Part], src_alignment: int, dst_alignment: int) -> list[Staged] | None:
    """Plan the parts of one page, planes with the same outer loops, through shared memory, where that is faster.

    None if the rows are whole words and sectors anyway, or if neither side is dense in pieces of whole words.
    """
    if not _is_slow(parts, src_alignment, dst_alignment):
        return None
    found = [_staged(parts, side, (src_alignment, dst_alignment)) for side in (1, 0)]
    # Take the side with fewer items: the words of the other side are then wider.
    return min(filter(None, found), key=lambda some: sum(one.part.chunk_bytes // one.item for one in some), default=None)


def _is_slow(parts: Sequence[Part], src_alignment: int, dst_alignment: int) -> bool:
    """True if a copy by rows needs many more words than a dense copy, or writes parts of sectors."""
    total = sum(part.nbytes for part in parts)
    alignments = ((part, (src_alignment, dst_alignment)) for part in parts)
    words = sum(part.nbytes // min(_word(part, side, both[side]) for side in (0, 1)) for part, both in alignments)
    if words * WIDEST > _MANY * total:
        return True
    cut = sum(part.nbytes for part in parts if any(step % _SECTOR for step in _row(part, 1)))
    return cut * _MOSTLY > total


def _row(part: Part, side: int) -> tuple[int, ...]:
    """Bytes of a dense row on one side, and the steps from row to row."""
    own = nest(Mode(mode.extent, _step(mode, side), _step(mode, side)) for mode in part.inner)
    return (own[0].extent, *(mode.dst for mode in own[1:])) if own else (part.run_bytes,)


def _step(mode: Mode, side: int) -> int:
    return mode.dst if side else mode.src


def _start(part: Part, side: int) -> tuple[int, int]:
    """Table index and byte offset of the start."""
    return (part.dst_table_offset, part.dst_offset) if side else (part.src_table_offset, part.src_offset)


def _word(part: Part, side: int, alignment: int) -> int:
    """The widest word for a part, as far as this side is concerned."""
    return widest_word(part.run_bytes, alignment, _start(part, side)[1], *(_step(mode, side) for mode in part.inner[1:]))


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
    if widest_word(alignments[side], *ids, *steps) < WIDEST or any(
        start[1] % WIDEST or size % WIDEST for start, size in segments
    ):
        return None
    made, begin = [], 0
    places = {}
    for start, size in segments:
        places[start] = begin
        begin += size
    started: set[tuple[int, int]] = set()
    turns: dict[tuple[int, int], tuple[tuple[object, ...], ...]] = {}
    for part, pieces in cut:
        at = _start(part, side)
        first, size = next((s, n) for s, n in segments if s[0] == at[0] and s[1] <= at[1] < s[1] + n)
        if _turns(part, pieces, side) != turns.setdefault(first, _turns(part, pieces, side)):
            return None  # parts that are adjacent in this piece are not adjacent in the next
        leads = first == at and first not in started
        if leads:
            started.add(first)
        place = places[first] + at[1] - first[1]
        made.append(_items(part, pieces, side, alignments[1 - side], place, size if leads else 0))
    return made if started == {start for start, _ in segments} else None


def _turns(part: Part, pieces: Mode, side: int) -> tuple[tuple[object, ...], ...]:
    """The steps of an id, of each outer loop and of a piece on one side: in the table, and in bytes."""
    if side:
        return (part.dst_id, *((mode.dst_table, mode.dst) for mode in (*part.outer, pieces)))
    return (part.src_id, *((mode.src_table, mode.src) for mode in (*part.outer, pieces)))


def _items(part: Part, pieces: Mode, side: int, alignment: int, place: int, held: int) -> Staged:
    """A part's loops over items.  An item is contiguous on the side that is not staged; short runs are put together from words."""
    other, run = 1 - side, part.run_bytes
    loops = sorted(part.inner[1:], key=lambda mode: _step(mode, other))
    far_id = part.src_id if side else part.dst_id

    def sizes(run: int, loops: Sequence[Mode]) -> tuple[int, int]:
        """Bytes of an item, and the widest word that divides every step in shared memory."""
        far = [_step(mode, other) for mode in (*loops, pieces, *part.outer) if mode.extent > 1]
        item = widest_word(run, alignment, _start(part, other)[1], *far_id.steps, *far)
        return item, widest_word(item, place, *(_step(mode, side) for mode in loops if mode.extent > 1))

    def staged(run: int, loops: Sequence[Mode], word: int, item: int, distance: int) -> Staged:
        inner = (Mode(run, 1, 1), *(mode for mode in loops if mode.extent > 1))
        return Staged(replace(part, inner=inner), pieces, word, item, distance, place, held, side == 0)

    if run in (1, 4) and loops and _step(loops[0], other) == run:
        count = math.gcd(WIDEST // run, loops[0].extent)
        rest = [loops[0].split(count)[1], *loops[1:]]
        item, word = sizes(run * count, rest)
        distance = _step(loops[0], side)
        if count > 1 and item == run * count and word >= run and distance % run == 0:
            return staged(item, rest, run, item, distance)
    item, word = sizes(run, loops)
    word = word if word == item else 4 if word >= 4 else 1  # the word sizes that are compiled
    return staged(run, loops, word, item, 4 if word >= 4 else 1)  # words of two bytes are moved as single bytes in shared memory


def _pieces(parts: Sequence[Part], side: int) -> list[tuple[Part, Mode]] | None:
    """The parts of one piece of a page (their slowest common loop is cut), each with the step to the next piece."""
    total = sum(part.chunk_bytes for part in parts)
    if total <= _WHOLE:
        return [(part, STILL) for part in parts]
    slowest = [max(part.inner[1:], key=lambda mode: _step(mode, side), default=None) for part in parts]
    if any(mode is None for mode in slowest) or len({mode.extent for mode in slowest if mode}) > 1:
        return [(part, STILL) for part in parts] if total <= _LARGEST else None
    extent = slowest[0].extent if slowest[0] else 1
    row = total // extent
    # The least number of rows that is a whole number of words in every part.
    least = math.lcm(*(WIDEST // math.gcd(WIDEST, _step(mode, side)) for mode in slowest if mode))
    fit = [n for n in range(least, extent + 1, least) if extent % n == 0]
    small = [n for n in fit if n * row <= _PIECE]
    count = max(small) if small else min(fit, default=0)
    if not count or count * row > _LARGEST:
        return None
    return [_cut(part, mode, count) for part, mode in zip(parts, slowest, strict=True) if mode]


def _cut(part: Part, mode: Mode, count: int) -> tuple[Part, Mode]:
    inside, pieces = mode.split(count)
    inner = [inside if m is mode else m for m in part.inner]
    return replace(part, inner=tuple(m for i, m in enumerate(inner) if m.extent > 1 or i == 0)), pieces


def _segments(parts: Sequence[Part], side: int) -> list[tuple[tuple[int, int], int]] | None:
    """The dense ranges of all parts together on this side.  Each begins where a part begins; None if that is not so."""
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
    """Table index, start and size of every dense run of a part."""
    own = nest(Mode(mode.extent, _step(mode, side), _step(mode, side)) for mode in part.inner)
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
