"""The command line: ``kvbm reshard``.

Only click is imported here before something runs, as for every command.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from ..commands import picture_option, shape_option, terminal, write_pictures
from ..shapes import load_shape


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG001
    """Presets; and files, which the shell knows."""
    from .presets import PRESETS

    found = [CompletionItem(f"{name}:tp") for name in PRESETS if incomplete and name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="file")]


@click.command()
@click.argument("src", metavar="A", shell_complete=_complete)
@click.argument("dst", metavar="B", shell_complete=_complete)
@shape_option()
@click.option(
    "--tokens", type=click.IntRange(1, 1 << 40), metavar="N", help="Count bytes for a sequence of so many tokens."
)
@click.option("--stripe", is_flag=True, help="Let all source ranks that hold the same send a share each.")
@click.option(
    "--gather",
    is_flag=True,
    help="In two steps: destination ranks that hold the same get a share each, and exchange them.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON; with --gather a list of both steps.")
@picture_option("svg", "a picture")
def reshard(
    src: str, dst: str, shape_text: str, tokens: int | None, stripe: bool, gather: bool, as_json: bool, svg: Path | None
) -> None:
    """Plan the copy of a cache from engine A to engine B, which spread it differently over their ranks, and prove it.

    A and B are placement files (.yaml), or presets: vllm:tp8,pp2,dcp4,nt16  trtllm:tp2,cp4,nt32  sglang:tp4,pp3
    dynamo:tp2,engine=trtllm. SHAPE is of the whole model. Nothing is copied.
    """
    from . import messages, presets, report

    model = load_shape(shape_text)
    sides = presets.load(src, model), presets.load(dst, model)
    made = messages.gather(*sides, stripe=stripe) if gather else (messages.plan(*sides, stripe=stripe),)
    if svg is not None:
        from . import picture

        write_pictures(lambda: picture.draw(*made), svg, quiet=as_json)
        if not as_json:
            return
    if as_json:
        found = [report.as_json(one, tokens) for one in made]
        click.echo(json.dumps(found if gather else found[0], indent=2, ensure_ascii=False))
        return
    width = min(terminal().width, 100)
    for number, one in enumerate(made, 1):
        if gather:
            click.echo(f"{'' if number == 1 else chr(10)}Step {number}:")
        click.echo(report.table(one, tokens))
        click.echo()
        for paragraph in report.explain(one).splitlines():
            click.echo(click.wrap_text(paragraph, width=width))
