"""The command line, and its first commands: layouts, shapes, show, check, which, plan, gallery, schema, codegen, tune, doctor.

`_LAZY` names the modules of the others.

Commands parse their arguments, call the library and print the result. A `KvbmError` becomes one message on stderr and the
exit code of its class. ``KVBM_DEBUG=1`` adds the traceback.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._version import __version__
from ..errors import BindError, BuildError, KvbmError, MissingKernelError, SpecError
from ..layout import spec
from ..layout.axes import BLOCK_SIZES
from ..layout.layout import Layout
from ..layout.shapes import BlockShape, load_shape, shape_names, shape_title
from ..show import as_json as records
from .click_classes import Group, print_error
from .common import (
    cast_options,
    confirm,
    device_option,
    fitting_shape,
    gpu_option,
    json_option,
    layout_argument,
    layouts_option,
    new_table,
    note,
    num_blocks_option,
    picture_option,
    print_json,
    print_prose,
    print_table,
    progress,
    shape_option,
    terminal,
    without_trailing_blanks,
    write_pictures,
)
from .complete import complete_dtype, complete_engine, complete_layout, complete_shape

if TYPE_CHECKING:
    from ..copy import cost_model
    from ..planner.cast import Cast
    from ..planner.plan import Plan

#: Commands that are defined in other modules.
_LAZY = {
    "bench": "..bench.cli",
    "declare": ".declare",
    "link": ".link",
    **dict.fromkeys(("convert", "digest", "verify"), ".files"),
    "reshard": ".reshard",
    "serve-check": ".serve_check",
    "smoke": "..testing.smoke",
    "store": ".store",
}


#: The groups of the help: what a user is about to do → commands.
_SECTIONS = {
    "Layouts and shapes": ("layouts", "shapes", "show", "check", "which", "declare"),
    "What a copy or an engine would do": ("plan", "reshard", "serve-check"),
    "Files of blocks": ("convert", "digest", "verify", "store"),
    "This machine, and the way to another": ("doctor", "smoke", "demo", "tune", "bench", "link"),
    "For editors, shells and builds": ("schema", "completion", "gallery", "codegen"),
}


@click.group(
    cls=Group, lazy=_LAZY, sections=_SECTIONS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    examples=[
        "kvbm show vllm/LBHNC",
        "kvbm plan vllm/LBHNC universal",
        "kvbm convert in.safetensors out.safetensors --to universal",
    ],
)  # fmt: skip
@click.version_option(__version__, "-V", "--version", prog_name="kvbm")
def main() -> None:
    """Describe KV-cache block layouts, and convert blocks between them.

    A LAYOUT is a name that `kvbm layouts` prints, or the path of a .yaml file. `kvbm COMMAND --help` has examples.
    """


# ---- layouts, shapes and plans --------------------------------------------------------------------------------------


@main.command(examples=[
    "kvbm layouts vllm/",
    "kvbm layouts mla --json",
    "kvbm layouts nhd --aliases --shape llama-3.1-8b",
])  # fmt: skip
@click.argument("part", required=False, metavar="[PART]", shell_complete=complete_layout)
@layouts_option("Also list the layouts in these files or folders (may be repeated).")
@click.option("--aliases", "only_aliases", is_flag=True, help="List names of equal layouts, with --shape also those equal there.")
@shape_option(default=None)
@num_blocks_option("With --shape: blocks in the pool.  [default: 1024]")
@json_option("a list of layouts; with --aliases an object")
def layouts(
    part: str | None, paths: tuple[Path, ...], only_aliases: bool, shape_text: str | None, num_blocks: int | None,
    as_json: bool,
) -> None:  # fmt: skip
    """List the shipped layouts: all of them, or those that have PART in their name (mla), or start with it (vllm/)."""
    listed = spec.load_all([spec.layouts_dir(), *paths])
    if shape_text is not None and not only_aliases:
        raise click.UsageError("--shape goes with --aliases; `kvbm show` draws a layout at a shape")
    if num_blocks is not None and shape_text is None:
        raise click.UsageError("--num-blocks goes with --aliases --shape SHAPE")
    if part is not None:
        text = part.lower()
        in_folder = text.endswith("/")  # "vllm/" is not part of "nanovllm/…"
        chosen = [
            one for one in listed if (one.name.lower().startswith(text) if in_folder else text in one.name.lower())
        ]
        if not chosen:
            folders = sorted({layout.name.rpartition("/")[0] + "/" for layout in listed if "/" in layout.name})
            raise SpecError(f"no layout has {part!r} in its name; expected part of one, such as {', '.join(folders)}")
        listed = chosen
    if only_aliases:
        _print_aliases(listed, load_shape(shape_text) if shape_text else None, num_blocks or 1024, as_json)
        return
    listed = sorted(listed, key=lambda layout: (layout.name.rpartition("/")[0], layout.name))
    if as_json:
        print_json([records.of_layout(layout) for layout in listed])
        return
    _print_layouts(listed)


def _print_layouts(listed: Sequence[Layout]) -> None:
    """One row per layout.  In a wide terminal and in pipes the title is beside the order, else below it."""
    from rich.text import Text

    console = terminal()
    if not console.is_terminal:
        table = new_table("name", "order", "fingerprint", "title")
        for layout in listed:
            table.add_row(layout.name, Text(layout.order_text), layout.fingerprint, Text(layout.title))
        print_table(table, console)
        return
    wide = console.width >= 110
    titles = ("order", "title") if wide else ("order, title",)
    table = new_table("name", *titles, "fingerprint", wrapped=titles[-1:], dim=("title", "fingerprint"))
    for _, folder in itertools.groupby(listed, key=lambda layout: layout.name.rpartition("/")[0]):
        for layout in folder:
            orders = [str(order) for order in layout.orders]
            order = Text(orders[0] if len(orders) == 1 else f"k: {orders[0]}\nv: {orders[1]}")
            for plane in layout.planes:
                order.append(f"\n  {plane}")
            about = (order, Text(layout.title)) if wide else (order.append(f"\n{layout.title}", "dim"),)
            table.add_row(layout.name, *about, layout.fingerprint)
        table.add_section()
    print_table(table, console)


def _print_aliases(listed: Sequence[Layout], shape: BlockShape | None, num_blocks: int, as_json: bool) -> None:
    from ..layout import identity

    groups = identity.aliases(listed)
    meetings = identity.same_addresses(listed, shape, num_blocks) if shape is not None else []
    if as_json:
        answer: dict[str, Any] = {"aliases": [records.of_group(group) for group in groups]}
        if shape is not None:
            at = {"shape": records.of_shape(shape), "num_blocks": num_blocks}
            answer["same_addresses"] = {
                **at,
                "groups": [[records.of_group(group) for group in meeting] for meeting in meetings],
            }
        print_json(answer)
        return
    click.echo("The same layout at every shape (one fingerprint):" if groups else "No two names mean the same.")
    for group in groups:
        click.echo(f"  {group[0].order_text}  ({group[0].fingerprint})")
        _print_names(group, 4)
    if shape is None:
        return
    at_shape = f"{shape} with {num_blocks:,} blocks"
    click.echo()
    if not meetings:
        print_prose(f"At {at_shape}, no others have the same addresses.")
        return
    print_prose(
        f"Different fingerprints, but the same address of every element at {at_shape}; at other shapes the addresses can differ:"
    )
    for number, meeting in enumerate(meetings, 1):
        click.echo(f"  {number}.")
        for group in meeting:
            click.echo(f"    {group[0].order_text}  ({group[0].fingerprint})")
            _print_names(group, 6)


def _print_names(group: Sequence[Layout], indent: int) -> None:
    names = ", ".join(layout.name for layout in group)
    margin, console = " " * indent, terminal()
    wrapped = click.wrap_text(names, min(console.width, 100), margin, margin)
    click.echo(wrapped if console.is_terminal else f"{margin}{names}")


@main.command(examples=["kvbm shapes llama", "kvbm shapes tp8 --json"])
@click.argument("part", required=False, metavar="[PART]", shell_complete=complete_shape)
@json_option("a list of shapes")
def shapes(part: str | None, as_json: bool) -> None:
    """List the shipped block shapes: all of them, or those that have PART in their name (llama, tp8).

    Sizes are layers (nl), K and V (no: 2; 1 for a latent), KV heads (nh), tokens of a block (nt) and elements of a head (hd).
    NAME/tpN is what each of N tensor-parallel ranks holds. The bytes are those of one block, without padding.
    """
    names = [name for name in shape_names() if part is None or part.lower() in name]
    if not names:
        raise SpecError(f"no shape has {part!r:.200} in its name; `kvbm shapes` lists all")
    found = [(name, shape_title(name), load_shape(name)) for name in names]
    if as_json:
        print_json([records.of_shape(shape, name, title) for name, title, shape in found])
        return
    console = terminal()
    wide = console.width >= 100
    titles = ("name", *BLOCK_SIZES, "dtype", "bytes per block", *(["title"] if wide else ()))
    table = new_table(*titles, right=(*BLOCK_SIZES, "bytes per block"), dim=("title",))
    for name, title, shape in found:
        numbers = map(str, (shape.nl, shape.no, shape.nh, shape.nt, shape.hd))
        table.add_row(name, *numbers, shape.dtype, f"{shape.nbytes:,}", *([title] if wide else ()))
    print_table(table, console)


@main.command(examples=[
    "kvbm show vllm/LBHNC",
    "kvbm show vllm/LBHNC --shape llama-3.1-70b/tp8 --num-blocks 4096",
    "kvbm show mine.yaml --svg mine.svg",
])  # fmt: skip
@layout_argument("layout_name", metavar="LAYOUT")
@shape_option(fits=True)
@num_blocks_option("Blocks in the pool.", default=1024, show_default=True)
@picture_option("svg", "a picture")
@picture_option("png", "a picture")
@picture_option("html", "a page with the picture, the axes and the address")
@json_option("allocations, and the stride of every axis")
def show(
    layout_name: str, shape_text: str | None, num_blocks: int, svg: Path | None, png: Path | None, html: Path | None,
    as_json: bool,
) -> None:  # fmt: skip
    """Draw a layout: its allocations, how the axes nest, and which bytes are contiguous."""
    layout = spec.load(layout_name)
    shape_text = fitting_shape(shape_text, layout)
    resolved = layout.resolve(load_shape(shape_text), num_blocks)
    if svg is not None or png is not None or html is not None:
        from ..show import figure
        from ..show.html import page

        write_pictures(lambda: figure.draw_layout(resolved), svg, png, html, lambda: page(resolved), quiet=as_json)
    if as_json:
        print_json(records.of_resolved(resolved))
    elif svg is None and png is None and html is None:
        from ..show import text as draw

        console = terminal()
        with without_trailing_blanks(console):
            draw.show(console, resolved, shape_text)


@main.command(examples=["kvbm check mine.yaml", "kvbm check mine.yaml --shape llama-3.1-8b,nt=32 --ambiguous"])
@click.argument("given", nargs=-1, required=True, metavar="LAYOUT|FOLDER...", shell_complete=complete_layout)
@click.option(
    "--shape", "shape_texts", multiple=True, metavar="SHAPE", help="Check at this shape (may be repeated).",
    shell_complete=complete_shape,
)  # fmt: skip
@click.option("--ambiguous", is_flag=True, help="Also list the layouts that accept the same arrays and read other elements.")
@json_option("a list with an object per layout")
def check(given: tuple[str, ...], shape_texts: tuple[str, ...], ambiguous: bool, as_json: bool) -> None:
    """Check that layouts are valid and one-to-one at every --shape, or at the shipped shapes that fit them.

    Takes names and files; a folder stands for every .yaml file in it. Prints every error with its file and line, and exits
    with the code of the first. With --ambiguous, every layout is compared with the shipped ones and with the others given, at
    the shapes of --shape or at all shipped ones.
    """
    from .check import chosen, legality, mistaken

    wanted = [(text, load_shape(text)) for text in shape_texts]
    known = sorted(spec.load_dir(spec.layouts_dir()), key=lambda layout: ("/" in layout.name, layout.name))
    shipped = {layout.fingerprint: layout.name for layout in reversed(known)}
    errors: list[KvbmError] = []
    answers: list[dict[str, Any]] = []
    good: list[tuple[dict[str, Any], Layout]] = []
    for one in list(chosen(given)):  # an error of a folder comes before anything is printed
        answers.append({"given": str(one), "error": None, "exit_code": 0})
        try:
            layout = spec.load(one)
            notes = list(legality(layout, wanted))
        except KvbmError as error:
            errors.append(error)
            print_error(error)
            answers[-1] |= {"error": str(error), "exit_code": error.exit_code}
            continue
        alias = shipped.get(layout.fingerprint)
        if alias is not None and not layout.file.startswith("layouts/"):
            notes.insert(0, f"means the same as the shipped layout {alias!r}")
        answers[-1] |= {
            "name": layout.name,
            "order": layout.order_text,
            "fingerprint": layout.fingerprint,
            "notes": notes,
        }
        good.append((answers[-1], layout))
    others = mistaken([layout for _, layout in good], known, wanted) if ambiguous else {}
    for found, layout in good:
        found["notes"] += others.get(layout.fingerprint, [])
        if as_json:
            continue
        click.echo(f"{click.style('ok', fg='green')}  {found['given']}: {layout.order_text}  ({layout.fingerprint})")
        for line in found["notes"]:
            print_prose(f"    {line}")
    if as_json:
        print_json(answers)
    if errors:
        sys.exit(errors[0].exit_code)


@main.command(examples=[
    "kvbm which '32x(2, 1024, 16, 8, 128)' --shape llama-3.1-8b",
    "kvbm which '32x(1024, 8, 16, 256)' --engine vllm",
])  # fmt: skip
@click.argument("arrays", nargs=-1, required=True, metavar="ARRAY...")
@shape_option()
@click.option(
    "--dtype",
    metavar="TYPE",
    help="Dtype of the arrays, such as uint8 for records; that of SHAPE if not given.",
    shell_complete=complete_dtype,
)
@click.option(
    "--engine", metavar="NAME", help="Only layouts of this engine, such as vllm.", shell_complete=complete_engine
)  # fmt: skip
@layouts_option("Also search the layouts in these files or folders (may be repeated).", "KVBM_LAYOUTS")
@num_blocks_option("Blocks that the arrays hold; derived from their sizes if it is not given.")
@json_option()
def which(
    arrays: tuple[str, ...], shape_text: str, dtype: str | None, engine: str | None, paths: tuple[Path, ...],
    num_blocks: int | None, as_json: bool,
) -> None:  # fmt: skip
    """List the layouts that fit arrays of these shapes and strides; in Python: kvbm.match(tensors, shape).

    An ARRAY is [COUNTx]SHAPE[:STRIDES]; strides are in elements, as torch prints them, and those of a contiguous array if not
    given. Brackets may stay: "32x(2, 1024, 16, 8, 128)". The arrays may be views of one allocation, as in vLLM 0.26 and newer.

    vLLM 0.26 and newer (vllm/LBHNC and other orders): kvbm.Pool.from_vllm reads the layout from vLLM's config.

    More than one layout can fit. The output says which check tells them apart. A file in a folder of --layouts that is no layout is
    named on stderr, and the others are searched. Exits with 14 if none fits; if the sizes allow one
    order only, the output has its layout.
    """
    from ..matching.match import match_described, own_layouts, parse, perhaps_bytes

    shape = load_shape(shape_text)
    given = parse(arrays, shape, dtype)
    if text := perhaps_bytes(given):
        note(text)
    own = own_layouts(paths, lambda error: note(f"skipped: {error}"))
    found = match_described(given, shape, engine, num_blocks, own, placed=False)
    if as_json:
        print_json(found.as_json())
    else:
        print_prose(str(found))
    if not found:
        sys.exit(BindError.exit_code)


@main.command(examples=[
    "kvbm plan vllm/LBHNC universal",
    "kvbm plan vllm/LBHNC universal --shape llama-3.1-70b/tp8 --svg plan.svg",
    "kvbm plan nhd record/per_token_head_fp8_planes --cast amax",
])  # fmt: skip
@layout_argument("src")
@layout_argument("dst")
@shape_option(fits=True)
@num_blocks_option("Blocks in each pool.", default=1024, show_default=True)
@cast_options("DST")
@picture_option("svg", "a picture")
@picture_option("png", "a picture")
@picture_option("html", "a page with the picture, the loops and the explanation")
@json_option("the loop nest, the kernels and the explanation")
def plan(
    src: str, dst: str, shape_text: str | None, num_blocks: int, cast: Cast, dtype: str | None, svg: Path | None,
    png: Path | None, html: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Print how blocks are copied from SRC to DST: the loops, the kernel, and the reasons."""
    from ..planner import plan as planner

    sides = spec.load(src), spec.load(dst)
    shape = load_shape(fitting_shape(shape_text, *sides))
    shapes = shape, shape if dtype is None else replace(shape, dtype=dtype)
    made = planner.plan(*sides, shapes, num_blocks=num_blocks, cast=cast)
    if svg is not None or png is not None or html is not None:
        from ..show.html import plan_page
        from ..show.plan_figure import draw_plan

        write_pictures(lambda: draw_plan(made), svg, png, html, lambda: plan_page(made), quiet=as_json)
    missing = _not_built(made)
    if as_json:
        print_json({**records.of_plan(made), "not_built": missing})
    elif svg is None and png is None and html is None:
        click.echo(f"{made}\n")
        print_prose(made.explain())
        if missing is not None:
            print_prose(missing)


