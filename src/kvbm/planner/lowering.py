"""Lowering: choose the kernels of a plan, replace missing kernels by others, and compute their arguments.

It is pure: the input is parts of a plan, the alignment of both sides and the existing kernels; the output is launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

from ..errors import MissingKernelError
from .cast import CastPart
from .kernel_forms import MAX_INNER, MAX_OUTER, MAX_PARTS, Form, Kernel, form_of, kernel_name, parse_kernel
from .loopnest import Arguments, Part
from .shared_tiles import Staged, stage

Addresses: TypeAlias = Any  # an array of them: nothing here imports NumPy

#: A plane with less than this share of a block's bytes is copied element by element in the launch of the others, if transposed.
_SMALL_SHARE = 4


class CellParams(NamedTuple):
    """A kernel's parameters for the cells of a part, in addition to its loops."""

    first: int  # key of the first cell at position 0
    #: Strides of the modes in keys.
    outer: tuple[int, ...]
    inner: tuple[int, ...]
    steps: tuple[int, ...] = ()  # strides in bytes of the binary digits of a word's number in its cell, fastest first
    #: Bytes of a word.  0: the kernel's word, and each word is a cell.
    word: int = 0
    along_b: bool = False  # for tiles: cells are the words of the destination


class Launch(NamedTuple):
    """One kernel, and the parts that it copies."""

    kernel: Kernel
    work: tuple[tuple[Part, Form], ...]  # each part with its form; for planes, each form has its own word
    #: The kernel that fits these parts exactly; `kernel` may be another one with surplus modes.  Empty: no other fits better.
    wanted: Kernel
    staged: tuple[Staged, ...] = ()  # how parts are staged in shared memory, if they are

    @property
    def name(self) -> str:
        """The kernel's name."""
        return kernel_name(self.kernel)

    def arguments(self, src: Steps, dst: Steps) -> list[Arguments]:
        """The arguments of the kernel, one per part, for tables that were shortened by `src` and `dst`."""
        args = [part.fold(src.entry, dst.entry).arguments(form, src.block, dst.block) for part, form in self.work]
        return [_of_page(one, rows) for one, rows in zip(self.staged, args, strict=True)] if self.staged else args


