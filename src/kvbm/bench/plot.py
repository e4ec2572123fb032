"""Pictures of measurements: ``kvbm bench plot CSV...`` turns what the other commands wrote into PNG and SVG files.

A file's columns say which pictures can be made of it, and its comment lines become their footer. Nothing is computed here
that is not in the file, but for shares of a sum and the spread of a group: a picture can be checked against its rows.
"""

from __future__ import annotations

import csv
import math
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from ..errors import KvbmError, SpecError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["KINDS", "Table", "comma_list", "draw", "plot", "read", "save"]

#: Backends that are kvbm's; `memcpy` is the yardstick, and every other name is a peer.
KVBM_BACKENDS = ("auto", "direct", "staged", "engine", "host", "vectorized", "batched", "memcpy_async")
YARDSTICK = "memcpy"

#: Of several backends, the one whose line is drawn, by direction.
_SHOWN = {
    "d2d": ("direct", "auto", "staged", "engine"),
    "h2h": ("host", "direct", "auto"),
    "": ("auto", "direct", "staged", "engine"),
}

_DIRECTIONS = {
    "d2d": "within a GPU",
    "d2h": "GPU to pinned host memory",
    "h2d": "pinned host memory to GPU",
    "p2p": "GPU to GPU",
    "h2h": "within the host",
}

_MOST_LINES = 6
_MOST_PAIRS = 4
_BARS_AT = 64  # blocks


# ---- reading -------------------------------------------------------------------------------------------------------


class Row(dict[str, str]):
    """A line of a CSV file that knows where it stands."""

    def __init__(self, values: Mapping[str, str], where: str) -> None:
        super().__init__(values)
        self.where = where

    def number(self, column: str) -> float:
        """The number in a column; `SpecError` names file and line if there is none."""
        try:
            value = float(self[column])
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise SpecError(f"{self.where}: column {column!r}: expected a number, got {self[column]!r}")
        return value

    def positive(self, column: str) -> float:
        """The number in a column that is drawn on a logarithmic axis, or divided by."""
        value = self.number(column)
        if value <= 0:
            raise SpecError(f"{self.where}: column {column!r}: expected a number above 0, got {self[column]!r}")
        return value


@dataclass(frozen=True)
class Table:
    """One header row and what stands below it.

    Attributes
    ----------
    path : Path
    comments : tuple of str
        The comment lines above the header, without their ``#``: commit, machine, driver, date.
    columns : tuple of str
    rows : tuple of Row
    """

    path: Path
    comments: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]


def read(path: Path) -> list[Table]:
    """The tables of a CSV file: a comment line begins a new one, as where runs were appended to one file.

    Raises
    ------
    SpecError
        Nothing but comments, a row with too few or too many cells, or text that is not UTF-8.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: expected a CSV file in UTF-8: {error}") from None
    parts: list[tuple[list[str], list[tuple[int, str]]]] = []
    for number, line in enumerate(lines, 1):
        is_comment = line.startswith("#")
        if not parts or (is_comment and parts[-1][1]):
            parts.append(([], []))
        if is_comment:
            parts[-1][0].append(line.lstrip("# ").rstrip())
        elif line.strip():
            parts[-1][1].append((number, line))
    tables = [_table(path, comments, held) for comments, held in parts if held]
    if not any(table.rows for table in tables):
        found = "a header and no rows" if tables else "none"
        raise SpecError(f"{path}: expected a header line and rows, as `kvbm bench` writes them, got {found}")
    return tables


def _table(path: Path, comments: Sequence[str], held: Sequence[tuple[int, str]]) -> Table:
    (_, header), *rest = held
    columns = tuple(next(csv.reader([header])))
    rows = []
    for number, line in rest:
        cells = next(csv.reader([line]))
        if len(cells) != len(columns):
            raise SpecError(f"{path}:{number}: expected {len(columns)} cells, as the header has, got {len(cells)}")
        rows.append(Row(dict(zip(columns, cells, strict=True)), f"{path}:{number}"))
    return Table(path, tuple(comments), columns, tuple(rows))


# ---- looks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Style:
    """Colours; series differ in hue for the colour-blind (Okabe and Ito), in marker and dash for those who print in grey."""

    paper: str
    ink: str
    muted: str
    grid: str
    shade: str
    series: tuple[str, ...]
    peer: str
    raw: str


_LIGHT = _Style(
    "#ffffff", "#1b1f24", "#59636e", "#e4e8ec", "#eef1f4",
    ("#0072b2", "#d55e00", "#009e73", "#9a4f86", "#56b4e9", "#b07d00"), "#c9a227", "#8fc1e3",
)  # fmt: skip
_DARK = _Style(
    "#0d1117", "#e6edf3", "#9aa4af", "#262c34", "#1a2129",
    ("#56b4e9", "#f0824a", "#2fc79b", "#d99ac2", "#9fd3f5", "#e6c34a"), "#b8932a", "#2f6c94",
)  # fmt: skip
_MARKERS = "os^DvP"
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (3, 1)), (0, (8, 2)))

_WIDTH = 8.0  # inches; at 100 dots an inch, the 800 px that a README gives a picture
_DPI = 200
_TEXT, _SMALL = 10.0, 8.5


@contextmanager
def _looks(style: _Style) -> Iterator[None]:
    """The defaults of matplotlib and ours over them, for as long as it takes: no setting of the caller's gets in, none is lost."""
    try:
        import matplotlib as mpl
    except ImportError:
        raise KvbmError("kvbm bench plot: matplotlib is not installed: pip install 'kvbm-layouts[bench]'") from None
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(
            {
                "font.size": _TEXT,
                "text.color": style.ink,
                "axes.labelcolor": style.muted,
                "axes.edgecolor": style.muted,
                "axes.linewidth": 0.8,
                "axes.facecolor": style.paper,
                "axes.spines.top": False,
                "axes.spines.right": False,
                "axes.axisbelow": True,
                "xtick.color": style.muted,
                "ytick.color": style.muted,
                "xtick.labelsize": 9.5,
                "ytick.labelsize": 9.5,
                "grid.color": style.grid,
                "grid.linewidth": 0.8,
                "lines.linewidth": 2.0,
                "lines.markersize": 5.0,
                "figure.facecolor": style.paper,
                "savefig.facecolor": style.paper,
                # Text stays text: it can be found and read aloud. The salt and no date: the same rows, the same bytes.
                "svg.fonttype": "none",
                "svg.hashsalt": "kvbm",
            }
        )
        yield


