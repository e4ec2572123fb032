"""The common parts of all commands: options, and output."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._arguments import quoted
from ..errors import LayoutError, printable
from ..layout import spec
from ..layout.shapes import LIMIT, load_shape
from .click_classes import Whole, is_coloured, is_quiet
from .complete import complete_any_device, complete_device, complete_dtype, complete_layout, complete_shape, some_of
from .values import device

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn
    from rich.table import Table
    from rich.text import Text

    from ..layout.layout import Layout
    from ..planner.cast import Cast


def note(text: str) -> None:
    """Print a note to stderr, unless ``--quiet`` is given."""
    if not is_quiet():
        head, text = "note:", _wrapped(f"note: {text}", new_console(stderr=True))
        click.echo(click.style(head, bold=True) + text.removeprefix(head), err=True)


def confirm(text: str) -> None:
    """Print what was done to stdout, unless ``--quiet`` is given.  A result that was asked for is no confirmation."""
    if not is_quiet():
        click.echo(text)


def shown(given: object) -> str:
    """A path, or a text of a file, as it may stand on a terminal."""
    return printable(str(given), 4096)


def new_console(*, stderr: bool = False) -> Console:
    """A console of rich with the colours of ``--color``."""
    from rich.console import Console

    class Ours(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end with 1; `Group` ends with its own code

    coloured = is_coloured()
    console = Ours(stderr=stderr, highlight=False, color_system=None if coloured is False else "auto")
    if coloured and not console.is_terminal:
        console = Ours(stderr=stderr, highlight=False, color_system="standard")
    return console


def terminal() -> Console:
    """The console for tables and drawings.  In a pipe or a file no line is wrapped or cut."""
    console = new_console()
    if not console.is_terminal:
        console.width = 10_000
    return console


#: Most columns that a cell is padded to in a pipe: one long cell must not make every line long.
_PIPE_PAD = 36


def print_table(table: Table, console: Console | None = None) -> None:
    """Print a table without cutting cells: if it is wider than the terminal, its lines are longer.

    In a pipe or a file every row is one line without trailing blanks, two blanks or more are between cells, a cell longer than
    others moves only the rest of its own line, and the table has no frame.
    """
    from ..show.text import print_whole, table_box

    console = console or terminal()
    if console.is_terminal:
        table.box, table.show_edge = table_box(console), False
        print_whole(console, table)
        return
    if table.title:
        console.print(table.title, style=table.title_style or "", soft_wrap=True)
    for row in _rows(table):
        console.print(row, soft_wrap=True)


#: A blank with nothing behind it but blanks and marks of colour.
_TRAILING = re.compile(r" (?=(?: |\x1b\[[\d;]*m)*$)")


@contextlib.contextmanager
def without_trailing_blanks(console: Console) -> Iterator[None]:
    """In a pipe or a file, the lines that are printed here end with their last character."""
    if console.is_terminal:
        yield
        return
    with console.capture() as found:
        yield
    for line in found.get().splitlines():
        console.file.write(f"{_TRAILING.sub('', line)}\n")


def _rows(table: Table) -> Iterator[Text]:
    """The lines of a table in a pipe."""
    from rich.text import Text

    columns = []
    for column in table.columns:
        cells = [Text(str(column.header), table.header_style)]
        for cell in column.cells:
            cells.append(cell.copy() if isinstance(cell, Text) else Text.from_markup(str(cell)))
            cells[-1].stylize_before(column.style)
        is_right = column.justify == "right"
        longest = max(cell.cell_len for cell in cells)
        width = longest if is_right else min(longest, _PIPE_PAD)
        for cell in cells:
            (cell.pad_left if is_right else cell.pad_right)(max(0, width - cell.cell_len))
        columns.append(cells)
    for row in zip(*columns, strict=True):
        line = Text("  ").join(row)
        line.rstrip()
        yield line


def new_table(
    *columns: str, right: Sequence[str] = (), wrapped: Sequence[str] = (), dim: Sequence[str] = (), **rest: Any
) -> Table:
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
    """Print lines.  They are wrapped only in a terminal, at 100 columns or fewer.

    What follows of an indented line is indented further.  Rows of a table, with two blanks between cells, are not wrapped; nor are
    words, such as paths, cut.
    """
    console = terminal()
    for line in text.splitlines() or [""]:
        click.echo(_wrapped(line, console))


def _wrapped(line: str, console: Console) -> str:
    width = min(console.width, 100)
    if not console.is_terminal or len(line) <= width or re.search(r"\S {2,}\S", line):
        return line
    margin = " " * (len(line) - len(line.lstrip()))
    return textwrap.fill(
        line.strip(), width, initial_indent=margin, subsequent_indent=f"{margin}  " if margin else "",
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


@contextlib.contextmanager
def progress(
    title: str, total: int | None = None, *columns: ProgressColumn, console: Console | None = None
) -> Iterator[Callable[..., None]]:
    """A progress bar in a terminal.  Yields rich's ``Progress.update`` (``advance=``, ``completed=``, ``description=``)."""
    from rich.progress import BarColumn, Progress, TextColumn

    console = console or new_console(stderr=True)
    all_columns = (TextColumn("{task.description}"), BarColumn(), *columns)
    with Progress(*all_columns, console=console, transient=True, disable=is_quiet() or not console.is_terminal) as bar:
        yield functools.partial(bar.update, bar.add_task(title, total=total))


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
    return click.option(
        "--device", default="cuda:0", show_default=True, callback=_gpu_number, metavar="cuda:N", help=text,
        shell_complete=complete_device,
    )  # fmt: skip


