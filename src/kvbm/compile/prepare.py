"""Prepare launches: turn a plan into copies that the compiled part runs.  The name of a kernel connects both."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from .. import _core
from ..errors import MissingKernelError
from ..planner.kernel_forms import Kernel, kernel_name, parse_kernel
from ..planner.loopnest import Part
from ..planner.lowering import CellParams, Kernels, Launch, Steps, engine_arguments, lower
from ..planner.plan import Plan
from . import nvrtc


@functools.cache
def _kernels_on(device: int) -> Kernels:
    """The kernels of a CUDA device, or of the host (-1)."""
    return Kernels(frozenset(_core.kernel_names()), functools.partial(_compiles, device), device >= 0)


def _compiles(device: int, kernel: Kernel) -> bool:
    """True if a kernel that is not built can be compiled at run time."""
    if device < 0 or not _core.num_images() or not nvrtc.is_known_kind(kernel) or nvrtc.why_not(device):
        return False
    nvrtc.kernel(kernel_name(kernel), device)
    return True


def warm(copies: Iterable[_core.Copy], device: int) -> None:
    """Load the kernels of copies on a GPU now, not while a model runs."""
    for kernel in dict.fromkeys(copy.kernel for copy in copies) if device >= 0 else ():
        _core.warm(kernel, device)


def launches_of(made: Plan, alignments: tuple[int, int], sm_limited: bool, device: int) -> list[Launch]:
    """The launches of a plan on a GPU, or on the host (-1)."""
    try:
        return lower(made.launches(*alignments, pages=device >= 0 and not sm_limited), _kernels_on(device), sm_limited=sm_limited)
    except MissingKernelError as error:
        raise MissingKernelError(f"{error}; {nvrtc.PERMANENT}") from None


def kernel_notes(launches: Sequence[Launch], device: int) -> list[str]:
    """Notes on kernels that were not built for the copy."""
    texts, missing = [], False
    for launch in {launch.kernel: launch for launch in launches}.values():
        if (origin := nvrtc.origin(launch.name, device)) is not None:
            texts.append(f"{origin}.")
        elif launch.wanted and launch.kernel != launch.wanted:
            wanted = kernel_name(launch.wanted)
            texts.append(f"{launch.name} runs in place of {wanted}, which is not built in: {_cost(launch)}.")
            missing = True
    if missing:
        why = nvrtc.why_not(device) if device >= 0 and _core.num_images() else ""
        texts.append(f"{why}. {nvrtc.PERMANENT}." if why else f"{nvrtc.PERMANENT}.")
    return texts


def _cost(launch: Launch) -> str:
    [wanted], [has] = launch.wanted, launch.kernel
    if wanted.kind == "tile" and has.kind != "tile":
        return f"{wanted.element}-byte elements move one by one, not in tiles, at a fraction of the speed"
    more = has.outer - wanted.outer + has.modes - wanted.modes
    text = f"it has {more} mode{'s' if more != 1 else ''} more than needed, and each costs every word a division"
    return text + (", and its teams share one large CTA a multiprocessor" if has.sm_limited else "")


def prepare(
    made: Plan,
    src_alignment: int,
    dst_alignment: int,
    *,
    sm_limited: bool = False,
    device: int = -1,
    src_steps: Steps = Steps(),  # noqa: B008  (immutable)
    dst_steps: Steps = Steps(),  # noqa: B008
) -> list[_core.Copy]:
    """The launches of a plan: one; or one each for K and V if they share no kernel; or more if it has many modes.

    Parameters
    ----------
    made : Plan
        The plan.
    src_alignment, dst_alignment : int
        Alignment of the base addresses of each side (bytes).
    sm_limited : bool
        Use kernels that accept a limit of multiprocessors.
    device : int
        CUDA device ordinal.  A kernel that is not built is compiled for it, if possible.  -1: the host, only built kernels.
    src_steps, dst_steps : Steps
        How the table of each side was shortened.

    Raises
    ------
    MissingKernelError
        The plan has so many modes that it would need thousands of launches.
    BuildError
        NVRTC refused a kernel.
    """
    return copies_of(made, launches_of(made, (src_alignment, dst_alignment), sm_limited, device), src_steps, dst_steps)


def copies_of(made: Plan, launches: Sequence[Launch], src_steps: Steps, dst_steps: Steps) -> list[_core.Copy]:
    """The launches of a plan (`launches_of`), for tables that were shortened as the steps say."""
    ids = _ids(made.parts[0], src_steps, dst_steps)
    return [
        _core.Copy(launch.name, launch.arguments(src_steps, dst_steps), *ids, sm_limited=launch.kernel[0].sm_limited)
        for launch in launches
    ]


def digest_copies(
    ready: Sequence[tuple[Launch, Sequence[CellParams]]],
    lanes: int,
    src_steps: Steps = Steps(),  # noqa: B008  (immutable)
    dst_steps: Steps = Steps(),  # noqa: B008
    *,
    sm_limited: bool = False,
) -> list[_core.Copy]:
    """The launches of a digest, separate or fused into a copy (`kvbm.digest.cells`), with built-in kernels.

    Parameters
    ----------
    ready : sequence of (Launch, sequence of CellParams)
        The planned launches, and the parameters of their cells.
    lanes : int
        Keys per token of the whole model.
    src_steps, dst_steps, sm_limited
        As for `prepare`; tiles do not accept a limit of multiprocessors.

    Raises
    ------
    MissingKernelError
        No suitable kernel is built in.
    """
    copies = []
    for launch, keys in (one for asked, cells in ready for one in _built(asked, cells)):
        ids = _ids(launch.work[0][0], src_steps, dst_steps)
        parts = [
            (*part[:-1], (one.word,) if one.word else part[-1])
            for part, one in zip(launch.arguments(src_steps, dst_steps), keys, strict=True)
        ]
        cells = lanes, [(*one[:4], one.along_b) for one in keys]
        copies.append(_core.Copy(launch.name, parts, *ids, cells, sm_limited=sm_limited))
    return copies


@functools.cache
def _digesting() -> tuple[Kernel, ...]:
    """The kernels that digest, the leanest first."""
    built = map(parse_kernel, _core.kernel_names())
    chosen = [kernel for kernel in built if kernel[0].digests]
    return tuple(sorted(chosen, key=lambda kernel: sorted((form.inner, form.outer) for form in kernel)[::-1]))


def _built(asked: Launch, cells: Sequence[CellParams]) -> Iterator[tuple[Launch, Sequence[CellParams]]]:
    """The launch with the leanest suitable built kernel; if there is none, its parts one by one."""
    for kernel in _digesting():
        if len(kernel) == len(asked.kernel) and all(has.runs(form) for has, form in zip(kernel, asked.kernel, strict=True)):
            forms = kernel if len(kernel) > 1 else kernel * len(asked.work)
            work = tuple(
                (part, replace(of, outer=form.outer, inner=form.inner))
                for (part, of), form in zip(asked.work, forms, strict=True)
            )
            yield asked._replace(kernel=kernel, work=work), cells
            return
    if len(asked.work) == 1:
        raise MissingKernelError(f"no kernel runs {kernel_name(asked.kernel)}, and none was built for any loop nest")
    for (part, form), one in zip(asked.work, cells, strict=True):
        yield from _built(Launch((form,), ((part, form),), (form,)), [one])


def engine_copies(made: Plan) -> list[_core.Copy]:
    """A plan's loop nests in bytes, for the copy engine; empty if one has too many modes."""
    ids = _ids(made.parts[0], Steps(), Steps())
    return [_core.Copy(None, cells, *ids) for cells in engine_arguments(made.parts)]


_Step = tuple[int, int]
_Extents = tuple[int, ...]


def _ids(part: Part, src_steps: Steps, dst_steps: Steps) -> tuple[_Step, _Step, tuple[_Extents, _Extents]]:
    """The step of an id on each side (entries, bytes), and the extents of its digits inside a block; the same for all parts."""
    folded = part.fold(src_steps.entry, dst_steps.entry)
    src, dst = (
        (0, steps.block) if steps.block is not None else (of.entries, of.nbytes)
        for of, steps in ((folded.src_id, src_steps), (folded.dst_id, dst_steps))
    )
    return src, dst, (part.src_id.extents, part.dst_id.extents)
