"""The command line: ``kvbm reshard``.

Only click is imported here before something runs, as for every command.
"""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import CompletionItem

from ..layout.shapes import load_shape
from .common import json_option, picture_option, print_json, print_prose, shape_option, write_pictures


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """Complete presets here; the shell completes file names."""
    from ..reshard.presets import PRESETS

    found = [CompletionItem(f"{name}:tp") for name in PRESETS if incomplete and name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="file")]


@click.command()
@click.argument("src", metavar="A", shell_complete=_complete)
@click.argument("dst", metavar="B", shell_complete=_complete)
@shape_option()
@click.option(
    "--tokens", type=click.IntRange(1, 1 << 40), metavar="N", help="Also print the bytes of a sequence of this length."
)
@click.option("--stripe", is_flag=True, help="Source ranks with the same data send a share each.")
@click.option(
    "--gather",
    is_flag=True,
    help="Two steps: destination ranks that need the same data get a share each, then exchange shares.",
)
@json_option("the whole plan; with --gather a list of both steps")
@picture_option("svg", "a picture")
def reshard(
    src: str, dst: str, shape_text: str, tokens: int | None, stripe: bool, gather: bool, as_json: bool, svg: Path | None
) -> None:
    """Plan which rank of engine A sends what to which rank of engine B, and prove that the plan is right.

    A and B are placement files (.yaml), or presets: vllm:tp8,pp2,dcp4,nt16  trtllm:tp2,cp4,nt32  sglang:tp4,pp3
    dynamo:tp2,engine=trtllm. SHAPE is of the whole model. Nothing is copied.
    """
    from ..reshard import messages, presets, report

    model = load_shape(shape_text)
    sides = presets.load(src, model), presets.load(dst, model)
    made = messages.gather(*sides, stripe=stripe) if gather else (messages.plan(*sides, stripe=stripe),)
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
        click.echo(report.table(one, tokens))
        click.echo()
        print_prose(report.explain(one))
