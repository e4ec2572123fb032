"""The command line: ``kvbm reshard``.

Only click is imported here before something runs, as for every command.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from .._arguments import quoted
from ..errors import SpecError
from ..layout.shapes import load_shape
from .click_classes import Command, Whole
from .common import (
    cast_options,
    json_option,
    layout_option,
    picture_option,
    print_json,
    print_prose,
    shape_option,
    write_pictures,
)

if TYPE_CHECKING:
    from ..planner.cast import Cast


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """Complete presets here; the shell completes file names."""
    from ..reshard.presets import PRESETS

    found = [CompletionItem(f"{name}:tp") for name in PRESETS if incomplete and name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="file")]


@click.command(
    cls=Command,
    examples=[
        "kvbm reshard vllm:tp4 vllm:tp2,nt64 --shape llama-3.1-70b",
        "kvbm reshard vllm:tp8 trtllm:tp2,cp4,nt32 --shape llama-3.1-70b --tokens 8192",
        "kvbm reshard vllm:tp4 vllm:tp2 --from nhd --to record/per_token_head_fp8_planes --cast amax",
    ],
)
@click.argument("src", metavar="A", shell_complete=_complete)
@click.argument("dst", metavar="B", shell_complete=_complete)
@shape_option()
@click.option("--tokens", type=Whole(1, 1 << 40), metavar="N", help="Also print the bytes of a sequence of this length.")
@click.option("--stripe", is_flag=True, help="Source ranks with the same data send a share each.")
@click.option(
    "--gather",
    is_flag=True,
    help="Two steps: destination ranks that need the same data get a share each, then exchange shares.",
)
@cast_options("B")
@layout_option("--from", "src_layout", help="With --cast: layout of A's pools; it says what changes.")
@layout_option("--to", "dst_layout", help="With --cast: layout of B's pools.")
@json_option("the whole plan; with --gather a list of both steps")
@picture_option("svg", "a picture")  # fmt: skip
def reshard(
    src: str, dst: str, shape_text: str, tokens: int | None, stripe: bool, gather: bool, cast: Cast, dtype: str | None,
    src_layout: str | None, dst_layout: str | None, as_json: bool, svg: Path | None,
) -> None:  # fmt: skip
    """Plan which rank of engine A sends what to which rank of engine B, and prove that the plan is right.

    A and B are placement files (.yaml), or presets: vllm:tp8,pp2,dcp4,nt16  trtllm:tp2,cp4,nt32  sglang:tp4,pp3
    dynamo:tp2,engine=trtllm. SHAPE is of the whole model. Nothing is copied.
    """
    from ..reshard import messages, presets, report

    if (src_layout is None) != (dst_layout is None) or (src_layout is not None and cast is None):
        raise click.UsageError("--from and --to: expected both, beside --cast, or none of them")
    model = load_shape(shape_text)
    part = re.match(r"[^,=]*(/tp([0-9]+))", shape_text)
    if part and int(part[2]) > 1:
        raise SpecError(
            f"--shape {quoted(shape_text)}: expected the shape of the whole model, which the placements divide, got that of a "
            f"rank: leave out {part[1]}"
        )
    sides = presets.load(src, model), presets.load(dst, model if dtype is None else replace(model, dtype=dtype))
    layouts = None if src_layout is None else (src_layout, dst_layout)
    if gather:
        made: tuple[messages.Resharding, ...] = messages.gather(*sides, stripe=stripe, cast=cast, layouts=layouts)
    else:
        made = (messages.plan(*sides, stripe=stripe, cast=cast, layouts=layouts),)
    for one in made:
        _ = one.cast_parts  # raises an error if there is no such cast
    if svg is not None:
        from ..show import reshard_figure

        write_pictures(lambda: reshard_figure.draw(*made), svg, quiet=as_json)
        if not as_json:
            return
    if as_json:
        found = [report.as_json(one, tokens) for one in made]
        print_json(found if gather else found[0])
        return
    for number, one in enumerate(made, 1):
        if gather:
            click.echo(f"{'' if number == 1 else chr(10)}Step {number}:")
        print_prose(report.table(one, tokens))
        click.echo()
        print_prose(report.explain(one))
