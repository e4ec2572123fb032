"""What all commands share: how they end, their options, and the terminal."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import spec
from .errors import BuildError, KvbmError
from .shapes import LIMIT, shape_names

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import ProgressColumn


class Group(click.Group):
    """A group whose commands may raise `KvbmError`, and may be in other modules.

    Parameters
    ----------
    lazy : mapping, optional
        Name of a command → module, below kvbm, that has it under this name, ``_`` for ``-``; imported when it is asked for.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, str] | None = None, **rest: Any) -> None:
        super().__init__(*args, **rest)
        self.lazy = lazy or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *self.lazy])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.lazy:
            module = importlib.import_module(self.lazy[cmd_name], __package__)
            command: click.Command = getattr(module, cmd_name.replace("-", "_"))
            return command
        return super().get_command(ctx, cmd_name)

    def main(self, *args: Any, **rest: Any) -> Any:
        """Run the program; a terminal that lacks a character shows a question mark."""
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="replace")
        with _signals_as_exceptions():
            return super().main(*args, **rest)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of ours becomes a message and an exit code."""
        try:
            return super().invoke(ctx)
        except (KvbmError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise  # click knows what to do
            if os.environ.get("KVBM_DEBUG", "0") not in {"", "0"}:
                traceback.print_exc()
            print_error(error)
            return ctx.exit(error.exit_code if isinstance(error, KvbmError) else 1)


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """SIGTERM and SIGHUP end the program as Ctrl-C does: what it has half-written, here or elsewhere, is removed."""
    is_main = threading.current_thread() is threading.main_thread()
    ours = [
        number for number in (signal.SIGTERM, signal.SIGHUP) if is_main and signal.getsignal(number) is signal.SIG_DFL
    ]

    def end(number: int, _: object) -> None:
        for each in ours:
            signal.signal(each, signal.SIG_IGN)  # once is enough
        raise SystemExit(128 + number)

    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def print_error(error: Exception) -> None:
    """One message on stderr; of a compiler also its command and what it said."""
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror and not isinstance(error, KvbmError):
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    click.echo(f"{click.style('error:', fg='red', bold=True)} {text}", err=True)
    if isinstance(error, BuildError):
        for extra in filter(None, (error.command, error.log)):
            click.echo(extra, err=True)


def terminal() -> Console:
    """Where tables and drawings go."""
    from rich.console import Console

    return Console(highlight=False)


@contextlib.contextmanager
def progress(
    title: str, total: int | None = None, *columns: ProgressColumn, console: Console | None = None
) -> Iterator[Callable[..., None]]:
    """A bar where there is a terminal; yields rich's ``Progress.update`` (``advance=``, ``completed=``, ``description=``)."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = console or Console(stderr=True)
    all_columns = (TextColumn("{task.description}"), BarColumn(), *columns)
    with Progress(*all_columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield functools.partial(bar.update, bar.add_task(title, total=total))


def _complete_layout(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001
    return [name for name in spec.layouts() if name.startswith(incomplete)]


def _complete_shape(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001
    return [name for name in shape_names() if name.startswith(incomplete)]


def layout_argument(name: str) -> Callable[[Any], Any]:
    """A LAYOUT, completed by the shell."""
    return click.argument(name, shell_complete=_complete_layout)


def layout_option(*names: str, **rest: Any) -> Callable[[Any], Any]:
    """An option that takes a LAYOUT."""
    return click.option(*names, metavar="LAYOUT", shell_complete=_complete_layout, **rest)


def shape_option(*, required: bool = True) -> Callable[[Any], Any]:
    """``--shape``."""
    return click.option(
        "--shape",
        "shape_text",
        required=required,
        metavar="SHAPE",
        shell_complete=_complete_shape,
        help="A preset (llama-3.1-8b, llama-3.1-70b/tp8), a preset with changes "
        "(llama-3.1-8b,nt=32,dtype=float8_e4m3fn), or all sizes (nl=2,no=2,nh=4,nt=16,hd=32,dtype=float16).",
    )


_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def size_of(text: str) -> int:
    """Bytes: ``64MiB``, ``1.5GB``, ``4096``; raises `click.BadParameter`."""
    match = re.fullmatch(r"\s*(\d{1,15})(?:\.(\d{1,6}))?\s*(?:([kmgt]i?)b?|b)?\s*", text, re.ASCII | re.IGNORECASE)
    count = int(float(f"{match[1]}.{match[2] or 0}") * _UNITS[(match[3] or "").lower()]) if match else 0
    if not 0 < count < 1 << 40:
        raise click.BadParameter(f"expected bytes such as 64MiB, below 1 TiB, got {text!r:.60}")
    return count


def size_option(*names: str, **rest: Any) -> Callable[[Any], Any]:
    """An option that takes bytes, as `size_of` reads them."""
    return click.option(*names, callback=lambda _, __, value: size_of(value), show_default=True, metavar="SIZE", **rest)


def num_blocks_option(text: str, **rest: Any) -> Callable[[Any], Any]:
    """``--num-blocks``."""
    return click.option("--num-blocks", type=click.IntRange(1, LIMIT), metavar="N", help=text, **rest)


def layouts_option(text: str) -> Callable[[Any], Any]:
    """``--layouts``, files or folders."""
    return click.option(
        "--layouts", "paths", multiple=True, type=click.Path(exists=True, path_type=Path), metavar="PATH", help=text
    )


def picture_option(suffix: str, what: str) -> Callable[[Any], Any]:
    """``--svg`` and its kin."""
    return click.option(
        f"--{suffix}",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help=f"Write {what} instead; FILE ends in .{suffix}. Needs matplotlib: pip install 'kvbm-layouts[show]'.",
    )


def write_pictures(
    make: Callable[[], Any], svg: Path | None, png: Path | None = None, html: Path | None = None, *, quiet: bool = False
) -> None:
    """Write the picture to the files that were asked for; nothing is drawn before all of them are known to be good.

    Their names are printed, unless `quiet`.
    """
    from .gallery import check_path, save

    for path, suffix in ((svg, ".svg"), (png, ".png"), (html, ".html")):
        if path is not None:
            check_path(path, suffix)
    if not (wanted := [path for path in (svg, png) if path is not None]):
        return
    figure = make()
    for path in wanted:
        save(figure, path)
        if not quiet:
            click.echo(path)
