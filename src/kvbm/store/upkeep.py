"""What operators do with a folder that engines share: look at it, verify every byte, and make room.  Engines may run meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..digest.cells import Model
from ..errors import BindError, DigestError, KvbmError, SpecError
from ..layout import spec as layouts
from ..layout.layout import Layout
from ..layout.shapes import BlockShape
from ..pool.pool import Pool
from .folder import (
    Described,
    Folder,
    Part,
    Unit,
    alone,
    by_use,
    cover,
    described,
    folders_of,
    forget,
    old_units_of,
    remove,
    units_of,
)
from .keys import Content
from .latents import layouts_of_latents

__all__ = ["Held", "Removed", "Wrong", "gc", "held", "verify"]

#: Called as ``progress(done_bytes, total_bytes)``.
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Wrong:
    """A file that is not what was stored; `error` says how."""

    path: Path
    error: KvbmError | OSError


@dataclass(frozen=True)
class Held:
    """The folder of a content, with its units, oldest first.

    `unknown` are folders whose units are not known: they cannot be read, or lie where no engine looks for them.
    """

    path: Path
    described: Described
    units: list[Unit] = field(repr=False)
    unknown: list[Wrong] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all files of units."""
        return sum(unit.nbytes for unit in self.units)

    @property
    def used(self) -> float:
        """Time of the last use of a unit; 0 without units."""
        return max((unit.used for unit in self.units), default=0.0)

    def content(self) -> Content:
        """The content.

        Raises `BindError` if its units are not found under this version's rule, or are in a layout that is neither shipped nor
        that of a latent.
        """
        if self.described.problem:
            raise BindError(f"{self.path}: {self.described.problem}")
        fields = self.described.fields
        try:
            shape, layers = BlockShape(**fields["shape"]), tuple(fields["layers"])
            if not all(type(layer) is int for layer in layers):
                raise TypeError(f"layers {layers!r:.60}")
            values = "" if fields["values"] == shape.dtype else str(fields["values"])
        except (KeyError, TypeError, ValueError, OverflowError, SpecError) as error:
            raise BindError(f"{self.path}: content.json: expected the fields of a content, got {error!r:.200}") from None
        layout = _layout(self.path, str(fields.get("fingerprint")), shape, values)
        return Content("", self.described.title, layers, shape, layout, values)

    def folder(self) -> Folder:
        """The units as engines see them; raises as `content`."""
        return Folder(self.path.parent, self.content(), key=self.path.name)

    def incomplete(self) -> list[Unit]:
        """Units with missing heads: a rank has not written them yet, or its file was removed.  Raises as `content`."""
        folder = self.folder()
        heads = folder.content.shape.nh
        return [unit for unit in self.units if cover(folder.parts(Path(unit.path).name), 0, heads) is None]


def _layout(path: Path, fingerprint: str, shape: BlockShape, values: str) -> Layout:
    """A shipped layout, or that of a latent with such values."""
    rope = re.search(r"\bthe last ([0-9]{1,6}) elements of the latent\b", values)
    for one in itertools.chain(
        layouts.load_dir(layouts.layouts_dir()), layouts_of_latents(shape.hd, int(rope[1])) if rope else ()
    ):
        if one.fingerprint == fingerprint:
            return one
    raise BindError(
        f"{path}: content.json: fingerprint: expected that of a shipped layout or of a quantised latent, got {fingerprint:.40}: "
        "its units cannot be read here"
    )


def held(folder: Path) -> list[Held]:
    """The contents in a folder, sorted by name.  Other folders and files are left out."""
    found = []
    for path in folders_of(folder):
        if (said := described(path)) is not None:
            unknown: list[Wrong] = []

            def problem(at: Path, error: KvbmError | OSError, unknown: list[Wrong] = unknown) -> None:
                unknown.append(Wrong(at, error))

            is_old = said.problem and not said.is_damaged
            units = [*units_of(path, problem=problem), *(old_units_of(path) if is_old else ())]
            found.append(Held(Path(path), said, sorted(units), unknown))
    return found


# ---- verify --------------------------------------------------------------------------------------------------------------


