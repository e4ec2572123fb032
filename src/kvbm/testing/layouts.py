"""Test cases for copy kernels: two declared layouts, data that encode their coordinates, guard words, and the expected bytes.

The expected place of a byte comes only from the declared layouts (`Resolved.address` of each plane); no plan and no kernel of kvbm
is used.  Arrays and expected bytes both follow `Layout.resolve`, so these cases cannot detect an error in it.  kvbm's own tests
compare `resolve` with an oracle that shares no code with it.  For your own layout, compare an element of its arrays with your
engine once.  A layout without planes counts as one plane without a name.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .._arguments import listed, number, quoted, require_a
from ..errors import BindError, LayoutError, PlanError
from ..layout.address_map import Access
from ..layout.axes import OF_A_BLOCK
from ..layout.layout import Layout
from ..layout.naming import dtype_name
from ..layout.resolved import Resolved
from ..layout.shapes import PACKED, BlockShape, as_shape, load_shape
from ..layout.spec import as_layout, example_shape
from ..memory.allocation import require_memory
from ..memory.array_info import array_on
from ..planner.plan import plan

#: The default layouts: Dynamo's (rows are moved), and one with transposed keys.
DEFAULT_LAYOUTS = ("nhd", "hnd", "universal", "vllm/paged_attn_v0")

#: Default sizes of a block: of a KV cache with different axes; of latents, without heads; of scale factors, without layers.
_KV, _LATENTS, _SCALES = (
    BlockShape(nl=3, no=2, nh=4, nt=16, hd=64),
    BlockShape(nl=3, no=1, nh=1, nt=16, hd=64),
    BlockShape(nl=1, no=1, nh=1, nt=256, hd=16),
)

#: Most layers and heads of a block with planes.  The other sizes are those of real models.
_LAYERS, _HEADS = 3, 4

#: Guard bytes before, between and after allocations, and the alignment of every allocation (bytes).
GUARD, ALIGNMENT = 192, 256

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]


def layout_cases(
    layouts: Iterable[str | Path | Layout] | None = None,
    dtypes: Iterable[str] = ("bfloat16",),
    batches: Iterable[int] = (1, 7),
    *,
    pairs: Iterable[tuple[str | Path | Layout, str | Path | Layout]] | None = None,
    shapes: Iterable[BlockShape] | None = None,
    device: str = "cpu",
    framework: str | None = None,
    seed: int = 0,
) -> Iterator[LayoutCase]:
    """Yield one case per pair of layouts, shape, dtype and batch size.  A case allocates its memory when it is used.

    Parameters
    ----------
    layouts : iterable, optional
        Names, paths of YAML files, or layouts.  Every ordered pair of them is tested, including each layout with itself.
        Default without `pairs`: `DEFAULT_LAYOUTS`.
    dtypes : iterable of str
        Keys of `kvbm.layout.shapes.ITEMSIZE`.  Planes with a declared dtype keep it.  If all planes of both layouts declare
        theirs, the case is yielded once for all dtypes.
    batches : iterable of int
        Number of blocks per copy.  The pools hold some more blocks, which the copy must not change.
    pairs : iterable of (source, destination), optional
        Pairs to test, instead of all pairs of `layouts`.
    shapes : iterable of BlockShape, optional
        Sizes of a block; the dtype is replaced.  Default: one shape that fits the axes of a pair; for planes, sizes of models that
        use them, with few layers and heads.
    device : str
        ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
    framework : {"numpy", "torch"}, optional
        Framework of the arrays.  Default: NumPy on the CPU, torch on a GPU.  NumPy has no bfloat16 and no fp8: unsigned integers
        of the same width replace them.  Records of several planes are uint8.
    seed : int
        Seed of the data and the block ids.

    Raises
    ------
    KvbmError
        A layout or dtype is unknown, or there is no copy for a pair at any of the shapes and dtypes (the error of `kvbm.plan`).
    BindError
        The device or framework is unknown, or a batch size is below 1.

    Examples
    --------
    >>> [str(case) for case in layout_cases(["nhd", "universal"], batches=[2])]  # doctest: +ELLIPSIS
    ['nhd->nhd-bfloat16-b2', 'nhd->universal-bfloat16-b2', 'universal->nhd-bfloat16-b2', ...]
    >>> [str(case) for case in layout_cases(pairs=[("vllm/nvfp4", "record/nvfp4_tensors")])]
    ['vllm/nvfp4->record/nvfp4_tensors-b1', 'vllm/nvfp4->record/nvfp4_tensors-b7']
    >>> case = next(layout_cases(["nhd"], batches=[2]))
    >>> case.dst_arrays[0][0, 0, 0] += 1  # a wrong byte
    >>> case.error()[:45]
    'nhd → nhd: wrong at l=0 o=0 h=0 t=0 d=0 of bl'
    """
    if layouts is not None and pairs is not None:
        raise BindError("layout_cases: expected layouts or pairs, got both")
    framework = _framework(device, framework)
    if isinstance(dtypes, str):
        raise BindError(f"layout_cases: dtypes: expected a list of names, got {dtypes!r:.60}")
    dtypes = tuple(dtype_name(one, "layout_cases: dtypes") for one in listed("layout_cases: dtypes", dtypes, "names of dtypes"))
    counts = listed("layout_cases: batches", batches, "numbers of blocks")
    batches = tuple(number("layout_cases: batches", one, 1, 1 << 24) for one in counts)
    if pairs is None:
        given_layouts = DEFAULT_LAYOUTS if layouts is None else listed("layout_cases: layouts", layouts, "a list of layouts")
        each = [_layout(one) for one in given_layouts]
        chosen = list(itertools.product(each, repeat=2))
    else:
        chosen = []
        for pair in listed("layout_cases: pairs", pairs, "pairs of layouts"):
            two = listed("layout_cases: pairs", pair, "pairs of layouts")
            if len(two) != 2:
                raise BindError(f"layout_cases: pairs: expected pairs of layouts, got {quoted(pair)}")
            chosen.append((_layout(two[0]), _layout(two[1])))
    given = None
    if shapes is not None:
        given = tuple(as_shape(one, "layout_cases: shapes") for one in listed("layout_cases: shapes", shapes, "block shapes"))
    for src, dst in chosen:
        yield from _of_pair(src, dst, given, dtypes, batches, (device, framework, seed))


def _of_pair(
    src: Layout, dst: Layout, given: Sequence[BlockShape] | None, dtypes: Sequence[str], batches: Sequence[int],
    rest: tuple[str, str, int],
) -> Iterator[LayoutCase]:  # fmt: skip
    seen: list[tuple[Access, ...]] = []
    first_error: LayoutError | PlanError | None = None
    for dtype in dtypes:
        for shape in (replace(shape, dtype=dtype) for shape in (_usual(src, dst) if given is None else given)):
            try:
                made = plan(src, dst, shape, num_blocks=(2, 2))
            except (LayoutError, PlanError) as error:
                first_error = first_error or error
                continue
            planes = (*made.src.accesses, *made.dst.accesses)
            if planes not in seen:  # planes with declared dtypes do not depend on the dtype
                seen.append(planes)
                for batch in batches:
                    yield LayoutCase(src, dst, shape, batch, *rest, numbered=given is not None and len(given) > 1)
            if given is None:
                break
    if not seen and first_error is not None:
        if given is None and _kinds(src) != _kinds(dst):
            plan(src, dst, (next(_usual(src, src)), next(_usual(dst, dst))))  # raises the error for different planes, at any sizes
        raise first_error


def _kinds(layout: Layout) -> set[tuple[str, str | None]]:
    return {(plane.name, plane.dtype) for plane in layout.planes}


def _usual(src: Layout, dst: Layout) -> Iterator[BlockShape]:
    """Shapes to try.  With planes: the example shapes of both layouts; else a shape for their common axes."""
    for text in (example_shape(layout) for layout in (src, dst) if layout.planes):
        if text is not None:
            shape = load_shape(text)
            yield replace(shape, nl=min(shape.nl, _LAYERS), nh=min(shape.nh, _HEADS))
    both = src.present & dst.present
    yield _KV if "h" in both else _LATENTS if "l" in both else _SCALES


def _layout(one: str | Path | Layout) -> Layout:
    return as_layout(one, "layout_cases: layout")


def _framework(device: str, framework: str | None) -> str:
    if not isinstance(device, str) or not re.fullmatch(r"cpu|cuda(:[0-9]{1,4})?", device):  # type: ignore[redundant-expr]
        raise BindError(f"layout_cases: device: expected cpu, cuda or cuda:N, got {quoted(device, 60)}")
    kind = device.partition(":")[0]
    if framework is not None:
        require_a(str, "layout_cases: framework", framework, "'numpy' or 'torch'")
    framework = framework or ("numpy" if kind == "cpu" else "torch")
    if framework not in ("numpy", "torch") or (framework == "numpy" and kind == "cuda"):
        raise BindError(
            f"layout_cases: framework: expected torch{' or numpy' if kind == 'cpu' else ''} on {device}, got {quoted(framework)}"
        )
    return framework


@dataclass(frozen=True)
class LayoutCase:
    """A copy to perform, and its expected result.  `layout_cases` creates cases.

    Attributes
    ----------
    src, dst : Layout
        Layouts of the source and of the destination.
    shape : BlockShape
        Sizes of a block on both sides.
    batch : int
        Number of blocks to copy.
    device, framework : str
        Device and framework of the arrays.
    seed : int
        Seed of the data and the block ids.
    src_ids, dst_ids : numpy.ndarray of int32
        Block ``src_ids[i]`` is copied into block ``dst_ids[i]``.
    src_arrays, dst_arrays : list of arrays
        One array per allocation, in table order and with the shapes of `Resolved.allocations`, as `kvbm.Pool` accepts them.  They
        are created on first access.  Each lies between guard words.  The value of every element encodes its coordinate (two
        elements of four bits together).
    src_blocks, dst_blocks : int
        Number of blocks on each side.

    Examples
    --------
    >>> import kvbm
    >>> (case,) = layout_cases(pairs=[("nhd", "universal")], batches=[3])
    >>> pools = [kvbm.Pool(case.src, case.shape, case.src_arrays), kvbm.Pool(case.dst, case.shape, case.dst_arrays)]
    >>> kvbm.convert(*pools, case.src_ids, case.dst_ids)
    >>> case.check()
    """

    src: Layout
    dst: Layout
    shape: BlockShape
    batch: int
    device: str = "cpu"
    framework: str = "numpy"
    seed: int = 0
    numbered: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("src", "dst"):
            require_a(Layout, f"layout case: {name}", getattr(self, name), "a Layout")
        require_a(BlockShape, "layout case: shape", self.shape, "a BlockShape")
        object.__setattr__(self, "batch", number("layout case: batch", self.batch, 1, 1 << 24))
        object.__setattr__(self, "seed", number("layout case: seed", self.seed, 0, 1 << 64))
        object.__setattr__(self, "framework", _framework(self.device, self.framework))

    def __repr__(self) -> str:
        return f"<LayoutCase {self}>"

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape.sizes.values())) + "-" if self.numbered else ""
        planes = self.src.planes + self.dst.planes
        dtype = "" if planes and all(plane.dtype for plane in planes) else f"{self.shape.dtype}-"
        return f"{self.src.name}->{self.dst.name}-{dtype}{sizes}b{self.batch}"

    @property
    def src_blocks(self) -> int:
        return self.batch + 5

    @property
    def dst_blocks(self) -> int:
        return self.batch + 3

    @cached_property
    def src_ids(self) -> npt.NDArray[np.int32]:
        return self._ids(1, self.src_blocks)

    @cached_property
    def dst_ids(self) -> npt.NDArray[np.int32]:
        return self._ids(2, self.dst_blocks)

    def _ids(self, salt: int, blocks: int) -> npt.NDArray[np.int32]:
        random = np.random.default_rng((self.seed, salt, self.batch))
        return random.permutation(blocks)[: self.batch].astype(np.int32)

    @cached_property
    def src_arrays(self) -> list[Any]:
        return self._src.arrays

    @cached_property
    def dst_arrays(self) -> list[Any]:
        return self._dst.arrays

    @cached_property
    def expected(self) -> Bytes:
        """All bytes of the destination after a correct copy: elements, padding, other blocks, guard words."""
        expected = self._dst.before.copy()
        for plane, read, write in self._places:
            for byte in range(plane.itemsize):
                expected[write + byte] = self._src.before[read + byte]
        return expected

    def error(self) -> str | None:
        """A sentence on what is wrong in the destination or the source; None if nothing is wrong.

        On a GPU it waits for the work on torch's current stream.
        """
        title = f"{self.src.name} → {self.dst.name}"
        got = self._dst.bytes()
        differs = got != self.expected
        if differs.any():
            return f"{title}: {self._explain(got, differs)}"
        changed = np.nonzero(self._src.bytes() != self._src.before)[0]
        if changed.size:
            return f"{title}: the source was written to, at {self._src.where(int(changed[0]))} ({changed.size:,} bytes)"
        return None

    def check(self) -> None:
        """Raise AssertionError with the sentence of `error`, if there is one."""
        __tracebackhide__ = True
        error = self.error()
        if error is not None:
            raise AssertionError(error)

    @cached_property
    def _resolved(self) -> tuple[Resolved, Resolved]:
        return self.src.resolve(self.shape, self.src_blocks), self.dst.resolve(self.shape, self.dst_blocks)

    @cached_property
    def _opaque(self) -> dict[str, set[str]]:
        return opaque_axes(*self._resolved)

    @cached_property
    def _src(self) -> _Side:
        side = _Side(self._resolved[0], self, salt=1)
        side.fill_with_coordinates()
        return side

    @cached_property
    def _dst(self) -> _Side:
        return _Side(self._resolved[1], self, salt=2)

    @cached_property
    def _places(self) -> list[tuple[_Plane, Numbers, Numbers]]:
        """For each plane of the destination: the places of the batch's elements in the bytes of source and destination."""
        return [
            (plane, self._src.planes[name].places(self.src_ids), plane.places(self.dst_ids))
            for name, plane in self._dst.planes.items()
        ]

    def _explain(self, got: Bytes, differs: npt.NDArray[np.bool_]) -> str:
        first, counts = "", []
        for plane, _, write in self._places:
            wrong = np.zeros(write.shape, bool)
            for byte in range(plane.itemsize):
                wrong |= differs[write + byte]
            if not wrong.any():
                continue
            counts.append(f"{int(wrong.sum()):,} of {wrong.size:,} {plane.what}")
            pair, element = (int(index) for index in np.unravel_index(int(wrong.argmax()), wrong.shape))
            have, want = (plane.gather(memory, write[pair, element, None]).hex() for memory in (got, self.expected))
            first = first or (
                f"wrong at {plane.coordinate(element)} of block {self.src_ids[pair]} → {self.dst_ids[pair]}: expected bytes "
                f"{want}, got {have}{self._origin(plane, got, write[pair, element:])}"
            )
        if counts:
            return f"{first} ({' and '.join(counts)} are wrong)"
        at = int(np.nonzero(differs)[0][0])
        return f"bytes that no copy may touch were written, at {self._dst.where(at)} ({int(differs.sum()):,} bytes)"

    def _origin(self, plane: _Plane, got: Bytes, write: Numbers) -> str:
        """The place that the bytes of an element may come from: it helps to find a wrong stride.

        `write` has its place and those of the next elements: a single byte occurs in many places, several bytes in one.
        """
        there, memory = self._src.planes[plane.name], self._src.before
        places = there.places(np.arange(self.src_blocks))
        elements = plane.gather(memory, places)
        for count in (8, 4, 1):
            have = plane.gather(got, write[:count])
            if plane.gather(self._dst.before, write[:count]) == have:
                return ", which is the value before the copy"
            if (at := _only(have, elements)) is not None:
                block, element = divmod(at // plane.itemsize, places.shape[1])
                return f", which is {there.coordinate(element)} of block {block}"
            if (at := _only(have, memory.tobytes())) is not None:
                return f", which is {self._src.where(at)}"
        return ""


class _Side:
    """Source or destination: allocations in one range of bytes, with guard words around each."""

    def __init__(self, resolved: Resolved, case: LayoutCase, salt: int) -> None:
        self.resolved, self.case = resolved, case
        # The bytes themselves, twice, and where each lies: an address and a hash for every element.
        require_memory(16 * resolved.nbytes, f"layout case {case}", "use a smaller batch or shape")
        self.bases: list[int] = []
        at = GUARD
        for allocation in resolved.allocations:
            at = -(-at // ALIGNMENT) * ALIGNMENT
            self.bases.append(at)
            at += allocation.nbytes + GUARD
        random = np.random.default_rng((case.seed, salt, 0))
        self.before: Bytes = np.frombuffer(random.bytes(at), np.uint8).copy()
        self.planes = {part.plane: _Plane(part, case._opaque[part.plane], self.bases) for part in resolved.planes}

    def fill_with_coordinates(self) -> None:
        """Set each element to a hash of plane, block and coordinate, so that an element at a wrong place is detected."""
        blocks = np.arange(self.resolved.num_blocks)
        places = [plane.places(blocks) for plane in self.planes.values()]
        elements, start = sum(each.shape[1] for each in places), (self.case.seed & 0xFFFFFFFF) << 32
        for plane, each in zip(self.planes.values(), places, strict=True):
            key = (blocks[:, None] * elements + np.arange(each.shape[1])).astype(np.uint64)
            hashed = _mix(key + np.uint64(start)).view(np.uint8).reshape(*each.shape, 8)
            for byte in range(plane.itemsize):
                self.before[each + byte] = hashed[..., byte]
            start += each.shape[1]

    @cached_property
    def buffer(self) -> Any:
        """The memory of the kernel as a uint8 array or tensor with an aligned first byte."""
        memory = self.before
        if self.case.device == "cpu":
            raw = np.empty(memory.size + ALIGNMENT, np.uint8)
            start = -raw.ctypes.data % ALIGNMENT
            memory = raw[start : start + memory.size]
            memory[:] = self.before
        if self.case.framework == "numpy":
            return memory
        import torch

        return torch.from_numpy(memory).to(self.case.device)

    @cached_property
    def arrays(self) -> list[Any]:
        made = []
        for base, allocation in zip(self.bases, self.resolved.allocations, strict=True):
            if self.case.framework == "numpy":
                made.append(array_on(self.buffer, allocation, base))
                continue
            import torch

            size = allocation.itemsize
            if any(stride % size for stride in allocation.strides):
                raise BindError(f"{self.resolved.layout.name}: torch cannot view strides of {allocation.strides} bytes")
            name = f"{allocation.dtype}_x2" if allocation.dtype in PACKED else allocation.dtype
            flat = self.buffer[base : base + allocation.nbytes].view(getattr(torch, name, torch.uint8))
            made.append(flat.as_strided(allocation.shape, [stride // size for stride in allocation.strides]))
        return made

    def bytes(self) -> Bytes:
        """The current contents of the memory."""
        now: Bytes = self.buffer if self.case.framework == "numpy" else self.buffer.cpu().numpy()
        return now

    def where(self, at: int) -> str:
        """A place as a text: an element, padding, or guard words."""
        for plane in self.planes.values():
            places = plane.places(np.arange(self.resolved.num_blocks))
            hit = (places <= at) & (at < places + plane.itemsize)
            if hit.any():
                block, element = (int(index) for index in np.unravel_index(int(hit.argmax()), hit.shape))
                return f"{plane.coordinate(element)} of block {block}"
        for index, (base, allocation) in enumerate(zip(self.bases, self.resolved.allocations, strict=True)):
            label = f"array {index}" + (f" ({allocation.label})" if allocation.label else "")
            if base <= at < base + allocation.nbytes:
                return f"byte {at - base} of {label}, which is padding"
            if at < base:
                return f"{base - at} bytes before {label}"
        return f"{at - self.bases[-1] - self.resolved.allocations[-1].nbytes} bytes behind the last array"


class Elements:
    """The elements of a plane in a block, in the same order on both sides of a copy.  A layout without planes has one plane.

    Axes of an opaque group are last, in their order in memory, as their order is unspecified.  Of elements that share a byte
    only the first is listed: no copy splits a byte.  Of every element of block 0 there are its number, table entry and byte.
    """

    def __init__(self, part: Resolved, opaque: Iterable[str]) -> None:
        self.part, self.name, self.itemsize = part, part.plane, part.shape.itemsize
        self.opaque = sorted(part.sizes.keys() & set(opaque), key=_axis_order)
        self.axes = [*sorted(part.extents.keys() - set(self.opaque), key=_axis_order), *self.opaque]
        self.sizes = tuple(part.sizes[axis] for axis in self.axes)
        self.number, self.entry, self.offset = self._found()

    def _found(self) -> tuple[Numbers, Numbers, Numbers]:
        grid: dict[str, Any] = dict(
            zip(self.axes, np.meshgrid(*map(np.arange, self.sizes), indexing="ij", sparse=True), strict=True)
        )
        halves = grid.pop("o", None)
        entry, offset = np.zeros(self.sizes, np.int64), np.zeros(self.sizes, np.int64)
        for o in range(self.part.sizes.get("o", 1)):
            mine = np.broadcast_to(halves is None or halves == o, self.sizes)
            for into, part in zip((entry, offset), self.part.address(0, o=o, **grid), strict=True):
                into[mine] = np.broadcast_to(part, self.sizes)[mine]
        entry, offset = entry.reshape(-1), offset.reshape(-1)
        span = int(offset.max()) + 1
        if self.opaque:
            count = math.prod(self.part.sizes[axis] for axis in self.opaque)
            entry, offset = np.divmod(np.sort((entry * span + offset).reshape(-1, count), axis=1).reshape(-1), span)
        number: Numbers = np.arange(entry.size)
        if self.part.shape.pack > 1:
            number = np.sort(np.unique(entry * span + offset, return_index=True)[1])
        return number, entry[number], offset[number]

    def coordinate(self, element: int) -> str:
        at = np.unravel_index(self.number[element], self.sizes)
        axes = (f"{axis}={int(index)}" for axis, index in zip(self.axes, at, strict=True))
        return " ".join((self.name, *axes)).lstrip()


class _Plane(Elements):
    """A plane of a side of a `LayoutCase`."""

    def __init__(self, part: Resolved, opaque: Iterable[str], bases: Sequence[int]) -> None:
        super().__init__(part, opaque)
        self.bases: Numbers = np.asarray(bases, np.int64)
        self.what = f"{'pairs of ' if part.shape.pack > 1 else ''}elements" + (f" of {self.name}" if self.name else "")

    def places(self, blocks: npt.NDArray[Any]) -> Numbers:
        """Place of each element's first byte, shape ``(len(blocks), elements)``."""
        entries, bytes_ = self.part.id_steps
        ids = blocks.astype(np.int64)[:, None]
        place: Numbers = self.bases[self.entry + ids * entries] + self.offset + ids * bytes_
        return place

    def gather(self, memory: Bytes, places: Numbers) -> bytes:
        """The bytes of the elements at these places, concatenated."""
        elements: Bytes = memory[places[..., None] + np.arange(self.itemsize)]
        return elements.tobytes()


def opaque_axes(*sides: Resolved) -> dict[str, set[str]]:
    """For each plane, the axes in an opaque group of one of the sides."""
    opaque: dict[str, set[str]] = {}
    for part in (part for side in sides for part in side.planes):
        terms = [piece.term for order in part.orders for piece in order if piece.term.opaque]
        opaque.setdefault(part.plane, set()).update(axis for term in terms for axis in term.axes)
    return opaque


def _only(part: bytes, whole: bytes) -> int | None:
    """The index of `part` in `whole` if it occurs exactly once, else None."""
    at = whole.find(part)
    return at if at >= 0 and whole.find(part, at + 1) < 0 else None


def _axis_order(axis: str) -> tuple[int, str]:
    return (OF_A_BLOCK.index(axis) if axis in OF_A_BLOCK else len(OF_A_BLOCK), axis)


def _mix(key: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Every bit of the result depends on every bit of the key (the finaliser of splitmix64)."""
    with np.errstate(over="ignore"):
        key = key + np.uint64(0x9E3779B97F4A7C15)
        key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))
