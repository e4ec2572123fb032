"""Finds the shipped layouts that fit given arrays: `kvbm.match`, and ``kvbm which`` on the command line.

Shapes and strides are compared, never contents.  Several layouts may fit the same arrays.  So the result is a list, with checks
that distinguish its members.  kvbm does not choose one.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .._arguments import listed, quoted
from ..errors import BindError, LayoutError, SpecError
from ..layout import spec
from ..layout.address_map import Access, Step, normal
from ..layout.axes import AXES
from ..layout.layout import Layout
from ..layout.loops import coalesce
from ..layout.naming import ITEMSIZE, SPELLINGS, dtype_name, suggestion
from ..layout.resolved import Allocation, Resolved, legal
from ..layout.shapes import BlockShape, numpy_name
from ..layout.slips import meant_array
from ..memory.array_checks import block_shape, reads_as
from ..memory.array_info import Array, dense, span
from .declare import declare_described, described, possible_orders
from .hints import HOW, Steps, near_shapes, own_layout, pitches, steps_between, steps_of, vllm_call

_READING = {
    "given": "",
    "unbound": "; one array per allocation, {parts}",
    "joined": "; the arrays are views of one allocation",
    "perhaps": "; only if the arrays are views of one allocation, which their shapes do not say",
}
#: Numbers, plain or in brackets: ``2,4``, ``(2,4)``, ``torch.Size([2,4])``.
_LIST = r"(?:(N)|(?:torch\.Size)?[(\[]{1,2}(N),?[)\]]{1,2})".replace("N", r"-?\d{1,18}(?:,-?\d{1,18})*")
_TEXT = re.compile(rf"(?:(\d{{1,6}})x ?)?{_LIST.replace('-?', '')}(?:: ?{_LIST})?", re.ASCII)
_WORST = ("exact", "permuted", "viewed")
#: A layout at a number of blocks (`_resolver`).
_Resolve: TypeAlias = "Callable[[int], Resolved | None]"


class Candidate(NamedTuple):
    """A layout that fits."""

    layout: Layout
    names: tuple[str, ...]  # all shipped names with the same meaning
    num_blocks: int  # number of blocks in the arrays with this layout
    fit: str  # ``"exact"``, ``"permuted"`` or ``"viewed"``
    how: str  # how the arrays are bound to the layout
    #: Python that does it, for the arrays ``tensors`` (a list; ``tensor`` if there is one) and the block shape
    #: ``shape``.
    code: str = ""


class Check(NamedTuple):
    """An experiment that distinguishes candidates: write one element with the engine, and look where it is."""

    #: The element to write, such as ``"head 1"``.  Every coordinate that is not named is 0.
    element: str
    outcomes: tuple[tuple[str, tuple[str, ...]], ...]  # a place of the element, and the layouts in which it is there

    def __str__(self) -> str:
        lines = [f"Write {self.element} with the engine, and look where it is:"]
        lines += [f"  {place}: {', '.join(names)}" for place, names in self.outcomes]
        return "\n".join(lines)


@dataclass(frozen=True, repr=False)
class Match(Sequence[Candidate]):
    """The layouts that fit some arrays: a sequence of `Candidate`, those of the engine first, and the best fits first.

    Attributes
    ----------
    shape : BlockShape
    arrays : str
        Description of the arrays.
    candidates : tuple of Candidate
    checks : tuple of Check
        Experiments that distinguish the candidates.  Candidates that no check separates have the same addresses at this shape, or
        an unspecified order.
    reason : str
        If no layout fits: the reason.
    alike : tuple of tuple of Candidate
        The candidates again: those with the same addresses of all elements are together.
    near : tuple of str
        If layouts fit only as views of the arrays: which other size of the shape would make layouts fit as they are.
    """

    shape: BlockShape
    arrays: str
    candidates: tuple[Candidate, ...]
    checks: tuple[Check, ...]
    reason: str = ""
    alike: tuple[tuple[Candidate, ...], ...] = ()
    near: tuple[str, ...] = ()

    def __getitem__(self, index: Any) -> Any:
        return self.candidates[index]

    def __len__(self) -> int:
        return len(self.candidates)

    @property
    def names(self) -> list[str]:
        """Every name of every candidate."""
        return [name for one in self.candidates for name in one.names]

    def __repr__(self) -> str:
        return f"Match({self.arrays}, {self.shape}: {', '.join(one.names[0] for one in self.candidates) or 'none'})"

    def __str__(self) -> str:
        lines = [f"{self.arrays}, block shape {self.shape}"]
        if not self.candidates:
            return f"{lines[0]}\nNo shipped layout fits: {self.reason}"
        for number, (one, *others) in enumerate(self.alike, 1):
            lines += [f"{number}. {', '.join(one.names)}", f"   {one.layout.order_text}"]
            lines += [f"   {one.num_blocks:,} blocks; {one.how}", f"   {one.code}"]
            if others:
                lines.append(f"   {len(others)} more layouts have the same addresses at this shape")
        if len(self.candidates) == 1:
            lines.append("No other shipped layout fits. Shapes do not prove a layout: compare with the engine's documentation.")
        if self.near:
            lines += ["", f"Each fits only as a view. Is the shape right? {'; or '.join(self.near)}."]
        for check in self.checks:
            lines += ["", str(check)]
        if len(self.candidates) > 1 and not self.checks:
            lines += ["", "No single element tells them apart: at this shape they have the same addresses, or promise no order."]
        if any(_READING["perhaps"] in one.how for one in self.candidates):
            lines += ["", "kvbm.match(tensors, shape) reads addresses, and so knows whether tensors are views of one allocation."]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The result as texts and numbers."""
        return {
            "arrays": self.arrays,
            "shape": str(self.shape),
            "candidates": [
                {
                    "names": list(one.names), "order": one.layout.order_text, "fingerprint": one.layout.fingerprint,
                    "num_blocks": one.num_blocks, "fit": one.fit, "how": one.how, "code": one.code,
                }
                for one in self.candidates
            ],
            "checks": [
                {"element": check.element, "outcomes": [{"place": place, "names": list(names)} for place, names in check.outcomes]}
                for check in self.checks
            ],
            "reason": self.reason,
            "near": list(self.near),
        }  # fmt: skip