def _inches(text: str, size: float, *, bold: bool = False) -> float:
    """Width of the longest line of a text; measured in the font that comes with matplotlib."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    font = FontProperties(weight="bold" if bold else "normal")
    widths = [TextPath((0, 0), line, size=size, prop=font).get_extents().width for line in text.split("\n") if line]
    return float(max(widths, default=0.0)) / 72


class _Sheet:
    """A figure of panels one under the other: title and subtitle above, footer below, all at distances in inches."""

    def __init__(
        self,
        style: _Style,
        title: str,
        subtitle: str,
        footer: str,
        panels: Sequence[float],
        *,
        left: float,
        right: float,
        between: float,
        below: float,
        above: float,
        columns: int = 1,
    ) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self.style = style
        lines = textwrap.wrap(subtitle, 102)
        foot = [line for part in footer.split("\n") for line in textwrap.wrap(part, 118)]
        head = 0.52 + 0.19 * len(lines) + above
        low = 0.18 + 0.165 * len(foot) + below
        height = head + sum(panels) + between * (len(panels) - 1) + low
        self.figure = Figure(figsize=(_WIDTH, height))
        FigureCanvasAgg(self.figure)
        self.axes: list[Axes] = []
        top = height - head
        width = (_WIDTH - columns * (left + right)) / columns
        for panel in panels:
            for column in range(columns):
                start = left + column * (width + left + right)
                box = (start / _WIDTH, (top - panel) / height, width / _WIDTH, panel / height)
                self.axes.append(self.figure.add_axes(box))
            top -= panel + between
        self.write(0.16, height - 0.16, title, size=13.5, weight="bold", va="top")
        for turn, line in enumerate(lines):
            self.write(0.16, height - 0.46 - 0.19 * turn, line, size=9.5, color=style.muted, va="top")
        for turn, line in enumerate(reversed(foot)):
            self.write(0.16, 0.12 + 0.165 * turn, line, size=7.5, color=style.muted, va="bottom")

    def write(self, x: float, y: float, text: str, **rest: Any) -> None:
        """Text at inches from the lower left corner."""
        width, height = self.figure.get_size_inches()
        self.figure.text(x / width, y / height, text, **rest)

    def heading(self, axes: Axes, text: str, *, lift: float = 0.1) -> None:
        """A panel's title, over its left edge."""
        axes.annotate(
            text, (0, 1), xycoords="axes fraction", xytext=(0, 72 * lift), textcoords="offset points",
            weight="bold", size=10.5, va="bottom",
        )  # fmt: skip


def _spread(wanted: Sequence[float], gaps: Sequence[float], highest: float = math.inf) -> list[float]:
    """Places nearest to those wanted, in the same order, so that neighbours are half of both their gaps apart.

    Labels that would overlap form a stack, which stands where its members wanted to be on average; no label is centred above
    `highest`, however far down that pushes the ones below it.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    # With the distances below taken off, "no overlap" is "never falling": pool neighbours that fall.
    below, total = {}, 0.0
    for turn, i in enumerate(order):
        total += (gaps[i] + gaps[order[turn - 1]]) / 2 if turn else 0.0
        below[i] = total
    stacks: list[list[int]] = []
    for i in order:
        stacks.append([i])
        while len(stacks) > 1 and _mean(stacks[-2], wanted, below) > _mean(stacks[-1], wanted, below):
            last = stacks.pop()
            stacks[-1] += last
    placed = dict.fromkeys(order, 0.0)
    for stack in stacks:
        for i in stack:
            placed[i] = _mean(stack, wanted, below) + below[i]
    for turn, i in reversed(list(enumerate(order))):
        after = order[turn + 1] if turn + 1 < len(order) else None
        placed[i] = min(placed[i], highest if after is None else placed[after] - (gaps[i] + gaps[after]) / 2)
    return [placed[i] for i in range(len(wanted))]


def _mean(stack: Sequence[int], wanted: Sequence[float], below: Mapping[int, float]) -> float:
    return sum(wanted[i] - below[i] for i in stack) / len(stack)


@dataclass(frozen=True)
class _End:
    """The label of a line: where the line ends, what it is called, and what else there is to say."""

    x: float
    y: float
    text: str
    color: str
    more: str = ""
    bold: bool = False

    @property
    def inches(self) -> float:
        more = _inches(self.more, _SMALL) if self.more else 0.0
        return max(_inches(self.text, _TEXT, bold=self.bold), more)

    @property
    def height(self) -> float:
        """In points, with what keeps it off its neighbour."""
        return 14.0 + 11.5 * (self.more.count("\n") + 1 if self.more else 0) + (3.0 if self.more else 0.0)


_LEADER = 0.42  # inches between the panel and the labels


def _label(sheet: _Sheet, axes: Axes, ends: Sequence[_End]) -> None:
    """Write the labels right of a panel, and lead each line to its own."""
    width, height = (axes.get_position().size * sheet.figure.get_size_inches()) * 72
    at = [(axes.transScale + axes.transLimits).transform((end.x, end.y)) for end in ends]
    places = _spread([float(y) * height for _, y in at], [end.height for end in ends], height - 5)
    for end, (x, y), place in zip(ends, at, places, strict=True):
        start, turn, stop = 1 + 6 / width, 1 + 14 / width, 1 + (72 * _LEADER - 5) / width
        axes.plot(
            [float(x) + 5 / width, start, max(turn, start), stop], [y, y, place / height, place / height],
            transform=axes.transAxes, color=end.color, linewidth=0.9, clip_on=False, solid_capstyle="round", gid="leader",
        )  # fmt: skip
        lift = 11.5 * (end.more.count("\n") + 1) / 2 if end.more else 0.0
        common: dict[str, Any] = {"xycoords": "axes points", "annotation_clip": False, "ha": "left"}
        spot = (width + 72 * _LEADER, place + lift)
        axes.annotate(end.text, spot, size=_TEXT, weight="bold" if end.bold else "normal", va="center", **common)
        if end.more:
            below = (spot[0], spot[1] - 7.0)
            axes.annotate(end.more, below, size=_SMALL, color=sheet.style.muted, va="top", linespacing=1.25, **common)


def _bytes_text(nbytes: float) -> str:
    """In decimal units, as GB/s are: 5.2 MB, 84 MB, 1.3 GB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size * 0.9995:
            value = nbytes / size
            return f"{value:.1f} {unit}" if value < 9.95 else f"{value:.0f} {unit}"
    return f"{nbytes:.0f} B"


