"""The picture of a resharding, for `kvbm reshard --svg`: what each rank holds, and what it sends to which rank.

It uses the sheet and the style of `kvbm.show.figure`.  matplotlib is imported when the first picture is made.
"""

from __future__ import annotations

import colorsys
import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..planner.plan import count_text, size_text
from ..reshard.placement import SHARED, Placement, Strips
from ..reshard.report import sentence, units
from ..reshard.strips import Runs, Turns
from .figure import EDGE, FILLS, HUES, LINE, MUTED, PAPER, PLAIN, PLANE_FILLS, PLANE_HUES, WIDTH, Sheet, inches, looks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..reshard.messages import Message, Resharding

#: Most boxes per side (the last one is for all remaining ranks), and most boxes per side that still have space for numbers.
_MOST, _ROOMY = 64, 20
_MOST_BANDS, _MOST_CELLS = 6, 48
_SIDE, _NAME, _BAR, _GAP = 2.84, 0.84, 0.58, 0.08  # inches: width of a box, of its names, of one bar, of a gap
_LEFTS = (EDGE, WIDTH - EDGE - _SIDE)  # left edges of the source's and of the destination's boxes

#: (fill, line, text); alternately light and dark, so that neighbours also differ in greyscale.
_INK = "#1b1f24"
_LIGHT = [(fill, line, _INK) for fill, line in zip((*FILLS, PLANE_FILLS[2]), (*HUES, PLANE_HUES[2]), strict=True)]
_DARK = [(hue, hue, PAPER) for hue in (HUES[1], HUES[3], HUES[0], PLANE_HUES[2], HUES[2])]
_COLOURS = [colour for pair in zip(_LIGHT, _DARK, strict=True) for colour in pair]
#: Brightness (0 to 255) of further light and dark colours, and their saturation.
_GREYS, _SATURATION = (214, 104), 0.55
_REST = (PLANE_FILLS[3], LINE, _INK)  # several senders without a separate colour

_NOTES = (
    "Colours and numbers in bars: the source rank. Ribbons and sizes: bytes per token of a sequence, on average.",
    "×2: two ranks that hold the same and send or get as much; the size is that of one.",
)


@dataclass
class _Box:
    """Ranks that are drawn as one box: they hold the same, and exchange the same with the same boxes."""

    ranks: list[int]
    messages: list[Message]
    is_rest: bool = False  # the box of all remaining ranks, which differ
    y: float = 0.0
    height: float = 0.0
    scale: float = 0.0  # width of a ribbon in inches per byte
    port: float = 0.0  # position of the next ribbon

    @property
    def name(self) -> str:
        return str(Runs.of(self.ranks))

    @property
    def title(self) -> str:
        count = len(self.ranks)
        return f"… {count} more" if self.is_rest else self.name + (f" ×{count}" if count > 1 else "")


def _further(number: int) -> tuple[str, str, str]:
    """A colour (fill, line, text) beyond those that were chosen: light for even numbers, else dark, and another hue for each."""
    grey, hue = _GREYS[number % 2], number * (math.sqrt(5) - 1) / 2 % 1.0  # steps of the golden ratio never come back
    low, high = 0.0, 1.0
    for _ in range(12):  # brightness grows with lightness
        lightness = (low + high) / 2
        rgb = [round(255 * part) for part in colorsys.hls_to_rgb(hue, lightness, _SATURATION)]
        if 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] < grey:
            low = lightness
        else:
            high = lightness
    fill = "#{:02x}{:02x}{:02x}".format(*rgb)
    return (fill, LINE, _INK) if number % 2 == 0 else (fill, fill, PAPER)


def draw(*steps: Resharding) -> Figure:
    """Draw a resharding, or the two steps of `gather` below each other.

    Ranks that hold, send and receive the same are one box.  At most 64 boxes are drawn per side; the last one is for all
    remaining ranks.  A bar per axis shows what the ranks hold: grey if it is not copied, else in the sender's colour, or in
    bands if several ranks send parts of it.  The width of a ribbon is proportional to its bytes.

    The figure is 800 px wide.  The label of a ribbon names its messages, such as ``"messages 0→0 1→0"``.  The label of a box
    names its ranks, such as ``"source ranks 0 1"`` or ``"destination ranks 0"``.  Raises `KvbmError` if matplotlib is not
    installed.
    """
    with looks():
        sheet = Sheet()
        for number, made in enumerate(steps):
            sheet.y += 0.3 if number else 0.0
            step = f"step {number + 1}: " if len(steps) > 1 else ""
            count = count_text(len(made.messages), "message")
            sheet.head(step + made.title, [f"{count}, {units(made)}", *sentence(made).split("; ")])
            _Drawing(sheet, made).all()
        return sheet.finish()


