"""The command line: ``kvbm bench``, the sweep, and its subcommands.

This module imports no NumPy and no torch before a command runs, because ``kvbm --help`` loads it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from ..cli.click_classes import Group, Whole, is_quiet
from ..cli.common import device_option, new_console
from ..cli.complete import complete_pair, complete_shape, items_of
from ..cli.values import comma_list, listed, numbers, usable_device
from ..errors import KvbmError
from ..layout.shapes import load_shape
from ..system.machine import device_of

if TYPE_CHECKING:
    from . import copies, table

#: Studies that are programs of the checkout (benchmarks/README.md).
STUDIES = ("auto", "digest", "interference", "link", "offload", "overhead", "reshard", "scale")

GPU_PROFILE, CPU_PROFILE = "llama-3.1-70b", "llama-3.1-8b"


class _Bench(Group):
    """Says where the studies are."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in STUDIES:
            ctx.fail(f"{cmd_name!r} is not part of the wheel: run `python -m benchmarks {cmd_name}` in a checkout of kvbm")
        return super().get_command(ctx, cmd_name)


def _list_option(name: str, *rest: str, table: str, **more: Any) -> Callable[[Any], Any]:
    """An option that takes names of a table of `copies`."""

    def names() -> Iterable[str]:
        from . import copies

        found: Iterable[str] = getattr(copies, table)
        return found

    return click.option(
        name, *rest, multiple=True, callback=comma_list(names), metavar="LIST", shell_complete=items_of(names=names), **more
    )


@click.group(cls=_Bench, lazy={"plot": "..bench.plot"}, invoke_without_command=True, examples=[
    "kvbm bench --direction h2h --pair nhd:universal --num-blocks 1,8 --iters 3 --out results.csv",
    "kvbm bench --direction d2d,h2d --pair vllm/LBHNC:universal --out gpu.csv",
])  # fmt: skip
@click.option(
    "--shape", "shape_text", metavar="SHAPE", shell_complete=complete_shape,
    help=f"Shape of a block: a preset, one with changes, or all sizes.  [default: {GPU_PROFILE}; {CPU_PROFILE} on the CPU]",
)  # fmt: skip
@click.option(
    "--num-blocks", "batches", metavar="N,N,…", default="1,2,4,8,16,32,64,128,256", show_default=True, callback=numbers,
    help="Blocks of a batch.",
)  # fmt: skip
@click.option("--tokens-per-block", "tokens", metavar="N,N,…", callback=numbers, help="Tokens of a block.  [default: the shape's]")
@_list_option(
    "--direction",
    "directions",
    table="DIRECTIONS",
    help="d2d, h2d, d2h (pinned host memory), p2p (two GPUs), h2h.  [default: d2d; h2h without a GPU]",
)
@_list_option(
    "--pattern",
    "patterns",
    table="PATTERNS",
    help="fc_to_fc, lw_to_fc, fc_to_lw, lw_to_lw. fc: a block is one allocation (operational); "
    "lw: one array per layer, and per K and V (nhd).",
)
@click.option(
    "--pair", "pairs", multiple=True, callback=listed, metavar="SRC:DST", shell_complete=complete_pair,
    help="Two layouts, e.g. nhd:universal.  [default: twelve pairs]",
)  # fmt: skip
@_list_option(
    "--backend",
    "backends",
    table="BACKENDS",
    help="auto, direct, staged, engine: kvbm's strategies. vectorized, batched, memcpy_async: raw copies, run by run. "
    "host: the CPU's kernels.  [default: direct for d2d; auto,direct,staged,engine for h2d and d2h; auto,direct,staged "
    "for p2p; host for h2h]",
)
@click.option("--peers/--no-peers", "built_in", default=True, help="Also PyTorch, CuPy and NumPy, where installed.")
@click.option(
    "--peer", "plug_ins", multiple=True, metavar="MODULE:FUNCTION",
    help="Also your own function: see `pydoc kvbm.bench.peers`.",
)  # fmt: skip
@click.option("--warmup", default=3, show_default=True, type=Whole(0), help="Calls before the timed ones.")
@click.option("--iters", type=Whole(1), help="Timed calls per figure.  [default: 30; 9 for h2h]")
@click.option("--max-sms", type=Whole(1), help="Multiprocessors that kvbm's kernels may use.")
@click.option("--replay", is_flag=True, help="Time replays of CUDA graphs, without the cost of launches.")
@device_option("The GPU.  [default: the first; cpu for none]", default=None)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="CSV file; then a table goes to stdout.")
@click.pass_context
def bench(
    ctx: click.Context, shape_text: str | None, batches: tuple[int, ...], tokens: tuple[int, ...],
    directions: tuple[str, ...], patterns: tuple[str, ...], pairs: tuple[str, ...], backends: tuple[str, ...],
    built_in: bool, plug_ins: tuple[str, ...], warmup: int, iters: int | None, max_sms: int | None, replay: bool,
    device: str | None, out: Path | None,
) -> None:  # fmt: skip
    """Measure copies on this machine; without a COMMAND, by direction, pair of layouts, batch and backend.

    Prints CSV; `kvbm bench plot` draws it. bandwidth_gbps counts each byte that is moved once, also where a copy within one
    memory reads and writes it; ratio is the time of one contiguous memcpy of the same bytes in the same run over the median.
    Data, block ids and their changes from call to call are random, and every copy is checked bitwise before it is timed.

    What cannot be measured here is skipped, with the reason on stderr. Exits with 1 if nothing of something that you named
    could be measured.
    """
    if ctx.invoked_subcommand is not None:
        given = [
            param.opts[0]
            for param in ctx.command.params
            if param.name and ctx.get_parameter_source(param.name) == click.core.ParameterSource.COMMANDLINE
        ]
        if given:
            raise click.UsageError(f"{', '.join(given)}: put options behind `{ctx.invoked_subcommand}`")
        return
    from . import copies, peers

    index = None if device is None else device_of(device)
    place = "cpu" if device == "cpu" else usable_device(f"--device {device}", index, "measuring on the CPU")
    directions = directions or ("d2d" if place != "cpu" else "h2h",)
    try:
        chosen = [copies.Pair.parse(text) for text in (*patterns, *pairs) or copies.PAIRS]
    except ValueError as error:
        if isinstance(error, KvbmError):
            raise
        raise click.BadParameter(str(error), param_hint="--pair") from None
    if replay and directions == ("h2h",):
        raise click.BadParameter("CUDA graphs are for GPUs, and h2h is measured on the CPU", param_hint="--replay")
    shape = load_shape(shape_text or (GPU_PROFILE if place != "cpu" else CPU_PROFILE))
    sweep = copies.Sweep(
        shapes=[replace(shape, nt=nt) for nt in sorted(tokens)] or [shape], batches=sorted(batches),
        directions=directions, pairs=chosen,
        backends={each: backends or copies.USUAL[each] for each in copies.DIRECTIONS},
        peers={text: peers.load(text) for text in plug_ins}, built_in_peers=built_in, place=place, warmup=warmup,
        iters=iters or (9 if directions == ("h2h",) else 30), max_sms=max_sms, replay=replay,
    )  # fmt: skip
    sweep.plans()
    named = {*plug_ins, *backends}
    if ctx.get_parameter_source("directions") == click.core.ParameterSource.COMMANDLINE:
        named |= set(directions)
    sys.exit(_run(sweep, place if directions != ("h2h",) else "cpu", named, out))