def _rate_text(gbps: float) -> str:
    return f"{gbps:,.0f}" if gbps >= 100 else f"{gbps:.1f}" if gbps >= 1 else f"{gbps:.2f}"


def _count_text(number: float) -> str:
    """1, 64, 4,096, 65,536, 262k, 1.05M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if number >= (size if unit == "M" else 100_000):
            return f"{number / size:.3g}{unit}"
    return f"{number:,.10g}"


def _time_text(us: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:g} {unit}"
    return f"{us:g} µs"


def _pair_text(pattern: str) -> str:
    if ":" in pattern:
        return pattern.replace(":", " → ", 1)
    return pattern.replace("_to_", " → ")


def _thinned(values: Sequence[float], most: int) -> list[float]:
    """Every second, third, … so that no more than `most` are left; the last one always is."""
    step = -(-len(values) // most)
    return list(reversed(list(reversed(values))[::step]))


def _ticks(axis: Any, values: Sequence[float], text: Callable[[float], str]) -> None:
    from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(FixedFormatter([text(value) for value in values]))
    axis.set_minor_locator(NullLocator())


def _decades(low: float, high: float, factors: Sequence[int] = (1,)) -> list[float]:
    """Round numbers between two others, and the next ones outside."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    return [factor * 10.0**e for e in range(first, last + 1) for factor in factors if low <= factor * 10.0**e <= high]


# ---- what the pictures have in common ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Job:
    """The rows of one picture, all of one machine."""

    rows: tuple[Row, ...]
    footer: str
    style: _Style
    pairs: tuple[str, ...] = ()

    @property
    def gpu(self) -> str:
        return self.rows[0]["gpu"]


class _TooLittleError(SpecError):
    """Rows of the right columns that do not make this picture."""


def _grouped(rows: Iterable[Row], *columns: str) -> dict[tuple[str, ...], list[Row]]:
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[column] for column in columns), []).append(row)
    return found


def _line(rows: Iterable[Row], x: str, y: str, *, is_log: bool = True) -> tuple[list[float], list[float]]:
    """Points of a line in the order of x; two rows at one x are an error."""
    found: dict[float, Row] = {}
    for row in rows:
        at = row.positive(x) if is_log else row.number(x)
        if at in found:
            raise SpecError(
                f"{row.where}: the same measurement stands at {found[at].where} already; plot the files of one run"
            )
        found[at] = row
    order = sorted(found)
    return order, [found[at].positive(y) if is_log else found[at].number(y) for at in order]


def _of_pairs(job: _Job, rows: Sequence[Row]) -> list[Row]:
    """The rows of the pairs asked for, and all yardsticks."""
    known = {row["pattern"] for row in rows if row["backend"] != YARDSTICK}
    if unknown := [pair for pair in job.pairs if pair not in known]:
        raise SpecError(f"pair {unknown[0]!r}: expected one of {', '.join(sorted(known))}")
    return [row for row in rows if not job.pairs or row["backend"] == YARDSTICK or row["pattern"] in job.pairs]


def _roof(rows: Iterable[Row]) -> dict[float, float]:
    """GB/s of the yardstick by total bytes: the fastest that stands in any row, its own or one that is compared with it."""
    found: dict[float, float] = {}
    for row in rows:
        nbytes = row.positive("total_bytes")
        found[nbytes] = max(_yardstick(row), found.get(nbytes, 0.0))
    return dict(sorted(found.items()))


def _yardstick(row: Row) -> float:
    """GB/s of the memcpy that a row is compared with."""
    return row.positive("total_bytes") / row.positive("memcpy_ms") / 1e6


def _by_direction(rows: Sequence[Row]) -> dict[str, list[Row]]:
    found = _grouped(rows, "direction")
    for (direction,), members in found.items():
        if direction not in _DIRECTIONS:
            raise SpecError(
                f"{members[0].where}: column 'direction': expected one of {', '.join(_DIRECTIONS)}, got {direction!r}"
            )
    return {direction: found[(direction,)] for direction in _DIRECTIONS if (direction,) in found}


def _shown_backend(direction: str, rows: Sequence[Row]) -> str | None:
    """The backend of kvbm whose line is drawn in this direction."""
    there = {row["backend"] for row in rows}
    wanted = (*_SHOWN.get(direction, _SHOWN[""]), *KVBM_BACKENDS)
    return next((name for name in wanted if name in there), None)


def _kernel_class(kernel: str) -> str:
    """rows, tile or copy; a joined kernel is of the harder class of its halves."""
    kinds = [part.split("_")[0] for part in kernel.split("__")]
    return next((kind for kind in ("tile", "rows", "copy") if kind in kinds), "no kernel")


# ---- roofline ------------------------------------------------------------------------------------------------------


def _roofline(job: _Job) -> Figure:
    """Bandwidth against the bytes of a batch, under that of one contiguous copy."""
    style, panels = job.style, []
    for direction, rows in _by_direction(_of_pairs(job, job.rows)).items():
        backend = _shown_backend(direction, rows)
        if backend is not None:
            panels.append((direction, backend, rows, _lines_of(backend, rows, style)))
    if not panels:
        raise _TooLittleError("roofline: expected rows of kvbm's backends, got only yardsticks and peers")
    if all(len(_roof(rows)) < 2 for _, _, rows, _ in panels):
        raise _TooLittleError("roofline: expected at least two sizes; measure more with --num-blocks, or draw the bars")
    labels = [end for *_, lines in panels for end in lines.ends]
    right = max(end.inches for end in labels) + _LEADER + 0.24
    sheet = _Sheet(
        style,
        "Bandwidth by size of the batch",
        f"{job.gpu}. GB/s of payload, each byte once. At the names: share of the memcpy at the largest size.",
        job.footer,
        [3.0] * len(panels),
        left=0.78,
        right=right,
        between=1.22,
        below=0.48,
        above=0.56,
    )
    for axes, (direction, backend, rows, lines) in zip(sheet.axes, panels, strict=True):
        sheet.heading(axes, f"{_DIRECTIONS[direction]} ({direction}), kvbm's backend {backend!r}", lift=0.34)
        _roofline_panel(sheet, axes, rows, lines)
    return sheet.figure


