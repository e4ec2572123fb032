"""Alternating measurements: rows that compare one time with another, as ratios of medians of the same rounds."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import click

from kvbm.bench.measure import device_of
from kvbm.cli.values import comma_list
from kvbm.layout.shapes import BlockShape
from kvbm.system.clock import CpuClock, GpuClock, Timed

from .section import Note, Row, common_options, figures, write_rows

__all__ = ["COLUMNS", "ROUNDS", "Asked", "Run", "Runner", "race", "race_options", "ratio", "row_of", "runner", "write_race"]

COLUMNS = (
    "case", "by", "n", "total_bytes", "median_ms", "gbps", "beside", "beside_ms", "ratio", "asked", "reached",
    "gpu", "driver", "commit",
)  # fmt: skip

#: The required ratio to the other's speed, or None.
Asked: TypeAlias = float | None


class Run(NamedTuple):
    """The parameters of a run."""

    place: str
    model: BlockShape
    iters: int
    quick: bool
    note: Note

    @property
    def on_gpu(self) -> bool:
        return device_of(self.place) >= 0


#: Times some calls: ``run(iters, warmup)``.
Runner: TypeAlias = Callable[[int, int], Timed]

#: Rounds of alternating measurements.
ROUNDS = 5


def race_options(
    sections: Sequence[str], iters: int, model: str, quick: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`common_options`, --shape, --what and --quick.  `model` and `quick` are help texts: default shape and effect of --quick."""
    options = (
        common_options(iters),
        click.option("--shape", "shape_text", metavar="SHAPE", help=f"The model.  [default: {model}]"),
        click.option("--what", "sections", default=",".join(sections), show_default=True, callback=comma_list(sections),
                     metavar="LIST", help="Sections to measure."),
        click.option("--quick", is_flag=True, help=quick),
    )  # fmt: skip

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def write_race(found: Iterator[Row], place: str, model: BlockShape, out: Path | None, title: str) -> None:
    """`write_rows`; if the rows go to a file, a table goes to stdout."""
    rows: list[Row] = []

    def kept() -> Iterator[Row]:
        for row in found:
            rows.append(row)
            yield row

    write_rows(kept(), COLUMNS, place, model, out, title)
    if out is not None:
        print_table(rows)


def race(runners: Mapping[str, Runner], iters: int) -> dict[str, list[float]]:
    """The median of every round per runner.  In each round every runner makes a few calls."""
    found: dict[str, list[float]] = {name: [] for name in runners}
    for turn in range(ROUNDS):
        for name, run in runners.items():
            found[name].append(run(max(iters // ROUNDS, 1), 1 if turn else 3).median)
    return found


def ratio(times: Sequence[float], of: Sequence[float]) -> float:
    """The median of the ratios of all rounds."""
    return statistics.median(one / other for one, other in zip(times, of, strict=True))


def row_of(
    case: str, by: str, n: int, nbytes: int, times: Sequence[float], beside: str, other: Sequence[float], asked: Asked
) -> Row:
    """A row that compares a copy with another one: the reached share of its speed."""
    reached = round(ratio(other, times), 4)
    seconds = statistics.median(times)
    return {
        "case": case, "by": by, "n": n, "total_bytes": nbytes, "median_ms": figures(seconds * 1e3),
        "gbps": figures(nbytes / seconds / 1e9), "beside": beside, "beside_ms": figures(statistics.median(other) * 1e3),
        "ratio": reached, "asked": "" if asked is None else f">= {asked:g}",
        "reached": "" if asked is None else "yes" if reached >= asked else "no",
    }  # fmt: skip


def runner(clock: GpuClock | CpuClock, calls: Sequence[Callable[[Any], object]]) -> Runner:
    """A `Runner` for calls that take turns, each with other ids."""
    turns = itertools.cycle(calls)
    return lambda iters, warmup: clock.time(lambda stream: next(turns)(stream), iters=iters, warmup=warmup)


def print_table(found: Sequence[Row]) -> None:
    """Print the measurements to stdout."""
    from kvbm.cli import common

    counted = ("n", "MB", "ms", "GB/s", "ratio", "asked", "reached")
    table = common.new_table("case", "by", "beside", *counted, right=counted)
    for row in found:
        megabytes = f"{row['total_bytes'] / 1e6:.0f}" if row["total_bytes"] else ""
        reached = "[bold red]NO[/]" if row["reached"] == "no" else row["reached"]
        table.add_row(
            row["case"], row["by"], row["beside"], str(row["n"]), megabytes, str(row["median_ms"]), str(row["gbps"]),
            str(row["ratio"]), row["asked"], reached,
        )  # fmt: skip
    common.print_table(table)
