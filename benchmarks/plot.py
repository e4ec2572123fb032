"""Pictures of the studies: ``python -m benchmarks plot CSV...`` draws what `kvbm bench plot` draws, and these besides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvbm.bench.plot import (
    BESIDE,
    COLUMNS,
    DIRECTIONS,
    GREY,
    KINDS,
    Bar,
    Job,
    Kind,
    command,
    draw_bars,
    grouped,
    line,
    pair_text,
    rate_text,
    scaled,
    ticks,
    unknown,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["STUDIES", "plot"]


def _time_text(us: float) -> str:
    """``12 µs``, ``1.2 ms``."""
    return scaled(us, {"s": 1e6, "ms": 1e3, "µs": 1})


def _count_text(number: float) -> str:
    """``9,000``, ``100k``."""
    return f"{number:,.10g}" if number < 1e5 else scaled(number, {"M": 1e6, "k": 1e3}).replace(" ", "")


def _log_lines(axes: Axes, drawn: Mapping[str, tuple[list[float], list[float]]], unit: str) -> None:
    """Lines on two logarithmic axes; `y` is in µs."""
    axes.set(xscale="log", yscale="log", xlabel=unit)
    for name, points in drawn.items():
        axes.plot(*points, label=name)
    ticks(axes.xaxis, sorted({at for x, _ in drawn.values() for at in x}), _count_text, 5)
    axes.yaxis.set_major_formatter(lambda value, _: _time_text(value))
    ys = [at for _, y in drawn.values() for at in y]
    if max(ys) < 10 * min(ys):
        axes.yaxis.set_minor_formatter(lambda value, _: _time_text(value))


def _interference(job: Job) -> Figure:
    """The slowdown of a matrix product by concurrent copies."""
    panels = [(direction, ours) for direction, _, ours in job.by_direction("pair")]
    said = "Time of a matrix product while copies run, over its time alone; speed of the copies. Dashed: a memcpy."
    heights = [0.27 * len(rows) + 0.8 for _, rows in panels]
    figure, every = job.panels("What a copy costs the model beside it", said, heights)
    for axes, (direction, rows) in zip(every, panels, strict=True):
        pairs = sorted({row["pair"] for row in rows})
        said = f", {pair_text(pairs[0])}" if len(pairs) == 1 else ""
        reference = rows[0].positive("memcpy_slowdown")
        bars = []
        for place, row in enumerate(sorted(rows, key=lambda row: row.positive("slowdown"))):
            slowdown = row.positive("slowdown")
            name = row["backend"] + (f", {row['max_sms']} SMs" if row["max_sms"] else "")
            name = name if said else f"{pair_text(row['pair'])}, {name}"
            # Required: no slower than beside a memcpy. The colour shows it, and the number after the bar.
            color = "C0" if slowdown <= reference * 1.05 else "C1"
            bars.append(Bar(place, name, slowdown, color, f"{slowdown:.2f}×  {rate_text(row.positive('copy_gbps'))}"))
        draw_bars(axes, bars, start=1.0)
        axes.axvline(1.0, color=GREY, marker="", linestyle="-", gid="alone")
        axes.axvline(reference, color=GREY, marker="", linestyle="--", gid="memcpy", zorder=1)
        axes.set_title(f"{DIRECTIONS[direction]}{said}; beside a memcpy {reference:.2f}×")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    every[-1].set_xlabel("time of the product, alone = 1×")
    return figure


def _overhead(job: Job) -> Figure:
    """Host time of a call by the number of ids, and of tensors."""
    panels = []
    for what in ("ids", "tensors"):
        rows = [row for row in job.rows if row["call"].startswith("kernels.") == (what == "tensors")]
        if not rows:
            continue
        calls, kinds = ({row[column] for row in rows} for column in ("call", "ids"))
        drawn = {}
        for (call, kind), held in grouped(rows, "call", "ids").items():
            name = kind if call == rows[0]["call"] else f"{call}, {kind}"
            name = call.removeprefix("kernels.") if len(kinds) == 1 and len(calls) > 1 else name
            drawn[name] = line(held, "count", "median_us")
        title = f"{rows[0]['call']}, by kind of ids" if what == "ids" else "lists of tensors (kvbm.kernels)"
        panels.append((title, what, drawn))
    on_gpu = "From the call to its return, the copy being in the stream; the GPU is never waited for."
    said = on_gpu if job.rows[0]["driver"] else "On the CPU the copy itself is part of the call."
    figure, every = job.panels("Host time of a call", said, [3.0] * len(panels))
    for axes, (title, what, drawn) in zip(every, panels, strict=True):
        axes.set_title(title)
        _log_lines(axes, drawn, f"{what} per call")
        axes.legend(**BESIDE)
    return figure


#: Panels of the picture: title, value of the column 'what' → name of the line, unit of the x axis.
_SCALES: tuple[tuple[str, dict[str, str], str], ...] = (
    ("Blocks in one copy", {"blocks": "time"}, "blocks"),
    ("Layers", {"layers": "time"}, "layers"),
    ("Ids of tiny blocks", {"ids_host": "host", "ids_gpu": "GPU", "ids_cpu": "CPU"}, "ids"),
    ("Memory held after many copies", {"soak_host": "host", "soak_gpu": "GPU"}, "copies"),
    ("Allocating a pool", {"pools": "time"}, "GiB"),
)


def _scale(job: Job) -> Figure:
    """Growth of time and memory with blocks, layers, ids, copies and the size of a pool."""
    found = {what: rows for (what,), rows in grouped(job.rows, "what").items()}
    known = {what for _, lines, _ in _SCALES for what in lines}
    for what, rows in found.items():
        if what not in known:
            raise unknown(f"{rows[0].where}: column 'what'", sorted(known), what)
    every_panel = [(title, {lines[w]: found[w] for w in lines if w in found}, unit) for title, lines, unit in _SCALES]
    panels = [panel for panel in every_panel if panel[1]]
    said = "Median times. Dotted: growth in proportion."
    figure, every = job.panels("How it grows", said, [2.5] * -(-len(panels) // 2), columns=2)
    for axes, (title, held, unit) in zip(every, panels, strict=False):
        notes = {row["notes"] for rows in held.values() for row in rows}
        axes.set_title("\n".join([title, *(pair_text(note) for note in notes if len(notes) == 1)]), size=9.5)
        if unit == "copies":
            most = 1.0
            for name, rows in held.items():
                x, y = line(rows, "n", "grown_mib", is_log=False)
                most = max(most, 1.1 * max(y))
                axes.plot(x, y, label=f"{name}: {1024 * y[-1]:.3g} KiB after {_count_text(x[-1])} copies")
            axes.set_ylim(-0.03 * most, most)  # less than 1 MiB is no growth, and is not drawn as one
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} MiB")
            axes.xaxis.set_major_formatter(lambda value, _: _count_text(value))
            axes.set_xlabel(unit)
        else:
            times = {name: line(rows, "n", "median_ms") for name, rows in held.items()}
            drawn = {name: (x, [1e3 * ms for ms in y]) for name, (x, y) in times.items()}
            _log_lines(axes, drawn, unit)
            axes.set_ylim(axes.get_ylim())  # so that the dotted lines do not extend the axis
            for x, y in drawn.values():
                ends = [x[0], x[-1]], [y[-1] * x[0] / x[-1], y[-1]]
                axes.plot(*ends, color=GREY, marker="", linestyle=":", zorder=1.5, gid="in proportion")
        if len(held) > 1 or unit == "copies":
            axes.legend()
    for axes in every[len(panels) :]:
        axes.set_axis_off()
    return figure


#: The pictures of the sweep and of the studies.
STUDIES: dict[str, Kind] = {
    **KINDS,
    "interference": Kind(
        ("direction", "pair", "backend", "max_sms", "slowdown", "memcpy_slowdown", "copy_gbps", *COLUMNS), _interference
    ),
    "overhead": Kind(("call", "ids", "count", "median_us", *COLUMNS), _overhead),
    "scale": Kind(("what", "n", "median_ms", "grown_mib", "notes", *COLUMNS), _scale),
}

plot = command(STUDIES)
