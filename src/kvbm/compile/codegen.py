"""The list of kernels to build, and their source: CUDA for the GPU and C++ for the host, from the same list.

Generation is deterministic: the same layouts give the same bytes.  The generated files only instantiate the templates of
``cuda/permute.cuh``; the logic of the kernels is written by hand in the headers that it lists.  The classes of kernels are
the kinds of `planner.kernel_forms.Form`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from string import Template

from ..errors import LayoutError, MissingKernelError, PlanError, SpecError
from ..layout.layout import Layout
from ..layout.resolved import legal
from ..layout.shapes import BlockShape
from ..layout.spec import layouts_dir, load_dir
from ..planner.cast import DIGESTED_CASTS, WIDE_CASTS, WIDE_MODES
from ..planner.kernel_forms import MAX_INNER, MAX_OUTER, WIDEST, Form, Kernel, kernel_name, parse_kernel
from ..planner.plan import between
from ..system.cache import replacing

#: Number of ``.cu`` files: few, because each is compressed alone; more than one, because nvcc compiles them in parallel.
_FILES = 4

_WORDS = (16, 8, 4, 2, 1)

#: A different size for every axis, so that no loops merge by accident.
_GENERIC = {"l": 3, "o": 2, "h": 5, "t": 7, "d": 11}

#: Layouts of engines that run only on CPUs.  They have no kernels of their own (these would be a third of all bytes).  The kernels
#: for any loop nest copy them.
ON_HOSTS = frozenset({"vllm/cpu", "vllm/cpu_vec", "vllm/cpu_amx"})

Pair = tuple[str, str]


def cuda_dir() -> Path:
    """Folder of ``kvbm.h``, ``permute.cuh`` and the template: in the package in a wheel, else at the checkout's root."""
    here = Path(__file__).resolve().parents[1]
    for candidate in (here / "cuda", here.parents[1] / "cuda"):
        if (candidate / "kernels.cu.in").is_file():
            return candidate
    raise SpecError(f"the CUDA sources are missing: expected the folder {here / 'cuda'}; reinstall kvbm-layouts")


# ---- the list of kernels -------------------------------------------------------------------------------------------


def kernels(layouts: Sequence[Layout]) -> dict[str, list[Pair]]:
    """All kernels that conversions between these layouts can need.

    Parameters
    ----------
    layouts : sequence of Layout
        All ordered pairs are planned at several sizes: each axis is one, equals its splits, or is larger.

    Returns
    -------
    dict
        Kernel name → the pairs that use it at 16-byte alignment; sorted.
    """
    found: dict[Kernel, set[Pair]] = {}

    def add(*forms: Form, pairs: Iterable[Pair] = ()) -> None:
        if all(form.outer <= MAX_OUTER and form.modes <= MAX_INNER for form in forms):
            found.setdefault(forms, set()).update(pairs)

    for forms, pairs in _asked(layouts).items():
        for form in forms:
            for variant in _variants(form):
                add(variant)
            add(form, pairs=pairs)
        if len(forms) == 2:
            add(*forms, pairs=pairs)
    for word in _WORDS:
        add(Form("rows", MAX_OUTER, MAX_INNER, 0, word))  # for any loop nest
    add(Form("record", MAX_OUTER, MAX_INNER, 0, 0))
    for kind in ("page_in", "page_out"):
        add(Form(kind, MAX_OUTER, MAX_INNER - 1, 0, 0))
    for forms in (*((form,) for form in _few()), *_digests(), *((form,) for form in _casts())):
        add(*forms)
    named = {kernel_name(kernel): pairs for kernel, pairs in found.items()}
    return {name: sorted(named[name]) for name in sorted(named)}


