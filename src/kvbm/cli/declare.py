"""The command line: ``kvbm declare``."""

from __future__ import annotations

import click

from ..layout.naming import dtype_name
from ..layout.shapes import BlockShape, load_shape
from .click_classes import Command
from .common import note, shape_option
from .complete import complete_dtype


@click.command(cls=Command, examples=[
    'kvbm declare "32x2,1024,16,8,128:41943040,40960,1024,128,1" --axes "[l] o b t h d"',
    'kvbm declare "32x1024,8,16,2,128" --axes "[l] b h t o d" --name mine',
])
@click.argument("arrays", nargs=-1, required=True, metavar="ARRAY...")
@click.option("--axes", required=True, metavar="AXES", help='The names of the axes, such as "[l] o b t h d".')
@click.option("--dtype", metavar="TYPE", shell_complete=complete_dtype,
              help="Dtype of the arrays; that of SHAPE, or bfloat16, if not given.")
@shape_option(default=None)
@click.option("--name", default="mine", show_default=True, metavar="TEXT", help="Name of the layout, for the comment.")  # fmt: skip
def declare(arrays: tuple[str, ...], axes: str, dtype: str | None, shape_text: str | None, name: str) -> None:
    """Write the layout of arrays of these shapes and strides as YAML; in Python: kvbm.declare(tensors, axes).

    An ARRAY is [COUNTx]SHAPE[:STRIDES], as for `kvbm which`. AXES are names for the axes of each array: b block, l layer, o K or
    V, h KV head, t token, d element of the head; in brackets in front, the axes of the list of arrays. --shape is needed where the
    arrays do not show the sizes of a block.

    The first example is one array per layer, K and V, blocks, tokens, heads, elements, where every block is padded to 40,960
    elements. Send the output to a file such as mine.yaml.
    """
    from ..matching.declare import declare_described
    from ..matching.match import parse, perhaps_bytes

    shape = load_shape(shape_text) if shape_text is not None else None
    own = shape or BlockShape(1, 1, 1, 1, 1, dtype_name(dtype or "bfloat16"))
    given = parse(arrays, own, dtype)
    if text := perhaps_bytes(given):
        note(text)
    click.echo(declare_described(given, axes, shape, name), nl=False)
