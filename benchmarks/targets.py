"""``python -m benchmarks targets CSV...``: the rows of `kvbm bench` that have a target, and whether they reach it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from kvbm.bench.table import Row, read
from kvbm.cli.common import new_table, print_table
from kvbm.planner.kernel_forms import parse_kernel

__all__ = ["REACH", "target", "targets"]

#: Required ratio to a memcpy: direction, class of the kernel → (least number of blocks, ratio), largest number first.
REACH: dict[tuple[str, str], tuple[tuple[int, float], ...]] = {
    ("d2d", "rows"): ((64, 0.97), (16, 0.95), (4, 0.90), (1, 0.90)),
    ("d2d", "short rows"): ((64, 0.90),),
    ("d2d", "tile of words"): ((64, 0.93),),
    ("d2d", "tile of 1 or 2 bytes"): ((64, 0.90),),
    ("d2d", "tile of 4 bytes"): ((64, 0.93),),
    ("h2d", ""): ((64, 0.985), (4, 0.95), (1, 0.90)),
    ("d2h", ""): ((64, 0.985), (4, 0.95), (1, 0.90)),
    ("p2p", ""): ((64, 0.95),),
    ("h2h", ""): ((1, 0.90),),
}

#: Backends with a required ratio: those that run if no strategy is named.
_ANSWERS = {"d2d": ("direct", "auto"), "h2d": ("auto",), "d2h": ("auto",), "p2p": ("auto",), "h2h": ("host",)}


def target(row: Mapping[str, str]) -> float | None:
    """The required ratio to a memcpy, or None."""
    direction, batch = row["direction"], int(row["num_blocks"])
    if row["backend"] not in _ANSWERS[direction]:
        return None
    if direction == "d2d" and batch < 4 and row["timing"] != "replay":
        return None  # the launch takes longer than the copy
    steps = REACH.get((direction, _class(row) if direction == "d2d" else ""), ())
    return next((ratio for least, ratio in steps if batch >= least), None)


def _class(row: Mapping[str, str]) -> str:
    forms = [form for name in row["kernel"].split() if name != "direct" for form in parse_kernel(name)]
    elements = [form.element for form in forms if form.kind == "tile"]
    if elements:
        # Packed keys and transposed values are one launch.  Its class is that of the widest elements.
        most = max(elements)
        return "tile of words" if most == 16 else f"tile of {'1 or 2' if most < 4 else '4'} bytes"
    return "short rows" if int(row["copy_size"]) <= 64 else "rows"


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="CSV...")
def targets(files: tuple[Path, ...]) -> None:
    """Compare rows of `kvbm bench` with the targets of kvbm. Exits with 1 if one is missed."""
    rows: list[tuple[Row, float]] = []
    for table in (table for path in files for table in read(path)):
        rows += ((row, ratio) for row in table.rows if (ratio := target(row)) is not None)
    numbers = ("blocks", "of a memcpy", "target")
    shown = new_table("pattern", "direction", "backend", *numbers, "", right=numbers)
    for row, ratio in rows:
        reached = "yes" if row.number("ratio") >= ratio else "[bold red]NO[/]"
        values = (row["pattern"], row["direction"], row["backend"], row["num_blocks"], f"{row.number('ratio'):.3f}")
        shown.add_row(*values, f"{ratio:g}", reached)
    print_table(shown)
    if any(row.number("ratio") < ratio for row, ratio in rows):
        raise click.exceptions.Exit(1)