class _Parts(Sequence[Array]):
    """The parts of one array along its first axes.  Each part is created on access."""

    def __init__(self, whole: Array, axes: int, count: int) -> None:
        self.whole, self.axes, self.size = whole, axes, count

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self.size))]
        if not 0 <= index < self.size:
            raise IndexError(index)
        address, whole = self.whole.address, self.whole
        for extent, stride in reversed(list(zip(whole.shape[: self.axes], whole.strides, strict=False))):
            index, at = divmod(index, extent)
            address += at * stride
        return whole._replace(address=address, shape=whole.shape[self.axes :], strides=whole.strides[self.axes :])


def _count(arrays: Sequence[Array]) -> int:
    """Number of arrays.  Parts of an array may be more than `len` takes."""
    return arrays.size if isinstance(arrays, _Parts) else len(arrays)


@dataclass(frozen=True, eq=False)
class _Reading:
    """One interpretation of the arrays as allocations.  If it assumes other addresses: `given` are the arrays there.

    `cast` is Python that makes each array one of another dtype, such as ``.view(torch.uint8)``.
    """

    name: str
    arrays: Sequence[Array]
    given: Sequence[Array] = ()
    cast: str = ""

    @functools.cached_property
    def looks(self) -> list[tuple[tuple[int, ...], tuple[int, ...], str]]:
        """Shape, strides and dtype, once for all arrays that are alike.  Parts of one array are."""
        alike = [self.arrays[0]] if isinstance(self.arrays, _Parts) else self.arrays
        return list(dict.fromkeys((one.shape, one.strides, one.dtype) for one in alike))

    @property
    def joined(self) -> bool:
        return self.name in ("joined", "perhaps")

    @property
    def single(self) -> bool:
        """True if there is one array."""
        return not self.joined and (self.name == "unbound" or _count(self.arrays) == 1)


class _Found(NamedTuple):
    candidate: Candidate
    resolved: Resolved
    reading: _Reading
    rank: tuple[int, ...]
    call: str


def match(
    tensors: Any, shape: BlockShape | str, *, engine: str | None = None, num_blocks: int | None = None,
    layouts: Iterable[Layout | str | Path] = (),
) -> Match:  # fmt: skip
    """List the layouts that fit some arrays, by their number, shapes, strides and dtypes.

    Parameters
    ----------
    tensors : array, sequence of arrays, or mapping of str to array
        The engine's tensors, as for `Pool`: one array per allocation in table order.  These views are recognised: permuted axes,
        joined axes, one tensor for all allocations, and views of one allocation.
    shape : BlockShape or str
        Sizes of a block.  A text without a dtype gets the dtype of the arrays.
    engine : str, optional
        Only layouts of this engine, such as ``"vllm"``.
    num_blocks : int, optional
        Number of blocks in the arrays.  Default: derived from their sizes.
    layouts : iterable of Layout, str or Path
        Layouts of your own, which are searched beside the shipped ones: files, and folders of files.  Their names in the result are
        the paths of their files.

    Returns
    -------
    Match
        A sequence of candidates; `print` it.  Several candidates are common.  A single one is no proof: contents are not read.

    Raises
    ------
    BindError
        There are no arrays, an item is not an array, or the arrays are on several devices.
    SpecError
        `shape` is not a shape, kvbm has no layouts for `engine`, or a file of `layouts` is wrong.

    Examples
    --------
    >>> import numpy as np
    >>> layers = [np.zeros((2, 6, 16, 4, 8), "float16") for _ in range(3)]
    >>> match(layers, "nl=3,no=2,nh=4,nt=16,hd=8", engine="vllm")[0].names
    ('vllm/flash_attn_nhd', 'lmcache/NL_X_TWO_NB_BS_NH_HS')
    """
    arrays, numpy = described("match", tensors)
    return match_described(arrays, shape, engine, num_blocks, own_layouts(layouts), numpy=numpy)


def match_described(
    arrays: Sequence[Array], shape: BlockShape | str, engine: str | None = None, num_blocks: int | None = None,
    own_ones: Sequence[Layout] = (), *, placed: bool = True, numpy: bool = False,
) -> Match:
    """`match` for arrays that are already described.  Without `placed`, their addresses mean nothing.

    The printed Python is for arrays of torch; with `numpy`, for those of NumPy.
    """
    sizes = shape if isinstance(shape, BlockShape) else block_shape(shape, arrays[0].dtype)
    for index, one in enumerate(arrays):
        if one.device != arrays[0].device:
            raise BindError(f"match: array {index} is on {one.device}, array 0 on {arrays[0].device}; expected one device")
    layouts, readings = _layouts(engine, own_ones), _readings(arrays, placed)
    raw = _cast(arrays, sizes.dtype, numpy) if _itemsize(arrays[0].dtype) == 1 else None
    readings += _readings(*raw[:1], placed, raw[1]) if raw else []
    own = f"{engine}/".lower()
    found = list(_candidates(readings, sizes, layouts, num_blocks))
    raw = _cast(arrays, "uint8", numpy)
    if raw and not found:  # planes of several dtypes share arrays of bytes
        planes = [same for same in layouts if same[0].planes]
        fits = _candidates(_readings(*raw[:1], placed, raw[1]), sizes, planes, num_blocks)
        found = [one for one in fits if not one.rank[2]]  # no row of the arrays goes on into another record
    known = set(own_ones)
    found.sort(
        key=lambda one: (
            engine is not None and one.candidate.layout not in known and not one.candidate.names[0].startswith(own), one.rank
        )
    )  # fmt: skip
    alike: dict[Any, list[Candidate]] = {}
    named = [one.candidate._replace(code=_code(one, one.candidate.names[0], numpy)) for one in found]
    for place, candidate in zip(_address_maps(found), named, strict=True):
        alike.setdefault(place, []).append(candidate)
    checks = _checks(found, arrays, sizes) if len(found) > 1 else ()
    near: list[str] = []
    if found and all(one.candidate.fit == "viewed" for one in found):
        near = near_shapes(arrays, sizes, functools.partial(_fitting, readings, layouts, num_blocks))
    reason = "" if found else _reason(arrays, sizes, layouts, readings, num_blocks, numpy)
    return Match(sizes, _words(arrays), tuple(named), tuple(checks), reason, tuple(map(tuple, alike.values())), tuple(near))


