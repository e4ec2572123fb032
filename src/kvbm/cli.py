"""The command line: ``kvbm layouts | show | check | plan | reshard | gallery | schema | codegen | convert | tune | …``, and so on.

Commands parse, call the library and print; what they know, they know from there. Every error that kvbm raises on
purpose ends as one message on stderr and its class's exit code; ``KVBM_DEBUG=1`` adds the traceback.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from . import spec
from .commands import (
    Group,
    layout_argument,
    layouts_option,
    num_blocks_option,
    picture_option,
    print_error,
    progress,
    shape_option,
    terminal,
    write_pictures,
)
from .errors import BuildError, KvbmError, MissingKernelError, SpecError
from .layout import Layout
from .shapes import BlockShape, load_shape

if TYPE_CHECKING:
    from . import tuning
    from .planner import Plan

#: Commands of other rooms.
_LAZY = {
    "bench": ".bench.cli",
    "link": ".reshard.linkcli",
    **dict.fromkeys(("convert", "digest", "verify"), ".store.cli"),
    "reshard": ".reshard.cli",
    "serve-check": ".integrations.vllm.cli",
    "smoke": ".testing.smoke",
}


@click.group(cls=Group, lazy=_LAZY, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="kvbm-layouts", prog_name="kvbm")
def main() -> None:
    """Describe KV-cache block layouts, and convert blocks between them.

    A LAYOUT is a name that `kvbm layouts` prints, or the path of a .yaml file.
    """


# ---- looking --------------------------------------------------------------------------------------------------------


@main.command()
@click.argument("part", required=False, metavar="[PART]")
@layouts_option("Files or folders of layouts to list beside the shipped ones (may be repeated).")
@click.option("--aliases", "only_aliases", is_flag=True, help="List names that mean the same; with --shape, there too.")
@shape_option(required=False)
@num_blocks_option("With --shape: blocks in the pool; 1024 if not given.")
def layouts(
    part: str | None, paths: tuple[Path, ...], only_aliases: bool, shape_text: str | None, num_blocks: int | None
) -> None:
    """List the shipped layouts: all of them, or those that have PART in their name (vllm/, mla)."""
    listed = spec.load_all([spec.layouts_dir(), *paths])
    if shape_text is not None and not only_aliases:
        raise click.UsageError("--shape goes with --aliases; `kvbm show` draws a layout at a shape")
    if num_blocks is not None and shape_text is None:
        raise click.UsageError("--num-blocks goes with --aliases --shape SHAPE")
    if part is not None:
        chosen = [layout for layout in listed if part.lower() in layout.name.lower()]
        if not chosen:
            folders = sorted({layout.name.rpartition("/")[0] + "/" for layout in listed if "/" in layout.name})
            raise SpecError(f"no layout has {part!r} in its name; expected part of one, such as {', '.join(folders)}")
        listed = chosen
    if only_aliases:
        _print_aliases(listed, load_shape(shape_text) if shape_text else None, num_blocks or 1024)
    else:
        _print_layouts(sorted(listed, key=lambda layout: (layout.name.rpartition("/")[0], layout.name)))


def _print_layouts(listed: Sequence[Layout]) -> None:
    from rich.table import Table
    from rich.text import Text

    from .draw import table_box

    console = terminal()
    table = Table(box=table_box(console), header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("name", style="bold", no_wrap=True)
    if wide := console.width >= 110:
        table.add_column("order", no_wrap=True)
        table.add_column("title", style="dim")
    else:
        table.add_column("order, title")
    table.add_column("fingerprint", style="dim", no_wrap=True)
    for _, folder in itertools.groupby(listed, key=lambda layout: layout.name.rpartition("/")[0]):
        for layout in folder:
            orders = [str(order) for order in layout.orders]
            order = Text(orders[0] if len(orders) == 1 else f"k: {orders[0]}\nv: {orders[1]}")
            for plane in layout.planes:
                order.append(f"\n  {plane}")
            about = (order, Text(layout.title)) if wide else (order.append(f"\n{layout.title}", "dim"),)
            table.add_row(layout.name, *about, layout.fingerprint)
        table.add_section()
    console.print(table)


def _print_aliases(listed: Sequence[Layout], shape: BlockShape | None, num_blocks: int) -> None:
    from . import identity

    groups = identity.aliases(listed)
    click.echo("The same layout at every shape (one fingerprint):" if groups else "No two names mean the same.")
    for group in groups:
        click.echo(f"  {group[0].order_text}  ({group[0].fingerprint})")
        _print_names(group, 4)
    if shape is None:
        return
    at = f"{shape} with {num_blocks:,} blocks"
    meetings = identity.same_addresses(listed, shape, num_blocks)
    click.echo()
    if not meetings:
        click.echo(f"At {at}, no others have the same addresses.")
        return
    click.echo(f"Other fingerprints, and yet the same address of every element at {at}; at others they can differ:")
    for number, meeting in enumerate(meetings, 1):
        click.echo(f"  {number}.")
        for group in meeting:
            click.echo(f"    {group[0].order_text}  ({group[0].fingerprint})")
            _print_names(group, 6)


def _print_names(group: Sequence[Layout], indent: int) -> None:
    names = ", ".join(layout.name for layout in group)
    margin = " " * indent
    click.echo(click.wrap_text(names, min(terminal().width, 100), margin, margin))


@main.command()
@layout_argument("name")
@shape_option()
@num_blocks_option("Blocks in the pool.", default=1024, show_default=True)
@picture_option("svg", "a picture")
@picture_option("png", "a picture")
@picture_option("html", "a page with the picture, the axes and the address")
def show(name: str, shape_text: str, num_blocks: int, svg: Path | None, png: Path | None, html: Path | None) -> None:
    """Draw a layout: what is allocated, how the axes nest, which bytes lie together."""
    resolved = spec.load(name).resolve(load_shape(shape_text), num_blocks)
    if svg is None and png is None and html is None:
        from . import draw

        draw.show(terminal(), resolved, shape_text)
        return
    from . import picture

    write_pictures(lambda: picture.draw_layout(resolved), svg, png, html)
    if html is not None:
        from .gallery import page

        html.write_text(page(resolved), encoding="utf-8")
        click.echo(html)


@main.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path), metavar="FILE...")
@click.option("--shape", "shape_texts", multiple=True, metavar="SHAPE", help="Must be legal here (may be repeated).")
@click.option(
    "--ambiguous", is_flag=True, help="Also name the layouts that take the same arrays and find other elements in them."
)
def check(files: tuple[Path, ...], shape_texts: tuple[str, ...], ambiguous: bool) -> None:
    """Check layout files: their text, and that they are one-to-one at the shipped shapes that fit them.

    Prints every error with its file and line, and ends with the exit code of the first. A folder stands for every .yaml
    file in it. With --ambiguous, every file is compared with the shipped layouts and with the other files, at the shapes
    of --shape or at all shipped ones.
    """
    from .check import legality, mistaken, yaml_files

    wanted = [(text, load_shape(text)) for text in shape_texts]
    known = sorted(spec.load_dir(spec.layouts_dir()), key=lambda layout: ("/" in layout.name, layout.name))
    shipped = {layout.fingerprint: layout.name for layout in reversed(known)}
    errors: list[KvbmError] = []
    good: list[tuple[Path, Layout, list[str]]] = []
    for path in yaml_files(files):
        try:
            if path.suffix not in {".yaml", ".yml"}:
                raise SpecError(f"{path}: expected a file that ends in .yaml")
            layout = spec.load(path)
            notes = list(legality(layout, wanted))
        except KvbmError as error:
            errors.append(error)
            print_error(error)
            continue
        alias = shipped.get(layout.fingerprint)
        if alias is not None and not layout.file.startswith("layouts/"):
            notes.insert(0, f"means the same as the shipped layout {alias!r}")
        good.append((path, layout, notes))
    others = mistaken([layout for _, layout, _ in good], known, wanted) if ambiguous else {}
    for path, layout, notes in good:
        notes += others.get(layout.fingerprint, [])
        click.echo(f"{click.style('ok', fg='green')}  {path}: {layout.order_text}  ({layout.fingerprint})")
        for note in notes:
            click.echo(f"    {note}")
    if errors:
        sys.exit(errors[0].exit_code)


@main.command()
@layout_argument("src")
@layout_argument("dst")
@shape_option()
@num_blocks_option("Blocks in each pool.", default=1024, show_default=True)
@picture_option("svg", "a picture")
@picture_option("png", "a picture")
def plan(src: str, dst: str, shape_text: str, num_blocks: int, svg: Path | None, png: Path | None) -> None:
    """Print how blocks get from SRC to DST: the loop nest, the kernel, and why."""
    from . import planner

    made = planner.plan(spec.load(src), spec.load(dst), load_shape(shape_text), num_blocks=num_blocks)
    if svg is not None or png is not None:
        from . import picture

        write_pictures(lambda: picture.draw_plan(made), svg, png)
        return
    click.echo(str(made))
    click.echo()
    width = min(terminal().width, 100)
    for paragraph in made.explain().splitlines():
        click.echo(click.wrap_text(paragraph, width=width))
    if (missing := _not_built(made)) is not None:
        click.echo(click.wrap_text(missing, width=width))


def _not_built(made: Plan) -> str | None:
    """What a plan's kernels are compiled with, or replaced by, where they are not built in; None: they are."""
    try:
        from . import _core, runtime
    except ImportError:  # nothing is built: `kvbm doctor` tells
        return None
    try:
        asked = made.kernels()
        names = set(asked) - set(_core.kernel_names())
    except MissingKernelError:  # the explanation says so
        return None
    if not names:
        return None
    text = f"Not built in: {', '.join(sorted(names))}. "
    try:
        text += f"On a GPU, {runtime.find()} compiles what is missing at first use. "
    except BuildError as error:
        text += f"A general kernel of more modes runs in its place ({error}). "
    return f"{text}{runtime.PERMANENT}."


