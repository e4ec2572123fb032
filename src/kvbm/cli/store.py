"""The command line: ``kvbm store ls | du | verify | gc``.

Only click is imported here before something runs, as for every command.
"""

from __future__ import annotations

import re
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .._arguments import quoted
from ..errors import DigestError, KvbmError, printable
from .click_classes import Group, print_error
from .common import confirm, json_option, new_table, note, print_json, print_table, progress, shown, size_of

if TYPE_CHECKING:
    from ..store.upkeep import Held

_FOLDER = click.argument("folder", metavar="FOLDER", type=click.Path(exists=True, file_okay=False, path_type=Path))

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def _age(ctx: click.Context, param: click.Parameter, value: str | None) -> float | None:  # noqa: ARG001
    """``7d``, ``12h``, ``90s``: seconds."""
    if value is None:
        return None
    match = re.fullmatch(r"\s*(\d{1,9})\s*([smhdw])\s*", value, re.ASCII)
    if match is None:
        raise click.BadParameter(f"expected a time such as 90s, 30m, 12h, 7d or 2w, got {quoted(value, 60)}")
    return int(match[1]) * _SECONDS[match[2]]


def _bytes(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:  # noqa: ARG001
    return None if value is None else 0 if value.strip() == "0" else size_of(value, 1 << 20)


@click.group(cls=Group)
def store() -> None:
    """Look after a folder that engines share: what it holds, whether it is as it was, and room.

    Engines may run meanwhile. A FOLDER is the `folder` of vLLM's settings and the `path` of SGLang's.
    """


@store.command("ls", examples=["kvbm store ls kv", "kvbm store ls kv --json"])
@_FOLDER
@json_option("a list of contents")
def ls(folder: Path, as_json: bool) -> None:
    """List the contents of a folder: which model, layers and heads, how much, and when it was used.

    Contents of another rule, such as of an earlier version of kvbm, are listed with the reason why they are not read.
    """
    from ..planner.plan import size_text
    from ..store.upkeep import held

    contents = held(folder)
    if as_json:
        print_json([_as_json(one) for one in contents])
        return
    if not contents:
        note(f"{shown(folder)}: no contents")
        return
    table = new_table("content", "model", "layers", "heads", "tokens", "values", "units", "size", "used",
                      right=("layers", "heads", "tokens", "units", "size"), wrapped=("model", "values"))  # fmt: skip
    for one in contents:
        shape = one.described.fields.get("shape", {})
        shape = shape if isinstance(shape, dict) else {}
        sizes = [_text(shape.get(name, "-")) for name in ("nl", "nh", "nt")]
        values = _text(one.described.fields.get("values", "-"))
        name = _text(one.path.name)[:12]
        counts = f"{len(one.units):,}", size_text(one.nbytes), _when(one.used)
        table.add_row(name, _text(one.described.title), *sizes, values, *counts)
    print_table(table)
    for one in contents:
        if one.described.problem:
            note(f"{_text(one.path.name)}: not read: {_text(one.described.problem)}")
        for wrong in one.unknown:
            note(f"not counted: {_text(wrong.error)}")


@store.command("du", examples=["kvbm store du kv", "kvbm store du kv --json"])
@_FOLDER
@json_option("bytes and units by content, and their sums")
def du(folder: Path, as_json: bool) -> None:
    """Sum units and bytes by content, and units with missing heads, which no engine finds."""
    from ..planner.plan import size_text
    from ..store.upkeep import held

    rows: list[dict[str, Any]] = []
    for one in held(folder):
        try:
            missing = len(one.incomplete())
        except KvbmError:  # `ls` says why
            missing = len(one.units)
        rows.append({"content": one.path.name, "units": len(one.units), "incomplete": missing, "bytes": one.nbytes})
    names = ("units", "incomplete", "bytes")
    whole: dict[str, int] = {name: sum(row[name] for row in rows) for name in names}
    if as_json:
        print_json({"contents": rows, **whole})
        return
    table = new_table("content", "units", "not found", "size", right=("units", "not found", "size"))
    for row in [*rows, {"content": "all", **whole}]:
        table.add_row(_text(row["content"])[:12], f"{row['units']:,}", f"{row['incomplete']:,}", size_text(row["bytes"]))
    print_table(table)


@store.command("verify", examples=["kvbm store verify kv", "kvbm store verify kv --json"])
@_FOLDER
@json_option("the numbers of units and bytes, and a list of what is wrong")
def verify(folder: Path, as_json: bool) -> None:
    """Read every byte of all units, and compare names, metadata and digests. Changes nothing.

    An engine that reads a wrong file computes its tokens and removes the file. Exits with 21 if a byte of a unit is wrong, else
    with the code of the first file or folder that cannot be read, or is not where engines look for it. Contents of another rule are
    left out.
    """
    from ..store.upkeep import held
    from ..store.upkeep import verify as verified

    contents = [one for one in held(folder) if one.described.is_damaged or not one.described.problem]
    found, codes = [], []
    with progress(str(folder)) as update:
        for wrong in verified(contents, lambda done, total: update(completed=done, total=total)):
            codes.append(wrong.error.exit_code if isinstance(wrong.error, KvbmError) else 1)
            found.append({"path": str(wrong.path), "error": str(wrong.error), "exit_code": codes[-1]})
            print_error(wrong.error)
    read = [one for one in contents if not one.described.problem]
    units, nbytes = sum(len(one.units) for one in read), sum(one.nbytes for one in read)
    if as_json:
        print_json({"units": units, "bytes": nbytes, "wrong": found})
    else:
        result = f"{len(found):,} wrong" if found else "all as they were"
        click.echo(f"{shown(folder)}: {units:,} units, {nbytes:,} bytes, {result}")
    if codes:
        sys.exit(DigestError.exit_code if DigestError.exit_code in codes else codes[0])


@store.command("gc", examples=["kvbm store gc kv --older-than 7d --dry-run", "kvbm store gc kv --to-size 500GB"])
@_FOLDER
@click.option("--older-than", callback=_age, metavar="TIME", help="Remove units that were not used for TIME, such as 7d or 12h.")
@click.option("--to-size", "to_bytes", callback=_bytes, metavar="SIZE",
              help="Then remove the least recently used units until SIZE is left, such as 500GB.")
@click.option("--other-rules", is_flag=True, help="Remove contents of other rules, which this version does not read.")
@click.option("--dry-run", is_flag=True, help="Change nothing, and say what would be removed.")
@json_option("what was removed, and what is left")  # fmt: skip
def gc(
    folder: Path, older_than: float | None, to_bytes: int | None, other_rules: bool, dry_run: bool, as_json: bool
) -> None:
    """Remove units by age and by size.

    Only files of units are removed, in folders with a content.json of kvbm. An engine that reads a file goes on; one that has
    looked up a unit that is gone computes its tokens.
    """
    from ..planner.plan import size_text
    from ..store.upkeep import gc as collected

    if older_than is None and to_bytes is None and not other_rules:
        raise click.UsageError("expected --older-than, --to-size or --other-rules")
    begin = time.perf_counter()
    done = collected(folder, older_than, to_bytes, other_rules, dry_run)
    if as_json:
        print_json({"dry_run": dry_run, "units": done.units, "bytes": done.nbytes, "left_units": done.left_units,
                    "left_bytes": done.left_bytes})  # fmt: skip
        return
    text = (
        f"{'would remove' if dry_run else 'removed'} {done.units:,} units, {size_text(done.nbytes)}; left: "
        f"{done.left_units:,} units, {size_text(done.left_bytes)}"
    )
    if dry_run:
        click.echo(text)
    else:
        confirm(f"{text} ({time.perf_counter() - begin:.1f} s)")


def _when(seconds: float) -> str:
    if not seconds:
        return "-"
    try:
        return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        return "in the future" if seconds > 0 else "-"


def _as_json(one: Held) -> dict[str, Any]:
    return {
        "content": one.path.name, "title": one.described.title, "problem": one.described.problem, "fields": one.described.fields,
        "units": len(one.units), "bytes": one.nbytes, "used": one.used or None,
    }  # fmt: skip


def _text(value: object) -> str:
    return printable(str(value), 200)
