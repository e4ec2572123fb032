"""How values of a file were cast: what its metadata say, and the scale of the caller that its codes need.

``kvbm.cast`` (JSON) has an item for each plane whose values were cast before they were written.  Scales that are planes of the
layout are in the file.  Those that the caller gave (`kvbm.Scale`) are only there.  If they are not 1, the codes alone have other
values, so ``kvbm.format`` is 2, which readers that know no casts refuse.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .._arguments import quoted
from ..errors import BindError, PlanError, printable
from ..layout.layout import Layout
from ..layout.region import Section
from ..layout.scales import QUANTISED, group_of, scale_text
from ..layout.shapes import ITEMSIZE, BlockShape
from ..planner.cast import PLAIN, Scale, difference, is_one, layers_of, numbers_text, of_json, to_json
from ..planner.plan import Plan, between_layers, scales_of, value_pairs
from .header import parsed_object

__all__ = ["CAST", "CastFrom", "Casting", "needs_scale", "notes_of", "require_scales", "require_told", "text_of"]

#: Metadata of the planes that were cast.
CAST = "kvbm.cast"

#: Characters of the metadata: some planes with the most scales that a copy takes.
_MOST_TEXT = 64 << 10

#: The format of scales that a scale of the caller multiplies (NVFP4).
_RELATIVE = "float8_e4m3fn"


@dataclass(frozen=True)
class CastFrom:
    """How the values of a plane of a file were cast.

    Attributes
    ----------
    dtype : str
        Dtype of the plane in the file.
    before : str
        Dtype of the values before the cast.
    scales : str
        What has a scale of its own in the file, such as ``one float32 for each token and head (128 elements)``; else empty.
    scale : kvbm.Scale, optional
        The scales of the caller: without scales in the file, a value is its code times this; scales of NVFP4 are multiplied by it.
        None if the codes need none.
    scale_plane : str, optional
        The plane that holds the scales; empty if none does.  None: the file does not say it, as its layout has no planes, or its
        version did not write it.

    Raises
    ------
    BindError
        Something is of another type, or no dtype.
    """

    dtype: str
    before: str
    scales: str = ""
    scale: Scale | None = None
    scale_plane: str | None = None

    def __post_init__(self) -> None:
        for what, given in (("dtype", self.dtype), ("dtype before", self.before)):
            if type(given) is not str or given not in ITEMSIZE:
                raise BindError(f"{what}: expected one of {', '.join(ITEMSIZE)}, got {quoted(given)}")
        if type(self.scales) is not str:
            raise BindError(f"scales: expected a text, got {quoted(self.scales)}")
        if self.scale_plane is not None and type(self.scale_plane) is not str:
            raise BindError(f"scale_plane: expected the name of a plane, or an empty text, got {quoted(self.scale_plane)}")
        scale: Any = self.scale
        if scale is not None and not (isinstance(scale, Scale) and scale.is_given):
            raise BindError(f"scale: expected a kvbm.Scale with numbers, got {quoted(scale)}")

    def __str__(self) -> str:
        own = f", {printable(self.scales)}" if self.scales else ""
        given = f", times {numbers_text(self.scale)}" if self.scale is not None and not is_one(self.scale) else ""
        return f"{self.dtype}{own}{given}, from {self.before}"


@dataclass(frozen=True)
class Casting:
    """The cast of a copy from, into, or between files, and what the metadata of the destination say of it.

    `scale` is as for `kvbm.convert`, None if no value changes.
    """

    scale: Scale | None
    notes: dict[str, CastFrom]

    @classmethod
    def of(cls, title: str, src: Section, dst: Section, told: Scale, known: Mapping[str, CastFrom]) -> Casting:
        """Plan a cast that the caller has `told`, of values that were cast before as in `known`; messages begin with `title`.

        Raises `BindError` if the caller's scales are not those of the file; `PlanError` if there is no such cast, nobody could
        read its values later, or the file's scale is that of other planes.
        """
        scale = _with_recorded(title, known, told, src.shape)
        made = between_layers(src, dst, title, None, scale)
        from_file = scale.is_given and not told.is_given
        if from_file and any(part.quantises and part.formats[2] in ("", _RELATIVE) for part in made.casts):
            raise PlanError(
                f"{title}: {scale} of the file would also quantise planes without scales of their own; pass cast={scale!r} if you "
                "mean that, or convert in two steps"
            )
        if from_file:
            _require_named(title, made, scale, known)
        return cls(scale, _written(title, made, scale, known)) if made.casts else cls(None, dict(known))


def _require_named(title: str, made: Plan, scale: Scale, known: Mapping[str, CastFrom]) -> None:
    """Raise `PlanError` if a scale that the file names would multiply a plane for which the file names none."""
    ours, theirs = ({access.plane: access.dtype for access in side.accesses} for side in (made.src, made.dst))
    scales = scales_of(made.src)
    for here, there in value_pairs(made.src, made.dst):
        own = ours[scales[here]] if here in scales else None
        multiplies = own is None or (own == _RELATIVE and not is_one(scale))
        is_named = here in known and known[here].scale is not None
        if ours[here] != theirs[there] and ours[here] in QUANTISED and multiplies and not is_named:
            raise PlanError(
                f"{title}: plane {here!r}: the file names no scale of its values, and {scale} is that of others; pass "
                f"cast={scale!r} if it holds for all, or convert in two steps"
            )


def _written(title: str, made: Plan, scale: Scale, known: Mapping[str, CastFrom]) -> dict[str, CastFrom]:
    """The notes of the destination."""
    ours, theirs = ({access.plane: access for access in side.accesses} for side in (made.src, made.dst))
    scales = scales_of(made.dst)
    notes: dict[str, CastFrom] = {}
    for here, there in value_pairs(made.src, made.dst):
        before, after = ours[here].dtype, theirs[there].dtype
        if before == after:
            notes |= {here: known[here]} if here in known else {}
            continue
        if before in PLAIN and after in PLAIN and not is_one(scale):
            raise PlanError(
                f"{title}: {scale}: values of {before} would be divided by it, and readers of {after} do not multiply; pass "
                "kvbm.Scale(1.0)"
            )
        text = ""
        given = scale if after in QUANTISED else None
        if there in scales:
            own = theirs[scales[there]]
            sizes = dict(theirs[there].sizes)
            text = scale_text(own.dtype, sizes, group_of(there, sizes, own.plane, dict(own.sizes)))
            given = None if own.dtype != _RELATIVE else scale if scale.is_given else Scale()
        notes[there] = CastFrom(after, before, text, given, scales.get(there, "") if made.dst.layout.planes else None)
    return notes


def needs_scale(notes: Iterable[CastFrom]) -> bool:
    """True if codes of a file have other values without a scale that only the metadata have."""
    return any(note.scale is not None and not is_one(note.scale) for note in notes)


def text_of(notes: Mapping[str, CastFrom]) -> str:
    """The metadata.  `notes_of` reads them."""
    text = json.dumps(
        {
            plane: {"dtype": note.dtype, "from": note.before}
            | ({"scales": note.scales} if note.scales else {})
            | ({} if note.scale is None else {"scale": to_json(note.scale)})
            | ({} if note.scale_plane is None else {"scale_plane": note.scale_plane})
            for plane, note in notes.items()
        }
    )
    if len(text) > _MOST_TEXT:
        raise PlanError(f"cast: {len(notes)} planes are cast, more than the metadata of a file may name")
    return text


def notes_of(path: object, text: str) -> dict[str, CastFrom]:
    """How planes were cast, by the metadata of a file; `BindError` if the text says nothing that is possible."""
    try:
        return {plane: _note(one) for plane, one in parsed_object(text, _MOST_TEXT).items()}
    except (ValueError, PlanError) as error:  # a BindError is a ValueError
        raise BindError(f"{path}: metadata {CAST!r}: {printable(str(error), 500)}, got {quoted(text)}") from None


def _note(given: object) -> CastFrom:
    fields: dict[str, Any] = given if isinstance(given, dict) else {}
    scale = None if fields.get("scale") is None else of_json(fields["scale"])
    texts = fields.get("dtype", ""), fields.get("from", ""), fields.get("scales", "")
    return CastFrom(*texts, scale, fields.get("scale_plane"))


def require_planes(path: object, notes: Mapping[str, CastFrom], layout: Layout) -> None:
    """Raise `BindError` if planes have their scales elsewhere than a layout says: other layouts of the same planes may say so."""
    held = dict.fromkeys((plane.name for plane in layout.planes), "") | {data: scale for scale, data in layout.scales.items()}
    for plane, note in notes.items():
        if plane in held and note.scale_plane is not None and held[plane] != note.scale_plane:
            was, says = (f"in plane {quoted(one, 60)}" if one else "in no plane" for one in (note.scale_plane, held[plane]))
            raise BindError(
                f"{path}: plane {quoted(plane, 60)} was cast with its scales {was}, and layout {layout.name!r} has them {says}: "
                "expected a layout with the same `scales:` of its planes"
            )


def require_scales(path: object, notes: Mapping[str, CastFrom], shape: BlockShape) -> None:
    """Raise `BindError` if the metadata have scales of other layers than those of such blocks, or of K and V that these lack."""
    for plane, note in notes.items():
        if note.scale is not None and (why := _misfit(note.scale, shape)):
            raise BindError(f"{path}: metadata {CAST!r}: plane {quoted(plane, 60)}: {why}")


def _misfit(scale: Scale, shape: BlockShape) -> str:
    """Why the scales are not those of blocks of a shape; empty if they may be."""
    if (count := layers_of(scale)) not in (None, shape.nl):
        return f"{scale}: expected one number for each of {shape.nl} layers, got {count}"
    if scale.k is not None and shape.no != 2:
        return f"{scale}: the blocks have no K and V of their own; expected Scale(x), where x is a number, or one for each layer"
    return ""


def _with_recorded(path: object, notes: Mapping[str, CastFrom], cast: Scale, shape: BlockShape) -> Scale:
    """The cast with the scales of the caller that a file was written with.

    Raises `BindError` if those are other scales than those of `cast`, or differ between planes.
    """
    recorded = {note.scale: plane for plane, note in notes.items() if note.scale is not None}
    if cast.is_given:
        if recorded and (why := _misfit(cast, shape)):
            raise BindError(f"{path}: cast: {why}")
        for scale, plane in recorded.items():
            if (place := difference(scale, cast)) is not None:
                raise BindError(
                    f"{path}: {f'plane {plane!r} was' if plane else 'its values were'} cast with {scale}, so {cast} would "
                    f"give other values{place}; pass cast='amax' (--cast amax), which uses the scales that the file names"
                )
        return next(iter(recorded), cast)  # the same numbers: the file goes on to name them in one way
    if len(recorded) > 1:
        raise BindError(
            f"{path}: metadata {CAST!r}: expected the same scales of a caller in all planes, got {' and '.join(map(str, recorded))}"
        )
    return next(iter(recorded), cast)


def require_told(path: object, notes: Mapping[str, CastFrom], cast: Scale | None, shape: BlockShape) -> None:
    """Raise `BindError` if planes of these notes hold codes that need scales, and the caller has not named them."""
    if cast is not None and cast.is_given:
        _with_recorded(path, notes, cast, shape)
        return
    for plane, note in notes.items():
        if needs_scale([note]):
            assert note.scale is not None
            one = note.scale.k is None and layers_of(note.scale) is None
            codes = f"kvbm.{note.scale!r}" if one else f"kvbm.store.read(path).casts[{plane!r}].scale"
            raise BindError(
                f"{path}: {f'plane {plane!r} holds' if plane else 'it holds'} {note.dtype} codes of {note.before} values, to be "
                f"multiplied by {numbers_text(note.scale)}, which no plane of the layout has; to get the values, pass cast='amax' "
                f"with a layout and dtype of {note.before}; to get the codes, pass cast={codes}"
            )