@main.command()
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder to write to.")
def gallery(out: Path) -> None:
    """Draw every shipped layout, one SVG for all names that mean the same, and write an index of them.

    Needs matplotlib: pip install 'kvbm-layouts[show]'.
    """
    from . import gallery as pictures

    written = pictures.gallery(out)
    click.echo(f"{len(written) - 1} pictures and {written[-1].name} in {out}")


@main.command()
@click.argument("kind", type=click.Choice(["layout", "shape", "placement"]), default="layout")
def schema(kind: str) -> None:
    """Print the JSON schema of layout files, or of shape or placement files, for an editor.

    The first line of a file names it: # yaml-language-server: $schema=PATH
    """
    from . import schema as schemas

    click.echo(schemas.text(kind), nl=False)


# ---- making ---------------------------------------------------------------------------------------------------------


@main.command()
@layouts_option("Files or folders of layouts (may be repeated); the shipped ones by default.")
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder to write to.")
@click.option("--check", "only_check", is_flag=True, help="Write nothing; exit with 1 if a file differs.")
def codegen(paths: tuple[Path, ...], out: Path, only_check: bool) -> None:
    """Write the CUDA and C++ sources of the kernels that convert between any two of the layouts."""
    from . import codegen as generator

    files = generator.generate(spec.load_all(paths) if paths else None)
    if only_check:
        differences = generator.check(files, out)
        for difference in differences:
            click.echo(difference)
        click.echo(f"{len(files)} files, " + (f"{len(differences)} differ" if differences else "all as generated"))
        if differences:
            sys.exit(1)
        return
    written = generator.write(files, out)
    for path in written:
        click.echo(path)
    click.echo(f"{len(files)} files in {out}, {len(written)} written, {len(files) - len(written)} as they were")


