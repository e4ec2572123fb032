"""Pictures of measurements: ``kvbm bench plot CSV...`` draws the CSV files of the sweep as PNG and SVG files.

The columns of a file determine its pictures. Its comment lines become their footers. The pictures show the values of the
file, so that they can be checked against its rows.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ..cli.click_classes import Command, is_quiet
from ..cli.complete import complete_pair, items_of
from ..cli.values import comma_list
from ..errors import SpecError
from ..show import html
from ..show.figure import looks
from .table import Row, Table, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Backends of kvbm.  `memcpy` is the yardstick; every other name is a peer.
KVBM_BACKENDS = ("auto", "direct", "staged", "engine", "host", "vectorized", "batched", "memcpy_async")
YARDSTICK = "memcpy"

DIRECTIONS = {
    "d2d": "within a GPU (d2d)",
    "d2h": "GPU to pinned host memory (d2h)",
    "h2d": "pinned host memory to GPU (h2d)",
    "p2p": "GPU to GPU (p2p)",
    "h2h": "within the host (h2h)",
}
_MOST_PAIRS, _BARS_AT = 4, 64  # most pairs in the bars; blocks of the bars


# ---- looks ---------------------------------------------------------------------------------------------------------

#: Series differ in hues that colour-blind readers can distinguish (Okabe and Ito), and in marker and dash for prints in grey.
_MARKERS = "os^DvPXph<>*"
_DASHES = 2 * ["-", "--", ":", "-.", (0, (3, 1)), (0, (8, 2))]
_SERIES = ["#0072b2", "#d55e00", "#009e73", "#9a4f86", "#56b4e9", "#b07d00"]
_SERIES_DARK = ["#56b4e9", "#f0824a", "#2fc79b", "#d99ac2", "#9fd3f5", "#e6c34a"]
_PEER, _RAW, GREY = "#c9a227", "#8fc1e3", "0.5"
_WIDTH = 8.0  # inches; at 100 dots per inch these are 800 px, the width of a picture in a README
BESIDE: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}  # place of a legend


def _settings(dark: bool) -> dict[str, Any]:
    """The matplotlib settings of all these pictures."""
    paper, ink, grid = ("#0d1117", "#e6edf3", "#262c34") if dark else ("#ffffff", "#1b1f24", "#e4e8ec")
    inked = ("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor", "xtick.color", "ytick.color")
    colors = 2 * (_SERIES_DARK if dark else _SERIES)
    return {
        **dict.fromkeys(inked, ink), "axes.facecolor": paper, "figure.facecolor": paper,
        "axes.prop_cycle": f"cycler(color={colors}, marker={list(_MARKERS)}, linestyle={_DASHES})",
        "axes.grid": True, "axes.grid.axis": "y", "grid.color": grid, "axes.axisbelow": True,
        "axes.spines.top": False, "axes.spines.right": False,
        "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
        "lines.markersize": 5.0, "legend.frameon": False, "legend.fontsize": 9.0, "figure.constrained_layout.use": True,
    }  # fmt: skip


def scaled(value: float, units: Mapping[str, float]) -> str:
    """The value with three digits, in the largest unit that it reaches.  `units` are from large to small."""
    unit, size = next(((u, s) for u, s in units.items() if value >= s * 0.9995), list(units.items())[-1])
    return f"{value / size:,.3g} {unit}"


def _bytes_text(nbytes: float) -> str:
    """Bytes in decimal units, as in GB/s."""
    return scaled(nbytes, {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1})


def rate_text(gbps: float) -> str:
    """``42.1 GB/s``, ``4,210 GB/s``."""
    return f"{gbps:,.0f} GB/s" if gbps >= 100 else f"{gbps:.3g} GB/s"


def pair_text(pattern: str) -> str:
    """``nhd → universal``."""
    return pattern.replace(":", " → ", 1) if ":" in pattern else pattern.replace("_to_", " → ")


def ticks(axis: Any, values: Sequence[float], text: Callable[[float], str], most: int = 7) -> None:
    """Put a tick at every value, or at every second, third, … value.  The last value always has a tick."""
    shown = list(values)[:: -1 * -(-len(values) // most)]
    axis.set_ticks(shown, [text(value) for value in shown])
    axis.set_ticks([], minor=True)


# ---- common parts of the pictures ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """The rows of one picture.  All are from one machine."""

    kind: str
    rows: tuple[Row, ...]
    footer: str
    pairs: tuple[str, ...] = ()

    def panels(self, title: str, legend: str, heights: Sequence[float], columns: int = 1) -> tuple[Figure, list[Axes]]:
        """A figure with rows of panels of the given heights in inches, a title above, and `legend` and the footer below."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        foot = (f"{self.rows[0]['gpu']}. {legend}", *self.footer.split("\n"))
        lines = [line for part in foot for line in textwrap.wrap(part, 120)]
        figure = Figure(figsize=(_WIDTH, sum(heights) + 0.5 + 0.16 * len(lines)))
        FigureCanvasAgg(figure)
        figure.suptitle(title, x=0.01, ha="left", size=13.5, weight="bold")
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", size=7.5)
        grid = figure.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
        return figure, list(grid.flat)

    def by_direction(self, column: str) -> Iterator[tuple[str, list[Row], list[Row]]]:
        """Directions with rows of the requested pairs: all rows, and those without the yardstick's."""
        known = {row[column] for row in self.rows if row["backend"] != YARDSTICK}
        if not known:
            raise _TooLittleError(f"{self.kind}: expected rows of kvbm's backends or of peers, got only yardsticks")
        if missing := [pair for pair in self.pairs if pair not in known]:
            raise unknown(f"pair {missing[0]!r}", sorted(known))
        wanted = {YARDSTICK, *(self.pairs or known)}
        found = grouped(self.rows, "direction")
        for (direction,), members in found.items():
            if direction not in DIRECTIONS:
                raise unknown(f"{members[0].where}: column 'direction'", DIRECTIONS, direction)
        for direction in DIRECTIONS:
            rows = [row for row in found.get((direction,), ()) if wanted & {row["backend"], row[column]}]
            if compared := [row for row in rows if row["backend"] != YARDSTICK]:
                yield direction, rows, compared