def _not_built(made: Plan) -> str | None:
    """A text about a plan's kernels that are not built in, and their replacement.  None if all are built in."""
    try:
        from .. import _core
        from ..compile import nvrtc
    except ImportError:  # the extension is not built: `kvbm doctor` reports it
        return None
    try:
        asked = made.kernels()
        names = set(asked) - set(_core.kernel_names())
    except MissingKernelError:  # the plan's explanation reports it
        return None
    if not names:
        return None
    text = f"Not built in: {', '.join(sorted(names))}. "
    try:
        text += f"On a GPU, {nvrtc.find()} compiles what is missing at first use. "
    except BuildError as error:
        text += f"A general kernel of more modes runs in its place ({error}). "
    return f"{text}{nvrtc.PERMANENT}."


@main.command(examples=["kvbm gallery --out pictures"])
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder to write to.")
def gallery(out: Path) -> None:
    """Draw each shipped layout as an SVG, and write an index page. Equal layouts share a picture.

    Needs matplotlib: pip install 'kvbm-layouts[show]'.
    """
    from ..show import html as pictures

    written = pictures.gallery(out)
    confirm(f"{len(written) - 1} pictures and {written[-1].name} in {out}")


@main.command(examples=["kvbm schema", "kvbm schema placement"])
@click.argument("kind", type=click.Choice(["layout", "shape", "placement"]), default="layout")
def schema(kind: str) -> None:
    """Print the JSON schema of layout, shape or placement files, for editors.

    Name it in the first line of a file: # yaml-language-server: $schema=PATH
    """
    folder = {"layout": ".", "shape": "shapes", "placement": "placements"}[kind]
    click.echo((spec.layouts_dir() / folder / "schema.json").read_text(encoding="utf-8"), nl=False)