class Steps(NamedTuple):
    """Equal steps in a pool's table, so that kernels need not read all of it."""

    #: Bytes from an allocation of a block to that of the next block.  The table then has only the entries of the first
    #: block.
    block: int | None = None
    #: Bytes from an entry of that table to the next.  The table then has one entry.
    entry: int | None = None

    @property
    def whole(self) -> int | None:
        """Bytes from each entry of the whole table to the next (above 0); 0 for a single entry; None if they differ."""
        return self.entry if self.block is None else None

    def shorten(self, table: Addresses, num_blocks: int) -> Addresses:
        """The part of the table that is read."""
        if self.entry is not None:
            return table[:1]
        return table if self.block is None else table[: len(table) // num_blocks]


# ---- the ideal launches of a plan ----------------------------------------------------------------------------------


def launches(parts: Sequence[Part], alignments: tuple[int, int], *, planes: bool, pages: bool) -> list[Launch]:
    """The launches of a plan if every possible kernel is built.

    K and V share a joined kernel.  Planes of one page (`planes`) share a kernel of records, in which transposed
    elements are rows of one, or, with `pages`, are staged in shared memory.  A part with more modes than a kernel
    supports is cut into pieces, with one launch each.  `alignments` are those of the base addresses of both sides, in
    bytes.
    """
    casts = [part for part in parts if isinstance(part, CastPart)]
    if casts:
        rest = [part for part in parts if not isinstance(part, CastPart)]
        return [*launches(rest, alignments, planes=planes, pages=pages), *(cast_launch(part, alignments) for part in casts)]
    work = [(part, part.form(*alignments)) for part in parts]
    if planes and work:
        return _of_planes(work, alignments) if pages else _of_records(work)
    if len(work) > 2:  # pieces of a section
        return _of_records(work)
    if all(part.fit(form.kind) == (part,) for part, form in work):
        return [_launch(tuple(form for _, form in work), work)] if work else []
    pieces = [piece for part, form in work for piece in part.fit(form.kind)]
    return [_launch((form,), [(piece, form)]) for piece in pieces for form in (piece.form(*alignments),)]


def _launch(kernel: Kernel, work: Sequence[tuple[Part, Form]], staged: Sequence[Staged] = ()) -> Launch:
    return Launch(kernel, tuple(work), kernel, tuple(staged))


def cast_launch(part: CastPart, alignments: tuple[int, int]) -> Launch:
    """The launch of a cast: its elements, and their scales if they are stored."""
    form = part.form(*alignments)
    work: list[tuple[Part, Form]] = [(part, form)]
    if part.scales:
        work.append((part.scales, part.scales.scale_form(form, alignments[part.quantises])))
    return _launch((replace(form, word=0),), work)


def _of_planes(work: Sequence[tuple[Part, Form]], alignments: tuple[int, int]) -> list[Launch]:
    """Stage a page in shared memory if that helps, or only K or V of it; the other planes are copied by rows."""
    page = _page([part for part, _ in work], alignments)
    if page is not None:
        return [page]
    made: list[Launch] = []
    rows: list[tuple[Part, Form]] = []
    for half in dict.fromkeys(part.half for part, _ in work):
        mine = [(part, form) for part, form in work if part.half == half]
        page = _page([part for part, _ in mine], alignments)
        if page is not None:
            made.append(page)
        else:
            rows += mine
    return made + _of_records(rows)


def _page(parts: Sequence[Part], alignments: tuple[int, int]) -> Launch | None:
    staged = stage(parts, *alignments) if 0 < len(parts) <= MAX_PARTS else None
    if staged is None or max(len(one.part.inner) for one in staged) >= MAX_INNER:
        return None
    outer, inner = max(len(one.part.outer) for one in staged), max(len(one.part.inner) for one in staged)
    kernel = form_of("page_in" if staged[0].gathers else "page_out", outer, inner, 0, 0)
    return _launch((kernel,), [(one.part, form_of("rows", outer, inner, 0, one.item)) for one in staged], staged)


def _of_records(work: Sequence[tuple[Part, Form]]) -> list[Launch]:
    """The launches of planes: up to `MAX_PARTS` share one, and large tiles have one of their own.

    With digests: `digest.cells._shared`.
    """
    made, rows = [], []
    total = sum(part.nbytes for part, _ in work)
    for part, form in work:
        if form.kind == "tile" and _SMALL_SHARE * part.nbytes > total:
            for piece in part.fit("tile"):
                own = form_of("tile", len(piece.outer), len(piece.inner) - 3, form.element, form.word)
                made.append(_launch((own,), [(piece, own)]))
            continue
        kind = "rows" if form.kind == "tile" else form.kind
        for piece in part.fit(kind):
            word = form.element or form.word
            rows.append((piece, form_of(kind, len(piece.outer), len(piece.inner), 0, word)))
    for first in range(0, len(rows), MAX_PARTS):
        some = rows[first : first + MAX_PARTS]
        if len(some) == 1:
            made.append(_launch((some[0][1],), some))
        else:
            # A launch uses one pair of tables; the strides of a block id in these are the same for all planes.
            outer, inner = max(form.outer for _, form in some), max(form.inner for _, form in some)
            made.append(_launch((form_of("record", outer, inner, 0, 0),), _padded(some, outer, inner)))
    return made


def _padded(work: Sequence[tuple[Part, Form]], outer: int, inner: int) -> list[tuple[Part, Form]]:
    """Forms with the numbers of modes of the kernel for all planes."""
    return [(part, replace(form, outer=outer, inner=inner)) for part, form in work]


# ---- existing kernels ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernels:
    """The kernels that a machine has."""

    names: frozenset[str]  # names of all built kernels
    compiles: Callable[[Kernel], bool]  # returns True if a kernel that is not built can be compiled at run time
    on_gpu: bool  # True for a GPU, False for the host

    @functools.cached_property
    def forms(self) -> tuple[Form, ...]:
        """Forms of the kernels of one part, the leanest first.  Only a plan whose own kernel is not built needs them."""
        single = (parse_kernel(name)[0] for name in sorted(self.names) if "__" not in name)
        return tuple(sorted(single, key=lambda form: (form.sm_limited, form.inner, form.outer, form.kind)))

    def has(self, kernel: Kernel) -> bool:
        return kernel_name(kernel) in self.names or self.compiles(kernel)


def lower(asked: Sequence[Launch], kernels: Kernels, *, sm_limited: bool = False) -> list[Launch]:
    """The launches with existing kernels: those that fit exactly, or others that can do the same work.

    With `sm_limited` they accept a limit of multiprocessors, and each copies one part.  Raises `MissingKernelError` if
    no kernel is built, or a part would need thousands of launches.
    """
    made = []
    for launch in asked:
        if launch.kernel[0].kind == "cast":
            # All of its kernels are built, and each also runs on few multiprocessors.
            kernel = (replace(launch.kernel[0], sm_limited=sm_limited),)
            made.append(launch._replace(kernel=kernel, wanted=kernel))
            continue
        if launch.staged or (len(launch.work) > 1 and not sm_limited):
            if kernels.has(launch.kernel):
                made.append(launch)
                continue
            if launch.kernel[0].of_planes:
                # The general kernel for planes.
                general = replace(launch.kernel[0], outer=MAX_OUTER, inner=MAX_INNER - bool(launch.staged))
                work = _padded(launch.work, general.outer, general.inner)
                made.append(launch._replace(kernel=(general,), work=tuple(work)))
                continue
        for part, form in launch.work:
            made += _alone(part, replace(form, sm_limited=sm_limited), kernels)
    return made


def _alone(part: Part, asked: Form, kernels: Kernels) -> Iterator[Launch]:
    """Launches of a part: by the exact kernel, built or compiled now; else a built one with surplus modes; else by elements."""
    candidates = [asked]
    if asked.kind == "tile":
        candidates.append(Form("rows", 0, 0, 0, asked.element, asked.sm_limited))
    wanted: Kernel = ()
    for candidate in candidates:
        pieces = part.fit(candidate.kind)
        inner = len(pieces[0].inner) - (3 if candidate.kind == "tile" else 0)
        form = replace(candidate, outer=len(pieces[0].outer), inner=inner)
        wanted = wanted or (form,)
        compiles = candidate is asked and not asked.sm_limited
        if form.name in kernels.names or (compiles and kernels.compiles((form,))):
            found: Form | None = form
        else:
            # Teams on all multiprocessors also transpose tiles, much faster than single elements; the host has no teams.
            likes = [form, replace(form, sm_limited=True)] if form.kind == "tile" and kernels.on_gpu else [form]
            found = next((other for like in likes for other in kernels.forms if other.runs(like)), None)
        if found is not None:
            yield from (Launch((found,), ((piece, found),), () if asked.sm_limited else wanted) for piece in pieces)
            return
    raise MissingKernelError(f"no kernel runs {kernel_name(wanted)}, and none was built for any loop nest")


def _of_page(one: Staged, of_rows: Arguments) -> Arguments:
    """Arguments of a kernel of pages: loops inside a piece, then the step to the next piece, and the staged parts."""
    offsets, outer, inner, strides, _ = of_rows
    still = [(1, 0, 0)] * (MAX_INNER - 1 - len(inner))
    loops = [*inner, *still, (one.pieces.extent, one.pieces.src, one.pieces.dst)]
    return offsets, outer, loops, strides, (one.word, one.item, one.distance, one.place, one.held)


def engine_arguments(parts: Sequence[Part]) -> list[list[Arguments]]:
    """Loop nests in bytes for the copy engine, several per call; empty if one has too many modes."""
    fitted = [part.fit("rows") for part in parts]
    if any(len(pieces) > 1 for pieces in fitted):
        return []
    args = [part.arguments(Form("rows", len(part.outer), len(part.inner), 0, 1)) for (part,) in fitted]
    return [args[first : first + MAX_PARTS] for first in range(0, len(args), MAX_PARTS)]
