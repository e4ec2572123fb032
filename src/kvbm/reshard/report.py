"""What a resharding is, for people and for programs: a table, a sentence, JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..planner import size_text
from ..shapes import ITEMSIZE
from .placement import Placement
from .strips import Meeting, Runs

if TYPE_CHECKING:
    from .messages import Resharding

__all__ = ["as_json", "sentence", "table", "units"]

_COLUMNS = ("from", "to", "heads", "layers", "tokens a unit", "bytes", "rows of")


def table(made: Resharding, tokens: int | None = None) -> str:
    """Who sends what to whom.

    Parameters
    ----------
    made : Resharding
    tokens : int, optional
        Length of a sequence to count bytes for; one unit if not given.
    """
    length = made.unit if tokens is None else tokens
    model = made.src.model
    row_bytes = model.hd * ITEMSIZE[model.dtype] // model.pack  # of one head of one token, whatever the layouts are
    rows = [_COLUMNS]
    rows += [
        (
            str(m.src), str(m.dst), _said(m.h), _said(m.l), f"{m.tokens} of {m.t.tokens}",
            size_text(made.nbytes(m, length // m.t.tokens * m.t.tokens)), f"{row_bytes} B",
        )
        for m in made.messages
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{made.src} → {made.dst}: {_plural(len(made.messages), 'message')}, {units(made)}"]
    for row in rows:
        cells = zip(row, widths, _COLUMNS, strict=True)
        said = [
            text.ljust(n) if column in ("heads", "layers", "tokens a unit") else text.rjust(n)
            for text, n, column in cells
        ]
        lines.append("  " + "   ".join(said).rstrip())
    lines.append(sentence(made))
    if tokens is not None:
        left = tokens % made.unit
        lines.append(
            f"{_plural(tokens, 'token')}: {_plural(tokens // made.unit, 'unit')}"
            + (f", and {_plural(left, 'token')} one by one" if left else "")
        )
    return "\n".join(lines)


def sentence(made: Resharding) -> str:
    """What was proven, and how many ranks send."""
    counts = [sum(m.src == rank for m in made.messages) for rank in range(made.src.world)]
    sending = sorted(count for count in counts if count)
    low, high = (sending[0], sending[-1]) if sending else (0, 0)
    each = _plural(high, "message") if low == high else f"{low} to {high} messages"
    return (
        f"proven: every coordinate of {made.dst.name} once, from a rank that holds it; "
        f"{len(sending)} of {_plural(made.src.world, 'source rank')} send{'s' if len(sending) == 1 else ''} {each}"
        + (" each" if len(sending) > 1 else "")
    )


def units(made: Resharding) -> str:
    """What a unit is, and how much of a block on each side."""
    sizes = sorted({m.t.tokens for m in made.messages})
    if len(sizes) != 1:
        return f"units of {sizes[0]} to {sizes[-1]} tokens" if sizes else "nothing to send"
    slots = [{m.t.src_slots for m in made.messages}, {m.t.dst_slots for m in made.messages}]
    sides = [
        ("a block" if n == place.nt else f"1/{place.nt // n} block") if len(found) == 1 else "parts of a block"
        for place, found in zip((made.src, made.dst), slots, strict=True)
        for n in (min(found),)
    ]
    return f"unit {_plural(sizes[0], 'token')}: {sides[0]} → {sides[1]}"


def _said(meetings: Sequence[Meeting]) -> str:
    """Coordinates of the model, and where they lie on the destination if that is another place."""
    model = Runs.of(sorted(x for meeting in meetings for x in meeting.coordinates("first")))
    local = Runs.of(sorted(x for meeting in meetings for x in meeting.coordinates("dst")))
    return str(model) if str(model) == str(local) else f"{model} → local {local}"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def as_json(made: Resharding) -> dict[str, Any]:
    """Everything of a resharding as JSON holds it: placements, messages with their loops, units."""
    return {
        "source": _placement(made.src),
        "destination": _placement(made.dst),
        "fingerprint": made.fingerprint,
        "messages": [
            {
                "from": m.src,
                "to": m.dst,
                "layers": [_meeting(x) for x in m.l],
                "heads": [_meeting(x) for x in m.h],
                "unit": m.t.tokens,
                "tokens": _meeting(m.t.meeting) if m.t.meeting else None,
                "slots": [m.t.src_slots, m.t.dst_slots],
                "bytes": made.nbytes(m, m.t.tokens),
            }
            for m in made.messages
        ],
    }


def _placement(placement: Placement) -> dict[str, Any]:
    ranks = [placement.strips(rank) for rank in range(placement.world)]
    return {
        "name": placement.name,
        "mesh": placement.mesh_text,
        "nt": placement.nt,
        "fingerprint": placement.fingerprint,
        "ranks": [
            {
                "layers": list(strips.l),
                "heads": list(strips.h),
                "tokens": {"every": strips.t.every, "over": strips.t.over, "index": strips.t.index},
            }
            for strips in ranks
        ],
    }


def _meeting(meeting: Meeting) -> dict[str, Any]:
    return {
        "first": meeting.first,
        "src": meeting.src,
        "dst": meeting.dst,
        "loops": [loop._asdict() for loop in meeting.loops],
    }