def _asked(layouts: Sequence[Layout]) -> dict[Kernel, set[Pair]]:
    """The kernels that the pairs of layouts need at 16-byte alignment, at all small shapes.

    Planning takes most of the time, so nothing is planned twice: layouts with the same meaning are planned once, a layout is
    resolved once per shape, and the names of a pair are expanded once for all of its shapes.
    """
    aliases: dict[Layout, list[str]] = {}  # layouts with the same meaning are equal
    for layout in layouts:
        if layout.name not in ON_HOSTS:
            aliases.setdefault(layout, []).append(layout.name)
    work: dict[BlockShape, list[tuple[int, int]]] = {}
    chosen = list(aliases)
    for i, j in itertools.product(range(len(chosen)), repeat=2):
        if {p.name for p in chosen[i].planes} != {p.name for p in chosen[j].planes}:
            continue
        for shape in _shapes(*_sizes(chosen[i], chosen[j])):
            work.setdefault(shape, []).append((i, j))
    asked: dict[Kernel, set[tuple[int, int]]] = {}
    for shape, pairs in work.items():
        # Source and destination have different numbers of blocks, so that strides that depend on them do not agree by accident.
        sources, destinations = (
            {k: legal(chosen[k], shape, n) for k in {p[side] for p in pairs}} for side, n in enumerate((13, 17))
        )
        for pair in pairs:
            src, dst = sources[pair[0]], destinations[pair[1]]
            if src is None or dst is None:
                continue
            try:
                launches = between(src.section, dst.section, "").launches()
            except (PlanError, MissingKernelError):
                continue  # no copy at this shape: a user who asks for this pair gets the error
            for launch in launches:
                # A joined kernel saves a launch.  It is worth its bytes only at sizes that caches have.
                joined = len(launch.kernel) == 1 or _is_usual(shape)
                for kernel in [launch.kernel] if joined else [(form,) for form in launch.kernel]:
                    asked.setdefault(kernel, set()).add(pair)
    names = list(aliases.values())
    return {
        forms: {named for i, j in pairs for named in itertools.product(names[i], names[j])}
        for forms, pairs in asked.items()
    }


def _is_usual(shape: BlockShape) -> bool:
    """True for a shape like an engine's: elements of one or two bytes, rows of tokens and of elements in whole words."""
    row = shape.hd * shape.itemsize
    return shape.itemsize <= 2 and shape.nt % WIDEST == 0 and row % WIDEST == 0 and row > 4 * WIDEST


def _sizes(src: Layout, dst: Layout) -> tuple[tuple[int, ...], bool, tuple[int, ...]]:
    """The split of each axis in the order of `_GENERIC`, whether K and V share a launch, and head sizes to plan with."""
    orders = [*src.orders, *dst.orders, *(order for plane in (*src.planes, *dst.planes) for order in plane.orders)]
    terms = [term for order in orders for term in order.terms if term.steps]
    splits = (
        math.lcm(*(size for term in terms if axis in term.axes for _, size, _ in term.steps)) for axis in _GENERIC
    )
    widths = tuple(width for width in _WIDTHS if all(_takes(layout, width) for layout in (src, dst)))[:2]
    return tuple(splits), max(len(src.orders), len(dst.orders)) == 2, widths if src.extra or dst.extra else ()


#: Head sizes at which the sizes of a layout's own axes, such as (hd - 64) // 128, are integers.
_WIDTHS = (176, 576, 128, 256, 1472, 64)


@functools.cache
def _takes(layout: Layout, width: int) -> bool:
    """True if the layout is legal at this head size, its own axes included."""
    names = {"nb": 1, "nl": 1, "no": 2, "nh": 1, "nt": 128, "hd": width, "es": 1}
    try:
        for _, expression in layout.extra:
            expression.evaluate(names)
        layout.resolve(BlockShape(1, 1 if "o" not in _axes(layout) else 2, 1, 128, width, "uint8"), 1)
    except LayoutError:
        return False
    return True


def _axes(layout: Layout) -> set[str]:
    return {axis for order in layout.orders for term in order.terms for axis in term.axes}


@functools.cache
def _shapes(splits: tuple[int, ...], joined: bool, widths: tuple[int, ...]) -> tuple[BlockShape, ...]:
    """Small shapes: every combination of axes of size one, axes that equal their splits, and larger axes."""
    choices = [[1, split, generic * split] for split, generic in zip(splits, _GENERIC.values(), strict=True)]
    if widths:
        choices[-1] = list(widths)
    # If K and V share a launch, the joined kernel depends on the dtype and on whether tokens fill whole words to transpose.
    dtypes = ("uint8", "bfloat16", "float32", "float64") if joined else ("bfloat16",)
    if joined:
        for sizes in choices[2:]:
            sizes.append(WIDEST * sizes[-1])
    every = itertools.product(*(sorted(set(sizes)) for sizes in choices))
    return tuple(BlockShape(nl, no, nh, nt, hd, dtype) for nl, no, nh, nt, hd in every for dtype in dtypes)


