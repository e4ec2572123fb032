"""How values of a file were cast: what its metadata say, and the scale of the caller that its codes need.

``kvbm.cast`` (JSON) has an item for each plane whose values were cast before they were written.  Scales that are planes of the
layout are in the file.  A scale that the caller gave (`kvbm.Scale`) is only there.  If it is not 1, the codes alone have other
values, so ``kvbm.format`` is 2, which readers that know no casts refuse.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .._arguments import is_real, quoted
from ..errors import BindError, PlanError, printable
from ..layout.region import Section
from ..layout.scales import QUANTISED, group_of, scale_text
from ..layout.shapes import ITEMSIZE
from ..planner.cast import PLAIN, Scale, is_one
from ..planner.plan import Plan, between_layers, scales_of, value_pairs
from .header import MAX_TEXT, parsed_object

__all__ = ["CAST", "CastFrom", "Casting", "needs_scale", "notes_of", "require_told", "text_of"]

#: Metadata of the planes that were cast.
CAST = "kvbm.cast"

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
    scale : float, optional
        The scale of the caller (`kvbm.Scale`): without scales in the file, a value is its code times this; scales of NVFP4 are
        multiplied by it.  None if the codes need none.

    Raises
    ------
    BindError
        Something is of another type, or no dtype, or the scale is not a float32 from 2**-100 to 2**100.
    """

    dtype: str
    before: str
    scales: str = ""
    scale: float | None = None

    def __post_init__(self) -> None:
        for what, given in (("dtype", self.dtype), ("dtype before", self.before)):
            if type(given) is not str or given not in ITEMSIZE:
                raise BindError(f"{what}: expected one of {', '.join(ITEMSIZE)}, got {quoted(given)}")
        if type(self.scales) is not str:
            raise BindError(f"scales: expected a text, got {quoted(self.scales)}")
        if self.scale is not None:
            if not is_real(self.scale) or Scale(self.scale).value != self.scale:
                raise BindError(f"scale: expected a float32, got {quoted(self.scale)}")
            object.__setattr__(self, "scale", Scale(self.scale).value)

    def __str__(self) -> str:
        own = f", {printable(self.scales)}" if self.scales else ""
        given = f", times {self.scale:g}" if self.scale not in (None, 1.0) else ""
        return f"{self.dtype}{own}{given}, from {self.before}"


@dataclass(frozen=True)
class Casting:
    """The cast of a copy from, into, or between files.

    Attributes
    ----------
    scale : Scale, optional
        As for `kvbm.convert`; None if no value changes.
    notes : dict of str to CastFrom
        What the metadata of the destination say.
    """

    scale: Scale | None
    notes: dict[str, CastFrom]

    @classmethod
    def of(cls, title: str, src: Section, dst: Section, told: Scale, known: Mapping[str, CastFrom]) -> Casting:
        """Plan a cast.

        Parameters
        ----------
        title : str
            Start of messages.
        src, dst : Section
            Both sides.
        told : Scale
            What the caller has said.
        known : mapping of str to CastFrom
            How values of the source were cast before.

        Raises
        ------
        BindError
            The caller's scale is not that of the file.
        PlanError
            There is no such cast, or nobody could read its values later, or the file's scale is that of other planes.
        """
        scale = _with_recorded(title, known, told)
        made = between_layers(src, dst, title, None, scale)
        if scale != told and any(part.quantises and part.formats[2] in ("", _RELATIVE) for part in made.casts):
            raise PlanError(
                f"{title}: {scale} of the file would also quantise planes without scales of their own; pass cast={scale!r} if you "
                "mean that, or convert in two steps"
            )
        if scale != told:
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
        if before in PLAIN and after in PLAIN and scale.value != 1:
            raise PlanError(
                f"{title}: {scale}: values of {before} would be divided by it, and readers of {after} do not multiply; pass "
                "kvbm.Scale(1.0)"
            )
        text = ""
        given: Any = scale.value if after in QUANTISED else None
        if there in scales:
            own = theirs[scales[there]]
            sizes = dict(theirs[there].sizes)
            text = scale_text(own.dtype, sizes, group_of(there, sizes, own.plane, dict(own.sizes)))
            given = given if own.dtype == _RELATIVE else None
        notes[there] = CastFrom(after, before, text, given)
    return notes


def needs_scale(notes: Iterable[CastFrom]) -> bool:
    """True if codes of a file have other values without a scale that only the metadata have."""
    return any(note.scale not in (None, 1.0) for note in notes)


def text_of(notes: Mapping[str, CastFrom]) -> str:
    """The metadata.  `notes_of` reads them."""
    text = json.dumps(
        {
            plane: {"dtype": note.dtype, "from": note.before}
            | ({"scales": note.scales} if note.scales else {})
            | ({} if note.scale is None else {"scale": note.scale})
            for plane, note in notes.items()
        }
    )
    if len(text) > MAX_TEXT:
        raise PlanError(f"cast: {len(notes)} planes are cast, more than the metadata of a file may name")
    return text


def notes_of(path: object, text: str) -> dict[str, CastFrom]:
    """How planes were cast, by the metadata of a file; `BindError` if the text says nothing that is possible."""
    try:
        return {plane: _note(one) for plane, one in parsed_object(text).items()}
    except (ValueError, PlanError) as error:  # a BindError is a ValueError
        raise BindError(f"{path}: metadata {CAST!r}: {printable(str(error), 500)}, got {quoted(text)}") from None


def _note(given: object) -> CastFrom:
    fields: dict[str, Any] = given if isinstance(given, dict) else {}
    return CastFrom(fields.get("dtype", ""), fields.get("from", ""), fields.get("scales", ""), fields.get("scale"))


def _with_recorded(path: object, notes: Mapping[str, CastFrom], cast: Scale) -> Scale:
    """The cast with the scale of the caller that a file was written with.

    Raises
    ------
    BindError
        The file was written with another scale than that of `cast`, or with several.
    """
    recorded = {note.scale: plane for plane, note in notes.items() if note.scale is not None}
    if cast.is_given:
        for scale, plane in recorded.items():
            if scale != cast.value:
                raise BindError(
                    f"{path}: {f'plane {plane!r} was' if plane else 'its values were'} cast with {Scale(scale)}, so {cast} would "
                    "give other values; pass cast='amax' (--cast amax), which uses the scale that the file names"
                )
        return cast
    if len(recorded) > 1:
        raise BindError(
            f"{path}: metadata {CAST!r}: expected one scale of a caller, got {', '.join(f'{one:g}' for one in recorded)}"
        )
    return Scale(next(iter(recorded))) if recorded else cast


def require_told(path: object, notes: Mapping[str, CastFrom], cast: Scale | None) -> None:
    """Raise `BindError` if planes of these notes hold codes that need a scale, and the caller has not named it."""
    if cast is not None and cast.is_given:
        _with_recorded(path, notes, cast)
        return
    for plane, note in notes.items():
        if needs_scale([note]):
            raise BindError(
                f"{path}: {f'plane {plane!r} holds' if plane else 'it holds'} {note.dtype} codes of {note.before} values, to be "
                f"multiplied by {note.scale:g}, which is in no plane of the layout; to get the values, pass cast='amax' with a "
                f"layout and dtype of {note.before}; to get the codes, pass cast=kvbm.Scale({note.scale!r})"
            )