class _TooLittleError(SpecError):
    """The rows have the right columns, but are not enough for this picture."""


def unknown(what: str, known: Iterable[str], got: str = "") -> SpecError:
    """The error for a name that is none of the known ones."""
    return SpecError(f"{what}: expected one of {', '.join(known)}" + (f", got {got!r}" if got else ""))


def grouped(rows: Iterable[Row], *columns: str) -> dict[tuple[str, ...], list[Row]]:
    """The rows by what they have in these columns."""
    found: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[column] for column in columns), []).append(row)
    return found


def line(rows: Iterable[Row], x: str, y: str, *, is_log: bool = True) -> tuple[list[float], list[float]]:
    """Points of a line in the order of x.  Two rows with the same x are an error."""
    found: dict[float, Row] = {}
    for row in rows:
        at = row.positive(x) if is_log else row.number(x)
        if at in found:
            raise SpecError(f"{row.where}: the same measurement stands at {found[at].where} already; plot the files of one run")
        found[at] = row
    order = sorted(found)
    return order, [found[at].positive(y) if is_log else found[at].number(y) for at in order]


def _yardstick(row: Row) -> float:
    """GB/s of the memcpy with which a row is compared."""
    return row.positive("total_bytes") / row.positive("memcpy_ms") / 1e6


def _roof(rows: Iterable[Row]) -> dict[float, float]:
    """GB/s of the yardstick by total bytes: the largest value of all rows, its own and those compared with it."""
    return dict(sorted((row.positive("total_bytes"), _yardstick(row)) for row in rows))


class Bar(NamedTuple):
    """A bar that ends at a value, its name on the axis, and the text after it."""

    place: float
    name: str
    end: float
    color: str
    text: str


def draw_bars(axes: Axes, bars: Sequence[Bar], start: float = 0.0) -> None:
    """Draw bars that begin at `start`, the first one on top, with room on the right for their texts."""
    places, names, ends, colors, texts = zip(*bars, strict=True)
    drawn = axes.barh(places, [end - start for end in ends], 0.75, start, color=colors, tick_label=names)
    paper = {"facecolor": axes.get_facecolor(), "edgecolor": "none", "pad": 0.5}
    axes.bar_label(drawn, texts, padding=6, size=9, bbox=paper)
    axes.set_ylim(places[-1] + 0.6, -0.6)
    axes.margins(x=0.28)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.spines["left"].set_visible(False)


