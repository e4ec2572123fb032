"""The command line: ``kvbm convert | verify | digest``.

Only click is imported here before something runs, as for every command.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import BindError, DigestError, KvbmError, printable
from ..layout import spec
from ..layout.shapes import LIMIT, load_shape
from .click_classes import Command, print_error
from .common import (
    cast_options,
    confirm,
    device_option,
    json_option,
    layout_option,
    num_blocks_option,
    print_json,
    progress,
    shape_option,
    shown,
)

if TYPE_CHECKING:
    from ..planner.cast import Cast
    from ..store.digests import Damage
    from ..store.file import Stored

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def _runs(ctx: click.Context, param: click.Parameter, given: str | None) -> list[range] | None:  # noqa: ARG001
    """``3,7-9``: numbers and ranges."""
    if given is None:
        return None
    runs = []
    for text in given.split(","):
        match = re.fullmatch(r"\s*(\d{1,10})(?:-(\d{1,10}))?\s*", text, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if last < first or last >= LIMIT:
            raise click.BadParameter(f"expected numbers of blocks such as 3,7-9, got {given!r:.60}")
        runs.append(range(first, last + 1))
    return runs


def _listed(runs: Sequence[range] | None, stored: Stored) -> list[int] | None:
    """The selected blocks.  Raises an error for a range that no file of this size can have, before listing it."""
    if runs is None:
        return None
    most = max(run.stop for run in runs)
    if most > stored.file.size * 2:  # a block has at least four bits
        raise BindError(f"{stored.path}: --blocks: there is no block {most - 1}")
    found = [block for run in runs for block in run]
    if len(set(found)) != len(found):
        raise click.UsageError("--blocks: expected each block once")
    return found


_BLOCKS = click.option("--blocks", callback=_runs, metavar="LIST", help="Only these blocks, such as 3,7-9.")
_JSON = json_option()


def _source_options(name: str) -> Callable[[Any], Any]:
    """Options for facts that a file may not contain."""

    def add(command: Any) -> Any:
        for option in (
            num_blocks_option(f"Blocks in {name}; needed if {name} and its size do not give the number."),
            shape_option(default=None),
            layout_option("--from", "src_name", help=f"Layout of {name}; needed if {name} does not name it."),
        ):
            command = option(command)
        return command

    return add


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Callable[[int, int], None]]:
    from rich.progress import TimeRemainingColumn, TransferSpeedColumn

    with progress(title, None, TransferSpeedColumn(), TimeRemainingColumn()) as update:
        yield lambda done, total: update(completed=done, total=total)


@click.command(
    cls=Command,
    examples=[
        "kvbm convert in.safetensors out.safetensors --to universal",
        "kvbm convert in.safetensors some.safetensors --to universal --blocks 0,2-3",
        "kvbm convert in.safetensors small.safetensors --to record/per_token_head_fp8_planes --cast amax",
    ],
)
@click.argument("source", metavar="IN", type=_FILE)
@click.argument("target", metavar="OUT", type=click.Path(dir_okay=False, path_type=Path))
@layout_option("--to", "dst_name", required=True, help="Layout of OUT.")
@_source_options("IN")
@_BLOCKS
@cast_options("OUT")
@device_option("Where to convert.")
@click.option("--no-verify", is_flag=True, help="Do not compare or compute digests; OUT gets those of IN, or none with --cast.")
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")  # fmt: skip
def convert(
    source: Path, target: Path, src_name: str | None, dst_name: str, shape_text: str | None, num_blocks: int | None,
    blocks: Sequence[range] | None, cast: Cast, dtype: str | None, device: str, no_verify: bool, force: bool,
) -> None:  # fmt: skip
    """Convert a safetensors file of blocks from one layout to another.

    A file holds one tensor per allocation, alloc_00000, alloc_00001, … in table order. Layout, fingerprint and shape are in
    its metadata. A layout name without a fingerprint needs --from to confirm it. OUT is written
    completely or not at all. If OUT is a symlink, its target is written.

    Each written block is compared with its digest in IN, or with a digest of the data that were read if IN has none. OUT gets
    these digests. A wrong block is an error that names its layers and tokens, and OUT stays as it was.

    Values change only with --cast. OUT then says what was cast, and has the digests of its own blocks; those of IN are
    compared as they are read. If IN was written with a scale X, amax uses it.
    """
    from .. import store

    if target.exists():
        if source.samefile(target):
            raise click.UsageError(f"IN and OUT are the same file: {source}")
        if not target.is_file():
            raise click.UsageError(f"{target} is no regular file: it is not replaced")
        if not force:
            raise click.UsageError(f"{target} is already there: --force replaces it")
    src_layout = spec.load(src_name) if src_name else None
    dst_layout = spec.load(dst_name)
    start = time.perf_counter()
    stored = store.read(source)
    with _bar(f"{source} → {dst_layout.name}") as update:
        made = store.convert(
            stored, target, dst_layout, _listed(blocks, stored), src_layout=src_layout,
            shape=load_shape(shape_text) if shape_text else None, num_blocks=num_blocks, cast=cast, dtype=dtype,
            device=device, verify=not no_verify, force=force, progress=update,
        )  # fmt: skip
    seconds = time.perf_counter() - start
    assert made.shape is not None
    assert made.num_blocks is not None
    nbytes = made.num_blocks * dst_layout.resolve(made.shape, made.num_blocks).block_bytes
    name = src_layout.name if src_layout else printable(stored.layout_name or "?")
    if made.casts != stored.casts:
        suffix = ", verified before the cast" if stored.digests and not no_verify else ""
        suffix += "".join(f"; {f'{printable(plane)}: ' if plane else ''}{one}" for plane, one in made.casts.items())
    else:
        suffix = "" if no_verify else ", verified" if made.digests else ", not verified: the layout has no digests"
    confirm(
        f"{shown(source)} ({name}) → {shown(target)} ({dst_layout.name}): {made.num_blocks:,} blocks, "
        f"{nbytes / 2**20:,.1f} MiB in {seconds:.2f} s, {nbytes / seconds / 1e9:.3g} GB/s, on {device}{suffix}"
    )


@click.command(cls=Command, examples=["kvbm verify in.safetensors", "kvbm verify in.safetensors --blocks 0-3 --json"])
@click.argument("paths", nargs=-1, required=True, type=_FILE, metavar="FILE...")
@layout_option("--from", "src_name", help="Layout of the files; needed if it is not shipped.")
@_BLOCKS
@_JSON
def verify(paths: tuple[Path, ...], src_name: str | None, blocks: Sequence[range] | None, as_json: bool) -> None:
    """Compare blocks of safetensors files with their digests.

    Digests are stored by `kvbm convert` and by `kvbm digest --write`. Prints each block that differs, with exactly the layers
    and tokens that are wrong. Exits with 21 if a block differs, else with the code of the first file that cannot be read or
    has no digests.
    """
    from .. import store

    source = spec.load(src_name) if src_name else None
    wrong = False

    def look(path: Path) -> dict[str, Any]:
        nonlocal wrong
        stored = store.read(path)
        ids = _listed(blocks, stored)
        with _bar(str(path)) as update:
            found = store.verify(stored, ids, src_layout=source, progress=update)
        wrong |= bool(found)
        checked = stored.num_blocks if ids is None else len(ids)
        if not as_json:
            for one in found:
                click.echo(f"{shown(path)}: {one}")
            click.echo(f"{shown(path)}: {checked:,} blocks compared, {f'{len(found):,} wrong' if found else 'all as they were'}")
        return {"num_blocks": stored.num_blocks, "compared": checked, "wrong": [_as_json(one) for one in found]}

    code = _each(paths, look, as_json)
    if wrong or code:
        sys.exit(DigestError.exit_code if wrong else code)


def _as_json(one: Damage) -> dict[str, Any]:
    return {
        "block": one.block,
        "what": one.what,
        "layers": None if one.layers is None else list(one.layers),
        "tokens": None if one.tokens is None else list(one.tokens),
        "stored": f"{one.expected:016x}",
        "found": f"{one.found:016x}",
    }


@click.command(cls=Command, examples=["kvbm digest in.safetensors", "kvbm digest in.safetensors --blocks 0-3 --json"])
@click.argument("paths", nargs=-1, required=True, type=_FILE, metavar="FILE...")
@_source_options("FILE")
@_BLOCKS
@click.option("--write", is_flag=True, help="Add digests to files that have none.")
@_JSON
def digest(
    paths: tuple[Path, ...], src_name: str | None, shape_text: str | None, num_blocks: int | None,
    blocks: Sequence[range] | None, write: bool, as_json: bool,
) -> None:  # fmt: skip
    """Print the digest of each block of safetensors files.

    A digest depends on the contents of a block and not on the layout: a converted file has the same digests. It is computed
    from the block as it is now; `kvbm verify` compares it with the stored one.

    With --write, digests are added to files that have none. A file is replaced when the new one is complete.
    """
    from .. import store

    if write and blocks is not None:
        raise click.UsageError("--write is for whole files: leave --blocks out")
    given: dict[str, Any] = {
        "src_layout": spec.load(src_name) if src_name else None,
        "shape": load_shape(shape_text) if shape_text else None,
        "num_blocks": num_blocks,
    }

    def look(path: Path) -> dict[str, Any]:
        stored = store.read(path)
        ids = _listed(blocks, stored)
        with _bar(str(path)) as update:
            if write:
                made = store.add_digests(stored, **given, progress=update)
                assert made.digests is not None
                found = made.digests
            else:
                found = store.digest(stored, ids, **given, progress=update)
        texts = [f"{value:016x}" for value in found.blocks.tolist()]
        named = dict(zip(range(len(texts)) if ids is None else ids, texts, strict=True))
        if not as_json:
            for block, text in named.items():
                click.echo(f"{text}  {shown(path)}:{block}")
        return {"blocks": [{"block": block, "digest": text} for block, text in named.items()]}

    if code := _each(paths, look, as_json):
        sys.exit(code)


def _each(paths: Sequence[Path], look: Callable[[Path], dict[str, Any]], as_json: bool) -> int:
    """Process all files, also after an error in one of them; return the exit code of the first error."""
    from ..store.digests import DIGEST

    code, results = 0, []
    for path in paths:
        try:
            results.append({"path": str(path), "error": None} | look(path))
        except (KvbmError, OSError) as error:
            print_error(error)
            code = code or (error.exit_code if isinstance(error, KvbmError) else 1)
            results.append({"path": str(path), "error": str(error)})
    if as_json:
        print_json({"digest": DIGEST, "files": results})
    return code
