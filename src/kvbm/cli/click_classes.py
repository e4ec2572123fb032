"""Commands and groups of commands: help with examples, the options that all have, and how a command ends."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
from click.exceptions import Exit

from .._arguments import quoted
from ..errors import BuildError, KvbmError, printable
from ..layout.naming import suggestion
from ..system import log

__all__ = ["CLOSED_PIPE", "GLOBAL", "INTERRUPTED", "Command", "Group", "Real", "Whole", "is_coloured", "is_quiet", "print_error"]

#: Exit codes of a program that a signal ends.  A closed pipe ends programs with SIGPIPE.
INTERRUPTED, CLOSED_PIPE = 128 + signal.SIGINT, 128 + signal.SIGPIPE

_QUIET, _VERBOSE = f"{__name__}.quiet", f"{__name__}.verbose"


# ---- options that every command has --------------------------------------------------------------------------------


def _set_quiet(ctx: click.Context, param: click.Parameter, value: bool) -> None:  # noqa: ARG001
    if value:
        ctx.meta[_QUIET] = True


def _set_verbose(ctx: click.Context, param: click.Parameter, value: int) -> None:  # noqa: ARG001
    if value:
        ctx.meta[_VERBOSE] = value
        log.show("info" if value == 1 else "debug")


def _set_color(ctx: click.Context, param: click.Parameter, value: str | None) -> None:  # noqa: ARG001
    if value is None:
        return
    each: click.Context | None = ctx
    while each is not None:  # errors are printed for the outer ones
        each.color = {"always": True, "never": False}.get(value)
        each = each.parent


#: As ruff and uv have them: before or after the name of a command.
GLOBAL = (
    click.Option(
        ["-q", "--quiet"], is_flag=True, expose_value=False, callback=_set_quiet,
        help="Print results and errors only: no notes, no progress.",
    ),
    click.Option(
        ["-v", "--verbose"], count=True, expose_value=False, callback=_set_verbose,
        help="Show kvbm's log on stderr; -vv also details, and the traceback of an error.",
    ),
    click.Option(
        ["--color"], type=click.Choice(["auto", "always", "never"]), expose_value=False, callback=_set_color,
        help="Colours.  [default: auto, in a terminal, if NO_COLOR is not set]",
    ),
)  # fmt: skip


def is_quiet() -> bool:
    """True with ``--quiet``."""
    ctx = click.get_current_context(silent=True)
    return ctx is not None and bool(ctx.meta.get(_QUIET))


def is_coloured() -> bool | None:
    """True with ``--color always``, False with ``--color never``, else None."""
    ctx = click.get_current_context(silent=True)
    return None if ctx is None else ctx.color


# ---- values --------------------------------------------------------------------------------------------------------


class _Words:
    """A range whose errors and help are in words."""

    what: str
    min: Any
    max: Any
    min_open: bool

    def _words(self) -> str:
        least = f"above {self.min}" if self.min_open else f"from {self.min}"
        if self.max is None or self.max >= 1 << 40:
            return least if self.min_open else f"{least} on"
        return f"{least}{', up' if self.min_open else ''} to {self.max:,}"

    def _describe_range(self) -> str:
        return self._words()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)  # type: ignore[misc]
        except click.BadParameter:
            raise click.BadParameter(f"expected {self.what} {self._words()}, got {quoted(str(value), 60)}", ctx, param) from None


class Whole(_Words, click.IntRange):
    """A whole number in a range."""

    what = "a whole number"


class Real(_Words, click.FloatRange):
    """A number in a range."""

    what = "a number"


# ---- commands ------------------------------------------------------------------------------------------------------


class _Common(click.Command):
    """Adds examples, command lines that the help lists and that run as they are, and the options of `GLOBAL`.

    `other_names` are options as other programs name them → the option of this command, which the error then suggests.
    """

    def __init__(
        self, *args: Any, examples: Sequence[str] = (), other_names: Mapping[str, str] | None = None, **rest: Any
    ) -> None:
        super().__init__(*args, **rest)
        self.examples = tuple(examples)
        self.other_names = other_names or {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if meant := self.other_names.get(error.option_name):
                raise click.UsageError(f"No such option {error.option_name!r}. Did you mean {meant}?", error.ctx) from None
            raise

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return [*super().get_params(ctx), *GLOBAL]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own = [one for one in super().get_params(ctx) if isinstance(one, click.Option)]
        for title, options in (("Options", own), ("Global options", GLOBAL)):
            rows = [row for option in options if (row := option.get_help_record(ctx)) is not None]
            with formatter.section(title):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples:  # whole, to be copied
                    formatter.write(f"{'':>{formatter.current_indent}}{line}\n")


class Command(_Common):
    """A command with examples and the options that every command has."""


class Group(_Common, click.Group):
    """A group of commands that may raise `KvbmError` and may be defined in other modules.

    `lazy` maps the name of a command to the module, relative to this package, that defines it under this name, with ``_`` for
    ``-``. The module is imported when the command is used.  `sections` maps titles to names of commands, in the order of the
    help; commands that no section names follow under ``Commands``.
    """

    command_class = Command

    def __init__(
        self, *args: Any, lazy: Mapping[str, str] | None = None, sections: Mapping[str, Sequence[str]] | None = None,
        **rest: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, **rest)
        self.lazy = lazy or {}
        self.sections = sections or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *self.lazy})

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        named = [name for some in self.sections.values() for name in some]
        rest = [name for name in names if name not in named]
        found = {name: command for name in names if (command := self.get_command(ctx, name)) and not command.hidden}
        width = max(map(len, found), default=0)
        for title, some in (*self.sections.items(), ("Commands", rest)):
            # The whole first sentence of each: click would cut it.
            rows = [(name.ljust(width), found[name].get_short_help_str(limit=200)) for name in some if name in found]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        _Common.format_options(self, ctx, formatter)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in self.lazy:
            module = importlib.import_module(self.lazy[cmd_name], __package__)
            command: click.Command = getattr(module, cmd_name.replace("-", "_"))
            return command
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command.  An error suggests names of all commands; click knows only those that are imported."""
        name = args[0]
        if not ctx.resilient_parsing and not name.startswith("-") and self.get_command(ctx, name) is None:
            ctx.fail(f"No such command {quoted(name, 60)}.{suggestion(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **rest: Any) -> Any:
        """Run the program.  Characters that the terminal cannot show become question marks."""
        if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
            sys.stdout.reconfigure(errors="replace")
        try:
            with _signals_as_exceptions():
                return super().main(*args, **rest)
        except SystemExit:
            try:
                sys.stdout.flush()
            except BrokenPipeError:
                _drop_stdout()
                sys.exit(CLOSED_PIPE)
            except OSError as error:
                print_error(error)
                sys.exit(1)
            raise

    def make_context(self, *args: Any, **rest: Any) -> click.Context:
        with _ending():
            ctx = super().make_context(*args, **rest)
            if ctx.color is None and os.environ.get("NO_COLOR"):  # rich looks itself
                ctx.color = False
            return ctx

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.  An error of kvbm or of the system becomes a message and an exit code."""
        with _ending():
            return super().invoke(ctx)


# ---- how a command ends --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """Turn errors into messages and exit codes, Ctrl-C into 130 and a closed pipe into 141."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo("\nAborted!", err=True)
        raise Exit(INTERRUPTED) from None  # click would end with 1
    except BrokenPipeError:
        _drop_stdout()
        raise Exit(CLOSED_PIPE) from None
    except click.UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise  # its message is the help
        if (at := error.ctx) is not None:
            click.echo(f"{at.get_usage()}\nTry '{at.command_path} --help' for options and examples.\n", err=True)
        _print_message(error.format_message())
        raise Exit(error.exit_code) from None
    except (KvbmError, OSError) as error:
        ctx = click.get_current_context(silent=True)
        is_verbose = ctx is not None and ctx.meta.get(_VERBOSE, 0) > 1
        if is_verbose or os.environ.get("KVBM_DEBUG", "0") not in {"", "0"}:
            traceback.print_exc()
        print_error(error)
        raise Exit(error.exit_code if isinstance(error, KvbmError) else 1) from None


def _drop_stdout() -> None:
    """Send what is still in the buffer of stdout to nowhere, so that Python does not complain when it ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())


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
    _print_message(text)
    if isinstance(error, BuildError):
        for extra in filter(None, (error.command, error.log)):
            click.echo(extra, err=True)


def _print_message(text: str) -> None:
    shown = "\n".join(printable(line, 10_000) for line in text.split("\n"))  # names of files may hold anything
    click.echo(f"{click.style('error:', fg='red', bold=True)} {shown}", err=True)