def _run(sweep: copies.Sweep, place: str, named: set[str], out: Path | None) -> int:
    """Measure, write the rows, and return the exit code."""
    from rich.progress import Progress

    from . import measure, table

    console = new_console(stderr=True)
    found: list[table.Record] = []
    comment = measure.header(place, sweep.shapes[0])
    code = 0
    with contextlib.ExitStack() as stack:
        stream: TextIO = sys.stdout
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            stream = stack.enter_context(out.open("w", newline="", encoding="utf-8"))
        rows = table.Rows(stream, comment)
        # A progress bar and CSV on one terminal would overwrite each other.
        shown = console.is_terminal and not is_quiet() and not (out is None and sys.stdout.isatty())
        progress = stack.enter_context(Progress(console=console, transient=True, disable=not shown))
        task = progress.add_task("measuring", total=sweep.steps)
        sweep.step = lambda title: progress.update(task, advance=1, description=title)
        shows = not is_quiet()
        sweep.note = lambda line: (
            progress.console.print(line, style="dim", soft_wrap=True, markup=False) if shows else None
        )
        try:
            for row in sweep.run():
                rows.write(row)
                found.append(row)
        except KeyboardInterrupt:
            code = 130
    if code:
        click.echo(f"interrupted: {len(found)} rows are kept", err=True)
    if out is not None:
        _print_table(comment, found)
        click.echo(f"{out}: {len(found)} rows")
    for missing in sorted(named - sweep.measured):
        code = code or 1
        click.echo(f"{missing}: was asked for, and nothing could be measured", err=True)
    return code


def _print_table(title: str, rows: Sequence[table.Record]) -> None:
    """Print the measurements."""
    from ..cli.common import new_table, print_table

    counted = ("tokens", "blocks", "µs", "GB/s", "of a memcpy")
    table = new_table("pattern", "direction", "backend", *counted, right=counted, title=title[2:], title_justify="left")
    for row in rows:
        table.add_row(
            row.pattern, row.direction, row.backend, str(row.tokens_per_block), str(row.num_blocks),
            f"{row.median_ms * 1e3:,.1f}", f"{row.bandwidth_gbps:,.1f}", f"{row.ratio:.3f}",
        )  # fmt: skip
    print_table(table)