def layout_option(*names: str, **rest: Any) -> Callable[[Any], Any]:
    """An option that takes a LAYOUT."""
    return click.option(*names, metavar="LAYOUT", shell_complete=complete_layout, **rest)


def device_option(text: str, *, default: str | None = "cpu") -> Callable[[Any], Any]:
    """``--device`` of commands that run on the CPU, too."""
    return click.option(
        "--device", default=default, show_default=default is not None, metavar="cpu|cuda:N", help=text,
        shell_complete=complete_any_device, callback=device,
    )  # fmt: skip


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
            note(f"{DEFAULT_SHAPE} does not fit {names}; the shape is {text}. --shape selects another.")
        return text
    return DEFAULT_SHAPE


def _cast(ctx: click.Context, param: click.Parameter, given: str | None) -> Cast:  # noqa: ARG001
    """``amax``, or the scales of the caller: a number, or JSON of several."""
    if given is None or given == "amax":
        return given  # type: ignore[return-value]
    from ..planner.cast import parsed
    from ..store.header import once

    try:
        try:
            found = float(given)
        except ValueError:
            found = json.loads(given, object_pairs_hook=once)
        return parsed(found)
    except (ValueError, RecursionError) as error:  # a PlanError is a ValueError
        why = "" if isinstance(error, json.JSONDecodeError | RecursionError) else f" ({error})"
        raise click.BadParameter(
            "expected amax, a number, or JSON: a list with one for each layer, or an object of both for k and v; got "
            f"{quoted(given, 60)}{why}"
        ) from None


def cast_option(help_: str) -> Callable[[Any], Any]:
    """``--cast``."""
    return click.option("--cast", callback=_cast, metavar="amax|X", help=help_, shell_complete=some_of("amax"))


def cast_options(name: str) -> Callable[[Any], Any]:
    """``--cast`` and ``--dtype``, of the side with this name."""

    def add(command: Any) -> Any:
        text = f"With --cast: dtype of {name}, where its layout does not say it."
        command = click.option("--dtype", metavar="DTYPE", help=text, shell_complete=complete_dtype)(command)
        return cast_option(
            "Quantise, or the reverse: with the scales of the layout (amax), or with others (X): a number, or JSON, with one for "
            'each layer ([0.1,0.2]) or for K and V ({"k":0.1,"v":[0.1,0.2]}).'
        )(command)

    return add


def json_option(what: str = "") -> Callable[[Any], Any]:
    """``--json``."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print JSON instead{f': {what}' if what else ''}.")


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def size_of(text: str, most_tib: int = 1) -> int:
    """The number of bytes of a text: ``64MiB``, ``1.5GB``, ``4096``.  Raises `click.BadParameter` for other texts."""
    match = re.fullmatch(r"\s*(\d{1,15})(?:\.(\d{1,6}))?\s*(?:([kmgt]i?)b?|b)?\s*", text, re.ASCII | re.IGNORECASE)
    count = int(float(f"{match[1]}.{match[2] or 0}") * _UNITS[(match[3] or "").lower()]) if match else 0
    if not 0 < count < most_tib << 40:
        raise click.BadParameter(f"expected bytes such as 64MiB, below {most_tib:,} TiB, got {quoted(text, 60)}")
    return count


def size_option(*names: str, **rest: Any) -> Callable[[Any], Any]:
    """An option for a number of bytes, which `size_of` reads."""

    def read(_: Any, __: Any, value: str | None) -> int | None:
        return None if value is None else size_of(value)

    return click.option(*names, callback=read, show_default=True, metavar="SIZE", **rest)


def num_blocks_option(text: str, **rest: Any) -> Callable[[Any], Any]:
    """``--num-blocks``."""
    return click.option("--num-blocks", type=Whole(1, LIMIT), metavar="N", help=text, **rest)


def layouts_option(text: str, envvar: str | None = None) -> Callable[[Any], Any]:
    """``--layouts``: files or folders.  Default: those of the environment variable, if one is named."""
    kind = click.Path(exists=True, path_type=Path)
    return click.option("--layouts", "paths", multiple=True, type=kind, metavar="PATH", help=text, envvar=envvar, show_envvar=True)


def picture_option(suffix: str, what: str) -> Callable[[Any], Any]:
    """``--svg``, ``--png`` and ``--html``."""
    return click.option(
        f"--{suffix}",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help=f"Write {what} instead; FILE ends in .{suffix}. Needs matplotlib: pip install 'kvbm-layouts[show]'.",
    )


def write_pictures(
    make: Callable[[], Any], svg: Path | None, png: Path | None = None, html: Path | None = None,
    page: Callable[[], str] | None = None, *, quiet: bool = False,
) -> None:  # fmt: skip
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
        confirm(str(path))