def _fitting(
    readings: Sequence[_Reading], layouts: Sequence[Sequence[Layout]], num_blocks: int | None, other: BlockShape
) -> list[str]:
    """Names of the layouts that fit with another shape, without those that only have the same bytes."""
    found = sorted(_candidates(readings, other, layouts, num_blocks), key=lambda one: one.rank)
    return [name for one in found if one.rank[:2] < (_WORST.index("viewed"), 1) for name in one.candidate.names]


def names_of_strides(arrays: Sequence[Array], shape: BlockShape, asked: str, most: int = 3) -> list[str]:
    """Names of layouts other than `asked` that fit arrays as given or permuted, for errors about strides.

    Layouts from the folder of the layout `asked` are first.
    """
    folder = asked.rpartition("/")[0] + "/"
    try:
        found = list(_candidates([_Reading("given", arrays)], shape, _layouts(None), None)) if _positive(arrays) else []
    except (LayoutError, TypeError, OverflowError):  # sizes may be symbols of a compiler
        return []
    close = [one.candidate for one in found if one.candidate.fit != "viewed" and asked not in one.candidate.names]
    names = [min(one.names, key=lambda name: not name.startswith(folder)) for one in close]
    return sorted(names, key=lambda name: not name.startswith(folder))[:most]


def parse(texts: Sequence[str], shape: BlockShape, dtype: str | None = None) -> list[Array]:
    """Arrays from texts ``[COUNTx]SHAPE[:STRIDES]`` of the command line, with the dtype of the shape.  They do not overlap.

    SHAPE and STRIDES may be in brackets, as torch prints them: ``32x(2, 1024, 16, 8, 128)``.  Raises `SpecError` if a
    text has another form, and `DTypeError` if `dtype` is not the name of a dtype.
    """
    dtype = shape.dtype if dtype is None else dtype_name(dtype)
    size, made = ITEMSIZE[dtype], list[Array]()
    for text in texts:
        found = _TEXT.fullmatch(re.sub(r", ?", ",", text))
        if found is None:
            meant = meant_array(text) if len(text) < 200 else ""
            advice = f". Did you mean {meant}?" if _TEXT.fullmatch(meant) else ""
            if text.endswith((".yaml", ".yml")):
                advice = f"; to look at a layout file: kvbm show {text}, kvbm check {text}"
            raise SpecError(f"array {quoted(text)}: expected [COUNTx]SHAPE[:STRIDES], such as 32x2,1024,16,8,128{advice}")
        extents = tuple(map(int, (found[2] or found[3]).split(",")))
        steps = found[4] or found[5]
        strides = tuple(int(step) * size for step in steps.split(",")) if steps else dense(extents, size)
        if len(strides) != len(extents):
            raise SpecError(f"array {quoted(text)}: expected as many strides as axes, got {len(strides)} and {len(extents)}")
        for _ in range(int(found[1] or 1)):
            made.append(Array(len(made) ** 2 << 64, extents, strides, dtype, "cpu"))
    if not made:
        raise SpecError("arrays: expected at least one")
    return made