@dataclass
class _Lines:
    """What a roofline panel draws: lines of (x, y), bands of (x, low, high), and a label for each."""

    lines: list[tuple[str, list[float], list[float]]] = field(default_factory=list)
    bands: list[tuple[list[float], list[float], list[float]]] = field(default_factory=list)
    ends: list[_End] = field(default_factory=list)


def _lines_of(backend: str, rows: Sequence[Row], style: _Style) -> _Lines:
    roof = _roof(rows)
    last = max(roof)
    found = _Lines(ends=[_End(last, roof[last], f"memcpy  {_rate_text(roof[last])} GB/s", style.ink, bold=True)])
    pairs = {pair: held for (pair,), held in _grouped((r for r in rows if r["backend"] == backend), "pattern").items()}
    points = {pair: _line(held, "total_bytes", "bandwidth_gbps") for pair, held in pairs.items()}
    share = {pair: max(held, key=lambda row: row.number("total_bytes")).number("ratio") for pair, held in pairs.items()}
    if len(pairs) <= _MOST_LINES:
        for turn, (pair, (x, y)) in enumerate(sorted(points.items(), key=lambda item: -item[1][1][-1])):
            found.lines.append((pair, x, y))
            found.ends.append(_End(x[-1], y[-1], f"{_pair_text(pair)}  {share[pair]:.2f}", style.series[turn]))
        return found
    classes: dict[str, list[str]] = {}
    for pair, held in pairs.items():
        classes.setdefault(_kernel_class(held[-1]["kernel"]), []).append(pair)
    # The class of most pairs is drawn first, so that the bands of the others lie over it.
    for turn, (kind, members) in enumerate(sorted(classes.items(), key=lambda item: (-len(item[1]), item[0]))):
        at: dict[float, list[float]] = {}
        for pair in members:
            for nbytes, gbps in zip(*points[pair], strict=True):
                at.setdefault(nbytes, []).append(gbps)
        x = sorted(at)
        middle = [median(at[nbytes]) for nbytes in x]
        found.lines.append((kind, x, middle))
        found.bands.append((x, [min(at[nbytes]) for nbytes in x], [max(at[nbytes]) for nbytes in x]))
        best, least = (pick(members, key=lambda pair: share[pair]) for pick in (max, min))
        text = f"{kind}: {len(members)} pairs" if len(members) > 1 else f"{_pair_text(best)}  {share[best]:.2f}"
        more = (
            f"{share[best]:.2f}  {_pair_text(best)}\n{share[least]:.2f}  {_pair_text(least)}"
            if len(members) > 1
            else ""
        )
        found.ends.append(_End(x[-1], middle[-1], text, style.series[turn], more))
    return found


def _roofline_panel(sheet: _Sheet, axes: Axes, rows: Sequence[Row], drawn: _Lines) -> None:
    style, roof = sheet.style, _roof(rows)
    sizes = sorted({row.positive("total_bytes") for row in rows})
    highest = max([*roof.values(), *(max(y) for _, _, y in drawn.lines), *(max(high) for _, _, high in drawn.bands)])
    top = highest * 1.14
    axes.set_xscale("log", base=2)
    margin = 2 ** (0.04 * max(math.log2(sizes[-1] / sizes[0]), 1))
    axes.set_xlim(sizes[0] / margin, sizes[-1] * margin)
    axes.set_ylim(0, top)
    axes.grid(axis="y")
    xs, ys = list(roof), list(roof.values())
    edges = [sizes[0] / margin, *xs, sizes[-1] * margin]
    axes.fill_between(edges, [ys[0], *ys, ys[-1]], top, color=style.shade, linewidth=0, gid="roof-area", zorder=0.6)
    axes.plot(xs, ys, color=style.ink, linewidth=2.4, label="memcpy", zorder=2.2)
    axes.annotate(
        "beyond one contiguous copy of the same bytes", (0, 1), xycoords="axes fraction", xytext=(7, -6),
        textcoords="offset points", size=_SMALL, color=style.muted, va="top",
    )  # fmt: skip
    for turn, (x, low, high) in enumerate(drawn.bands):
        axes.fill_between(x, low, high, color=style.series[turn], alpha=0.22, linewidth=0, gid="band")
    for turn, (name, x, y) in enumerate(drawn.lines):
        axes.plot(
            x, y, color=style.series[turn], marker=_MARKERS[turn], linestyle=_DASHES[turn], label=name, zorder=3,
            markeredgecolor=style.paper, markeredgewidth=0.7,
        )  # fmt: skip
    axes.set_ylabel("GB/s")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    _ticks(axes.xaxis, _thinned(sizes, 6), _bytes_text)
    blocks = {row.positive("total_bytes"): row.positive("num_blocks") for row in rows}
    above = axes.secondary_xaxis("top")
    _ticks(above.xaxis, _thinned(sizes, 6), lambda nbytes: _blocks_text(blocks[nbytes]))
    above.tick_params(length=0, pad=1)
    above.spines["top"].set_visible(False)
    _label(sheet, axes, drawn.ends)


def _blocks_text(blocks: float) -> str:
    return f"{blocks:,.0f} block{'s' if blocks != 1 else ''}"


# ---- bars against peers --------------------------------------------------------------------------------------------


