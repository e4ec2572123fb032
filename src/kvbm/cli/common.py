"""The common parts of all commands: errors and exit codes, options, and output."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._arguments import quoted
from ..errors import BuildError, KvbmError, LayoutError, PlanError, printable
from ..layout import spec
from ..layout.shapes import LIMIT, load_shape, shape_names

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn
    from rich.table import Table

    from ..layout.layout import Layout
    from ..planner.cast import Cast


class Group(click.Group):
    """A group of commands that may raise `KvbmError` and may be defined in other modules.

    Parameters
    ----------
    lazy : mapping, optional
        Name of a command → module, relative to this package, that defines it under this name, with ``_``
        for ``-``.  The module is imported when the command is used.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, str] | None = None, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.lazy = lazy or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self.lazy})

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_commands(self, ctx, formatter)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.lazy:
            module = importlib.import_module(self.lazy[cmd_name], __package__)
            command: click.Command = getattr(module, cmd_name.replace("-", "_"))
            return command
        return super().get_command(ctx, cmd_name)

    def main(self, *args: Any, **rest: Any) -> Any:
        """Run the program.  Characters that the terminal cannot show become question marks."""
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="replace")
        try:
            with _signals_as_exceptions():
                return super().main(*args, **rest)
        except OSError as error:  # of help that cannot be written
            print_error(error)
            sys.exit(1)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.  A `KvbmError` or an OSError becomes a message and an exit code, and Ctrl-C the exit code 130."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("\nAborted!", err=True)
            return ctx.exit(128 + signal.SIGINT)  # click would end with 1
        except (KvbmError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise  # click handles it
            if os.environ.get("KVBM_DEBUG", "0") not in {"", "0"}:
                traceback.print_exc()
            print_error(error)
            return ctx.exit(error.exit_code if isinstance(error, KvbmError) else 1)


def write_commands(group: click.Group, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """List commands in the help with the whole first sentence of each.  click would cut it."""
    found = [(name, group.get_command(ctx, name)) for name in group.list_commands(ctx)]
    rows = [(name, command.get_short_help_str(limit=200)) for name, command in found if command and not command.hidden]
    if rows:
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """SIGTERM and SIGHUP end the program with an exception, as Ctrl-C does, so half-written files are removed."""
    is_main = threading.current_thread() is threading.main_thread()
    handled = [
        number for number in (signal.SIGTERM, signal.SIGHUP) if is_main and signal.getsignal(number) is signal.SIG_DFL
    ]

    def end(number: int, _: object) -> None:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)  # ignore further signals
        raise SystemExit(128 + number)

    for number in handled:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def print_error(error: Exception) -> None:
    """Print the message of an error to stderr; for a compiler error also the command and its output."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror and not isinstance(error, KvbmError):
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    shown = "\n".join(printable(line, 10_000) for line in text.split("\n"))  # names of files may hold anything
    click.echo(f"{click.style('error:', fg='red', bold=True)} {shown}", err=True)
    if isinstance(error, BuildError):
        for extra in filter(None, (error.command, error.log)):
            click.echo(extra, err=True)


def terminal() -> Console:
    """The console for tables and drawings.  In a pipe or a file no line is wrapped or cut."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 10_000
    return console


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table without cutting cells: if it is wider than the terminal, its lines are longer.

    In a pipe or a file every row is one line without trailing blanks, and the table has no frame.
    """
    from ..show.text import print_whole, table_box

    console = console or terminal()
    if console.is_terminal:
        table.box = table_box(console)
        print_whole(console, table)
        return
    table.box = None
    with console.capture() as found:
        print_whole(console, table)
    console.file.write("".join(f"{line.rstrip()}\n" for line in found.get().splitlines()))


def new_table(*columns: str, right: Sequence[str] = (), wrapped: Sequence[str] = (), dim: Sequence[str] = (), **rest: Any) -> Table:
    """A table for the command line.  In a narrow terminal only the `wrapped` columns have several lines."""
    from rich.table import Table

    table = Table(header_style="bold", padding=(0, 2, 0, 0), pad_edge=False, **rest)
    for number, name in enumerate(columns):
        style = "dim" if name in dim else "bold" if number == 0 else None
        table.add_column(name, justify="right" if name in right else "left", style=style, no_wrap=name not in wrapped)
    return table


def print_json(found: Any) -> None:
    """Print the output of ``--json``."""
    click.echo(json.dumps(found, indent=2, ensure_ascii=False))


def print_prose(text: str) -> None:
    """Print paragraphs.  They are wrapped only in a terminal, at 100 columns or fewer."""
    console = terminal()
    for paragraph in text.splitlines() or [""]:
        click.echo(click.wrap_text(paragraph, width=min(console.width, 100)) if console.is_terminal else paragraph)


@contextlib.contextmanager
def progress(
    title: str, total: int | None = None, *columns: ProgressColumn, console: Console | None = None
) -> Iterator[Callable[..., None]]:
    """A progress bar in a terminal.  Yields rich's ``Progress.update`` (``advance=``, ``completed=``, ``description=``)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = console or Console(stderr=True)
    all_columns = (TextColumn("{task.description}"), BarColumn(), *columns)
    with Progress(*all_columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield functools.partial(bar.update, bar.add_task(title, total=total))


def complete_layout(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001
    """Names of shipped layouts that begin with `incomplete`."""
    return [name for name in spec.layouts() if name.startswith(incomplete)]


def complete_shape(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001
    """Names of shipped shapes that begin with `incomplete`."""
    return [name for name in shape_names() if name.startswith(incomplete)]


def layout_argument(name: str, **rest: Any) -> Callable[[Any], Any]:
    """An argument LAYOUT with shell completion."""
    return click.argument(name, shell_complete=complete_layout, **rest)


def _gpu_number(ctx: click.Context, param: click.Parameter, value: str) -> int:  # noqa: ARG001
    match = re.fullmatch(r"(?:cuda:)?(\d{1,4})", str(value), re.ASCII)
    if match is None:
        raise click.BadParameter(f"expected cuda:N, such as cuda:0, got {quoted(value, 60)}")
    return int(match[1])


def gpu_option(text: str) -> Callable[[Any], Any]:
    """``--device`` of commands that need a GPU."""
    return click.option("--device", default="cuda:0", show_default=True, callback=_gpu_number, metavar="cuda:N", help=text)


def layout_option(*names: str, **rest: Any) -> Callable[[Any], Any]:
    """An option that takes a LAYOUT."""
    return click.option(*names, metavar="LAYOUT", shell_complete=complete_layout, **rest)


#: Default shape of commands that need one.
DEFAULT_SHAPE = "llama-3.1-8b"


def shape_option(*, default: str | None = DEFAULT_SHAPE, fits: bool = False) -> Callable[[Any], Any]:
    """``--shape``.  With the default None it may be left out.  With `fits` the default is the result of `fitting_shape`."""
    return click.option(
        "--shape",
        "shape_text",
        default=None if fits else default,
        show_default=default is not None and not fits,
        metavar="SHAPE",
        shell_complete=complete_shape,
        help="A preset that `kvbm shapes` lists (llama-3.1-8b, llama-3.1-70b/tp8), a preset with changes "
        "(llama-3.1-8b,nt=32,dtype=float8_e4m3fn), or all sizes (nl=2,no=2,nh=4,nt=16,hd=32,dtype=float16)."
        + (f"  [default: {DEFAULT_SHAPE}, or another that fits]" if fits else ""),
    )


def fitting_shape(given: str | None, *layouts: Layout) -> str:
    """The given shape, else the first of a few at which all the layouts are legal.  Prints a note if it is not the default."""
    if given is not None:
        return given
    for text in filter(None, (DEFAULT_SHAPE, *map(spec.example_shape, layouts))):
        try:
            for layout in layouts:
                layout.resolve(load_shape(text), 1024)
        except LayoutError:
            continue
        if text != DEFAULT_SHAPE:
            names = " and ".join(layout.name for layout in layouts)
            click.echo(f"note: {DEFAULT_SHAPE} does not fit {names}; the shape is {text}. --shape selects another.", err=True)
        return text
    return DEFAULT_SHAPE


def _cast(ctx: click.Context, param: click.Parameter, given: str | None) -> Cast:  # noqa: ARG001
    """``amax``, or a number: the scale of the caller."""
    if given is None or given == "amax":
        return given  # type: ignore[return-value]
    from ..planner.cast import Scale

    try:
        return Scale(float(given))
    except (ValueError, PlanError):
        raise click.BadParameter(f"expected amax, or a number from 2**-100 to 2**100, got {quoted(given, 60)}") from None


def cast_options(name: str) -> Callable[[Any], Any]:
    """``--cast`` and ``--dtype``, of the side with this name."""

    def add(command: Any) -> Any:
        text = f"With --cast: dtype of {name}, where its layout does not say it."
        command = click.option("--dtype", metavar="DTYPE", help=text)(command)
        return click.option(
            "--cast",
            callback=_cast,
            metavar="amax|X",
            help="Quantise, or the reverse: with the scales of the layout (amax), or with one scale (X).",
        )(command)

    return add


def json_option(what: str = "") -> Callable[[Any], Any]:
    """``--json``."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print JSON instead{f': {what}' if what else ''}.")


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def size_of(text: str) -> int:
    """The number of bytes of a text: ``64MiB``, ``1.5GB``, ``4096``.  Raises `click.BadParameter` for other texts."""
    match = re.fullmatch(r"\s*(\d{1,15})(?:\.(\d{1,6}))?\s*(?:([kmgt]i?)b?|b)?\s*", text, re.ASCII | re.IGNORECASE)
    count = int(float(f"{match[1]}.{match[2] or 0}") * _UNITS[(match[3] or "").lower()]) if match else 0
    if not 0 < count < 1 << 40:
        raise click.BadParameter(f"expected bytes such as 64MiB, below 1 TiB, got {quoted(text, 60)}")
    return count


def size_option(*names: str, **rest: Any) -> Callable[[Any], Any]:
    """An option for a number of bytes, which `size_of` reads."""
    return click.option(*names, callback=lambda _, __, value: size_of(value), show_default=True, metavar="SIZE", **rest)


def num_blocks_option(text: str, **rest: Any) -> Callable[[Any], Any]:
    """``--num-blocks``."""
    return click.option("--num-blocks", type=click.IntRange(1, LIMIT), metavar="N", help=text, **rest)


def layouts_option(text: str) -> Callable[[Any], Any]:
    """``--layouts``: files or folders."""
    return click.option(
        "--layouts", "paths", multiple=True, type=click.Path(exists=True, path_type=Path), metavar="PATH", help=text
    )


def picture_option(suffix: str, what: str) -> Callable[[Any], Any]:
    """``--svg``, ``--png`` and ``--html``."""
    return click.option(
        f"--{suffix}",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help=f"Write {what} instead; FILE ends in .{suffix}. Needs matplotlib: pip install 'kvbm-layouts[show]'.",
    )


def write_pictures(
    make: Callable[[], Any],
    svg: Path | None,
    png: Path | None = None,
    html: Path | None = None,
    page: Callable[[], str] | None = None,
    *,
    quiet: bool = False,
) -> None:
    """Write the picture, and the `page` for `html`, to the given files.  All paths are checked before drawing.

    The paths are printed, unless `quiet`.
    """
    from ..show.html import check_path, save

    for path, suffix in ((svg, ".svg"), (png, ".png"), (html, ".html")):
        if path is not None:
            check_path(path, suffix)
    wanted = [path for path in (svg, png) if path is not None]
    if wanted:
        figure = make()
        for path in wanted:
            save(figure, path)
    if html is not None and page is not None:
        html.write_text(page(), encoding="utf-8")
        wanted.append(html)
    for path in wanted if not quiet else ():
        click.echo(path)