# ---- the machine ----------------------------------------------------------------------------------------------------


@main.command()
@click.option(
    "--device", default=0, show_default=True, type=click.IntRange(0, 9999), metavar="N", help="Which GPU: cuda:N."
)
@click.option("--show", is_flag=True, help="Print the table that is there, and measure nothing.")
def tune(device: int, show: bool) -> None:
    """Measure which way of copying is the fastest on this machine, for transfers with strategy="auto".

    Takes some seconds and needs 256 MiB of the GPU's memory. The first such transfer does it too, where it was not done before.
    """
    from . import tuner, tuning
    from .transfer import Transfer

    gpu, driver = tuning.machine(device)
    if show:
        table, path = tuning.load(gpu, driver), tuning.path(gpu, driver)
        if table is None:
            click.echo(f"no table for {gpu}, driver {driver}: expected {path}; `kvbm tune` makes it", err=True)
            sys.exit(1)
    else:
        with progress(f"measuring on cuda:{device}") as update:
            table = tuner.measure(device, Transfer, lambda done, total: update(completed=done, total=total))
        path = tuning.save(table)
        tuner.reload()
    _print_table(table)
    click.echo(f"{table.title}, kvbm {table.kvbm}: {path}")


def _print_table(measured: tuning.Table) -> None:
    from rich.table import Table
    from rich.text import Text

    from . import tuner, tuning
    from .draw import table_box
    from .planner import size_text

    console, block = terminal(), 1 << 20
    table = Table(box=table_box(console), header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    for title in ("direction", "pieces of", "fastest"):
        table.add_column(title, no_wrap=title != "fastest")
    for title in tuning.STRATEGIES:
        table.add_column(title, justify="right", no_wrap=True)
    for direction in measured.directions:
        for run in tuner.RUNS:
            way = tuning.Way(run)
            choice = measured.choose(direction, dict.fromkeys(tuning.STRATEGIES, way), block)
            assert choice is not None
            *few, (_, last) = choice.limits
            said = [f"{name} up to {size_text(pairs * block)}" for pairs, name in few]
            speeds = []
            for name in tuning.STRATEGIES:
                cost = measured.costs.get((direction, name))
                rate = f"{64 * block / float(cost.seconds(64, block, way)) / 1e9:,.1f}" if cost else "-"
                speeds.append(Text(rate, "bold" if name == last else ""))
            table.add_row(direction, size_text(run), ", ".join([*said, f"then {last}" if said else last]), *speeds)
    console.print(table)
    console.print(
        "The three columns at the right are GB/s of 64 blocks of 1 MiB, by the costs fitted to the table.", style="dim"
    )


@main.command()
def doctor() -> None:
    """Tell what is here: the extension, its kernels, the driver, the GPUs; and what to do about what is missing."""
    from rich.table import Table
    from rich.text import Text

    from .doctor import findings

    console = terminal()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    exit_code = 0
    styles = {"ok": "green", "note": "yellow", "missing": "red", "": ""}
    for mark, what, text in findings():
        table.add_row(Text(mark, styles[mark]), what, Text(text))
        if mark == "missing" and what == "extension":
            exit_code = BuildError.exit_code
    console.print(table)
    sys.exit(exit_code)


@main.command()
@click.option("--device", help="cpu or cuda:N; by default the first GPU if there is one.")
@click.option("--seed", default=0, show_default=True, help="For weights, prompt and block ids.")
def demo(device: str | None, seed: int) -> None:
    """Convert a real model's KV cache through three layouts and carry on generating, bit for bit.

    Exits with 1 if a logit differs in a bit. Needs torch and transformers: pip install 'kvbm-layouts[demo]'.
    """
    from . import demo as demonstration

    if not demonstration.run(terminal(), device=device, seed=seed):
        sys.exit(1)


if __name__ == "__main__":
    main()