def _bars(job: _Job) -> Figure:
    """Bandwidth at one size: the yardstick, kvbm, and what one would write without it."""
    style, panels = job.style, []
    left_out = 0
    for direction, rows in _by_direction(_of_pairs(job, job.rows)).items():
        sizes = sorted({row.positive("num_blocks") for row in rows if row["backend"] != YARDSTICK})
        if not sizes:
            continue
        size = _BARS_AT if _BARS_AT in sizes else sizes[-1]
        here = [row for row in rows if row.positive("num_blocks") == size]
        by_pattern = _grouped((row for row in here if row["backend"] != YARDSTICK), "pattern")
        groups = {pattern: held for (pattern,), held in by_pattern.items()}
        # Pairs that more backends and peers can do say more.
        order = sorted(groups, key=lambda key: -len(groups[key]))[: len(job.pairs) or _MOST_PAIRS]
        left_out += len(groups) - len(order)
        panels.append((direction, size, _roof(here), {key: groups[key] for key in groups if key in order}))
    if not panels:
        raise _TooLittleError("bars: expected rows of kvbm's backends or of peers, got only yardsticks")
    names = {_backend_text(row["backend"]) for *_, groups in panels for held in groups.values() for row in held}
    left = max(_inches(name, _TEXT) for name in (*names, "memcpy")) + 0.38
    heights = [0.27 * (1 + sum(1.15 + len(held) for held in groups.values())) for *_, groups in panels]
    subtitle = f"{job.gpu}. GB/s of payload, each byte once; share of the memcpy measured with it (line)."
    if left_out:
        subtitle += f" {left_out} more pairs were measured: choose with --pair."
    sheet = _Sheet(
        style, "kvbm, a memcpy, and other ways to do it", subtitle, job.footer, heights, left=left, right=0.95,
        between=0.62, below=0.12, above=0.36,
    )  # fmt: skip
    for axes, (direction, size, roof, groups) in zip(sheet.axes, panels, strict=True):
        nbytes = max(roof)
        sheet.heading(
            axes, f"{_DIRECTIONS[direction]} ({direction}), {_blocks_text(size)}, {_bytes_text(nbytes)}", lift=0.06
        )
        _bars_panel(sheet, axes, roof[nbytes], groups, left)
    return sheet.figure


def _backend_text(backend: str) -> str:
    return f"kvbm {backend}" if backend in KVBM_BACKENDS else backend


def _bars_panel(sheet: _Sheet, axes: Axes, roof: float, groups: Mapping[str, Sequence[Row]], left: float) -> None:
    style = sheet.style
    place, ticks, names, widest = 0.0, [0.0], ["memcpy"], roof
    _bar(axes, style, 0.0, roof, roof, style.ink, f"{_rate_text(roof)} GB/s", "1×")
    for pair, held in groups.items():
        place += 1.15
        axes.annotate(
            _pair_text(pair), (0, place), xycoords=("axes fraction", "data"), xytext=(-72 * left + 14, 0),
            textcoords="offset points", size=_TEXT, weight="bold", va="center", annotation_clip=False,
        )  # fmt: skip
        # kvbm's first, in their usual order; peers by speed.
        for row in sorted(held, key=_bar_order):
            place += 1.0
            gbps = row.positive("bandwidth_gbps")
            is_ours = row["backend"] in KVBM_BACKENDS
            is_raw = row["backend"] in ("vectorized", "batched", "memcpy_async")
            color = style.raw if is_raw else style.series[0] if is_ours else style.peer
            ratio, yardstick = row.positive("ratio"), _yardstick(row)
            # Each row's own yardstick: on a noisy machine they differ, and the ratio is to this one.
            axes.vlines(yardstick, place - 0.5, place + 0.5, color=style.ink, linewidth=1.4, gid="roof")
            widest = max(widest, yardstick, gbps)
            share = f"{ratio:.2f}×" if ratio >= 0.1 else f"{ratio:.3f}×"
            _bar(axes, style, place, gbps, roof, color, f"{_rate_text(gbps)} GB/s", share)
            ticks.append(place)
            names.append(_backend_text(row["backend"]))
    axes.set_xlim(0, widest * 1.003)
    axes.set_ylim(place + 0.6, -0.6)
    axes.set_yticks(ticks, names)
    axes.tick_params(axis="y", length=0, labelsize=_TEXT, labelcolor=style.ink)
    axes.set_xticks([])
    axes.spines[["left", "bottom"]].set_visible(False)


def _bar_order(row: Row) -> tuple[int, float]:
    name = row["backend"]
    return (KVBM_BACKENDS.index(name), 0.0) if name in KVBM_BACKENDS else (99, -row.positive("bandwidth_gbps"))


def _bar(axes: Axes, style: _Style, place: float, gbps: float, roof: float, color: str, text: str, ratio: str) -> None:
    axes.barh(place, gbps, height=0.72, color=color, linewidth=0)
    # Inside where the bar is long enough, so that it keeps clear of the yardstick's line.
    is_inside = gbps > roof * 0.35
    look: dict[str, Any] = {"ha": "right", "color": _readable(color)} if is_inside else {"bbox": _over(style)}
    axes.annotate(
        text, (gbps, place), xytext=(-7 if is_inside else 7, 0), textcoords="offset points", va="center", size=_TEXT,
        annotation_clip=False, **look,
    )  # fmt: skip
    axes.annotate(
        ratio, (1, place), xycoords=("axes fraction", "data"), xytext=(72 * 0.8, 0), textcoords="offset points",
        va="center", ha="right", size=_TEXT, weight="bold", annotation_clip=False,
    )  # fmt: skip


def _readable(color: str) -> str:
    """Dark or light, whichever stands out from a colour."""
    from matplotlib.colors import to_rgb

    red, green, blue = (part**2.2 for part in to_rgb(color))
    return "#10151b" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.25 else "#ffffff"


def _over(style: _Style) -> dict[str, Any]:
    """A box of paper under a text that stands on lines."""
    return {"boxstyle": "square,pad=0.1", "facecolor": style.paper, "edgecolor": "none"}


# ---- interference --------------------------------------------------------------------------------------------------