# ---- generated files ------------------------------------------------------------------------------------------------


@main.command(examples=["kvbm codegen --layouts mine.yaml --out kernels", "kvbm codegen --layouts mine.yaml --out kernels --check"])
@layouts_option("Files or folders of layouts (may be repeated).  [default: the shipped ones]")
@click.option("--out", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder to write to.")
@click.option("--check", "only_check", is_flag=True, help="Write nothing; exit with 1 if a file differs.")
def codegen(paths: tuple[Path, ...], out: Path, only_check: bool) -> None:
    """Write the CUDA and C++ sources of the kernels that convert between any two of the layouts."""
    from ..compile import codegen as generator

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
        confirm(str(path))
    confirm(f"{len(files)} files in {out}, {len(written)} written, {len(files) - len(written)} as they were")


# ---- the machine ----------------------------------------------------------------------------------------------------


@main.command(examples=["kvbm tune", "kvbm tune --show --json"])
@gpu_option("The GPU.")
@click.option("--show", is_flag=True, help="Print the stored table, and measure nothing.")
@json_option("the fastest way by direction and size of pieces")
def tune(device: int, show: bool, as_json: bool) -> None:
    """Measure which way of copying is the fastest on this machine, for transfers with strategy="auto".

    Takes some seconds and needs 256 MiB of GPU memory. The first such transfer measures it, too, if there is no table yet.
    """
    from ..copy import autotune, cost_model, tables
    from ..system import machine

    gpu, driver = machine.gpu_and_driver(device)
    if show:
        table, path = cost_model.load(gpu, driver), cost_model.path(gpu, driver)
        if table is None:
            click.echo(f"no table for {gpu}, driver {driver}: expected {path}; `kvbm tune` makes it", err=True)
            sys.exit(1)
    else:
        with progress(f"measuring on cuda:{device}") as update:
            table = autotune.measure(device, lambda done, total: update(completed=done, total=total))
        path = cost_model.save(table)
        tables.reload()
    rows = _choices(table)
    if as_json:
        print_json({"machine": table.title, "kvbm": table.kvbm, "path": str(path), "rows": rows})
        return
    _print_choices(rows)
    click.echo(f"{table.title}, kvbm {table.kvbm}: {path}")


def _choices(measured: cost_model.Table) -> list[dict[str, Any]]:
    """A table by direction and piece size: the strategy per range of bytes, and GB/s of each for 64 blocks of 1 MiB."""
    from ..copy import autotune, cost_model, strategies

    found, block = [], 1 << 20
    for direction in measured.directions:
        for run in autotune.RUNS:
            way = cost_model.Way(run)
            choice = measured.choose(direction, dict.fromkeys(strategies.STRATEGIES, way), block)
            assert choice is not None
            *few, (_, last) = choice.limits
            speeds = {}
            for name in strategies.STRATEGIES:
                cost = measured.costs.get((direction, name))
                speeds[name] = 64 * block / float(cost.seconds(64, block, way)) / 1e9 if cost else None
            limits = [{"strategy": name, "up_to_bytes": pairs * block} for pairs, name in few]
            found.append({"direction": direction, "run_bytes": run, "limits": limits, "strategy": last, "gbps": speeds})
    return found


def _print_choices(rows: Sequence[dict[str, Any]]) -> None:
    from rich.text import Text

    from ..copy import strategies
    from ..planner.plan import size_text

    names = strategies.STRATEGIES
    table = new_table("direction", "pieces of", "fastest", *names, right=names, wrapped=("fastest",))
    for row in rows:
        ranges = [f"{one['strategy']} up to {size_text(one['up_to_bytes'])}" for one in row["limits"]]
        last = row["strategy"]
        speeds = ((name, row["gbps"][name]) for name in names)
        cells = [Text("-" if rate is None else f"{rate:,.1f}", "bold" if name == last else "") for name, rate in speeds]
        fastest = ", ".join([*ranges, f"then {last}" if ranges else last])
        table.add_row(row["direction"], size_text(row["run_bytes"]), fastest, *cells)
    print_table(table)
    print_prose("The three columns on the right are GB/s for 64 blocks of 1 MiB, computed from the costs fitted to the table.")


@main.command(examples=["kvbm doctor", "kvbm doctor --json"])
@json_option("a list of findings")
def doctor(as_json: bool) -> None:
    """List what works here: the extension, its kernels, the driver, the GPUs; and how to get what is missing.

    Exits with 0 if everything that was built can be used, or if there is no GPU; with 16 if the package is broken (an
    extension that cannot be imported, no NumPy, files overwritten by the other distribution called kvbm); with 19 if it has
    CUDA kernels and there is a driver, and no GPU can run them.
    """
    from .doctor import exit_code, findings

    found = list(findings())
    if as_json:
        print_json([{"mark": mark, "what": what, "text": text} for mark, what, text in found])
        sys.exit(exit_code(found))
    from rich.table import Table
    from rich.text import Text

    console = terminal()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    styles = {"ok": "green", "note": "yellow", "missing": "yellow", "broken": "red", "": ""}
    for mark, what, text in found:
        table.add_row(Text(mark, styles[mark]), what, Text(text))
    with without_trailing_blanks(console):
        console.print(table)
    sys.exit(exit_code(found))


@main.command(examples=["kvbm completion bash"])
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a script with which a shell completes commands, options, layouts and shapes.

    \b
    bash: kvbm completion bash > ~/.local/share/bash-completion/completions/kvbm
    zsh:  kvbm completion zsh > DIR/_kvbm, where DIR is in $fpath; or in ~/.zshrc: eval "$(kvbm completion zsh)"
    fish: kvbm completion fish > ~/.config/fish/completions/kvbm.fish
    """  # noqa: D301  (the mark of click for lines that are not wrapped)
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found is not None, shell
    click.echo(found(main, {}, "kvbm", "_KVBM_COMPLETE").source())


@main.command(examples=["kvbm demo --device cpu"])
@device_option("Where to run.  [default: the first GPU, else cpu]", default=None)
@click.option("--seed", default=0, show_default=True, help="Seed for weights, prompt and block ids.")
def demo(device: str | None, seed: int) -> None:
    """Convert a model's KV cache through three layouts and back, continue to generate, and compare the logits.

    Exits with 1 if a bit of a logit differs. Needs torch and transformers: pip install 'kvbm-layouts[demo]'.
    """
    from ..bench import demo as demonstration

    if not demonstration.run(terminal(), device=device, seed=seed):
        sys.exit(1)


if __name__ == "__main__":
    main()