def _few() -> Iterator[Form]:
    """Kernels that run on few multiprocessors.  One kernel serves every loop nest of its word size.

    They wait for the bus, so the arithmetic for unused modes costs no time.
    """
    for word in _WORDS:
        yield Form("rows", MAX_OUTER, MAX_INNER, 0, word, sm_limited=True)
    for element in _WORDS:
        for word in {WIDEST, element}:
            yield Form("tile", MAX_OUTER, MAX_INNER - 2, element, word, sm_limited=True)


#: Pairs of outer and inner loops of the digests of layouts in use, and of copies between them.
_DEPTHS = ((0, 3), (0, 4), (0, 5), (1, 2), (1, 3), (1, 4), (2, 2), (2, 3), (2, 4))


def _digests() -> Iterator[Kernel]:
    """Kernels that compute digests: of cells alone, and of rows, planes and tiles during a copy, at the depths of layouts in use.

    Deeper loop nests run with the kernel for any loop nest.
    """
    for outer, inner in (*_DEPTHS, (MAX_OUTER, MAX_INNER)):
        for word in _WORDS if outer == MAX_OUTER else (WIDEST,):
            yield (Form("digest", outer, inner, 0, word),)
            yield (Form("rows", outer, inner, 0, word, sums=True),)
    for element in (1, 2, 4):
        yield (Form("digest", MAX_OUTER, MAX_INNER, element, WIDEST),)
    for outer, inner in ((1, 4), (MAX_OUTER, MAX_INNER)):
        yield (Form("record", outer, inner, 0, 0, sums=True),)

    def tile(outer: int, inner: int, element: int) -> Form:
        return Form("tile", outer, inner, element, WIDEST, sums=True)

    for outer, inner in ((0, 1), (1, 0), (1, 1)):
        yield (tile(outer, inner, WIDEST),)
    for element in (1, 2, WIDEST):
        yield (tile(MAX_OUTER, MAX_INNER - 2, element),)
    # K by whole words and V by elements: the head of V has one more loop.
    yield tile(1, 0, WIDEST), tile(1, 0, 2)
    for element in (1, 2):
        yield tile(1, 1, WIDEST), tile(1, 2, element)


def _casts() -> Iterator[Form]:
    """Kernels that cast, for any loop nest: contiguous elements of common formats, and any elements of any formats."""
    for values in sorted(WIDE_CASTS):
        yield Form("cast", MAX_OUTER, WIDE_MODES, 8, 0, values=values)
    for values in sorted(DIGESTED_CASTS):
        yield Form("cast", MAX_OUTER, WIDE_MODES, 8, 0, sums=True, values=values)
    for values, element in itertools.product(("any_plain", "plain_any"), (1, 2)):
        yield Form("cast", MAX_OUTER, MAX_INNER, element, 0, values=values)


def _variants(form: Form) -> Iterator[Form]:
    """The kernels of the same structure for every element size and alignment."""
    if form.of_planes:
        yield form
        return
    if form.kind == "tile":
        for element in _WORDS:
            for word in {WIDEST, element}:
                yield Form("tile", form.outer, form.inner, element, word)
    # If base addresses are not aligned to an element, the words become narrower and a tile becomes rows.
    inner = form.inner + 3 if form.kind == "tile" else form.inner
    for word in _WORDS:
        yield Form("copy" if form.kind == "copy" else "rows", form.outer, inner, 0, word)


# ---- their source --------------------------------------------------------------------------------------------------