def _interference(job: _Job) -> Figure:
    """How much longer a matrix product takes while copies run beside it."""
    style = job.style
    directions = _by_direction(job.rows)
    panels = []
    for direction, rows in directions.items():
        ours = [row for row in rows if row["backend"] != YARDSTICK]
        if job.pairs:
            ours = [row for row in ours if row["pair"] in job.pairs]
        if ours:
            panels.append((direction, ours))
    if not panels:
        raise _TooLittleError("interference: expected rows of kvbm's strategies, got only the yardstick")
    several = {direction: len({row["pair"] for row in rows}) > 1 for direction, rows in panels}
    names = [_strategy_text(row, several[direction]) for direction, rows in panels for row in rows]
    left = max(_inches(name, _TEXT) for name in names) + 0.38
    sheet = _Sheet(
        style,
        "What a copy costs the model beside it",
        f"{job.gpu}. Time of a matrix product while copies run, over its time alone. Right: their speed.",
        job.footer,
        [0.3 * len(rows) + 0.3 for _, rows in panels],
        left=left,
        right=1.62,
        between=0.62,
        below=0.58,
        above=0.36,
    )
    slowest = max(row.positive("slowdown") for _, rows in panels for row in rows)
    least = min([1.0, *(row.positive("slowdown") for _, rows in panels for row in rows)])
    span = max(slowest - least, 0.1)
    for axes, (direction, rows) in zip(sheet.axes, panels, strict=True):
        pairs = "" if several[direction] else f", {_pair_text(rows[0]['pair'])}"
        sheet.heading(axes, f"{_DIRECTIONS[direction]} ({direction}){pairs}", lift=0.06)
        reference = rows[0].positive("memcpy_slowdown")
        rows = sorted(rows, key=lambda row: row.positive("slowdown"))
        for place, row in enumerate(rows):
            slowdown = row.positive("slowdown")
            # No worse than a memcpy is what is asked for; the colour says so, and the number beside it.
            color = style.series[0] if slowdown <= reference * 1.05 else style.series[1]
            axes.barh(place, slowdown - 1, left=1.0, height=0.66, color=color, linewidth=0)
            axes.annotate(
                f"{slowdown:.2f}×", (max(slowdown, 1.0), place), xytext=(7, 0), textcoords="offset points",
                va="center", weight="bold", annotation_clip=False, bbox=_over(style),
            )  # fmt: skip
            axes.annotate(
                f"{_rate_text(row.positive('copy_gbps'))} GB/s", (1, place), xycoords=("axes fraction", "data"),
                xytext=(72 * 1.5, 0), textcoords="offset points", va="center", ha="right", color=style.muted,
                annotation_clip=False,
            )  # fmt: skip
        axes.set_xlim(least - 0.03 * span, slowest + 0.02 * span)
        axes.set_ylim(len(rows) - 0.4, -0.9)
        axes.axvline(1.0, color=style.ink, linewidth=1.2, gid="alone")
        axes.axvline(reference, color=style.ink, linewidth=1.1, linestyle=(0, (3, 2)), gid="memcpy")
        axes.annotate(
            f"beside a memcpy: {reference:.2f}×", (max(reference, 1.0), -0.64), xytext=(7, 0),
            textcoords="offset points", size=_SMALL, color=style.muted, va="center", bbox=_over(style),
        )  # fmt: skip
        axes.set_yticks(range(len(rows)), [_strategy_text(row, several[direction]) for row in rows])
        axes.tick_params(axis="y", length=0, labelsize=_TEXT, labelcolor=style.ink)
        axes.spines["left"].set_visible(False)
        axes.grid(axis="x")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    sheet.axes[-1].set_xlabel("time of the product, alone = 1×")
    return sheet.figure


def _strategy_text(row: Row, with_pair: bool) -> str:
    budget = f", {row['max_sms']} SMs" if row["max_sms"] else ""
    pair = f"{_pair_text(row['pair'])}, " if with_pair else ""
    return f"{pair}{row['backend']}{budget}"


# ---- overhead ------------------------------------------------------------------------------------------------------


def _overhead(job: _Job) -> Figure:
    """Host time of a call against the number of ids, and of tensors."""
    style = job.style
    by_ids = [row for row in job.rows if not row["call"].startswith("kernels.")]
    by_tensors = [row for row in job.rows if row["call"].startswith("kernels.")]
    panels: list[tuple[str, str, list[tuple[str, list[float], list[float]]]]] = []
    for rows, what in ((by_ids, "ids"), (by_tensors, "tensors")):
        if not rows:
            continue
        calls = {row["call"] for row in rows}
        kinds = {row["ids"] for row in rows}
        drawn = []
        for (call, kind), held in _grouped(rows, "call", "ids").items():
            name = kind if call == rows[0]["call"] else f"{call}, {kind}"
            if len(kinds) == 1 and len(calls) > 1:
                name = call.removeprefix("kernels.")
            drawn.append((name, *_line(held, "count", "median_us")))
        title = f"{rows[0]['call']}, by kind of ids" if what == "ids" else "lists of tensors (kvbm.kernels)"
        panels.append((title, what, drawn))
    if any(len(drawn) > _MOST_LINES for *_, drawn in panels):
        raise _TooLittleError(f"overhead: expected at most {_MOST_LINES} kinds of ids a picture; plot the files apart")
    right = max(_inches(name, _TEXT) for *_, drawn in panels for name, *_ in drawn) + _LEADER + 0.55
    sheet = _Sheet(
        style,
        "Host time of a call",
        f"{job.gpu}. From the call to its return, the copy being in the stream; the GPU is never waited for."
        if job.rows[0]["driver"]
        else f"{job.gpu}. On the CPU the copy itself is part of the call.",
        job.footer,
        [2.6] * len(panels),
        left=0.88,
        right=right,
        between=1.12,
        below=0.62,
        above=0.36,
    )
    for axes, (title, what, drawn) in zip(sheet.axes, panels, strict=True):
        sheet.heading(axes, title)
        ends = [_End(x[-1], y[-1], name, style.series[turn], bold=False) for turn, (name, x, y) in enumerate(drawn)]
        _log_panel(axes, style, drawn, 7)
        axes.set_xlabel(f"{what} a call")
        _label(sheet, axes, ends)
    return sheet.figure


def _log_panel(axes: Axes, style: _Style, drawn: Sequence[tuple[str, list[float], list[float]]], ticks: int) -> None:
    """Lines on two logarithmic axes with round numbers beside them; `y` is in µs."""
    everything = [at for _, xs, ys in drawn for at in zip(xs, ys, strict=True)]
    xs, ys = sorted({x for x, _ in everything}), [y for _, y in everything]
    axes.set_xscale("log")
    axes.set_yscale("log")
    margin = (xs[-1] / xs[0]) ** 0.04 if len(xs) > 1 else 1.5
    axes.set_xlim(xs[0] / margin, xs[-1] * margin)
    low, high = min(ys) / 1.35, max(ys) * 1.35
    axes.set_ylim(low, high)
    factors = (1, 2, 5) if high / low < 40 else (1,)
    _ticks(axes.xaxis, _thinned(xs, ticks), _count_text)
    _ticks(axes.yaxis, _decades(low, high, factors), _time_text)
    axes.grid(axis="y")
    for turn, (name, x, y) in enumerate(drawn):
        axes.plot(
            x, y, color=style.series[turn], marker=_MARKERS[turn], linestyle=_DASHES[turn], label=name,
            markeredgecolor=style.paper, markeredgewidth=0.7,
        )  # fmt: skip


