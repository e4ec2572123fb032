"""Descriptions of a resharding: a table, sentences, JSON."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ..layout.shapes import ITEMSIZE
from ..planner.cast import table_of, to_json
from ..planner.plan import cast_text, count_text, size_text
from .placement import Placement, Strips
from .strips import Meeting, Runs, meet_in_unit

if TYPE_CHECKING:
    from .messages import Message, Resharding

_COLUMNS = ("from", "to", "heads", "layers", "tokens per unit", "bytes", "rows of")
_LEFT = ("heads", "layers", "tokens per unit")

#: Most rows of a table, and the number that is shown if there are more.
_MOST_ROWS, _SHOWN = 40, 32


def table(made: Resharding, tokens: int | None = None) -> str:
    """The table of messages.  Equal messages share a row.  Of very many rows only the first are shown.

    Bytes are those of a sequence of so many tokens; default: of one unit.
    """
    groups = list(_groups(made, tokens))
    several = any(len(group) > 1 for group, _ in groups)
    rows = [tuple(f"{column} each" if several and column == "bytes" else column for column in _COLUMNS)]
    rows += [(_ranks(m.src for m in group), _ranks(m.dst for m in group), *texts) for group, texts in groups]
    cut = len(rows) - 1 if len(rows) - 1 <= _MOST_ROWS else _SHOWN
    left_out = sum(len(group) for group, _ in groups[cut:])
    rows = rows[: cut + 1]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"{made.src} → {made.dst}: {count_text(len(made.messages), 'message')}, {units(made)}"]
    for row in rows:
        cells = zip(row, widths, _COLUMNS, strict=True)
        texts = [text.ljust(n) if column in _LEFT else text.rjust(n) for text, n, column in cells]
        lines.append("  " + "   ".join(texts).rstrip())
    if left_out:
        lines.append(
            f"  … and {count_text(left_out, 'message')} in {count_text(len(groups) - cut, 'row')}; the JSON has all of them"
        )
    total = sum(made.nbytes(m, tokens) for m in made.messages)
    if len(made.messages) > 1:
        lines.append(
            f"{size_text(total)} in all, for {'a unit of each' if tokens is None else count_text(tokens, 'token')}"
        )
    lines += [f"cast {made.cast}: {_changes(made)}"] if made.cast is not None else []
    lines.append(sentence(made))
    if tokens is not None:
        left = tokens % made.unit
        lines.append(
            f"{count_text(tokens, 'token')}: {count_text(tokens // made.unit, 'unit')}"
            + (f", and {count_text(left, 'token')} one by one" if left else "")
        )
    return "\n".join(lines)


def _groups(made: Resharding, tokens: int | None) -> Iterator[tuple[list[Message], tuple[str, ...]]]:
    """Groups of messages that differ only in one of their ranks, and the text of each group."""
    model = made.src.model
    row_bytes = model.hd * ITEMSIZE[model.dtype] // model.pack  # of one head of one token, whatever the layouts are
    text_of = functools.cache(_meeting_text)
    alike: dict[tuple[str, ...], list[Message]] = {}
    for m in made.messages:
        held, size = f"{m.tokens} of {m.t.tokens}", size_text(made.nbytes(m, tokens))
        alike.setdefault((text_of(m.h), text_of(m.l), held, size, f"{row_bytes} B"), []).append(m)
    found = []
    for row, messages in alike.items():
        sides = [
            {rank: [m for m in messages if m[i] == rank] for rank in sorted({m[i] for m in messages})} for i in (0, 1)
        ]
        found += [(group, row) for group in min(sides, key=len).values()]
    return iter(sorted(found, key=lambda group: (group[0][0].dst, group[0][0].src)))


def _ranks(ranks: Iterator[int]) -> str:
    found = sorted(set(ranks))
    return ", ".join(map(str, found)) if len(found) == 2 else str(Runs.of(found))


def sentence(made: Resharding) -> str:
    """The sentence on what was proven, and how many ranks send."""
    counts = [sum(m.src == rank for m in made.messages) for rank in range(made.src.world)]
    sending = sorted(count for count in counts if count)
    low, high = (sending[0], sending[-1]) if sending else (0, 0)
    whole = ", and every scale from a message that has all of its elements" if any(one.scale for one in made.casts) else ""
    each = count_text(high, "message") if low == high else f"{low} to {high} messages"
    return (
        f"proven: every coordinate of {made.dst.name} once, from a rank that holds it{whole}; "
        f"{len(sending)} of {count_text(made.src.world, 'source rank')} send{'s' if len(sending) == 1 else ''} {each}"
        + (" each" if len(sending) > 1 else "")
    )


def units(made: Resharding) -> str:
    """The size of a unit, and its share of a block on each side."""
    if not made.messages:
        return "nothing to send"
    unit = made.messages[0].t  # equal in all messages: it depends on the turns of a side, not on the rank
    slots = (made.src, unit.src_slots), (made.dst, unit.dst_slots)
    sides = ["1 block" if n == place.nt else f"1/{place.nt // n} block" for place, n in slots]
    return f"unit {count_text(unit.tokens, 'token')}: {sides[0]} → {sides[1]}"


def _meeting_text(meetings: Sequence[Meeting]) -> str:
    """Coordinates of the model, and their local coordinates on the destination if these differ."""
    model = Runs.of(sorted(x for meeting in meetings for x in meeting.coordinates("first")))
    local = Runs.of(sorted(x for meeting in meetings for x in meeting.coordinates("dst")))
    return str(model) if str(model) == str(local) else f"{model} → local {local}"


# ---- sentences -----------------------------------------------------------------------------------------------------


def explain(made: Resharding) -> str:
    """One paragraph each: overlaps on each axis, the unit and its limit, tokens that are copied one by one, the senders."""
    return "\n".join([*_meetings(made), _why_the_unit(made), _one_by_one(made), *_senders(made), *_casts(made)])


def _meetings(made: Resharding) -> Iterator[str]:
    sides = (made.src, made.sends), (made.dst, made.takes)
    for axis, what in (("l", "Layers"), ("h", "KV heads")):
        parts = []
        for place, strips in sides:
            held = {getattr(one, axis) for one in strips}
            sizes = _span(sorted({one.size for one in held}))
            parts.append(
                f"every rank of {place.name} has {sizes}"
                if len(held) == 1
                else f"{place.name} has {len(held)} shares of {sizes}"
            )
        sources: dict[int, set[Runs]] = {}
        for m in made.messages:
            sources.setdefault(m.dst, set()).add(getattr(made.sends[m.src], axis))
        most = max(map(len, sources.values()), default=0)
        met = f", and a rank of {made.dst.name} gets its own from up to {most} of them" if most > 1 else ""
        yield f"{what}: {', '.join(parts)}{met}."
    yield f"Tokens: {'; '.join(f'{place.name}: {_turns(strips)}' for place, strips in sides)}."


def _changes(made: Resharding) -> str:
    """What a cast changes, in a few words."""
    if made.layouts is None:
        return "the layouts of both sides say what changes (layouts=, --from and --to, or the pools of Local)"
    if not made.casts:
        return "nothing changes, as both sides have the same formats"
    named = [(one.planes[0] or one.planes[1], " → ".join(one.formats)) for one in made.casts]
    return ", ".join(f"{name}{name and ': '}{formats}" for name, formats in named)


def _casts(made: Resharding) -> Iterator[str]:
    if made.cast is None:
        return
    if made.layouts is None or not made.casts:
        yield f"Cast {made.cast}: {_changes(made)}."
        return
    for text in cast_texts(made):
        yield f"Cast: {text[0].lower()}{text[1:]}."
    copied = set(made.layouts[0].planes) and [
        plane.name for plane in made.layouts[0].planes
        if plane.name not in {one.planes[0] for one in made.casts} | {one.scale for one in made.casts if one.scaled == 0}
    ]  # fmt: skip
    if copied:
        yield f"Copied bit by bit: {', '.join(copied)}."
    sender, receiver = made.src.name, made.dst.name
    yield (
        f"Between processes, chunks have the format of {(sender, receiver)[made.coded]}, the smaller one: "
        + (f"{sender} casts before it sends." if made.coded else f"{receiver} casts what it receives.")
    )


def cast_texts(made: Resharding) -> list[str]:
    """What the casts do, without full stops: with the scales of all layers, of which a message has some."""
    found, model = [], made.src.model
    for part in made.cast_parts:
        assert made.cast is not None
        halves = range(model.no) if part.half is None else (part.half,)
        found.append(cast_text(replace(part, given=table_of(made.cast, range(model.nl), halves)[0])))
    return list(dict.fromkeys(found))


def _span(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


def _turns(strips: Sequence[Strips]) -> str:
    turn = strips[0].t
    if turn.over == 1:
        return "every rank holds all of a sequence"
    return f"{turn.over} ranks take turns of {count_text(turn.every, 'token')}"


def _why_the_unit(made: Resharding) -> str:
    if not made.messages:
        return "Unit: there is nothing to send."
    message = made.messages[0]
    unit, sides = message.t.tokens, (made.sends[message.src].t, made.takes[message.dst].t)
    sizes = made.src.nt, made.dst.nt
    spans = [size * turn.over for size, turn in zip(sizes, sides, strict=True)]
    parts = [
        f"a block of {place.name} holds {place.nt} tokens"
        + (f", those of the {turn.over} ranks together {span} neighbours" if turn.over > 1 else "")
        for place, turn, span in zip((made.src, made.dst), sides, spans, strict=True)
    ]
    text = f"Unit: {count_text(unit, 'token')}, copied as one: {'; '.join(parts)}."
    whole = math.gcd(*spans)
    if unit == spans[0] == spans[1]:
        return f"{text} A larger one would not lie in one block of a rank."
    if unit == whole:
        return f"{text} No larger number divides {spans[0]} and {spans[1]}."
    if unit < (best := meet_in_unit(*sides, sizes, made.cuts).tokens):
        return f"{text} The block tables of both sides begin at other positions; otherwise it would be {best}."
    if unit < (best := meet_in_unit(*sides, sizes).tokens):
        cuts = ", ".join(str(cut) for cut in sorted({*made.cuts[0], *made.cuts[1]}))
        return f"{text} The layouts split the tokens of a block at {cuts}, which parts a larger one; otherwise it would be {best}."
    return (
        f"{text} In one of {whole} tokens the turns of both sides do not fit in each other: every rank must hold the same part of "
        "every unit, or one rank all of one."
    )


def _one_by_one(made: Resharding) -> str:
    if made.unit == 1:
        return "Token by token: a unit is one token, so ranges of tokens may begin and end anywhere."
    most = count_text(made.unit - 1, "token")
    return (
        f"Token by token: where a range begins or ends inside a unit, at most {most} at each end go one by one, in a second copy. "
        "No other token of their blocks is touched."
    )


def _senders(made: Resharding) -> Iterator[str]:
    source, destination = made.src.name, made.dst.name
    classes: dict[Strips, list[int]] = {}
    for rank, strips in enumerate(made.sends):
        classes.setdefault(strips, []).append(rank)
    equal = [ranks for ranks in classes.values() if len(ranks) > 1]
    if not equal:
        yield f"Senders: no two ranks of {source} have the same to send, so there is no choice."
    else:
        more = f", and so on, {len(equal)} groups" if len(equal) > 1 else ""
        text = f"Senders: ranks of {source} hold the same: {_ranks(iter(equal[0]))}{more}."
        parts = Counter((m.dst, made.sends[m.src]) for m in made.messages)
        if max(parts.values(), default=0) > 1:
            yield f"{text} All of a group send, a share of the layers each, to use all of their links."
        else:
            yield (
                f"{text} One of a group sends to a rank of {destination}: the one with the least to send so far, and of those the "
                "one at the nearest place, unless prefer= says another. All ranks come to the same choice by themselves."
            )
    held = [made.dst.strips(rank) for rank in range(made.dst.world)]
    if len(set(held)) == len(held):
        return
    if list(made.takes) != held:
        yield f"Receivers: ranks of {destination} that hold the same get a share of the layers each in this step."
    else:
        yield (
            f"Receivers: {len(held) // len(set(held))} ranks of {destination} hold the same, and each gets all of it. In two steps "
            "(reshard.gather, --gather) each gets a share, and they exchange these."
        )


# ---- JSON ----------------------------------------------------------------------------------------------------------


def as_json(made: Resharding, tokens: int | None = None) -> dict[str, Any]:
    """A resharding as an object for JSON: placements, messages with their loops, units.  `tokens` as for `table`."""
    return {
        "source": _placement(made.src),
        "destination": _placement(made.dst),
        "fingerprint": made.fingerprint,
        **({} if made.cast is None else {"cast": _cast(made)}),
        "messages": [
            {
                "from": m.src,
                "to": m.dst,
                "layers": [_meeting(x) for x in m.l],
                "heads": [_meeting(x) for x in m.h],
                "unit": m.t.tokens,
                "tokens": _meeting(m.t.meeting) if m.t.meeting else None,
                "slots": [m.t.src_slots, m.t.dst_slots],
                "bytes": made.nbytes(m, tokens),
            }
            for m in made.messages
        ],
    }


def _cast(made: Resharding) -> dict[str, Any]:
    assert made.cast is not None
    return {
        "scale": to_json(made.cast),
        "planes": [
            {"from": dict(zip(("plane", "dtype"), ours, strict=True)), "to": dict(zip(("plane", "dtype"), theirs, strict=True))}
            | ({"scales": one.scale} if one.scale else {})
            for one in made.casts
            for ours, theirs in [zip(one.planes, one.formats, strict=True)]
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
                "tokens": asdict(strips.t),
            }
            for strips in ranks
        ],
    }


def _meeting(meeting: Meeting) -> dict[str, Any]:
    return {**meeting._asdict(), "loops": [loop._asdict() for loop in meeting.loops]}