def generate(layouts: Sequence[Layout] | None = None) -> dict[str, str]:
    """The source files of the kernels for these layouts.

    Parameters
    ----------
    layouts : sequence of Layout, optional
        Default: the shipped layouts.

    Returns
    -------
    dict
        File name → text: ``kernels_00.cu`` … (GPU), ``kernels_host.cpp`` (CPU, and the table of all kernels),
        ``manifest.txt`` (kernel, file, pairs).
    """
    chosen = list(layouts) if layouts is not None else load_dir(layouts_dir())
    names = kernels(chosen)
    # Kernels with neighbouring names have similar machine code.  In one file they compress a quarter better.
    casts = [name for name in names if name.startswith(("cast_", "sum_cast_"))]
    copies = [name for name in names if name not in casts]
    images = {name: index * min(_FILES, len(copies)) // len(copies) for index, name in enumerate(copies)}
    images |= {name: _FILES + name.startswith("sum_") for name in casts}
    template = Template((cuda_dir() / "kernels.cu.in").read_text(encoding="utf-8"))
    files: dict[str, str] = {}
    for image in sorted(set(images.values())):
        file = f"kernels_{image:02}.cu"
        mine = [name for name in names if images[name] == image]
        text = "\n".join(_comment(name, names[name]) + f"KVBM_KERNEL({name}, {_types(name)})\n" for name in mine)
        files[file] = template.substitute(file=file, layouts=len(chosen), kernels=text.rstrip("\n"))
    files["kernels_host.cpp"] = _host(names, images)
    files["manifest.txt"] = "".join(
        f"{name}\tkernels_{images[name]:02}.cu\t{', '.join(f'{src} → {dst}' for src, dst in pairs)}".rstrip() + "\n"
        for name, pairs in names.items()
    )
    return files


def _parts(name: str) -> int:
    """Number of parts of a launch; 0 if the kernel takes any number."""
    forms = parse_kernel(name)
    if forms[0].kind == "cast":
        return 0 if forms[0].element < 8 else 2 if forms[0].values.count("_") == 2 else 1  # elements, and scales
    return 0 if forms[0].of_planes else len(forms)


def source(name: str) -> str:
    """The source file of one kernel, for compilation at run time.  It has the kernel's line of a generated file.

    Examples
    --------
    >>> print(source("rows_o1_i3_w16").splitlines()[-1])
    KVBM_KERNEL(rows_o1_i3_w16, Rows<1, 3, 16>)
    """
    return (
        f'// {name}.cu\n#include "permute.cuh"\n\nusing namespace kvbm;\n\n'
        f"{_comment(name, ())}KVBM_KERNEL({name}, {_types(name)})\n"
    )


def _types(name: str) -> str:
    """Template arguments of a kernel."""
    forms = parse_kernel(name)
    # All parts of a launch have the same CTA size: that of a tile, if one is a tile.
    threads = "kTileThreads" if any(form.kind == "tile" for form in forms) else "kRowThreads"

    def of(form: Form) -> str:
        if form.kind == "cast":
            if form.element < 8:
                return f"CastAny<{_commas(form.outer, form.inner, str(form.values == 'plain_any').lower(), form.element)}>"
            types = [name.capitalize() for name in form.values.split("_")]
            return f"Cast<{_commas(form.outer, form.inner, *types, *['None'] * (3 - len(types)), *['true'] * form.sums)}>"
        if form.kind == "digest":
            return f"Digest<{_commas(form.outer, form.inner, form.word, *([form.element] if form.element else []))}>"
        if form.kind == "record":
            return f"Record<{_commas(form.outer, form.inner, *(['true'] if form.sums else []))}>"
        if form.of_planes:
            return f"Page<{_commas(form.outer, form.inner, str(form.kind == 'page_in').lower())}>"
        if form.kind == "tile":
            sizes = [form.outer, form.inner, form.element, form.word]
            extra = ["kFewTeams"] if form.sm_limited else ["1", "true"] if form.sums else []
            return f"Tile<{_commas(*sizes, *extra)}>"
        if form.sm_limited:
            return f"FewRows<{_commas(form.outer, form.inner, form.word)}>"
        extra = [threads] if threads != "kRowThreads" else []
        if form.sums:
            extra = [threads, "true"]
        return f"Rows<{_commas(form.outer, form.inner, form.word, *extra)}>"

    return _commas(*map(of, forms))


def _commas(*items: object) -> str:
    return ", ".join(map(str, items))


def _comment(name: str, pairs: Sequence[Pair]) -> str:
    lines = []
    for label, form in zip(("K: ", "V: "), parse_kernel(name), strict=False):
        loops = ["pair", *(f"chunk{k}" for k in reversed(range(form.outer)))]
        if form.kind == "tile":
            loops += [f"rest{k}" for k in reversed(range(form.inner))]
            square = WIDEST // form.element if form.word > form.element else 1
            turned = f" by {square} x {square} elements in registers" if square > 1 else ""
            inside = f"turn B x A, elements of {form.element} B, words of {form.word} B{turned}"
        elif form.kind == "record":
            loops += ["plane", *(f"row{k}" for k in reversed(range(1, form.inner)))]
            inside = f"copy{' and digest' if form.sums else ''} a run of the plane's words"
        elif form.kind == "digest":
            loops += [f"row{k}" for k in reversed(range(1, form.inner))]
            inside = f"sum up the digests of a run of cells, in words of {form.word} bytes"
            inside += f", of elements of {form.element} that are turned" if form.element else ""
        elif form.kind == "cast":
            loops += [f"group{k}" for k in reversed(range(3, form.inner))]
            how = "contiguous elements" if form.element == 8 else f"elements{' in pairs' * (form.element == 2)} at any strides"
            inside = f"cast{' and digest' if form.sums else ''} the elements of a group, {how}"
        elif form.of_planes:
            loops += ["plane", *(f"row{k}" for k in reversed(range(1, form.inner)))]
            inside = "move a run of the plane's items between shared memory and memory"
        else:
            loops += [f"row{k}" for k in reversed(range(1, form.inner))]
            inside = f"copy{' and digest' * form.sums}{', and digest if asked,' * form.sm_limited} a run of {form.word}-byte words"
        lines.append(f"// {label if '__' in name else ''}for {', '.join(loops)}: {inside}")
        if form.sm_limited:
            who = "teams of threads" if form.kind == "tile" else "warps"
            lines.append(f"// by {who} that share a CTA and take turns: on as few multiprocessors as it is given")
    if pairs:
        shown = ", ".join(f"{src} -> {dst}" for src, dst in pairs[:3])
        more = f" and {len(pairs) - 3} more pairs" if len(pairs) > 3 else ""
        lines.append(f"// {shown}{more}")
    return "\n".join(lines) + "\n"


def _host(names: Mapping[str, Sequence[Pair]], images: Mapping[str, int]) -> str:
    rows = "\n".join(f"  KVBM_KERNEL({name}, {images[name]}, {_parts(name)}, {_types(name)})" for name in names)
    return (
        "// kernels_host.cpp: written by `kvbm codegen`; an edit is lost with the next build.\n"
        "// The same kernels for the host, and the table through which both are found.\n"
        '#include "permute.cuh"\n\nusing namespace kvbm;\n\n'
        f'extern "C" const kvbm_kernel kvbm_kernels[] = {{\n{rows}\n}};\n\n'
        f'extern "C" const int32_t kvbm_num_kernels = {len(names)};\n'
    )


# ---- files ---------------------------------------------------------------------------------------------------------


def write(files: Mapping[str, str], out_dir: str | Path) -> list[Path]:
    """Write generated files.  Unchanged files are not touched, and no file is left half-written.

    Returns
    -------
    list of Path
        The files that were written or removed (generated files of an earlier run that are no longer made).
    """
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    changed = []
    for name, text in files.items():
        path = folder / name
        if path.is_file() and path.read_bytes() == text.encode():
            continue
        with replacing(path) as part:
            part.write_bytes(text.encode())
        changed.append(path)
    for path in _stale(files, folder):
        path.unlink()
        changed.append(path)
    return changed


def check(files: Mapping[str, str], out_dir: str | Path) -> list[str]:
    """The changes that `write` would make, one sentence per file.  Empty if all files are up to date."""
    folder = Path(out_dir)
    problems = []
    for name, text in files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{path}: missing")
        elif path.read_bytes() != text.encode():
            problems.append(f"{path}: differs from what the layouts say")
    return problems + [f"{path}: no layout asks for it" for path in _stale(files, folder)]


def _stale(files: Mapping[str, str], folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("kernels_[0-9][0-9].cu") if path.name not in files)