# ---- the sweep -----------------------------------------------------------------------------------------------------


def _roofline(job: Job) -> Figure:
    """Bandwidth by the bytes of a batch, compared with one contiguous copy; within a GPU as a share, as the lines coincide."""
    panels = []
    for direction, rows, compared in job.by_direction("pattern"):
        first = {"d2d": ("direct",), "h2h": ("host", "direct")}.get(direction, ())
        there = grouped(compared, "backend")
        if backend := next((name for name in (*first, *KVBM_BACKENDS) if (name,) in there), None):
            panels.append((direction, backend, rows, grouped(there[(backend,)], "pattern")))
    if not panels:
        raise _TooLittleError("roofline: expected rows of kvbm's backends, got only yardsticks and peers")
    if all(len(_roof(rows)) < 2 for _, _, rows, _ in panels):
        raise _TooLittleError("roofline: expected at least two sizes; measure more with --num-blocks, or draw the bars")
    legend = "Payload, each byte once. At the names: share of the memcpy at the largest size."
    figure, every = job.panels("Bandwidth by size of the batch", legend, [3.4] * len(panels))
    for axes, (direction, backend, rows, pairs) in zip(every, panels, strict=True):
        blocks = {row.positive("total_bytes"): _blocks_text(row.positive("num_blocks")) for row in rows}
        is_share = direction == "d2d"
        ylabel = "share of a memcpy" if is_share else "GB/s"
        axes.set(title=f"{DIRECTIONS[direction]}, kvbm's backend {backend!r}", xscale="log", ylabel=ylabel)
        roof = _roof(rows)
        label = f"memcpy  {rate_text(roof[max(roof)])}"
        top = dict.fromkeys(roof, 1.0) if is_share else roof
        axes.plot([*top], [*top.values()], color=GREY, marker="", linestyle="-", linewidth=2.5, label=label)
        axes.set_prop_cycle(None)
        y_column = "ratio" if is_share else "bandwidth_gbps"
        points = {pair: line(held, "total_bytes", y_column) for (pair,), held in pairs.items()}
        for pair, (x, y) in sorted(points.items(), key=lambda item: -item[1][1][-1]):
            last = max(pairs[(pair,)], key=lambda row: row.number("total_bytes"))
            axes.plot(x, y, label=f"{pair_text(pair)}  {last.number('ratio'):.2f}")
        axes.margins(y=0.1)
        axes.set_ylim(min(0.8, *(min(y) - 0.02 for _, y in points.values())) if is_share else 0, None)
        ticks(axes.xaxis, sorted(blocks), lambda size, counts=blocks: f"{_bytes_text(size)}\n{counts[size]}")  # type: ignore[misc]
        axes.legend(**BESIDE)
    return figure


def _blocks_text(blocks: float) -> str:
    return f"{blocks:,.0f} block{'s' if blocks != 1 else ''}"


def _bars(job: Job) -> Figure:
    """Bandwidth at one size: the yardstick, kvbm, and copies without kvbm."""
    panels = []
    left_out = 0
    for direction, rows, compared in job.by_direction("pattern"):
        sizes = {row.positive("num_blocks") for row in compared}
        size = _BARS_AT if _BARS_AT in sizes else max(sizes)
        here = (row for row in compared if row.positive("num_blocks") == size)
        groups = {pair: held for (pair,), held in grouped(here, "pattern").items()}
        # Prefer pairs that more backends and peers support.
        most = sorted(groups, key=lambda pair: -len(groups[pair]))[: len(job.pairs) or _MOST_PAIRS]
        left_out += len(groups) - len(most)
        nbytes, gbps = max(_roof(row for row in rows if row.positive("num_blocks") == size).items())
        title = f"{DIRECTIONS[direction]}, {_blocks_text(size)}, {_bytes_text(nbytes)}"
        panels.append((title, gbps, {pair: groups[pair] for pair in groups if pair in most}))
    legend = "GB/s of payload, each byte once, and the share of the memcpy measured with it (line)."
    if left_out:
        legend += f" {left_out} more pairs were measured: choose with --pair."
    heights = [0.7 + 0.24 * (1 + sum(1 + len(held) for held in groups.values())) for *_, groups in panels]
    figure, every = job.panels("kvbm, a memcpy, and other ways to do it", legend, heights)
    for axes, (title, roof, groups) in zip(every, panels, strict=True):
        bars, yardsticks = [Bar(0.0, YARDSTICK, roof, GREY, f"{rate_text(roof)}  1×")], {}
        for pair, held in groups.items():
            head = bars[-1].place + 1
            axes.annotate(pair_text(pair), (0, head), (4, 0), textcoords="offset points", va="center", weight="bold")
            for place, row in enumerate(sorted(held, key=_bar_order), 1):
                bars.append(_bar(row, head + place))
                yardsticks[head + place] = _yardstick(row)
        draw_bars(axes, bars)
        # Draw each row's own yardstick: on a noisy machine they differ, and the ratio refers to this one.
        low, high = ([place + half for place in yardsticks] for half in (-0.5, 0.5))
        axes.vlines([*yardsticks.values()], low, high, color=GREY, gid="roof", zorder=1)
        axes.set(title=title, xlim=(0, None), xlabel="GB/s")
    return figure


