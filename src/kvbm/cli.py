"""The command line: ``kvbm layouts | show | check | plan | gallery | schema | codegen | convert | tune | …``, and so on.

Commands parse, call the library and print; what they know, they know from there. Every error that kvbm raises on
purpose ends as one message on stderr and its class's exit code; ``KVBM_DEBUG=1`` adds the traceback.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import spec
from .bench.cli import bench
from .errors import BindError, BuildError, KvbmError, LayoutError, MissingKernelError, SpecError
from .layout import AXES, Layout
from .shapes import BlockShape, load_shape, shape_names
from .testing.smoke import smoke

if TYPE_CHECKING:
    from rich.console import Console

    from . import tuning
    from .planner import Plan
    from .pool import Pool

_CHUNK_BYTES = 64 << 20  # `convert` moves this much between two steps of its progress bar


class _Group(click.Group):
    """A group whose commands may raise `KvbmError`."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; an error of ours becomes a message and an exit code."""
        try:
            return super().invoke(ctx)
        except (KvbmError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                raise  # click knows what to do
            if os.environ.get("KVBM_DEBUG", "0") not in {"", "0"}:
                traceback.print_exc()
            _print_error(error)
            return ctx.exit(error.exit_code if isinstance(error, KvbmError) else 1)


def _print_error(error: Exception) -> None:
    text = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.strerror and not isinstance(error, KvbmError):
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    click.echo(f"{click.style('error:', fg='red', bold=True)} {text}", err=True)
    if isinstance(error, BuildError):
        for extra in filter(None, (error.command, error.log)):
            click.echo(extra, err=True)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _complete_layout(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001
    return [name for name in spec.layouts() if name.startswith(incomplete)]


def _complete_shape(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:  # noqa: ARG001
    return [name for name in shape_names() if name.startswith(incomplete)]


def _layout_argument(name: str) -> Callable[[Any], Any]:
    return click.argument(name, shell_complete=_complete_layout)


def _layout_option(*names: str, **rest: Any) -> Callable[[Any], Any]:
    return click.option(*names, metavar="LAYOUT", shell_complete=_complete_layout, **rest)


def _shape_option(*, required: bool = True) -> Callable[[Any], Any]:
    return click.option(
        "--shape",
        "shape_text",
        required=required,
        metavar="SHAPE",
        shell_complete=_complete_shape,
        help="A preset (llama-3.1-8b, llama-3.1-70b/tp8), a preset with changes "
        "(llama-3.1-8b,nt=32,dtype=float8_e4m3fn), or all sizes (nl=2,no=2,nh=4,nt=16,hd=32,dtype=float16).",
    )


def _layouts_option(text: str) -> Callable[[Any], Any]:
    return click.option(
        "--layouts", "paths", multiple=True, type=click.Path(exists=True, path_type=Path), metavar="PATH", help=text
    )


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="kvbm-layouts", prog_name="kvbm")
def main() -> None:
    """Describe KV-cache block layouts, and convert blocks between them.

    A LAYOUT is a name that `kvbm layouts` prints, or the path of a .yaml file.
    """


main.add_command(bench)
main.add_command(smoke)


# ---- looking --------------------------------------------------------------------------------------------------------


@main.command()
@click.argument("part", required=False, metavar="[PART]")
@_layouts_option("Files or folders of layouts to list beside the shipped ones (may be repeated).")
@click.option("--aliases", "only_aliases", is_flag=True, help="List names that mean the same; with --shape, there too.")
@_shape_option(required=False)
@click.option("--num-blocks", type=click.IntRange(1), help="With --shape: blocks in the pool; 1024 if not given.")
def layouts(
    part: str | None, paths: tuple[Path, ...], only_aliases: bool, shape_text: str | None, num_blocks: int | None
) -> None:
    """List the shipped layouts: all of them, or those that have PART in their name (vllm/, mla)."""
    found = spec.load_all([spec.layouts_dir(), *paths])
    if shape_text is not None and not only_aliases:
        raise click.UsageError("--shape goes with --aliases; `kvbm show` draws a layout at a shape")
    if num_blocks is not None and shape_text is None:
        raise click.UsageError("--num-blocks goes with --aliases --shape SHAPE")
    if part is not None:
        chosen = [layout for layout in found if part.lower() in layout.name.lower()]
        if not chosen:
            folders = sorted({layout.name.rpartition("/")[0] + "/" for layout in found if "/" in layout.name})
            raise SpecError(f"no layout has {part!r} in its name; expected part of one, such as {', '.join(folders)}")
        found = chosen
    if only_aliases:
        _print_aliases(found, load_shape(shape_text) if shape_text else None, num_blocks or 1024)
    else:
        _print_layouts(sorted(found, key=lambda layout: (layout.name.rpartition("/")[0], layout.name)))


def _print_layouts(found: Sequence[Layout]) -> None:
    from rich.table import Table
    from rich.text import Text

    from .draw import table_box

    console = _console()
    table = Table(box=table_box(console), header_style="bold", padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("name", style="bold", no_wrap=True)
    if wide := console.width >= 110:
        table.add_column("order", no_wrap=True)
        table.add_column("title", style="dim")
    else:
        table.add_column("order, title")
    table.add_column("fingerprint", style="dim", no_wrap=True)
    for _, folder in itertools.groupby(found, key=lambda layout: layout.name.rpartition("/")[0]):
        for layout in folder:
            orders = [str(order) for order in layout.orders]
            order = Text(orders[0] if len(orders) == 1 else f"k: {orders[0]}\nv: {orders[1]}")
            for plane in layout.planes:
                order.append(f"\n  {plane}")
            about = (order, Text(layout.title)) if wide else (order.append(f"\n{layout.title}", "dim"),)
            table.add_row(layout.name, *about, layout.fingerprint)
        table.add_section()
    console.print(table)


def _picture_option(suffix: str, what: str) -> Callable[[Any], Any]:
    return click.option(
        f"--{suffix}",
        metavar="FILE",
        type=click.Path(path_type=Path),
        help=f"Write {what} instead; FILE ends in .{suffix}. Needs matplotlib: pip install 'kvbm-layouts[show]'.",
    )


def _print_aliases(found: Sequence[Layout], shape: BlockShape | None, num_blocks: int) -> None:
    from . import identity

    groups = identity.aliases(found)
    click.echo("The same layout at every shape (one fingerprint):" if groups else "No two names mean the same.")
    for group in groups:
        click.echo(f"  {group[0].order_text}  ({group[0].fingerprint})")
        _print_names(group, 4)
    if shape is None:
        return
    at = f"{shape} with {num_blocks:,} blocks"
    meetings = identity.same_addresses(found, shape, num_blocks)
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
    click.echo(click.wrap_text(names, min(_console().width, 100), margin, margin))


@main.command()
@_layout_argument("name")
@_shape_option()
@click.option("--num-blocks", default=1024, show_default=True, help="Blocks in the pool.")
@_picture_option("svg", "a picture")
@_picture_option("png", "a picture")
@_picture_option("html", "a page with the picture, the axes and the address")
def show(name: str, shape_text: str, num_blocks: int, svg: Path | None, png: Path | None, html: Path | None) -> None:
    """Draw a layout: what is allocated, how the axes nest, which bytes lie together."""
    resolved = spec.load(name).resolve(load_shape(shape_text), num_blocks)
    if svg is None and png is None and html is None:
        from . import draw

        draw.show(_console(), resolved, shape_text)
        return
    from . import picture

    _write_pictures(lambda: picture.draw_layout(resolved), svg, png, html)
    if html is not None:
        from .gallery import page

        html.write_text(page(resolved), encoding="utf-8")
        click.echo(html)


def _write_pictures(make: Callable[[], Any], svg: Path | None, png: Path | None, html: Path | None = None) -> None:
    """Write the picture to the files that were asked for; nothing is drawn before all of them are known to be good."""
    from .gallery import check_path, save

    for path, suffix in ((svg, ".svg"), (png, ".png"), (html, ".html")):
        if path is not None:
            check_path(path, suffix)
    if not (wanted := [path for path in (svg, png) if path is not None]):
        return
    figure = make()
    for path in wanted:
        save(figure, path)
        click.echo(path)


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
    wanted = [(text, load_shape(text)) for text in shape_texts]
    known = sorted(spec.load_dir(spec.layouts_dir()), key=lambda layout: ("/" in layout.name, layout.name))
    shipped = {layout.fingerprint: layout.name for layout in reversed(known)}
    errors: list[KvbmError] = []
    good: list[tuple[Path, Layout, list[str]]] = []
    for path in _yaml_files(files):
        try:
            layout = spec.load(path if path.suffix in {".yaml", ".yml"} else _not_yaml(path))
            notes = list(_check_legality(layout, wanted))
        except KvbmError as error:
            errors.append(error)
            _print_error(error)
            continue
        alias = shipped.get(layout.fingerprint)
        if alias is not None and not layout.file.startswith("layouts/"):
            notes.insert(0, f"means the same as the shipped layout {alias!r}")
        good.append((path, layout, notes))
    mistaken = _mistaken([layout for _, layout, _ in good], known, wanted) if ambiguous else {}
    for path, layout, notes in good:
        notes += mistaken.get(layout.fingerprint, [])
        click.echo(f"{click.style('ok', fg='green')}  {path}: {layout.order_text}  ({layout.fingerprint})")
        for note in notes:
            click.echo(f"    {note}")
    if errors:
        sys.exit(errors[0].exit_code)


def _mistaken(
    mine: Sequence[Layout], known: Sequence[Layout], wanted: Sequence[tuple[str, BlockShape]]
) -> dict[str, list[str]]:
    """Notes by fingerprint: which layouts take the same arrays and mean something else, and at which shapes."""
    from . import identity

    names: dict[BlockShape, str] = {}  # some presets have equal sizes: once is enough
    for name, shape in wanted or [(name, load_shape(name)) for name in shape_names()]:
        names.setdefault(shape, name)
    for layout in mine if not wanted else ():
        if not any(_is_legal(layout, shape) for shape in names) and (example := spec.example_shape(layout)):
            names.setdefault(load_shape(example), example)
    layouts = list({layout.fingerprint: layout for layout in reversed([*known, *mine])}.values())[::-1]
    found: dict[str, dict[str, list[str]]] = {layout.fingerprint: {} for layout in mine}
    for shape, shape_name in names.items():
        for group in identity.ambiguous(layouts, shape):
            for meaning in group:
                others = [other.name for those in group if those is not meaning for other in those]
                for layout in meaning:
                    for other in others if layout.fingerprint in found else ():
                        found[layout.fingerprint].setdefault(other, []).append(shape_name)
    notes: dict[str, list[str]] = {}
    for fingerprint, others_of in found.items():
        where: dict[tuple[str, ...], list[str]] = {}
        for other, places in others_of.items():
            where.setdefault(tuple(places), []).append(other)
        notes[fingerprint] = [
            f"same arrays as {', '.join(sorted(others))} at {_some(places, len(names))}: nothing can notice a mix-up; name the "
            "layout explicitly"
            for places, others in where.items()
        ] or [f"no other layout takes its arrays at {_some(list(names.values()), len(names))}"]
    return notes


def _some(names: Sequence[str], total: int, most: int = 4) -> str:
    if len(names) <= most:
        return ", ".join(names)
    return (
        "any shipped shape" if len(names) == total else f"{', '.join(names[:most])} and {len(names) - most} more shapes"
    )


def _yaml_files(paths: Iterable[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from (file for file in sorted(path.rglob("*.yaml")) if file.relative_to(path).parts[0] != "shapes")
        else:
            yield path


def _not_yaml(path: Path) -> Path:
    raise SpecError(f"{path}: expected a file that ends in .yaml")


def _check_legality(layout: Layout, wanted: Sequence[tuple[str, BlockShape]]) -> Iterator[str]:
    """Yield notes. Raises where the layout is illegal for a wanted shape, or for every shipped one that fits."""
    for _, shape in wanted:
        layout.resolve(shape, 1024)
    absent = [axis for axis in AXES if axis not in layout.present]
    shipped = [(name, load_shape(name)) for name in shape_names()]
    fitting = [(name, shape) for name, shape in shipped if all(shape.sizes.get(axis) == 1 for axis in absent)]
    example = spec.example_shape(layout)
    if example is not None and not any(_is_legal(layout, shape) for _, shape in fitting):
        # Shipped shapes are of models; an indexer's keys and some latents have other sizes.
        if not wanted:
            yield f"one-to-one at {load_shape(example)}, which is no shipped shape"
        return
    if not fitting:
        if not wanted:
            yield f"no shipped shape fits (it has no axis {', '.join(map(repr, absent))}): give one with --shape"
        return
    reasons: dict[str, list[str]] = {}
    failed: LayoutError | None = None
    for name, shape in fitting:
        try:
            layout.resolve(shape, 1024)
        except LayoutError as error:
            failed = failed or error
            reasons.setdefault(re.sub(r" \(at [^()]*\)$", "", str(error)), []).append(name)
    legal = len(fitting) - sum(map(len, reasons.values()))
    if failed is not None and legal == 0 and not wanted:
        raise failed
    yield f"one-to-one at {legal} of {len(fitting)} shipped shapes"
    for reason, names in reasons.items():
        yield f"not at {', '.join(names)}: {reason}"


def _is_legal(layout: Layout, shape: BlockShape) -> bool:
    try:
        layout.resolve(shape, 1024)
    except LayoutError:
        return False
    return True


@main.command()
@_layout_argument("src")
@_layout_argument("dst")
@_shape_option()
@click.option("--num-blocks", default=1024, show_default=True, help="Blocks in each pool.")
@_picture_option("svg", "a picture")
@_picture_option("png", "a picture")
def plan(src: str, dst: str, shape_text: str, num_blocks: int, svg: Path | None, png: Path | None) -> None:
    """Print how blocks get from SRC to DST: the loop nest, the kernel, and why."""
    from . import planner

    made = planner.plan(spec.load(src), spec.load(dst), load_shape(shape_text), num_blocks=num_blocks)
    if svg is not None or png is not None:
        from . import picture

        _write_pictures(lambda: picture.draw_plan(made), svg, png)
        return
    click.echo(str(made))
    click.echo()
    width = min(_console().width, 100)
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
        asked = made.kernels() if made.src.parts else [form.name for form in made.fit().forms()]
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
@click.argument("kind", type=click.Choice(["layout", "shape"]), default="layout")
def schema(kind: str) -> None:
    """Print the JSON schema of layout files, or of shape files, for an editor.

    The first line of a file names it: # yaml-language-server: $schema=PATH
    """
    from . import schema as schemas

    click.echo(schemas.text(kind), nl=False)


# ---- making ---------------------------------------------------------------------------------------------------------


@main.command()
@_layouts_option("Files or folders of layouts (may be repeated); the shipped ones by default.")
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


@main.command()
@click.argument("source", metavar="IN", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("target", metavar="OUT", type=click.Path(dir_okay=False, path_type=Path))
@_layout_option("--from", "src_name", help="Layout of IN; needed if IN does not say.")
@_layout_option("--to", "dst_name", required=True, help="Layout of OUT.")
@_shape_option(required=False)
@click.option("--num-blocks", type=click.IntRange(1), help="Blocks in IN; needed if neither IN nor its size says.")
@click.option("--device", default="cpu", show_default=True, help="Where to convert: cpu or cuda:N.")
@click.option("--force", is_flag=True, help="Replace OUT if it is there.")
def convert(
    source: Path,
    target: Path,
    src_name: str | None,
    dst_name: str,
    shape_text: str | None,
    num_blocks: int | None,
    device: str,
    force: bool,
) -> None:
    """Convert a safetensors file of blocks from one layout to another.

    A file holds one tensor an allocation, alloc_00000, alloc_00001, … in table order; layout, fingerprint and shape are
    in its metadata. Both files are memory-mapped; OUT appears whole or not at all.
    """
    from . import store

    match = re.fullmatch(r"cpu|cuda(?::(\d+))?", device)
    if match is None:
        raise click.BadParameter(f"expected cpu or cuda:N, got {device!r}", param_hint="--device")
    if target.exists():
        if source.samefile(target):
            raise click.UsageError(f"IN and OUT are the same file: {source}")
        if not force:
            raise click.UsageError(f"{target} is already there: --force replaces it")
    stored = store.read(source)
    src = stored.pool(_source_layout(stored, src_name), load_shape(shape_text) if shape_text else None, num_blocks)
    dst_layout = spec.load(dst_name)
    step = min(max(1, _CHUNK_BYTES // src.resolved.block_bytes), src.num_blocks)
    move = _on_host if device == "cpu" else _OnDevice(int(match[1] or 0), src, dst_layout, step)
    start = time.perf_counter()
    with store.create(target, dst_layout, src.shape, src.num_blocks, force=force) as dst:
        _in_steps(f"{src.layout.name} → {dst_layout.name}", src, dst, step, move)
    seconds = time.perf_counter() - start
    nbytes = src.num_blocks * src.resolved.block_bytes
    click.echo(
        f"{source} ({src.layout.name}) → {target} ({dst_layout.name}): {src.num_blocks:,} blocks, "
        f"{nbytes / 2**20:,.1f} MiB in {seconds:.2f} s, {nbytes / seconds / 1e9:.2f} GB/s, on {device}"
    )


def _source_layout(stored: Any, name: str | None) -> Layout:
    if name is not None:
        return spec.load(name)
    if stored.layout_name is None:
        raise BindError(f"{stored.path}: the file does not say which layout it is in: give --from")
    try:
        return spec.load(stored.layout_name)
    except KvbmError:
        raise BindError(
            f"{stored.path}: the file is in layout {stored.layout_name!r} ({stored.metadata.get('kvbm.order', '?')}), "
            "which is not a shipped one: give its .yaml file with --from"
        ) from None


_Move = Callable[["Pool", "Pool", range], None]


def _in_steps(title: str, src: Pool, dst: Pool, step: int, move: _Move) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=src.num_blocks * src.resolved.block_bytes)
        for first in range(0, src.num_blocks, step):
            ids = range(first, min(first + step, src.num_blocks))
            move(src, dst, ids)
            progress.advance(task, len(ids) * src.resolved.block_bytes)


def _on_host(src: Pool, dst: Pool, ids: range) -> None:
    from .transfer import convert as convert_blocks

    convert_blocks(src, dst, list(ids), list(ids))


class _OnDevice:
    """Converts on a GPU, some blocks at a time: they travel in small pools of the same two layouts."""

    def __init__(self, device: int, src: Pool, dst_layout: Layout, num_blocks: int) -> None:
        from .pool import Pool

        self.device = device
        both = (src.layout, dst_layout)
        self.far_src, self.far_dst = (Pool.allocate(it, src.shape, num_blocks, f"cuda:{device}") for it in both)
        self.near_src, self.near_dst = (Pool.allocate(it, src.shape, num_blocks, "cpu") for it in both)

    def __call__(self, src: Pool, dst: Pool, ids: range) -> None:
        from .transfer import convert as convert_blocks

        here = list(range(len(ids)))
        convert_blocks(src, self.near_src, list(ids), here)
        self.copy(self.near_src, self.far_src)
        convert_blocks(self.far_src, self.far_dst, here, here, stream=0)
        self.copy(self.far_dst, self.near_dst)
        convert_blocks(self.near_dst, dst, here, list(ids))

    def copy(self, src: Pool, dst: Pool) -> None:
        """Copy every allocation across, and wait."""
        import numpy as np

        from . import _core

        sizes = np.array([allocation.nbytes for allocation in src.resolved.allocations], np.uint64)
        _core.memcpy_batch(dst.addresses, src.addresses, sizes, 1, self.device, 0)
        _core.synchronize(self.device, 0)


# ---- the machine ----------------------------------------------------------------------------------------------------


@main.command()
@click.option("--device", default=0, show_default=True, type=click.IntRange(0), metavar="N", help="Which GPU: cuda:N.")
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
        table = _with_progress(f"measuring on cuda:{device}", lambda step: tuner.measure(device, Transfer, step))
        path = tuning.save(table)
        tuner.reload()
    _print_table(table)
    click.echo(f"{table.title}, kvbm {table.kvbm}: {path}")


def _with_progress(title: str, work: Callable[[Callable[[int, int], None]], Any]) -> Any:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        return work(lambda done, total: progress.update(task, completed=done, total=total))


def _print_table(measured: tuning.Table) -> None:
    from rich.table import Table
    from rich.text import Text

    from . import tuner, tuning
    from .draw import table_box
    from .planner import size_text

    console, block = _console(), 1 << 20
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

    console = _console()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    exit_code = 0
    styles = {"ok": "green", "note": "yellow", "missing": "red", "": ""}
    for mark, what, text in _findings():
        table.add_row(Text(mark, styles[mark]), what, Text(text))
        if mark == "missing" and what == "extension":
            exit_code = BuildError.exit_code
    console.print(table)
    sys.exit(exit_code)


def _findings() -> Iterator[tuple[str, str, str]]:
    yield "ok", "kvbm", f"{_version('kvbm-layouts') or 'not installed, run from a checkout'}, {Path(__file__).parent}"
    yield "ok", "python", f"{platform.python_version()} ({sys.platform}, {platform.machine()}, {os.cpu_count()} cores)"
    yield "ok", "layouts", f"{len(spec.layouts())} in {spec.layouts_dir()}"
    if _version("kvbm"):
        yield (
            "missing",
            "conflict",
            f"another distribution called 'kvbm' ({_version('kvbm')}) is installed under the same import name: "
            "pip uninstall kvbm, then reinstall kvbm-layouts",
        )
    build = _build_info()
    try:
        from . import _core
    except ImportError as error:
        yield "missing", "extension", f"kvbm._core does not import ({error}): pip install . (needs a C++ compiler)"
        yield from _compiler()
        yield from _packages()
        return
    names = _core.kernel_names()
    yield "ok", "extension", f"{len(names)} kernels for the CPU"
    targets = str(build.get("targets") or "")
    if _core.num_images():
        built = f"{targets or 'targets unknown'}, nvcc {build.get('nvcc') or 'unknown'}"
        yield "ok", "CUDA kernels", f"{len(names)} kernels in {_core.num_images()} images: {built}"
    else:
        why = build.get("why_not") or "built without CUDA"
        yield "missing", "CUDA kernels", f"stubs: a GPU call raises, everything else works ({why})"
        yield from _compiler()
    yield from _gpus(_core, targets, str(build.get("nvcc") or ""))
    yield _run_time_compiler()
    yield from _packages()


def _gpus(core: Any, targets: str, nvcc: str) -> Iterator[tuple[str, str, str]]:
    try:
        version = core.driver_version()
    except KvbmError as error:
        yield "missing", "driver", str(error)
        return
    yield "ok", "driver", f"CUDA {version // 1000}.{version % 1000 // 10}"
    if nvcc and version // 1000 < int(nvcc.partition(".")[0]):
        yield "note", "", f"the kernels were built with nvcc {nvcc}: update the driver if they do not load"
    try:
        count = core.device_count()
        if not count:
            yield "missing", "GPU", "none visible (CUDA_VISIBLE_DEVICES hides some?): conversions run on the CPU"
        for index in range(count):
            info = core.device_info(index)
            major, minor = info["capability"]
            text = f"{info['name']}, sm_{major}{minor}, {info['sms']} SMs, {info['memory'] / 2**30:.0f} GiB"
            if targets and not _runs_on(targets, major, minor):
                rebuild = f"rebuild with CUDA_ARCHS={major}{minor} pip install ."
                yield "missing", f"cuda:{index}", f"{text}; no kernel image for it: {rebuild}"
            else:
                yield "ok", f"cuda:{index}", text
        batch = core.has_memcpy_batch()
        text = "in the driver" if batch else "not in this driver (CUDA 12.8 has it): one copy a call"
        yield "ok" if batch else "note", "batched memcpy", text
        yield from _tables(count)
    except KvbmError as error:
        yield "missing", "GPU", str(error)


def _tables(count: int) -> Iterator[tuple[str, str, str]]:
    """What `kvbm tune` has found out about these GPUs."""
    from . import tuning

    for gpu, driver in dict.fromkeys(map(tuning.machine, range(count))):
        found = tuning.load(gpu, driver)
        if found is not None:
            yield "ok", "tuning", f"{found.title}: {tuning.path(gpu, driver)}"
        else:
            yield "note", "tuning", f"{gpu}: not measured yet; the first transfer does, or `kvbm tune`"


def _runs_on(targets: str, major: int, minor: int) -> bool:
    """Whether a cubin of the same major and no later minor is there, or PTX that is no newer."""
    for kind, number in re.findall(r"(sm|compute)_(\d+)", targets):
        its = (int(number[:-1]), int(number[-1]))
        if (its[0] == major and its[1] <= minor) or (kind == "compute" and its <= (major, minor)):
            return True
    return False


def _compiler() -> Iterator[tuple[str, str, str]]:
    from . import nvcc

    try:
        compiler = nvcc.find()
        what = "reinstall kvbm-layouts and the CUDA kernels are built"
        yield "note", "nvcc", f"{compiler.version} is here ({compiler.origin}): {what}"
    except KvbmError as error:
        yield "note", "nvcc", str(error)


def _run_time_compiler() -> tuple[str, str, str]:
    """Whether layouts whose structure was not built get kernels of their own, and where these are kept."""
    from . import runtime

    try:
        found = runtime.find()
        folder = runtime.folder()
    except (KvbmError, RuntimeError) as error:  # RuntimeError: no home
        return "note", "NVRTC", f"{error}: new structures run on general kernels"
    count = len(list(folder.glob("*.cubin")))
    return "ok", "NVRTC", f"{found.version}, {found.path}; {count} kernel{'s' if count != 1 else ''} in {folder}"


def _packages() -> Iterator[tuple[str, str, str]]:
    for name, what in (
        ("numpy", "needed"),
        ("cuda-core", "streams"),
        ("cuda-bindings", "streams"),
        ("torch", "its tensors are taken; the demo"),
        ("cupy", "its arrays are taken"),
        ("transformers", "the demo"),
    ):
        version = _version(name) or next(filter(None, map(_version, _OTHER_NAMES.get(name, ()))), None)
        yield ("ok" if version else "missing" if what == "needed" else ""), name, version or f"not installed ({what})"


_OTHER_NAMES = {"cupy": ("cupy-cuda13x", "cupy-cuda12x")}


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _build_info() -> dict[str, Any]:
    """Return what the build wrote beside the extension."""
    try:
        info = json.loads(Path(__file__).with_name("_build.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, dict) else {}


@main.command()
@click.option("--device", help="cpu or cuda:N; by default the first GPU if there is one.")
@click.option("--seed", default=0, show_default=True, help="For weights, prompt and block ids.")
def demo(device: str | None, seed: int) -> None:
    """Convert a real model's KV cache through three layouts and carry on generating, bit for bit.

    Exits with 1 if a logit differs in a bit. Needs torch and transformers: pip install 'kvbm-layouts[demo]'.
    """
    from . import demo as demonstration

    if not demonstration.run(_console(), device=device, seed=seed):
        sys.exit(1)


if __name__ == "__main__":
    main()