def perhaps_bytes(arrays: Sequence[Array]) -> str:
    """A note if the strides of texts may be in bytes, as NumPy has them: none is below the size of an element; else ""."""
    size = _itemsize(arrays[0].dtype)
    steps = {stride // size for one in arrays for stride in one.strides}
    if size == 1 or not steps or min(steps) != size or any(step % size for step in steps):
        return ""
    return (
        f"strides are in elements, as torch prints them. All of these are multiples of {size}, the bytes of one element: if they "
        "are NumPy's, which are in bytes, divide them"
    )


@functools.cache
def _shipped() -> tuple[Layout, ...]:
    """All shipped layouts, names without a folder first.  They are read once per process."""
    return tuple(sorted(spec.load_dir(spec.layouts_dir()), key=lambda layout: ("/" in layout.name, layout.name)))


def own_layouts(
    given: Iterable[Layout | str | Path], broken: Callable[[SpecError], None] | None = None
) -> list[Layout]:
    """The layouts of files and folders, named by the paths of their files.  A layout as such keeps its name.

    `broken` is called with the error of a file in a folder that is no layout; without it, the error is raised.
    """
    if isinstance(given, Layout | str | Path):
        given = [given]
    found: list[Layout] = []
    for one in listed("layouts", given, "files, folders and layouts"):
        if isinstance(one, Layout):
            found.append(one)
            continue
        if not issubclass(type(one), str | Path):  # not what an object says itself of its class
            raise SpecError(f"layouts: expected a file, a folder or a Layout, got {quoted(one)}")
        found += (replace(layout, name=layout.file) for layout in spec.load_all([one], broken))
    return found


def _layouts(engine: str | None, own: Sequence[Layout] = ()) -> list[list[Layout]]:
    """The shipped layouts, of one engine if one is named, and further ones, in groups with the same meaning."""
    known: Sequence[Layout] = _shipped()
    if engine is not None:
        text = str(engine).lower()
        word = re.compile(rf"(?<![\w-]){re.escape(text)}(?!\w)", re.IGNORECASE)  # "nano-vLLM" is not vLLM
        mine = [one for one in known if one.name.startswith(f"{text}/") or any(map(word.search, one.used_by))]
        if not mine or not text:
            folders = sorted({one.name.partition("/")[0] for one in known if "/" in one.name})
            raise SpecError(f"engine: expected one of {', '.join(folders)}, got {quoted(engine)}.{suggestion(text, folders)}")
        known = sorted(mine, key=lambda layout: (not layout.name.startswith(f"{text}/"), layout.name))
    by_meaning: dict[str, list[Layout]] = {}
    for layout in [*own, *known]:
        by_meaning.setdefault(layout.fingerprint, []).append(layout)
    return list(by_meaning.values())


# ---- candidates ----------------------------------------------------------------------------------------------------


def _candidates(
    readings: Sequence[_Reading], shape: BlockShape, layouts: Sequence[Sequence[Layout]], num_blocks: int | None
) -> Iterator[_Found]:
    for same in layouts:
        resolve = _resolver(same[0], shape, num_blocks)
        found = (_fit_layout(same, shape, resolve, reading, num_blocks) for reading in readings)
        best = min((one for one in found if one), key=lambda one: one.rank, default=None)
        if best is not None:
            yield best


def _addresses(arrays: Sequence[Array]) -> Any:
    """The address of each array: int64, or Python's integers if they are larger."""
    return np.array([one.address for one in arrays])


def _table_axes(one: _Found) -> set[str]:
    """The axes along which a layout goes from one allocation to another."""
    accesses = one.resolved.accesses
    return {axis for access in accesses for step in _steps(access, 1) if step.entries for axis in step.axes}


def _steps(access: Access, num_blocks: int) -> list[Step]:
    """The steps of all digits, those of the block's id among them."""
    return [*access.steps, Step(("b",), 1, num_blocks, *access.block)]


def _address_maps(found: Sequence[_Found]) -> list[Any]:
    """What is equal for two layouts that put every element at the same address, however the arrays are bound.

    If all of them take one array, or its parts, the addresses of allocations are linear, and the maps are small for any number of
    parts.  Otherwise allocations may be anywhere, so addresses are not linear in the `table_axes` of all layouts that are compared.
    These addresses are listed, one for each index along these axes.
    """
    linear = [_linear_map(one) for one in found]
    if None not in linear:
        return linear
    table_axes = set[str]().union(*map(_table_axes, found))
    return [_listed_map(one, table_axes) for one in found]


def _linear_map(one: _Found) -> Any:
    """The map of a layout that takes one array, or parts of it along its first axes; None for other arrays."""
    arrays, maps = one.reading.arrays, []
    if _count(arrays) > 1 and not isinstance(arrays, _Parts):
        return None
    for access in one.resolved.accesses:
        steps = list[Step]()
        for step in _steps(access, one.candidate.num_blocks):
            steps += _in_parts(step, arrays) if isinstance(arrays, _Parts) else [step._replace(entries=0)]
        nbytes, entry = access.at
        address = arrays[entry].address + nbytes
        maps.append((access.plane, access.half, access.dtype, access.packed, address, normal(steps)))
    return tuple(maps), one.candidate.num_blocks, bool(one.resolved.parts)


def _in_parts(step: Step, arrays: _Parts) -> Iterator[Step]:
    """A step from part to part as steps in bytes: one for each axis of the array that it goes along (`_is_in_order`)."""
    inside, extents = 1, arrays.whole.shape[: arrays.axes]
    for extent, stride in reversed(list(zip(extents, arrays.whole.strides, strict=False))):
        inside, low = inside * extent, inside
        if low <= step.entries < inside and step.extent > 1:
            count = min(step.extent, inside // step.entries)
            yield step._replace(extent=count, nbytes=step.nbytes + step.entries // low * stride, entries=0)
            step = step._replace(
                divisor=step.divisor * count, extent=step.extent // count, nbytes=step.nbytes * count, entries=step.entries * count
            )
    yield step


def _listed_map(one: _Found, table_axes: set[str]) -> Any:
    """The map of a layout whose allocations may be anywhere."""
    allocations, maps = _addresses(one.reading.arrays), []
    for access in one.resolved.accesses:
        nbytes: Any
        entry: Any
        (nbytes, entry), listed, linear = access.at, dict[tuple[str, ...], int](), []
        for step in sorted(_steps(access, one.candidate.num_blocks), key=lambda step: (step.axes, -step.divisor)):
            if table_axes.isdisjoint(step.axes):
                linear.append(step)
                continue
            index = np.arange(step.extent)
            nbytes = np.add.outer(nbytes, index * step.nbytes)
            entry = np.add.outer(entry, index * step.entries)
            listed[step.axes] = listed.get(step.axes, 1) * step.extent
        addresses = allocations[entry] + nbytes
        digest = hashlib.sha256(str(addresses.tolist()).encode() if addresses.dtype == object else addresses.tobytes()).digest()
        maps.append((access.plane, access.half, access.dtype, access.packed, digest, tuple(listed.items()), normal(linear)))
    return tuple(maps), one.candidate.num_blocks, bool(one.resolved.parts)


def _cast(arrays: Sequence[Array], dtype: str, numpy: bool) -> tuple[list[Array], str] | None:
    """The same memory as arrays of another dtype, and the Python that makes each; None if there is no such view."""
    size, wanted = _itemsize(arrays[0].dtype), ITEMSIZE[dtype]
    if size == wanted or not _positive(arrays) or any(one.dtype != arrays[0].dtype or not one.shape for one in arrays):
        return None
    orders, made = set[tuple[int, ...]](), []
    for one in arrays:
        order = list(range(len(one.shape)))
        if one.strides[-1] != size:  # the axis of neighbours must be the last one
            order.sort(key=lambda axis: (one.shape[axis] > 1, -one.strides[axis]))
        orders.add(() if order == sorted(order) else tuple(order))
        shape, strides = [one.shape[axis] for axis in order], [one.strides[axis] for axis in order]
        whole = [shape[-1] * size, one.address, *(s for n, s in zip(shape[:-1], strides, strict=False) if n > 1)]
        if strides[-1] != size or any(n % wanted for n in whole):
            return None
        shape[-1], strides[-1] = shape[-1] * size // wanted, wanted
        made.append(one._replace(shape=tuple(shape), strides=tuple(strides), dtype=dtype))
    if len(orders) > 1:  # the Python is the same for all arrays
        return None
    [axes] = orders
    turned = "" if not axes else f".transpose({list(axes)})" if numpy else f".permute({list(axes)})"
    return made, f'{turned}.view("{numpy_name(dtype)}")' if numpy else f"{turned}.view(torch.{dtype})"


def _code(found: _Found, name: str, numpy: bool) -> str:
    """Python that binds the arrays to the layout of this name."""
    layout, _, blocks, fit, *_ = found.candidate
    reading, resolved, call = found.reading, found.resolved, found.call
    text = (f"tensor{reading.cast}" if reading.single else f"[one{reading.cast} for one in tensors]") if reading.cast else (
        "tensor" if reading.single else "tensors"
    )
    if call:
        return call.replace("(tensors,", f"({text},")
    # What gives each array in a loop, and the rest of the loop.
    each, loop = "tensors[0]" + reading.cast if reading.joined else text, ""
    if isinstance(reading.arrays, _Parts):
        each, loop = _part(reading.arrays, text)
        text = f"list({text})" if loop == f" for one in {text}" else f"[{each}{loop}]"
    elif _count(reading.arrays) > 1:
        each, loop = f"one{reading.cast}", " for one in tensors"
    if fit != "exact" or reading.joined:
        kinds = resolved.kinds
        size = 1 if numpy else _itemsize(reading.arrays[0].dtype)
        views = [(kind.shape, tuple(stride // size for stride in kind.strides)) for kind in kinds]
        if len(kinds) == 1:
            text = _strided(each, "{}, {}".format(*views[0]), numpy)
        else:
            ways = _ways(resolved, [str(view) for view in views])
            rows = f"[{each}{loop}]" if reading.cast or reading.name == "unbound" else "tensors"
            text, loop = _strided("one", "*view", numpy), f" for one, view in zip({rows}, {ways})"
        text = f"[{text}{loop}]" if loop else text
    end = f", num_blocks={blocks}" if _needs_blocks(layout, resolved) else ""
    return f'kvbm.Pool("{name}", shape, {text}{end})'


def _ways(resolved: Resolved, views: Sequence[str]) -> str:
    """A list of the view of each array, in Python, which is short also for many arrays."""
    pieces = [piece for piece in resolved.planes[0].orders[0] if piece.table]  # fastest first, without the planes
    digits = [
        ("planes", len(resolved.parts)) if term.planes else (" ".join(term.axes), pieces.pop(0).extent)
        for term in reversed(resolved.layout.orders[0].table)
    ]
    firsts = [0, *itertools.accumulate(len(part.kinds) for part in resolved.planes)]

    def text(digits: Sequence[tuple[str, int]], plane: int, o: int) -> list[tuple[str, int]]:
        """Texts and how often each is repeated, for the digits of the table from the fastest to one of them."""
        if not digits:
            of_plane = firsts[plane + 1] - firsts[plane]
            return [(f"[{views[firsts[plane] + min(o, of_plane - 1)]}]", 1)]
        *faster, (axis, extent) = digits
        if axis in ("planes", "o"):
            runs = [run for i in range(extent) for run in text(faster, *((i, o) if axis == "planes" else (plane, i)))]
            grouped = itertools.groupby(runs, key=operator.itemgetter(0))
            return [(one, sum(count for _, count in group)) for one, group in grouped]
        runs = text(faster, plane, o)
        if len(runs) == 1:
            return [(runs[0][0], runs[0][1] * extent)]
        return runs if extent == 1 else [(f"({joined(runs)})", extent)]

    def joined(runs: Iterable[tuple[str, int]]) -> str:
        return " + ".join(f"{one} * {count}" for one, count in runs)

    return joined(text(digits, 0, 0))


def _strided(one: str, view: str, numpy: bool) -> str:
    return f"numpy.lib.stride_tricks.as_strided({one}, {view})" if numpy else f"{one}.as_strided({view})"


def _needs_blocks(layout: Layout, resolved: Resolved) -> bool:
    """True if the shapes of the arrays do not say how many blocks there are."""
    return "b" not in resolved.first.axes and not layout.b_in_table


def _positive(arrays: Sequence[Array]) -> bool:
    """True if no array is empty, and no stride is 0 or less."""
    return not any(
        0 in one.shape or any(s <= 0 for n, s in zip(one.shape, one.strides, strict=True) if n > 1) for one in arrays
    )


def _readings(arrays: Sequence[Array], placed: bool, cast: str = "") -> list[_Reading]:
    """The interpretations of the arrays.  Without `placed`, their addresses mean nothing: they may be views of one allocation."""
    if not arrays or not _positive(arrays):
        return []
    found, first, count = [_Reading("given", arrays, cast=cast)], arrays[0], len(arrays)
    if count == 1:
        parts = 1
        for axis, extent in enumerate(first.shape):
            parts *= extent
            if parts > 1:
                found.append(_Reading("unbound", _Parts(first, axis + 1, parts), cast=cast))
        return found
    if any(one[1:5] != first[1:5] for one in arrays):
        return found
    step = arrays[1].address - first.address
    if not placed:
        steps = steps_between(first, count, _itemsize(first.dtype))
    elif step > 0 and all(one.address == first.address + index * step for index, one in enumerate(arrays)):
        steps = [step]
    else:
        steps = []
    for step in steps:
        whole = first._replace(shape=(count, *first.shape), strides=(step, *first.strides))
        given = () if placed else [first._replace(address=first.address + index * step) for index in range(count)]
        found.append(_Reading("joined" if placed else "perhaps", [whole], given, cast))
    return found


def _resolver(layout: Layout, shape: BlockShape, given: int | None) -> _Resolve:
    """Resolves the layout for a number of blocks; None where that is an error.

    Many readings ask for the same number: each is resolved once, unless the caller of `match` has `given` it.
    """
    resolve = functools.partial(legal, layout, shape)
    return functools.cache(resolve) if given is None else resolve  # a given one may be anything: it need not be a key


def _fit_layout(
    same: Sequence[Layout], shape: BlockShape, resolve: _Resolve, reading: _Reading, num_blocks: int | None
) -> _Found | None:
    layout, names = same[0], tuple(one.name for one in same)
    for blocks in _blocks(layout, shape, reading.arrays) if num_blocks is None else [num_blocks]:
        resolved = resolve(blocks)
        if resolved is None or resolved.table_size != _count(reading.arrays) or not _is_in_order(reading.arrays, resolved):
            continue
        kinds = resolved.kinds
        looks: Iterable[tuple[int, Any]] = ((kind, look) for kind in range(len(kinds)) for look in reading.looks)
        if len(kinds) > 1 and len(reading.looks) > 1:
            kind_of = zip(resolved.kind_of_entry, reading.arrays, strict=True)
            looks = {(kind, (one.shape, one.strides, one.dtype)) for kind, one in kind_of}
        fits = [_fit(one, kinds[kind], resolved) for kind, one in looks]
        first, call = reading.arrays[0], ""
        if len(fits) == 1 and reads_as(first.dtype, kinds[0].dtype) and reading.name != "unbound":
            call = vllm_call(names, resolved, first, joined=reading.joined)
        if reading.name == "perhaps" and not call:
            continue
        if call and None in fits:
            fits = ["viewed"]  # K and V have orders that no view shows: the sizes fit
        if None not in fits:
            fit = max((text for text in fits if text), key=_WORST.index)
            key = fit if fit == "exact" and not reading.joined else "vllm" if call else "whole" if fit == "exact" else fit
            how = HOW["parts" if key == "exact" and reading.name == "unbound" else key]
            how = how.format(call=call, shape=_wanted(resolved)) + _READING[reading.name].format(parts=_parts(reading))
            if _needs_blocks(layout, resolved) and not call:
                how += f"; pass num_blocks={blocks}"
            if reading.cast:
                how = f"of {kinds[0].dtype}, {reading.cast}: {how}"
            cuts = {stride for _, stride in steps_of(first.shape, first.strides)}
            crossed = not cuts <= {stride for one in kinds for stride in one.strides}
            # For latents, layouts of latents before those with an axis of K and V.
            rank = (_WORST.index(fit), not call or shape.no == 1, crossed, kinds[0].shape.count(1), reading.name == "perhaps")
            return _Found(Candidate(layout, names, blocks, fit, how), resolved, reading, rank, call if key == "vllm" else "")
    return None


def _is_in_order(arrays: Sequence[Array], resolved: Resolved) -> bool:
    """True unless the arrays are parts of one array whose axes are not those of the table of allocations, or several of them."""
    if not isinstance(arrays, _Parts):
        return True
    size = resolved.table_size
    ends = {1, *(size // piece.table for piece in resolved.planes[0].orders[0] if piece.table)}
    if resolved.has_separate_planes and len(resolved.parts) > 1:
        step = resolved.parts[1].bases[0][1] - resolved.parts[0].bases[0][1]
        ends |= {size // step, size // step // len(resolved.parts)}
    return set(itertools.accumulate(arrays.whole.shape[: arrays.axes], operator.mul)) <= ends


def _part(arrays: _Parts, text: str) -> tuple[str, str]:
    """One of the parts of an array along its first axes, and the loop over all of them, in Python."""
    extents = arrays.whole.shape[: arrays.axes]
    if len(extents) == 1:
        return "one", f" for one in {text}"
    names = [f"i{axis}" for axis in range(len(extents))]
    loops = "".join(f" for {name} in range({extent})" for name, extent in zip(names, extents, strict=True))
    return f"{text}[{', '.join(names)}]", loops


def _parts(reading: _Reading) -> str:
    """What makes a list of the parts of one array along its first axes, in Python."""
    if not isinstance(reading.arrays, _Parts):
        return ""
    each, loop = _part(reading.arrays, f"tensor{reading.cast}")
    return f"list(tensor{reading.cast})" if each == "one" else f"[{each}{loop}]"


def _wanted(resolved: Resolved) -> str:
    """What `Pool` takes in place of arrays with other axes."""
    kind, *more = resolved.kinds
    if more:
        return ""
    count = "one view" if resolved.table_size == 1 else "views"
    return f"; kvbm.Pool takes {count} of shape {kind.shape} ({' '.join(kind.axes)})"


def _blocks(layout: Layout, shape: BlockShape, arrays: Sequence[Array]) -> list[int]:
    """The possible numbers of blocks in arrays of these sizes."""
    one = _block(layout, shape, *layout.scales.items())
    if one is None:
        return []
    count, sizes = one
    if layout.b_in_table:
        blocks, rest = divmod(_count(arrays), count)
        return [blocks] if blocks and not rest else []
    if _count(arrays) != count:
        return []
    held = math.prod(arrays[0].shape) * _itemsize(arrays[0].dtype)
    return sorted({held // size for size in sizes if size and held >= size and held % size == 0}, reverse=True)


@functools.lru_cache(maxsize=8192)
def _block(layout: Layout, shape: BlockShape, *_scales: tuple[str, str]) -> tuple[int, frozenset[int]] | None:
    """Allocations of one block, and the possible bytes of the first; None if the layout is not legal at this shape.

    Equal layouts may differ in their scales, and only one of them may be legal.
    """
    one = legal(layout, shape, 1)
    if one is None:
        return None
    return one.table_size, frozenset({math.prod(one.first.shape) * one.first.itemsize, one.first.nbytes})


def _itemsize(dtype: str) -> int:
    """Bytes per item of a dtype: one that a block may hold, or a void dtype of NumPy."""
    return ITEMSIZE.get(SPELLINGS.get(dtype, dtype)) or (int(dtype[4:]) // 8 if dtype.startswith("void") else 1)


def _fit(look: Sequence[Any], kind: Allocation, resolved: Resolved) -> str | None:
    """How an array of this shape, strides and dtype fits an allocation of a layout; None if it does not fit."""
    shape, strides, dtype = look
    if not reads_as(dtype, kind.dtype):
        return None
    if shape == kind.shape and all(a == b for n, a, b in zip(shape, strides, kind.strides, strict=True) if n > 1):
        return "exact"
    given_steps = steps_of(shape, strides)
    layout_steps = steps_of(kind.shape, kind.strides)
    if kind.axes == ("elements",):
        layout_steps = _agreed(resolved, kind)
    elif given_steps == layout_steps and not kind.is_record:
        return "permuted"
    if _nests(given_steps, layout_steps):
        return "viewed"
    if kind.is_record and given_steps and coalesce(given_steps) == [(kind.nbytes, 1)]:
        return "viewed"  # all bytes with the padding, in one piece
    return None


def _agreed(resolved: Resolved, kind: Allocation) -> Steps:
    """The steps that K and V have in common, if both lie in one allocation in different orders."""
    cuts = set.intersection(*({p.stride for p in pieces if p.extent > 1 and not p.table} for pieces in resolved.orders))
    edges = [kind.itemsize, *sorted(cut for cut in cuts if cut > kind.itemsize and kind.nbytes % cut == 0), kind.nbytes]
    return [(high // low, low) for low, high in itertools.pairwise(edges) if high > low]


def _nests(one: Steps, other: Steps) -> bool:
    """True if two nests of axes cover the same bytes, and no axis of one begins inside an axis of the other and ends outside."""
    if coalesce(one) != coalesce(other):
        return False
    one_strides, other_strides = {stride for _, stride in one}, {stride for _, stride in other}
    shared = sorted(one_strides & other_strides)
    for low, high in zip(shared, [*shared[1:], math.inf], strict=True):
        if any(low < cut < high for cut in one_strides) and any(low < cut < high for cut in other_strides):
            return False
    return True


# ---- words ---------------------------------------------------------------------------------------------------------


def _words(arrays: Sequence[Array]) -> str:
    looks = dict.fromkeys((one.shape, one.strides, one.dtype) for one in arrays)
    (shape, strides, dtype), *more = looks
    dense = span(shape, strides, 1) and coalesce(steps_of(shape, strides))
    gaps = "" if not dense or (len(dense) == 1 and list(strides) == sorted(strides, reverse=True)) else f", strides {strides} bytes"
    count = f"{len(arrays):,} arrays" if len(arrays) > 1 else "1 array"
    kinds = f", and {len(more)} other kinds" if more else ""
    return f"{count} of shape {shape}{gaps}, {dtype}{kinds}"


def _reason(
    arrays: Sequence[Array], shape: BlockShape, layouts: Sequence[Sequence[Layout]], readings: Sequence[_Reading],
    num_blocks: int | None, numpy: bool,
) -> str:
    for index, one in enumerate(arrays):
        for n, s in zip(one.shape, one.strides, strict=True):
            if n == 0:
                return f"array {index} is empty: shape {one.shape}"
            if n > 1 and s <= 0:
                return f"array {index} has a stride of {s} bytes along an axis of {n}; no layout has strides below 1"
    if texts := _with_pitches(shape, layouts, readings, num_blocks, numpy):
        return "none has these strides. " + "\nOr: ".join(texts)
    if orders := possible_orders(arrays, shape):
        if len(orders) == 1:
            text = declare_described(arrays, orders[0], shape, numpy=numpy).rstrip()
            return (
                f"none has this order. By the sizes it can only be {orders[0]}, unless an axis is split or its size means "
                f"something else. As a layout of your own, mine.yaml:\n{text}"
            )
        some = " or ".join(orders[:3]) + (", …" if orders[3:] else "")
        return (
            f"none has this order. By the sizes it can be {some}. Which of them the engine's documentation says; "
            f'kvbm.declare(tensors, "{orders[0]}") or `kvbm declare` writes its layout'
        )

    if shape.no > 1 and (raw := _cast(arrays, "uint8", numpy)):  # K and V of other sizes side by side, in one row
        own = [same for same in layouts if same[0].planes]
        found = _candidates(_readings(*raw[:1], True), replace(shape, no=1), own, num_blocks)
        fit = sorted((one for one in found if not one.rank[2]), key=lambda one: one.rank)
        if fitting := [name for one in fit[:4] for name in one.candidate.names]:
            return (
                f"none takes elements of {arrays[0].dtype}; with no=1, as the planes k and v of a row are K and V, as bytes, "
                f"{raw[1]}, these fit: {', '.join(fitting)}"
            )

    if near := near_shapes(arrays, shape, functools.partial(_fitting, readings, layouts, num_blocks)):
        return "; or ".join(near)
    held = sum(math.prod(one.shape) * _itemsize(one.dtype) for one in arrays)
    if held % shape.nbytes:
        return f"the arrays hold {held:,} bytes, and a block {shape.nbytes:,}: not a whole number of blocks. Is the shape right?"
    return (
        "none has allocations of these shapes and strides at this block shape. Is the shape right? A layout of your own is one "
        "line of YAML, which kvbm.declare and `kvbm declare` write from the names of the axes"
    )


def _with_pitches(
    shape: BlockShape, layouts: Sequence[Sequence[Layout]], readings: Sequence[_Reading], num_blocks: int | None, numpy: bool
) -> list[str]:
    """Layouts whose order fits the arrays, with the pitch that they need, as YAML: one per set of equal addresses."""
    found = list[tuple[_Found, str, str]]()
    resolvers = {id(same): _resolver(same[0], shape, num_blocks) for same in layouts}
    for same, reading in itertools.product(layouts, readings):
        layout, resolve, array = same[0], resolvers[id(same)], reading.arrays[0]
        if layout.planes or layout.pitch or len(layout.orders) > 1:
            continue
        for blocks in _blocks(layout, shape, reading.arrays) if num_blocks is None else [num_blocks]:
            resolved = resolve(blocks)
            if resolved is None or not (steps := pitches(array, resolved.first)):
                continue
            try:
                text = own_layout(layout.order_text, steps, resolved.first.itemsize)
                mine = spec.parse(text, name="mine")
            except (LayoutError, SpecError):
                continue
            if one := _fit_layout([mine], shape, _resolver(mine, shape, num_blocks), reading, blocks):
                found.append((one, ", ".join(one.name for one in same), text))
    texts: dict[Any, str] = {}
    found.sort(key=lambda item: item[0].rank)
    for place, (one, names, text) in zip(_address_maps([one for one, *_ in found]), found, strict=True):
        intro = f"The order of {names} fits{_READING[one.reading.name].format(parts=_parts(one.reading))}, with a pitch."
        code = _code(one, "mine.yaml", numpy)
        texts.setdefault(place, f"{intro} As a layout of your own, mine.yaml, for\n{code}:\n{text}")
    return list(texts.values())


# ---- checks --------------------------------------------------------------------------------------------------------


def _checks(found: Sequence[_Found], arrays: Sequence[Array], shape: BlockShape) -> Iterator[Check]:
    """Experiments.  Each one distinguishes candidates that the ones before it do not."""
    blocks = min(one.candidate.num_blocks for one in found)
    sizes = {"b": blocks, **shape.sizes}
    axes = [axis for axis in "htolbd" if sizes[axis] > 1]  # in the order in which they are tried
    groups: list[list[_Found]] = [list(found)]
    for chosen in [*((axis,) for axis in axes), *itertools.combinations(axes, 2)]:
        at = dict.fromkeys(chosen, 1)
        places = {one.candidate.names[0]: _place(one, at, arrays) for one in found}
        parts = [
            [one for one in group if places[one.candidate.names[0]] == place]
            for group in groups
            for place in dict.fromkeys(places[one.candidate.names[0]] for one in group)
        ]
        if len(parts) > len(groups):
            groups = parts
            outcomes: dict[str, list[str]] = {}
            for name, place in places.items():
                outcomes.setdefault(place, []).append(name)
            label = ", ".join(f"{AXES[axis]} 1" if axis != "o" else "V" for axis in chosen)
            yield Check(label, tuple((place, tuple(names)) for place, names in outcomes.items()))


def _place(one: _Found, at: Mapping[str, int], arrays: Sequence[Array]) -> str:
    """The place of an element of a layout, in the given arrays.  For several planes: the place in each plane.

    The names of planes are left out: the same bytes can have different names in two layouts.
    """
    if not one.resolved.parts:
        return _place_in(one, one.resolved, at, arrays)
    # A plane does not have the axes along which its elements are shared, and may have other axes than ``d``.
    places = ((part, {axis: i for axis, i in at.items() if axis in part.sizes}) for part in one.resolved.parts)
    first, *others = (_place_in(one, part, mine, arrays) for part, mine in places)
    return f"{first}{'; its other planes: ' if others else ''}{', '.join(others)}"


def _place_in(one: _Found, resolved: Resolved, at: Mapping[str, int], arrays: Sequence[Array]) -> str:
    loose = {axis for access in resolved.accesses for step in access.steps if step.opaque for axis in step.axes}
    if loose & set(at):
        return f"somewhere in {{{' '.join(axis for axis in AXES if axis in loose)}}}, whose order is not promised"
    try:
        entry, offset = resolved.address(at.get("b", 0), **{axis: i for axis, i in at.items() if axis != "b"})
    except LayoutError:
        return "nowhere: the layout does not have that axis"
    address = one.reading.arrays[int(entry)].address + int(offset)
    arrays = one.reading.given or arrays
    for number, array in enumerate(arrays):
        rest, index = address - array.address, [0] * len(array.shape)
        for axis in sorted(range(len(array.shape)), key=lambda axis: -array.strides[axis]):
            if array.shape[axis] > 1 and rest >= 0:
                index[axis] = min(rest // array.strides[axis], array.shape[axis] - 1)
                rest -= index[axis] * array.strides[axis]
        if 0 <= rest < _itemsize(array.dtype):
            return f"array {number}, index {tuple(index)}"
    return f"byte {int(offset):,} of allocation {int(entry)}"