def _bar(row: Row, place: float) -> Bar:
    name, gbps, ratio = row["backend"], row.positive("bandwidth_gbps"), row.positive("ratio")
    text = f"{rate_text(gbps)}  {ratio:.{2 if ratio >= 0.1 else 3}f}×"
    if name not in KVBM_BACKENDS:
        return Bar(place, name, gbps, _PEER, text)
    return Bar(place, f"kvbm {name}", gbps, _RAW if name in KVBM_BACKENDS[5:] else "C0", text)


def _bar_order(row: Row) -> tuple[int, float]:
    """Backends of kvbm first, in their usual order, then peers by speed."""
    name = row["backend"]
    return (KVBM_BACKENDS.index(name), 0.0) if name in KVBM_BACKENDS else (99, -row.positive("bandwidth_gbps"))


# ---- from files to pictures ----------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A kind of picture: the columns that its rows need, and the function that draws it."""

    columns: tuple[str, ...]
    build: Callable[[Job], Figure]


#: Columns of every kind: the machine, and the measured version.
COLUMNS = ("gpu", "driver", "commit")
_SWEEP = (
    "tokens_per_block", "num_blocks", "pattern", "direction", "backend", "total_bytes", "bandwidth_gbps", "memcpy_ms", "ratio",
    "timing", "kernel", "shape", *COLUMNS,
)  # fmt: skip

#: The pictures of a sweep by name.
KINDS = {"roofline": Kind(_SWEEP, _roofline), "bars": Kind(_SWEEP, _bars)}


def draw(
    tables: Sequence[Table], kinds: Sequence[str] = (), *, pairs: Sequence[str] = (), dark: bool = False,
    note: Callable[[str], None] = lambda _: None, known: Mapping[str, Kind] = KINDS,
) -> dict[str, Figure]:  # fmt: skip
    """Draw the pictures for which the tables have rows; if `kinds` or `pairs` are given, only these.  `known` are all kinds.

    The name of a figure is the kind, with the shape and timing if the sweep has several.  `note` is called for each kind that
    was not requested by name and could not be drawn.

    Raises `SpecError` if columns are missing, a requested kind has no rows, rows are from several machines, or a cell is not a
    number; `KvbmError` if matplotlib is not installed.
    """
    found: dict[str, Figure] = {}
    with looks(_settings(dark), "bench"):
        for kind in kinds or known:
            if kind not in known:
                raise unknown(f"kind {kind!r}", known)
            fitting = [table for table in tables if table.rows and not _missing(table, known[kind])]
            if not fitting and kinds:
                raise _no_table(tables, {kind: known[kind]})
            try:
                for name, job in _jobs(kind, known[kind], fitting, tuple(pairs)):
                    found[name] = known[kind].build(job)
            except _TooLittleError as error:
                if kinds:
                    raise
                note(f"{error}: left out")
    if not found:
        raise _no_table(tables, known)
    return found


def _missing(table: Table, kind: Kind) -> list[str]:
    return [column for column in kind.columns if column not in table.columns]