def verify(contents: Sequence[Held], progress: Progress | None = None) -> Iterator[Wrong]:
    """Read every byte of all files, and compare names, metadata and digests.  Nothing is changed.

    Files that are removed meanwhile are left out.  A content of another rule, or whose description is damaged, is one wrong folder,
    as is each folder whose units are not known.
    """
    done, total = 0, sum(one.nbytes for one in contents)
    for one in contents:
        yield from one.unknown
        try:
            folder = one.folder()
        except KvbmError as error:
            yield Wrong(one.path, error)
            continue
        pools: dict[int, Pool] = {}
        for unit in one.units:
            name = Path(unit.path).name
            for path in folder.strangers(name):
                yield Wrong(path, BindError(f"{path}: expected a regular file of heads from 0 to {folder.content.shape.nh - 1}"))
            for part in folder.parts(name):
                try:
                    _verify(folder, name, part, pools)
                except FileNotFoundError:
                    pass
                except (KvbmError, OSError) as error:
                    yield Wrong(folder.home(name) / part.name, error)
            done += unit.nbytes
            if progress is not None:
                progress(done, total)


def _verify(folder: Folder, name: str, part: Part, pools: dict[int, Pool]) -> None:
    """Raise an error for a file that is wrong."""
    shape, count = folder.content.shape, part.last - part.first
    stored, heads = folder.inspect(name, part)
    with stored:
        if count not in pools:
            pools[count] = Pool.allocate(folder.content.layout, replace(shape, nh=count), 1)
        pool = pools[count]
        if stored.digests is None:
            raise BindError(f"{stored.path}: expected a file with digests")
        stored.source(folder.content.layout, pool.shape, 1).fill(pool, [0], [0])
        found = [("block", int(pool.digest([0])[0]), int(stored.digests.blocks[0]))]
        for row, wanted in enumerate(heads):
            model = Model(heads=range(part.first, part.last), nh=shape.nh)
            got = int(pool.section(h=row).digest([0], model=model)[0])
            found.append((f"head {part.first + row}", got, wanted))
        for what, got, wanted in found:
            if got != wanted:
                raise DigestError(f"{stored.path}: {what}: expected digest {wanted:#018x}, got {got:#018x}")


# ---- gc ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Removed:
    """What `gc` has removed, or would remove, and what is left, with files that could not be removed."""

    units: int
    nbytes: int
    left_units: int
    left_bytes: int


def gc(
    folder: Path, older_than: float | None = None, to_bytes: int | None = None, other_rules: bool = False, dry_run: bool = False
) -> Removed:
    """Remove units: only their files, and only below folders of contents (see `described`).

    Parameters
    ----------
    older_than : float, optional
        Remove units that were not used for so many seconds.
    to_bytes : int, optional
        Then remove the least recently used units, until the others have so many bytes.
    other_rules : bool
        Remove the contents of other rules, which this version of kvbm does not read.  A damaged description is not another rule.
    dry_run : bool
        Change nothing.

    Raises
    ------
    BindError
        Another process removes files of this folder at the moment.
    """
    with contextlib.nullcontext(True) if dry_run else alone(folder) as is_alone:
        if not is_alone:
            raise BindError(f"{folder}: another process removes files there at the moment; try again")
        contents = held(folder)
        others = [one for one in contents if one.described.problem and not one.described.is_damaged]
        of_others = {unit.path for one in others for unit in one.units}
        units = by_use(unit for one in contents for unit in one.units)
        left, now = sum(unit.nbytes for unit in units), time.time()
        count, nbytes = 0, 0
        for unit in units:
            is_old = older_than is not None and now - unit.used > older_than
            is_over = to_bytes is not None and left > to_bytes
            if not (is_old or is_over or (other_rules and unit.path in of_others)):
                continue
            gone = unit.nbytes if dry_run else remove(unit)
            count, nbytes, left = count + (gone == unit.nbytes), nbytes + gone, left - gone
        if not dry_run:
            for one in contents:
                if other_rules and one in others:
                    forget(one.path)
                else:
                    list(units_of(str(one.path), clear=True))
    return Removed(count, nbytes, len(units) - count, left)