class _Drawing:
    """One resharding on a sheet."""

    def __init__(self, sheet: Sheet, made: Resharding) -> None:
        self.sheet, self.made, self.places = sheet, made, (made.src, made.dst)
        sent: dict[int, list[Message]] = {}
        got: dict[int, list[Message]] = {}
        for m in made.messages:
            sent.setdefault(m.src, []).append(m)
            got.setdefault(m.dst, []).append(m)
        self.sources = _boxes(made.src, made.sends, sent, lambda m: m[2:])
        self.source_of = {rank: i for i, box in enumerate(self.sources) for rank in box.ranks}
        self.targets = _boxes(made.dst, made.takes, got, lambda m: (self.source_of[m.src], *m[2:]))
        self.ribbons: dict[tuple[int, int], list[Message]] = {}
        target_of = {rank: i for i, box in enumerate(self.targets) for rank in box.ranks}
        for m in made.messages:
            self.ribbons.setdefault((self.source_of[m.src], target_of[m.dst]), []).append(m)
        self.colours = self._colours()
        self.tokens, self.grain = _tokens([strips.t for strips in (*made.sends, *made.takes)], made.unit)

    def all(self) -> None:
        sheet, sides = self.sheet, (self.sources, self.targets)
        self._heads()
        heights = [0.54 if len(boxes) <= _ROOMY else 0.195 for boxes in sides]
        tall = max(1.15 * height * len(boxes) for boxes, height in zip(sides, heights, strict=True))
        for boxes, height in zip(sides, heights, strict=True):
            for i, box in enumerate(boxes):
                box.height, box.y = height, sheet.y + (i + 0.5) * tall / len(boxes) - height / 2
        self._ribbons()
        for side, boxes in enumerate(sides):
            for box in boxes:
                self._box(side, box)
        sheet.y += tall + 0.14
        sheet.key([(PLAIN, "", "held, but no part of this copy"), (PAPER, "", "held by other ranks")])
        notes = _NOTES if any("×" in box.title for boxes in sides for box in boxes) else _NOTES[:1]
        for note in notes:
            sheet.text(EDGE, sheet.y + 0.04, note, size=8, color=MUTED, room=WIDTH - 2 * EDGE)
            sheet.y += 0.16

    # ---- what is drawn ---------------------------------------------------------------------------------------------

    def _colours(self) -> list[tuple[str, str, str]]:
        """One colour per source box, alternately light and dark.

        If possible it differs from the colours of the neighbour and of boxes that send to the same rank.  More boxes than there
        are chosen colours have a colour each.
        """
        count = len(_COLOURS)
        if len(self.sources) > count:
            colours = _COLOURS + [_further(i) for i in range(count, len(self.sources))]
            return [_REST if box.is_rest else colour for box, colour in zip(self.sources, colours, strict=True)]
        given = [i % count for i in range(len(self.sources))]
        senders = [{m.src for m in target.messages} for target in self.targets]
        together = [{self.source_of[rank] for rank in ranks} for ranks in senders]
        for i in list(range(len(given))) * 4:  # several passes, as each change affects the others
            rivals = sorted(set().union(*(some for some in together if i in some)) - {i})
            near, before = [given[s] for s in rivals], [given[s] for s in rivals if s < i][-1:]
            costs = [
                (near.count(c), given[max(i - 1, 0) : i] == [c], [c % 2] == [b % 2 for b in before], (c - i) % count)
                for c in range(count)
            ]
            given[i] = costs.index(min(costs))
        return [_REST if box.is_rest else _COLOURS[c] for box, c in zip(self.sources, given, strict=True)]

    def _nbytes(self, messages: Sequence[Message]) -> float:
        """Average bytes per token of a sequence: ranks that hold tokens in turns send only some of the tokens."""
        sends, takes, nbytes = self.made.sends, self.made.takes, self.made.nbytes
        return sum(nbytes(m) / m.tokens * _share(sends[m.src].t, takes[m.dst].t) for m in messages)

    def _cells(self, side: int, box: _Box, axis: str) -> list[tuple[int, ...] | None]:
        """Per coordinate of an axis: None if this box does not hold it, else the boxes that send it (may be empty)."""
        made, place = self.made, self.places[side]
        whole = self.tokens if axis == "t" else range(getattr(place.model, f"n{axis}"))
        held = set().union(*(_held(place.strips(rank), axis, self.tokens) for rank in box.ranks))
        senders: dict[int, set[int]] = {}
        for m in box.messages:
            if axis == "t":
                both = _held(made.sends[m.src], axis, self.tokens) & _held(made.takes[m.dst], axis, self.tokens)
            else:
                both = {x for meeting in getattr(m, axis) for x in meeting.coordinates("first")}
            for x in both:
                senders.setdefault(x, set()).add(self.source_of[m.src])
        return [tuple(sorted(senders.get(x, ()))) if x in held else None for x in whole]

    # ---- drawing ---------------------------------------------------------------------------------------------------

    def _heads(self) -> None:
        """Draw per side a block with its first unit, and the headings of the boxes' columns."""
        sheet, tall = self.sheet, 0.16
        y = sheet.y + 0.3
        smallest = min((m.t for m in self.made.messages), key=lambda unit: unit.tokens, default=None)
        for x, side, place in zip(_LEFTS, (0, 1), self.places, strict=True):
            sheet.text(x, y - 0.12, str(place), size=9, weight="bold", room=_SIDE)
            sheet.box(x, y, _SIDE, tall, PAPER)
            if smallest is not None:
                slots = (smallest.src_slots, smallest.dst_slots)[side]
                count, ranks = place.nt // slots, smallest.tokens // slots
                sheet.box(x, y, _SIDE / count, tall, FILLS[0], label=f"unit of {slots} slots of {place.nt}")
                for i in range(2, count) if count <= 64 else ():
                    sheet.axes.plot([x + i * _SIDE / count] * 2, [y, y + tall], color=LINE, linewidth=0.5)
                caption = f"a unit: {slots} of a block's {place.nt} slots" + (
                    f", on each of {ranks} ranks" if ranks > 1 else ""
                )
                sheet.text(x, y + tall + 0.1, caption, size=7.5, color=MUTED, room=_SIDE)
            turns = Runs.of(x // self.grain for x in self.tokens).runs
            ends = [(run.first * self.grain, (run.last + 1) * self.grain - 1) for run in turns]
            tokens = ", ".join(f"{a}–{b}" if a < b else f"{a}" for a, b in ends)
            whole = [str(Runs.of(range(n))) for n in (place.model.nl, place.model.nh)]
            sheet.text(x, y + 0.52, "rank", size=8, color=MUTED)
            for i, (name, caption) in enumerate(zip(SHARED.values(), (*whole, tokens), strict=True)):
                left = x + _NAME + i * (_BAR + _GAP)
                sheet.text(left, y + 0.52, name, size=8, color=MUTED, room=_BAR + 0.06)
                sheet.text(left, y + 0.67, caption, size=7, color=MUTED, room=_BAR + 0.06)
        if smallest is not None:
            sheet.axes.annotate(
                "", (_LEFTS[1] - 0.03, y + tall / 2), (EDGE + _SIDE + 0.03, y + tall / 2),
                arrowprops={"arrowstyle": "-|>,head_width=0.16,head_length=0.35", "color": HUES[0], "linewidth": 1.0},
            )  # fmt: skip
            sheet.text(WIDTH / 2, y - 0.02, count_text(smallest.tokens, "token"), size=8, ha="center")
        sheet.y = y + 0.8

    def _ribbons(self) -> None:
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path

        boxes, weights = [*self.sources, *self.targets], {p: self._nbytes(found) for p, found in self.ribbons.items()}
        # All boxes have the same width per byte, except the box for all remaining ranks.
        full = [(box, self._nbytes(box.messages)) for box in boxes if box.messages]
        scale = 0.3 / max(weights.values(), default=1.0)
        scale = min([scale, *(0.94 * box.height / total for box, total in full if not box.is_rest)])
        for box, total in full:
            box.scale = min(scale, 0.94 * box.height / total)
            box.port = box.y + (box.height - total * box.scale) / 2
        left, right = EDGE + _SIDE, _LEFTS[1]
        middle = (left + right) / 2
        codes = [Path.MOVETO, *[Path.CURVE4] * 3, Path.LINETO, *[Path.CURVE4] * 3, Path.CLOSEPOLY]
        for (i, j), weight in sorted(weights.items()):
            source, target = self.sources[i], self.targets[j]
            a, b = source.port, target.port
            c, d = source.port, target.port = a + weight * source.scale, b + weight * target.scale
            xs = (left, middle, middle, right, right, middle, middle, left, left)
            outline = Path(list(zip(xs, (a, a, b, b, d, d, c, c, a), strict=True)), codes)
            fill, line, _ = self.colours[i]
            label = "messages " + " ".join(f"{m.src}→{m.dst}" for m in self.ribbons[i, j])
            looks = {"facecolor": fill, "edgecolor": line, "linewidth": 0.5, "alpha": 0.8, "label": label}
            self.sheet.axes.add_patch(PathPatch(outline, **looks))

    def _box(self, side: int, box: _Box) -> None:
        sheet, x, y = self.sheet, _LEFTS[side], box.y
        name, way = (("source", "to"), ("destination", "from"))[side]
        sheet.box(x, y, _SIDE, box.height, PAPER, label=f"{name} ranks {' '.join(map(str, box.ranks))}")
        if not side:
            fill = self.colours[self.source_of[box.ranks[0]]][0] if box.messages else PLAIN
            sheet.box(x + _SIDE - 0.07, y, 0.07, box.height, fill)
        is_roomy = box.height > 0.3
        at, size, top = (0.13, 9.0, 0.08) if is_roomy else (box.height / 2, 8.0, 0.035)
        sheet.text(x + 0.06, y + at, box.title, size=size, weight="bold", room=_NAME - 0.1)
        strips = self.places[side].strips(box.ranks[0])
        for i, axis in enumerate("lht"):
            left = x + _NAME + i * (_BAR + _GAP)
            self._bar(left, y + top, 0.22 if is_roomy else box.height - 0.07, self._cells(side, box, axis), side == 1)
            if is_roomy:
                turn = "all" if strips.t.over == 1 else f"{strips.t.every:,} of {strips.t.period:,}"
                caption = turn if axis == "t" else str(getattr(strips, axis)) or "none"
                sheet.text(left, y + 0.42, caption, size=7.5, color=MUTED, room=_BAR + 0.04)
        if is_roomy:
            others = sorted({m.src if side else m.dst for m in box.messages})
            caption = f"{way} {', '.join(map(str, others)) if len(others) < 4 else Runs.of(others)}"
            caption = caption if inches(caption, 7.5) <= _NAME - 0.12 else f"{way} {len(others)} ranks"
            nbytes = size_text(round(self._nbytes(box.messages) / len(box.ranks)))
            sheet.text(x + 0.06, y + 0.28, nbytes if others else "nothing", size=7.5, room=_NAME - 0.1)
            sheet.text(x + 0.06, y + 0.42, caption if others else "", size=7.5, color=MUTED)

    def _bar(self, x: float, y: float, tall: float, cells: Sequence[tuple[int, ...] | None], is_named: bool) -> None:
        sheet, each = self.sheet, _BAR / len(cells)
        sheet.box(x, y, _BAR, tall, PAPER, linewidth=0.4)
        for cell, run in itertools.groupby(cells):
            left, wide = x, len(list(run)) * each
            x += wide
            if cell is None:
                continue
            bands, name = [self.colours[i] for i in cell] or [(PLAIN, LINE, MUTED)], ""
            if len(cell) > _MOST_BANDS:
                bands, name = [_REST], f"{len(cell)} ranks"
            elif len(cell) == 1:
                name = self.sources[cell[0]].name
            for i, (fill, line, _) in enumerate(bands):
                edge = {"edgecolor": line, "linewidth": 0.3 if wide > 0.04 else 0.0}
                sheet.box(left, y + i * tall / len(bands), wide, tall / len(bands), fill, **edge)
            if is_named and tall > 0.11 and name and inches(re.sub("[0-9]", "0", name), 6.5) < wide - 0.01:
                sheet.text(left + wide / 2, y + tall / 2, name, size=6.5, ha="center", color=bands[0][2])


def _boxes(
    place: Placement, strips: Sequence[Strips], messages: dict[int, list[Message]], meaning: Callable[[Message], object]
) -> list[_Box]:
    found: dict[object, list[int]] = {}
    for rank in range(place.world):
        does = frozenset(map(meaning, messages.get(rank, ())))
        found.setdefault((place.strips(rank), strips[rank], does), []).append(rank)
    groups = list(found.values())
    if len(groups) > _MOST:
        groups[_MOST - 1 :] = [sorted(itertools.chain.from_iterable(groups[_MOST - 1 :]))]
    made = [_Box(ranks, [m for rank in ranks for m in messages.get(rank, ())]) for ranks in groups]
    made[-1].is_rest = len(groups) < len(found)
    return made


def _held(strips: Strips, axis: str, tokens: Sequence[int]) -> set[int]:
    return {x for x in tokens if strips.t.holds(x)} if axis == "t" else set(getattr(strips, axis))


@functools.lru_cache(maxsize=4096)
def _share(a: Turns, b: Turns) -> float:
    """The fraction of a sequence's tokens that both hold."""
    positions = range(0, math.lcm(a.period, b.period), math.gcd(a.every, b.every))
    return sum(bool(a.holds(x) and b.holds(x)) for x in positions) / len(positions)


def _tokens(turns: Sequence[Turns], unit: int) -> tuple[list[int], int]:
    """The positions that a bar shows, and the number of tokens that each represents."""
    split = {(turn.every, turn.period) for turn in turns if turn.over > 1}
    if not split:
        return [0], unit
    grain, period = math.gcd(*(every for every, _ in split)), math.lcm(*(period for _, period in split))
    found = list(range(0, period * max(1, 8 * grain // period), grain))
    if len(found) > _MOST_CELLS:  # short turns on one side, long turns on the other: show the beginning of each long turn
        short, long = min(period for _, period in split), max(every for every, _ in split)
        found = [x for x in found if x % long < short]
    return found, grain
