"""Common parts of the commands other than the sweep: options, the output of rows, and progress."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import click

from kvbm import _core, kernels
from kvbm.bench.measure import commit, device_of, header, machine
from kvbm.bench.table import Rows
from kvbm.cli.values import device as device_option
from kvbm.errors import CudaUnavailableError, KvbmError
from kvbm.layout.shapes import BlockShape

__all__ = ["TINY", "Note", "Row", "common_options", "require_gpu", "stamp", "write_rows"]

#: Blocks of 1 KiB, so that a million fit into memory.  They measure overhead, not bandwidth.
TINY = BlockShape(nl=2, no=2, nh=2, nt=4, hd=16, dtype="bfloat16")

Row: TypeAlias = dict[str, Any]
Note: TypeAlias = Callable[[str], None]


def default_place() -> str:
    """The first GPU, if there is one and kvbm was built with CUDA; else the CPU."""
    with contextlib.suppress(KvbmError):
        if not kernels.is_using_stubs() and _core.device_count():
            return "cuda:0"
    return "cpu"


def require_gpu(place: str, what: str) -> int:
    """The ordinal of a GPU; `CudaUnavailableError` if there is none."""
    device = device_of(place)
    if device < 0:
        raise CudaUnavailableError(f"{what} needs a GPU; expected --device cuda:N, got {place}")
    _core.device_info(device)  # raises kvbm's error if there is none
    return device


def stamp(place: str) -> Row:
    """The last columns of every row."""
    gpu, driver = machine(place)
    return {"gpu": gpu, "driver": driver, "commit": commit()}


def _place(context: click.Context, parameter: click.Parameter, value: str | None) -> str:
    return device_option(context, parameter, value) or default_place()


def common_options(iters: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """--device, --iters and --out."""
    options = (
        click.option(
            "--device", "place", callback=_place, metavar="cpu|cuda:N",
            help="Where to measure.  [default: the first GPU, else cpu]",
        ),
        click.option(
            "--iters", default=iters, show_default=True, type=click.IntRange(1), help="Timed calls per figure, at most."
        ),
        click.option(
            "--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
            help="CSV file to write.  [default: stdout]",
        ),
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def note(text: str) -> None:
    """Print a line to stderr: what is left out, and why."""
    click.echo(text, err=True)


def write_rows(
    found: Iterator[Row], columns: Sequence[str], place: str, shape: BlockShape | None, out: Path | None, title: str
) -> int:
    """Write rows as soon as they are measured, with a line of progress on stderr if stderr is a terminal.

    Returns
    -------
    int
        Number of rows.

    Raises
    ------
    KvbmError
        There are no rows: everything was left out.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    bar = Progress(
        SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
        console=console, transient=True, disable=not console.is_terminal, redirect_stdout=False,
    )  # fmt: skip
    count = 0
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(out.open("w", newline="", encoding="utf-8")) if out is not None else sys.stdout
        rows = Rows(file, header(place, shape), columns)
        stack.enter_context(bar)
        stack.callback(_close, found)
        task = bar.add_task(title, total=None)
        for row in found:
            rows.write(row)
            count += 1
            bar.update(task, description=f"{title}: {count} figures")
    if not count:
        raise KvbmError(f"{title}: nothing could be measured; the lines above say why")
    if out is not None:
        click.echo(f"{out}: {count} figures")
    return count


def _close(found: Iterator[Row]) -> None:
    """Close a generator, so that it releases its memory now.  After Ctrl-C nothing else would close it."""
    close = getattr(found, "close", None)
    if close is not None:
        close()


def figures(value: float) -> float:
    """Round to five significant digits, the precision of a clock."""
    return float(f"{value:.5g}")