def _no_table(tables: Sequence[Table], kinds: Mapping[str, Kind]) -> SpecError:
    """The error for tables without a suitable kind: it names the kind that lacks the fewest columns."""
    lacks = {(table.path, name): _missing(table, kind) for name, kind in kinds.items() for table in tables}
    (path, name), missing = min(lacks.items(), key=lambda item: len(item[1]) / len(kinds[item[0][1]].columns))
    if not missing:
        return SpecError(f"{path}: no rows that a picture could be made of")
    columns = f"column{'s' if len(missing) > 1 else ''} {', '.join(map(repr, missing))}"
    return SpecError(f"{path}: {name}: expected the columns that `kvbm bench` writes; {columns} missing")


def _jobs(name: str, kind: Kind, tables: Sequence[Table], pairs: tuple[str, ...]) -> Iterator[tuple[str, Job]]:
    """The pictures of a kind by name: one, or one per shape and timing of the sweep."""
    rows = [row for table in tables for row in table.rows]
    machines = [(gpu, held[0].where) for (gpu,), held in grouped(rows, "gpu").items()]
    if len(machines) > 1:
        (one, here), (other, there) = machines[:2]
        raise SpecError(f"{name}: a picture shows one machine, got {one} ({here}) and {other} ({there}); plot them apart")
    footer = "\n".join(dict.fromkeys(comment for table in tables for comment in table.comments))
    groups = grouped(rows, *(column for column in ("shape", "timing") if column in kind.columns)) if rows else {}
    several = [len(set(column)) > 1 for column in zip(*groups, strict=True)]
    for key, held in groups.items():
        whole = "-".join([name, *(_name(part) for part, is_told in zip(key, several, strict=True) if is_told)])
        legend = [footer]
        if key and key[0] not in footer and key[0].replace(",", " ") not in footer:
            legend.append(key[0])
        if "replay" in key:
            legend.append("timed by graph replays")
        yield whole, Job(name, tuple(held), "\n".join(legend), pairs)


def _name(part: str) -> str:
    """A shape or a timing as part of a file's name."""
    return part.replace("dtype=", "").replace("=", "").replace(",", "-")


def save(
    figures: Mapping[str, Figure], out: Path, formats: Sequence[str] = ("png", "svg"), *, dark: bool = False
) -> list[Path]:
    """Write figures of `draw` into a folder, and return their files.  The same rows give the same bytes."""
    out.mkdir(parents=True, exist_ok=True)
    files = {out / f"{name}.{suffix}": figure for name, figure in figures.items() for suffix in formats}
    for path, figure in files.items():
        html.save(figure, path, _settings(dark))
    return list(files)


def command(known: Mapping[str, Kind]) -> click.Command:
    """The command ``plot``, which draws these kinds."""

    @click.command(cls=Command, examples=["kvbm bench plot results.csv --out pictures"])
    @click.argument(
        "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="CSV..."
    )
    @click.option("--out", default=".", show_default=True, type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
                  help="Folder to write to.")  # fmt: skip
    @click.option("--kind", "kinds", callback=comma_list(tuple(known)), metavar="KIND,...", shell_complete=items_of(*known),
                  help=f"Which pictures: {', '.join(known)}. If not given, all that the files have columns for.")  # fmt: skip
    @click.option("--format", "formats", default="png,svg", show_default=True, callback=comma_list(("png", "svg")),
                  metavar="FORMAT,...", shell_complete=items_of("png", "svg"), help="png, svg or both.")  # fmt: skip
    @click.option(
        "--pair", "pairs", multiple=True, shell_complete=complete_pair, metavar="SRC:DST",
        help="Only this pair, as the CSV names it (may be repeated).",
    )  # fmt: skip
    @click.option("--dark/--light", default=False, help="Light on dark, or dark on light (the default).")
    def plot(
        files: tuple[Path, ...], out: Path, kinds: tuple[str, ...], formats: tuple[str, ...], pairs: tuple[str, ...],
        dark: bool,
    ) -> None:  # fmt: skip
        """Draw pictures of what was measured, from the CSV files that the measurements wrote.

        Comment lines at the top of the files become the footers. Writes one file a picture and format, and prints their names.
        Needs matplotlib: pip install 'kvbm-layouts[bench]'.
        """
        tables = [table for path in files for table in read(path)]
        figures = draw(
            tables, kinds, pairs=pairs, dark=dark, note=lambda text: None if is_quiet() else click.echo(text, err=True),
            known=known,
        )  # fmt: skip
        for path in save(figures, out, formats or ("png", "svg"), dark=dark):
            if not is_quiet():
                click.echo(path)

    return plot


plot = command(KINDS)