# ---- scale ---------------------------------------------------------------------------------------------------------

#: Panels of the picture: title, what the rows are called and how their lines are named, the axis below.
_SCALES: tuple[tuple[str, dict[str, str], str], ...] = (
    ("Blocks in one copy", {"blocks": "time"}, "blocks"),
    ("Layers", {"layers": "time"}, "layers"),
    ("Ids of tiny blocks", {"ids_host": "host", "ids_gpu": "GPU", "ids_cpu": "CPU"}, "ids"),
    ("Memory held after many copies", {"soak_host": "host", "soak_gpu": "GPU"}, "copies"),
    ("Allocating a pool", {"pools": "time"}, "GiB"),
)


def _scale(job: _Job) -> Figure:
    """How time and memory grow with blocks, layers, ids, copies and the size of a pool."""
    style, found = job.style, _grouped(job.rows, "what")
    known = {what for _, lines, _ in _SCALES for what in lines}
    for (what,), rows in found.items():
        if what not in known:
            raise SpecError(f"{rows[0].where}: column 'what': expected one of {', '.join(sorted(known))}, got {what!r}")
    panels = []
    for title, lines, unit in _SCALES:
        held = {name: found[(what,)] for what, name in lines.items() if (what,) in found}
        if held:
            panels.append((title, held, unit))
    rows_of_panels = -(-len(panels) // 2)
    sheet = _Sheet(
        style,
        "How it grows",
        f"{job.gpu}. Median times. Dotted: growth in proportion.",
        job.footer,
        [1.95] * rows_of_panels,
        left=0.78,
        right=0.34,
        between=1.18,
        below=0.62,
        above=0.5,
        columns=2,
    )
    for axes, (title, held, unit) in zip(sheet.axes, panels, strict=False):
        notes = {row["notes"] for rows in held.values() for row in rows}
        sheet.heading(axes, title, lift=0.24)
        note = _pair_text(notes.pop()) if len(notes) == 1 else ""
        axes.annotate(
            note, (0, 1), xycoords="axes fraction", xytext=(0, 5), textcoords="offset points", size=_SMALL,
            color=style.muted, va="bottom",
        )  # fmt: skip
        if unit == "copies":
            _growth_panel(axes, style, held)
        else:
            _time_panel(axes, style, held)
        axes.set_xlabel(unit)
    for axes in sheet.axes[len(panels) :]:
        axes.set_axis_off()
    return sheet.figure


def _time_panel(axes: Axes, style: _Style, held: Mapping[str, Sequence[Row]]) -> None:
    drawn = []
    for name, rows in held.items():
        x, y = _line(rows, "n", "median_ms")
        drawn.append((name, x, [1e3 * ms for ms in y]))
    _log_panel(axes, style, drawn, 5)
    for _, x, y in drawn:
        axes.plot(
            [x[0], x[-1]], [y[-1] * x[0] / x[-1], y[-1]], color=style.muted, linewidth=1.0, linestyle=(0, (1, 2)),
            zorder=1.5, gid="in proportion",
        )  # fmt: skip
    if len(drawn) > 1:
        axes.set_ylim(bottom=axes.get_ylim()[0] / 1.8)  # room for a name below the lower line
        for turn, (name, x, y) in enumerate(drawn):
            axes.annotate(
                name, (x[0], y[0]), xytext=(-3, 6 if turn == 0 else -14), textcoords="offset points", size=9.5,
                color=style.series[turn], weight="bold",
            )  # fmt: skip


def _growth_panel(axes: Axes, style: _Style, held: Mapping[str, Sequence[Row]]) -> None:
    drawn = [(name, *_line(rows, "n", "grown_mib", is_log=False)) for name, rows in held.items()]
    most = max(max(y) for *_, y in drawn)
    least = min(min(y) for *_, y in drawn)
    room = max(most - least, 1.0)
    axes.set_ylim(least - 0.15 * room, most + 0.45 * room)
    for turn, (name, x, y) in enumerate(drawn):
        axes.plot(x, y, color=style.series[turn], linestyle=_DASHES[turn], label=name)
    places = _spread([y[-1] for *_, y in drawn], [0.22 * room] * len(drawn))
    for turn, ((name, x, _), place) in enumerate(zip(drawn, places, strict=True)):
        axes.annotate(
            name, (x[-1], place), xytext=(0, 3), textcoords="offset points", ha="right", va="bottom", size=9.5,
            color=style.series[turn], weight="bold",
        )  # fmt: skip
    axes.grid(axis="y")
    axes.yaxis.set_major_locator(_few_ticks())
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} MiB")
    xs = sorted({x for _, line, _ in drawn for x in line})
    ticks = [xs[0], xs[len(xs) // 2], xs[-1]]
    _ticks(axes.xaxis, sorted(set(ticks)), _count_text)


def _few_ticks() -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(4)


# ---- from files to pictures ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    columns: tuple[str, ...]
    build: Callable[[_Job], Figure]


_SWEEP = (
    "tokens_per_block", "num_blocks", "pattern", "direction", "backend", "total_bytes", "bandwidth_gbps", "memcpy_ms",
    "ratio", "timing", "kernel", "shape", "gpu", "driver", "commit",
)  # fmt: skip
_KINDS = {
    "roofline": _Kind(_SWEEP, _roofline),
    "bars": _Kind(_SWEEP, _bars),
    "interference": _Kind(
        (
            "direction",
            "pair",
            "backend",
            "max_sms",
            "slowdown",
            "memcpy_slowdown",
            "copy_gbps",
            "gpu",
            "driver",
            "commit",
        ),
        _interference,
    ),
    "overhead": _Kind(("call", "ids", "count", "median_us", "gpu", "driver", "commit"), _overhead),
    "scale": _Kind(("what", "n", "median_ms", "grown_mib", "notes", "gpu", "driver", "commit"), _scale),
}

#: The pictures there are.
KINDS = tuple(_KINDS)


def draw(
    tables: Sequence[Table],
    kinds: Sequence[str] = (),
    *,
    pairs: Sequence[str] = (),
    dark: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> dict[str, Figure]:
    """Make the pictures that the tables have rows for.

    Parameters
    ----------
    tables : sequence of Table
        From `read`.
    kinds : sequence of str
        Of `KINDS`; if none is named, all that can be made.
    pairs : sequence of str
        Patterns, e.g. ``"nhd:universal"``; all if none is named.
    dark : bool
        Light on dark instead of dark on light.
    note : callable
        Told of each picture that was not asked for by name and could not be made, and why.

    Returns
    -------
    dict of str to matplotlib.figure.Figure
        By name: the kind; where the sweep has several shapes or timings, one a shape and timing.

    Raises
    ------
    SpecError
        Columns that are missing, no rows for a kind that was named, rows of several machines, cells that are no numbers.
    KvbmError
        matplotlib is not installed.
    """
    for kind in kinds:
        if kind not in _KINDS:
            raise SpecError(f"kind {kind!r}: expected one of {', '.join(KINDS)}")
    style = _DARK if dark else _LIGHT
    found: dict[str, Figure] = {}
    with _looks(style):
        for kind in kinds or KINDS:
            fitting = [table for table in tables if table.rows and not _missing(table, kind)]
            if not fitting:
                if kinds:
                    raise SpecError(_no_table(tables, kind))
                continue
            try:
                for name, job in _jobs(kind, fitting, style, tuple(pairs)):
                    found[name] = _KINDS[kind].build(job)
            except _TooLittleError as error:
                if kinds:
                    raise
                note(f"{error}: left out")
    if not found:
        raise SpecError(_no_table(tables, *KINDS))
    return found


def _missing(table: Table, kind: str) -> list[str]:
    return [column for column in _KINDS[kind].columns if column not in table.columns]


def _no_table(tables: Sequence[Table], *kinds: str) -> str:
    """What would have been needed, and how near the nearest came."""
    kind, nearest = min(
        ((kind, table) for kind in kinds for table in tables),
        key=lambda each: len(_missing(each[1], each[0])) / len(_KINDS[each[0]].columns),
    )
    missing = _missing(nearest, kind)
    if not missing:
        return f"{nearest.path}: no rows that a picture could be made of"
    lacks = f"column{'s' if len(missing) > 1 else ''} {', '.join(map(repr, missing))}"
    return f"{nearest.path}: {kind}: expected the columns that `kvbm bench` writes; {lacks} missing"


def _jobs(kind: str, tables: Sequence[Table], style: _Style, pairs: tuple[str, ...]) -> Iterator[tuple[str, _Job]]:
    rows = [row for table in tables for row in table.rows]
    machines: dict[str, Row] = {}
    for row in rows:
        machines.setdefault(row["gpu"], row)
    if len(machines) > 1:
        (one, here), (other, there) = list(machines.items())[:2]
        raise SpecError(
            f"{kind}: a picture shows one machine, got {one} ({here.where}) and {other} ({there.where}); plot them apart"
        )
    footer = "\n".join(dict.fromkeys(comment for table in tables for comment in table.comments))
    groups = _grouped(rows, "shape", "timing") if _KINDS[kind].columns is _SWEEP else {("", ""): rows}
    for (shape, timing), held in groups.items():
        suffix = ""
        if len({key[0] for key in groups}) > 1:
            suffix += "-" + "-".join(part.replace("=", "") for part in shape.replace("dtype=", "").split(","))
        if len({key[1] for key in groups}) > 1:
            suffix += f"-{timing}"
        is_said = not shape or shape in footer or shape.replace(",", " ") in footer
        said = footer if is_said else f"{footer}\n{shape}"
        said = f"{said}\ntimed by graph replays" if timing == "replay" else said
        yield kind + suffix, _Job(tuple(held), said, style, pairs)


def save(
    figures: Mapping[str, Figure], out: Path, formats: Sequence[str] = ("png", "svg"), *, dark: bool = False
) -> list[Path]:
    """Write figures of `draw` into a folder, which is made if it is not there: PNG at twice the size, SVG with text as text.

    The same rows give the same bytes with one version of matplotlib: no date is in the files, no random name.

    Returns
    -------
    list of Path
        What was written.
    """
    out.mkdir(parents=True, exist_ok=True)
    written = []
    with _looks(_DARK if dark else _LIGHT):
        for name, figure in figures.items():
            for suffix in formats:
                path = out / f"{name}.{suffix}"
                metadata = (
                    {"Date": None, "Creator": "kvbm bench plot"} if suffix == "svg" else {"Software": "kvbm bench plot"}
                )
                figure.savefig(path, format=suffix, dpi=_DPI if suffix == "png" else 72, metadata=metadata)
                written.append(path)
    return written


def comma_list(known: Sequence[str]) -> Callable[[click.Context, click.Parameter, str | None], tuple[str, ...]]:
    """A callback for options that take some of these names with commas between them; none given is none."""

    def parse(_: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
        names = [name.strip() for name in (value or "").split(",") if name.strip()]
        for name in names:
            if name not in known:
                raise click.BadParameter(f"expected some of {', '.join(known)}, got {name!r}", param=parameter)
        return tuple(dict.fromkeys(names))

    return parse


@click.command()
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="CSV..."
)
@click.option("--out", default=".", show_default=True, type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
              help="Folder to write to.")  # fmt: skip
@click.option("--kind", "kinds", callback=comma_list(KINDS), metavar="KIND,...",
              help=f"Which pictures: {', '.join(KINDS)}. If not given, all that the files have columns for.")  # fmt: skip
@click.option("--format", "formats", default="png,svg", show_default=True, callback=comma_list(("png", "svg")),
              metavar="FORMAT,...", help="png, svg or both.")  # fmt: skip
@click.option(
    "--pair", "pairs", multiple=True, metavar="SRC:DST", help="Only this pair, as the CSV names it (may be repeated)."
)
@click.option("--dark/--light", default=False, help="Light on dark, or dark on light (the default).")
def plot(
    files: tuple[Path, ...],
    out: Path,
    kinds: tuple[str, ...],
    formats: tuple[str, ...],
    pairs: tuple[str, ...],
    dark: bool,
) -> None:
    """Draw pictures of what was measured, from the CSV files that `kvbm bench` and its other commands wrote.

    Comment lines at the top of the files become the footers. Writes one file a picture and format, and prints their names.
    Needs matplotlib: pip install 'kvbm-layouts[bench]'.
    """
    tables = [table for path in files for table in read(path)]
    figures = draw(tables, kinds, pairs=pairs, dark=dark, note=lambda text: click.echo(text, err=True))
    for path in save(figures, out, formats or ("png", "svg"), dark=dark):
        click.echo(path)
