"""Casts: the loop nests of copies that change the format of values.

A cast is a copy with a third address map, that of the scales.  Its loops are the common refinement of all three.  The loops without
a stride in the scales go through a group, the others go from group to group.  ``docs/reference/cast.md`` has the arithmetic.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from .._arguments import flag, is_real, quoted
from ..errors import LayoutError, MissingKernelError, PlanError
from ..layout.address_map import Access, Step
from ..layout.loops import coalesce, refine
from ..layout.scales import QUANTISED, Group
from .kernel_forms import MAX_INNER, MAX_OUTER, WIDEST, Form
from .loopnest import STILL, STRIDE_LIMIT, Arguments, Id, Mode, Part

#: Formats of elements and scales → their names in kernels.
FORMATS = {
    "bfloat16": "bf16", "float16": "f16", "float32": "f32", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "i8",
    "float4_e2m1fn": "e2m1", "float8_e8m0fnu": "e8m0",
}  # fmt: skip

#: Formats of values that are not quantised.
PLAIN = ("bfloat16", "float16", "float32")

#: Elements that a thread moves at a time, if they are contiguous and aligned.
ITEM = 8

#: Numbers of formats in the parameters of kernels (``cuda/formats.cuh``).
_NUMBERS = {"": 0} | {name: number for number, name in enumerate(
    ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "float4_e2m1fn", "float8_e8m0fnu"), 1
)}  # fmt: skip

#: Quantised formats with the formats of their scales for which there are kernels of contiguous elements; alone: without scales.
_SCALED = (
    ("e4m3", "f32"), ("e4m3", "e8m0"), ("e5m2", "f32"), ("i8", "f32"), ("e2m1", "e4m3"), ("e2m1", "e8m0"),
    ("e4m3",), ("e5m2",), ("i8",),
)  # fmt: skip

#: Casts from float32 that digest, too.  Others would make the wheel larger, and back a pass of its own is faster.
_DIGESTED_OF_F32 = {"f32_e4m3_f32", "f32_i8_f32", "f32_e4m3_e8m0", "f32_e2m1_e4m3"}


def _there_and_back(*plain: str) -> frozenset[str]:
    """Casts between formats that are not quantised and those that are."""
    return frozenset(
        "_".join((*formats, *scale))
        for one, (quantised, *scale) in itertools.product(plain, _SCALED)
        for formats in ((one, quantised), (quantised, one))
    )


#: The formats of kernels that also digest the quantised side.
DIGESTED_CASTS = _there_and_back("bf16", "f16") | _DIGESTED_OF_F32

#: The formats of kernels for contiguous elements.  Kernels for any formats do the rest.
WIDE_CASTS = _there_and_back("bf16", "f16", "f32") | {
    "_".join(formats) for formats in itertools.permutations(("bf16", "f16", "f32"), 2)
}

#: Inner modes of these kernels.
WIDE_MODES = 6

#: Inner modes of a group (``kGroup`` of ``cuda/prepare.cuh``).
GROUP_MODES = 3

#: Most elements that share a scale of the caller and are cast by the same threads.
_RUN = 256

#: Most scales of the caller in a launch (``KVBM_MAX_SCALES`` of ``cuda/kvbm.h``).
MAX_SCALES = 512

#: Range of a scale that the caller gives: it and its reciprocal, multiplied by a stored scale, stay in the range of float32.
_LEAST, _MOST = 2.0**-100, 2.0**100


#: One scale, or one for each layer.
_Numbers = float | tuple[float, ...]


@dataclass(frozen=True)
class Scale:
    """Scales that the caller gives for a cast: one, or one for each layer, together or apart for K and V.

    The layers are those of the pool, or of the section, that holds the quantised values; of the destination if none does.  Between
    engines they are all layers of the model.

    Parameters
    ----------
    value : float or sequence of float
        For planes without scales of their own: an element's value is its code times this.  For scales of e4m3 (NVFP4): the scale of
        the whole tensor, by which they are multiplied.  Numbers are rounded to float32.
    k, v : float or sequence of float, optional
        Both, in place of `value`: the scales of K and those of V.
    is_given : bool
        False: every plane that is cast must have scales of its own, and there are no numbers.

    Attributes
    ----------
    text : str
        The scale as a text that a compiler of Python takes for a constant: ``amax``, or the numbers as JSON.

    Raises
    ------
    PlanError
        A number is not from 2**-100 to 2**100, K and V have scales for different numbers of layers, only one of them has any, or
        there are numbers and `is_given` is False.

    Examples
    --------
    >>> Scale(0.5)
    Scale(0.5)
    >>> Scale(k=[0.5, 0.25], v=1.0)  # for two layers
    Scale(k=(0.5, 0.25), v=1.0)
    """

    value: _Numbers | Sequence[float] = 1.0
    k: _Numbers | Sequence[float] | None = field(default=None, kw_only=True)
    v: _Numbers | Sequence[float] | None = field(default=None, kw_only=True)
    is_given: bool = field(default=True, kw_only=True)
    text: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        if (self.k is None) != (self.v is None):
            raise PlanError(f"Scale: expected k and v, or none of them, got only {'k' if self.v is None else 'v'}")
        for name in ("value", "k", "v") if self.k is not None else ("value",):
            object.__setattr__(self, name, _numbers(name, getattr(self, name)))
        if self.k is not None and self.value != 1.0:
            raise PlanError(f"Scale: expected k and v, or one value for both, got k, v and {quoted(self.value)}")
        counts = {len(of) for of in self.halves if isinstance(of, tuple)}
        if len(counts) > 1:
            raise PlanError(f"Scale: expected k and v for as many layers, got {' and '.join(str(len(of)) for of in self.halves)}")
        if not flag("Scale: is_given", self.is_given, PlanError) and (self.k is not None or self.value != 1.0):
            raise PlanError(f"Scale: is_given is False: expected no numbers, got {', '.join(map(quoted, self.halves))}")
        text = json.dumps(self.value if self.k is None else {"k": self.k, "v": self.v})
        object.__setattr__(self, "text", text if self.is_given else "amax")

    @property
    def halves(self) -> tuple[Any, Any]:
        """The numbers of K, and those of V; the same if they are not apart."""
        return (self.value, self.value) if self.k is None else (self.k, self.v)

    def __repr__(self) -> str:
        if self.k is not None:
            return f"Scale(k={quoted(self.k)}, v={quoted(self.v)})"
        return f"Scale({quoted(self.value)})" if self.is_given else "Scale(is_given=False)"

    def __str__(self) -> str:
        return repr(self) if self.is_given else "'amax'"


def is_one(scale: Scale) -> bool:
    """True if every number is 1."""
    return all(of == 1 or (isinstance(of, tuple) and set(of) == {1}) for of in scale.halves)


def layers_of(scale: Scale) -> int | None:
    """How many layers have numbers of their own; None: all layers have the same."""
    return next((len(of) for of in scale.halves if isinstance(of, tuple)), None)


def numbers_text(scale: Scale) -> str:
    """The numbers in a few words: ``0.5``, or ``6 scales from 0.01 to 0.05``."""
    found = [one for of in scale.halves for one in (of if isinstance(of, tuple) else (of,))]
    count = len(found) if scale.k is not None else len(found) // 2
    return f"{found[0]:g}" if len({*found}) == 1 else f"{count} scales from {min(found):g} to {max(found):g}"


def difference(one: Scale, other: Scale) -> str | None:
    """Where two scales differ first: `` in K of layer 3``, or nothing for two single numbers.  None: they mean the same."""
    if one.is_given != other.is_given:
        return ""
    counts = {count for count in map(layers_of, (one, other)) if count is not None}
    if len(counts) > 1:
        return " in the number of layers"
    for layer in range(max(counts, default=1)):
        ours, theirs = ([of[layer] if isinstance(of, tuple) else of for of in scale.halves] for scale in (one, other))
        if ours != theirs:
            half = "KV"[ours[0] == theirs[0]] if (one.k, other.k) != (None, None) else ""
            place = " of ".join(filter(None, (half, f"layer {layer}" if counts else "")))
            return f" in {place}" if place else ""
    return None


def of_layers(scale: Scale, layers: Sequence[int]) -> Scale:
    """The numbers of some layers."""
    k, v = (tuple(of[i] for i in layers) if isinstance(of, tuple) else of for of in scale.halves)
    return Scale(k=k, v=v) if scale.k is not None else replace(scale, value=k)


def table_of(scale: Scale, layers: Sequence[int], halves: Sequence[int]) -> tuple[tuple[float, ...], dict[str, int]]:
    """The numbers of these layers of K (0), V (1) or both, and the distance between those of neighbours along ``l`` and ``o``.

    An axis that makes no difference has no distance, and a single number has none at all.
    """
    of = [scale.halves[half] for half in halves]
    rows = [tuple(one[layer] if isinstance(one, tuple) else one for one in of) for layer in layers]
    if len({*rows}) == 1:
        rows = rows[:1]
    if all(len({*row}) == 1 for row in rows):
        rows = [row[:1] for row in rows]
    steps = {"l": len(rows[0])} if len(rows) > 1 else {}
    return tuple(itertools.chain(*rows)), steps | ({"o": 1} if len(rows[0]) > 1 else {})


def _numbers(name: str, given: Any) -> _Numbers:
    """One number, or a tuple of them, in float32."""
    where = "Scale" if name == "value" else f"Scale: {name}"
    found = given.tolist() if hasattr(given, "tolist") else given  # of NumPy and torch
    if isinstance(found, Sequence) and not isinstance(found, str | bytes):
        many = tuple(_number(f"{where}: layer {layer}", one) for layer, one in enumerate(found))
        if many:
            return many
    return _number(where, found)


def _number(where: str, given: Any) -> float:
    if not is_real(given) or not _LEAST <= given <= _MOST:
        raise PlanError(f"{where}: expected a number from 2**-100 to 2**100, got {quoted(given)}")
    rounded: float = struct.unpack("f", struct.pack("f", given))[0]
    return rounded


#: A cast in which each scale is computed from, or stored with, the elements of its group.
AMAX = Scale(is_given=False)


#: How users say that values change: `kvbm.Transfer` documents it.
Cast = Literal["amax"] | Scale | None


def as_cast(given: object) -> Scale | None:
    """The scale of a cast as users give it; None for a copy that changes no value; `PlanError` for anything else."""
    kind = type(given)  # an object may say anything of its class
    if given is None or issubclass(kind, Scale):
        return given  # type: ignore[return-value]
    if issubclass(kind, str) and str.__str__(given) == "amax":
        return AMAX
    raise PlanError(f"cast: expected 'amax' or a kvbm.Scale, got {quoted(given)}")


def to_json(scale: Scale) -> Any:
    """The scale in JSON: ``"amax"``, a number, a list with one for each layer, or an object of both for ``k`` and ``v``."""
    return json.loads(scale.text) if scale.is_given else scale.text


def parsed(given: Any) -> Scale:
    """The scale of a setting: as `to_json` writes it, but with any numbers; `PlanError` if it is something else."""
    if isinstance(given, str) and given == AMAX.text:
        return AMAX
    if not isinstance(given, dict) or given.keys() != {"k", "v"}:
        return Scale(given)
    if any(of is None for of in given.values()):  # Scale would take its default
        raise PlanError(f"Scale: expected numbers for k and v, got {quoted(given)}")
    return Scale(k=given["k"], v=given["v"])


def of_json(given: Any) -> Scale:
    """The scale that `to_json` wrote; `PlanError` if it is something else, or a number is no float32."""
    made = parsed(given)
    if to_json(made) != given:
        raise PlanError(f"Scale: expected numbers in float32, got {quoted(given)}")
    return made


def paired(planes: Sequence[Iterable[str]], scales: Sequence[Mapping[str, str]]) -> list[tuple[str, str]]:
    """The planes of values of both sides that belong together: by name, or the only ones.

    `scales`: of each side, plane of values → plane of its scales.
    """
    values = [[plane for plane in some if plane not in of.values()] for some, of in zip(planes, scales, strict=True)]
    pairs = [(plane, plane) for plane in values[0] if plane in values[1]]
    if not pairs and len(values[0]) == len(values[1]) == 1:  # one kind of values on each side: names do not matter
        return [(values[0][0], values[1][0])]
    return pairs


def scaled_side(
    title: str, plane: str, formats: tuple[str, str], scales: tuple[str | None, str | None], cast: Scale
) -> int | None:
    """Which side has the scales of a cast: 0 the source, 1 the destination; None: neither.

    Raises `PlanError` if there is no cast between these formats, or it needs scales that neither side has.
    """
    where = f"{title}: {f'plane {plane!r}: ' if plane else ''}{formats[0]} to {formats[1]}"
    for side, dtype in enumerate(formats):
        if dtype not in (*PLAIN, *QUANTISED):
            raise PlanError(f"{where}: expected one of {', '.join((*PLAIN, *QUANTISED))} on each side, got {dtype}")
        if scales[side] and dtype in PLAIN:
            raise PlanError(f"{where}: plane {scales[side]!r} holds scales of elements that are not quantised")
    if all(dtype in QUANTISED for dtype in formats):
        raise PlanError(f"{where}: both are quantised; cast to bfloat16, float16 or float32 first, and from there")
    if not any(scales) and not cast.is_given:
        raise PlanError(
            f"{where}: no plane of scales takes part; expected a layout that declares one (`scales:` of a plane) and a section "
            "that has it, or cast=Scale(1.0) for one scale of the caller (at the command line: --cast 1.0)"
        )
    return 0 if scales[0] else 1 if scales[1] else None


@dataclass(frozen=True)
class CastPart(Part):
    """The loop nest of a cast, of its elements or of its scales.  Both have the same modes.

    Modes count elements; of elements that share a byte, they count pairs.  ``inner[:3]`` go through a group.
    """

    #: Dtypes of the source and of the destination, and of the scales; empty if none are stored.
    formats: tuple[str, str, str] = ("", "", "")
    element: int = 1  # elements that a step of ``inner[0]`` moves: 2 if two share a byte
    element_step: int = 0  # bytes between two elements on the side where they do not share a byte
    #: The scales of the caller.  The ``key`` of a mode is the step of their number.
    given: tuple[float, ...] = (1.0,)
    scales: CastPart | None = None  # the loop nest of the scales

    @property
    def kind(self) -> str:
        return "cast"

    @property
    def quantises(self) -> bool:
        """True if the destination has the scales."""
        return self.formats[0] in PLAIN

    @property
    def elements(self) -> int:
        """Number of elements of a block."""
        return self.element * math.prod(mode.extent for mode in (*self.inner, *self.outer))

    @property
    def group(self) -> int:
        """Number of elements that share a scale."""
        return self.element * math.prod(mode.extent for mode in self.inner[:GROUP_MODES])

    @property
    def side_bytes(self) -> tuple[int, int]:
        """Bytes per block of the source and of the destination."""
        sides = [self.elements * bits_of(dtype) // 8 for dtype in self.formats[:2]]
        if self.formats[2]:
            sides[self.quantises] += self.elements // self.group * bits_of(self.formats[2]) // 8
        return sides[0], sides[1]

    @property
    def nbytes(self) -> int:
        return min(self.side_bytes)

    @property
    def run_bytes(self) -> int:
        return max(1, self.inner[0].extent * self.element * min(map(bits_of, self.formats[:2])) // 8)

    def fit(self, kind: str) -> tuple[Part, ...]:
        del kind
        return (self,)

    def form(self, src_alignment: int, dst_alignment: int) -> Form:
        """The kernel form for base addresses that are multiples of these.

        Its `element` is the number of elements that a thread moves at a time.  Its `word` is 1 if codes are less aligned than their
        word: items of eight codes of 8 bits then move in words of 4 bytes, others byte by byte.
        """
        steps = [
            math.gcd(alignment, offset, *of.steps, *(mode[side] for mode in (*self.inner[1:], *self.outer)))
            for side, alignment, offset, of in (
                (1, src_alignment, self.src_offset, self.src_id), (2, dst_alignment, self.dst_offset, self.dst_id)
            )
        ]  # fmt: skip
        run = self.inner[0]
        widths = [bits_of(dtype) for dtype in self.formats[:2]]
        if (
            self._wide
            and run.extent * self.element % ITEM == 0
            and (run.src, run.dst) == tuple(width * self.element // 8 for width in widths)
            and (self.element == 1 or self.element_step == max(widths) // 8)
            and not any(step % (4 if width <= 8 else WIDEST) for step, width in zip(steps, widths, strict=True))
        ):
            narrow = any(step % 8 for step, width in zip(steps, widths, strict=True) if width == 8)
            return Form("cast", MAX_OUTER, WIDE_MODES, ITEM, int(narrow), values=self._wide)
        whole = [math.gcd(step, mode) for step, mode in zip(steps, (run.src, run.dst), strict=True)]
        if self.element > 1:
            whole[not self.quantises] = math.gcd(whole[not self.quantises], self.element_step)
        narrow = any(step % max(1, width // 8) for step, width in zip(whole, widths, strict=True))
        values = "plain_any" if self.quantises else "any_plain"
        return Form("cast", MAX_OUTER, MAX_INNER, self.element, int(narrow), values=values)

    def scale_form(self, values: Form, alignment: int) -> Form:
        """The form of the loop nest of scales, for base addresses that are multiples of the alignment."""
        side, offset, of = (2, self.dst_offset, self.dst_id) if self.quantises else (1, self.src_offset, self.src_id)
        step = math.gcd(alignment, offset, *of.steps, *(mode[side] for mode in (*self.inner, *self.outer)))
        return replace(values, word=int(step % (bits_of(self.formats[2]) // 8) > 0))

    @property
    def _wide(self) -> str:
        """The formats of its kernel for contiguous elements; empty if there is none."""
        values = "_".join(FORMATS[dtype] for dtype in self.formats if dtype)
        return values if values in WIDE_CASTS and len(self.inner) <= WIDE_MODES else ""

    def arguments(self, form: Form, src_step: int | None = None, dst_step: int | None = None) -> Arguments:
        outer = self._padded(form.outer)
        inner = [self.inner[0].split(form.element // self.element)[1], *self.inner[1:]]
        inner += [STILL] * (form.inner - len(inner))
        given: Any = self.given[0]
        if len(self.given) > 1:
            given = tuple(mode.key for mode in outer), tuple(mode.key for mode in inner), self.given
        formats = sum(_NUMBERS[dtype] << 4 * k for k, dtype in enumerate(self.formats))
        return self._arguments(outer, inner, (form.word, self.element_step, given, formats), src_step, dst_step)


def cast_part(
    title: str, src: Access, dst: Access, scale: Access | None, group: Group | None,
    given: tuple[tuple[float, ...], Mapping[str, int]], half: int | None, keys: tuple[Access | None, Access | None] = (None, None),
) -> CastPart:  # fmt: skip
    """The loop nest of a cast between two planes, of which exactly one is quantised, or none.

    `scale` is the address map of the scales, on the quantised side, and `group` the elements that share one of them.
    `given` are the scales of the caller, and the distance between those of neighbours along each axis that has some
    (`table_of`).  `half` is 0 for K and 1 for V, if both are separate.  For digests, `keys` are the address maps of the
    keys of the quantised elements, and of their scales (`kvbm.digest.cells`).

    Raises `PlanError` if the maps have no common refinement, or a group lies in several allocations, and
    `MissingKernelError` if the nest has more loops than kernels support.
    """
    quantises = src.dtype in PLAIN
    label = " ".join(filter(None, (src.plane or dst.plane, "KV"[half] if half is not None else "")))
    where = f"{title}: {f'plane {label!r}: ' if label else ''}"
    sides = [src, dst] if scale is None else [src, dst, scale]
    if any(step.opaque or len(step.axes) > 1 for side in sides for step in side.steps):
        raise PlanError(
            f"{where}axes are fused, or in a group without a promised order: a cast cannot tell the elements of a group; use a "
            "layout in which every axis stands for itself"
        )
    quantised = dst if quantises else src
    plain = src if quantises else dst
    pack, packed = quantised.pack, "".join(quantised.packed)
    if pack > 1 and (len(packed) != 1 or (group and packed not in (group.axis, *group.whole))):
        raise PlanError(f"{where}{pack} elements of {quantised.dtype} that share a byte must be neighbours in one group")
    step = _pair_step(where, plain, packed) if pack > 1 else 0
    numbers, steps = given
    if keys[0] and len(numbers) > 1:
        raise PlanError(f"{where}casts with several scales of the caller do not digest")
    if len(numbers) > MAX_SCALES:
        raise MissingKernelError(
            f"{where}{len(numbers)} scales of the caller: expected at most {MAX_SCALES} in one copy; copy sections of fewer "
            "layers, `section(l=range(…))` of both pools, with the scales of these layers"
        )
    loops = list(_loops(where, src, dst, scale, group, packed, pack, steps, keys))
    if scale is not None:
        inside = _nested([loop for loop in loops if not any(loop[5:7])])
        rest = _nested([loop for loop in loops if any(loop[5:7])])
        if len(numbers) > 1 and any(loop[7] for loop in inside):
            raise PlanError(
                f"{where}the elements of one scale have several scales of the caller, by layer or for K and V; expected one for all"
            )
    else:
        inside, rest = _cut(_nested(loops), len(numbers) > 1)
    if any(loop[2] or loop[4] for loop in inside) or _span(inside) >= STRIDE_LIMIT:
        raise PlanError(
            f"{where}the elements of one scale lie in several allocations, or 4 GiB apart; expected one allocation: convert in two "
            "steps, through a layout that has a group in one"
        )
    chunk = [loop for loop in rest if not any(loop[2:7:2]) and max(loop[1], loop[3], *loop[5:]) < STRIDE_LIMIT]
    outer = [loop for loop in rest if loop not in chunk]
    while len(chunk) > (WIDE_MODES if len(outer) < MAX_OUTER else MAX_INNER) - GROUP_MODES:
        outer.insert(0, chunk.pop())
    while _span([*inside, *chunk]) >= STRIDE_LIMIT:
        largest = max(chunk, key=lambda loop: _span([loop]))
        chunk.remove(largest)
        outer.insert(0, largest)
    if len(inside) > GROUP_MODES or len(outer) > MAX_OUTER:
        raise MissingKernelError(
            f"{where}a cast of {len(inside)} loops inside a group, {len(chunk)} between groups of a chunk and {len(outer)} between "
            f"chunks: expected at most {GROUP_MODES}, {MAX_INNER - GROUP_MODES} and {MAX_OUTER}; convert in two steps, through a "
            "layout with an order between both"
        )
    still = (1, *(0,) * 8)
    inner = [*inside, *[still] * (GROUP_MODES - len(inside)), *chunk]
    formats = (src.dtype, dst.dtype, scale.dtype if scale else "")

    def nest(
        one: Access, other: Access, a: int, b: int, key: int, scales: CastPart | None = None, given: tuple[float, ...] = (1.0,)
    ) -> CastPart:
        """The nest with strides `a`, `b` and `key` of each loop for source, destination and keys; none if below 0."""
        of_keys = keys[key - 7]

        def mode(loop: Sequence[int]) -> Mode:
            (src, src_table), (dst, dst_table) = (loop[k : k + 2] if k >= 0 else (0, 0) for k in (a, b))
            return Mode(loop[0], src, dst, src_table, dst_table, loop[key])

        ids = [Id(side.block[1], side.block[0], side.units) for side in (one, other)]
        return CastPart(
            one.at[0], other.at[0], one.at[1], other.at[1], tuple(map(mode, outer)), tuple(map(mode, inner)), ids[0], ids[1],
            label, half, of_keys.at[0] if of_keys else 0, formats, pack, step, given, scales,
        )  # fmt: skip

    scales = None
    if scale is not None:
        scales = nest(src, scale, -1, 5, 8) if quantises else nest(scale, dst, 5, -1, 8)
    made = nest(src, dst, 1, 3, 7, scales, numbers)
    if made.elements != math.prod(step.extent for step in plain.steps):  # every rule above must keep this true
        raise PlanError(
            f"{where}the cast has {made.elements} elements per block: this is a defect of kvbm; please report both layouts"
        )
    return made


def bits_of(dtype: str) -> int:
    """Bits of a code."""
    return {"float32": 32, "bfloat16": 16, "float16": 16, "float4_e2m1fn": 4}.get(dtype, 8)


#: A loop: extent; bytes and entries of the source, of the destination and of the scales; numbers of scales of the caller, or keys
#: of the elements; keys of the scales.
_Loop = tuple[int, ...]


def _nesting(loop: Sequence[int]) -> tuple[int, ...]:
    """Sort key of loops: fastest in the destination first."""
    return loop[4], loop[3], loop[2], loop[1]


def _nested(loops: Sequence[_Loop]) -> list[_Loop]:
    return coalesce(sorted(loops, key=_nesting))


def _span(loops: Sequence[_Loop]) -> int:
    """Bytes from the first to the last coordinate, on the side where they lie farthest apart."""
    return max(sum((loop[0] - 1) * loop[side] for loop in loops) for side in (1, 3, 5))


def _cut(loops: Sequence[_Loop], scales: bool) -> tuple[list[_Loop], list[_Loop]]:
    """A run of at most `_RUN` elements of the fastest loop, and the loops outside; no run if it selects allocations or scales.

    `scales`: there are several of the caller.
    """
    if not loops or loops[0][2] or loops[0][4] or (scales and loops[0][7]):
        return [], list(loops)
    extent, *strides = loops[0]
    run = max(size for size in range(1, min(extent, _RUN) + 1) if extent % size == 0)
    inside = [(run, *strides)] if run > 1 else []
    left = [(extent // run, *(stride * run for stride in strides))] if extent > run else []
    return inside, [*left, *loops[1:]]


def _pair_step(where: str, plain: Access, axis: str) -> int:
    """Bytes between two elements that share a byte on the other side."""
    first = next((step for step in plain.steps if step.axes == (axis,)), None)
    if first is None or first.extent % 2 or first.entries:
        raise PlanError(f"{where}two elements share a byte on one side, and are split along '{axis}' on the other")
    return first.nbytes


def _loops(
    where: str, src: Access, dst: Access, scale: Access | None, group: Group | None, packed: str, pack: int,
    given: Mapping[str, int], keys: tuple[Access | None, Access | None],
) -> Iterator[_Loop]:  # fmt: skip
    """The common refinement of both sides, of the scales, of those of the caller, and of keys."""

    def of_scales(scale: Access, group: Group) -> list[tuple[int, int, int, int]]:
        """The digits of scales along the axis of the elements."""
        if axis == group.axis:
            if group.size % low:
                raise PlanError(f"{where}{low} elements share a byte, and {group.size} a scale; expected a multiple")
            shared = [(low, group.size // low, 0, 0)] if group.size > low else []
            return [*shared, *((step.divisor * group.size, *step[2:5]) for step in scale.digits(group.scale_axis))]
        return alike if axis in group.whole else _digits(scale, axis, 1)
    for axis, size in src.sizes:
        low = pack if axis == packed else 1
        digits = [_digits(side, axis, low if side.pack == 1 else 1) for side in (src, dst)]
        alike = [(low, size // low, 0, 0)] if size > low else []  # one scale for all coordinates
        digits.append(of_scales(scale, group) if scale and group else alike)
        if keys[0] is None:
            digits += [[(1, size, given[axis], 0)] if axis in given else alike, alike]
        else:
            of_scale = of_scales(keys[1], group) if keys[1] and group else alike
            digits += [_digits(keys[0], axis, low if keys[0].pack == 1 else 1), of_scale]
        if not any(digits):  # two elements in one byte
            continue
        try:
            for loop in refine(digits):  # the scales of the caller and keys are in no allocations
                yield *loop[:8], loop[9]
        except (LayoutError, IndexError):
            splits = ["(" + ",".join(str(digit[1]) for digit in reversed(side)) + ")" for side in digits[:3]]
            raise PlanError(
                f"{where}splits {' and '.join(splits)} of '{axis}' (source, destination, scales) have no common refinement"
            ) from None


def _digits(access: Access, axis: str, low: int) -> list[tuple[int, int, int, int]]:
    """Digits of an axis from `low` on: divisor, extent, bytes and entries."""
    return [digit for digit in (_above(step, low) for step in access.digits(axis)) if digit[1] > 1]


def _above(step: Step, low: int) -> tuple[int, int, int, int]:
    """A digit without its `low` fastest coordinates, if it begins below."""
    if step.divisor >= low:
        return step[1:5]
    return low, step.extent * step.divisor // low, step.nbytes * low // step.divisor, step.entries * low // step.divisor


def require_sizes(title: str, src: Access, dst: Access) -> None:
    """Raise `PlanError` unless two planes have equal axes."""
    if src.sizes != dst.sizes:
        plane = src.plane or dst.plane
        where = f"{title}: {f'plane {plane!r}: ' if plane else ''}"
        raise PlanError(f"{where}the source has the sizes {_sizes(src)}, the destination {_sizes(dst)}; expected the same")


def _sizes(access: Access) -> str:
    return " ".join(f"{axis}={size}" for axis, size in access.sizes) or "of one element"
